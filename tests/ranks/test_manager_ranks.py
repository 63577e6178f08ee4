"""`CheckpointManager` on several ranks, and loads of what is damaged or overwritten meanwhile."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import manager_cases as cases
import pytest
import torch
import torch.distributed as dist
from manager_cases import damage, restore, saved, state_of

import ckpt_storage
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    InvalidInputError,
    PhaseTimeoutError,
)
from ckpt_storage.format.documents import FileRef
from ckpt_storage.inspect.verify import divided, part_bytes
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import prune
from ckpt_storage.manager.resume import Check
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.options import Timeouts
from ckpt_storage.store import open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.posix_faults import FaultPosix
from ckpt_storage.testing.ranks import RankPool, run_ranks
from ckpt_storage.transfer.ranges import RangeReader

RUN: dict[str, Any] = {"mode": "thread", "timeout": 60}
NEWEST = "step-00000002"


@pytest.mark.parametrize(("check", "in_background"), [("read", True), ("deep", False)])
def test_training_that_falls_back_past_damage_comes_by_its_step_again(
    tmp_path: Path, check: Any, caplog: pytest.LogCaptureFixture, *, in_background: bool
) -> None:
    """The job that resumed from step 1 saves step 2 again, is told of it, and resumes from that."""
    saved(tmp_path, 1, 2)
    damage(tmp_path / NEWEST)
    with CheckpointManager(tmp_path, keep=KeepLatest(3), **RUN) as manager:
        assert restore(manager, check=check).step == 1
        caplog.clear()
        if in_background:
            manager.save_async(2, state_of(2), sync_files=False).result(60)
        else:
            manager.save(2, state_of(2), sync_files=False)
        said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert len([text for text in said if "is to replace it" in text]) == 1
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager, check="deep").step == 2


def test_a_sound_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    """What another job saved since under the name of the damaged step stays."""
    saved(tmp_path, 1, 2)
    damage(tmp_path / NEWEST)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager).step == 1
        ckpt_storage.save(state_of(2), tmp_path / NEWEST, overwrite=True, sync_files=False)
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
        with pytest.raises(CheckpointExistsError):
            manager.save(1, state_of(1), sync_files=False)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager).step == 2


def test_all_ranks_save_the_damaged_step_again(ranks: RankPool, tmp_path: Path) -> None:
    """No rank needs to know of `overwrite`, and no two ranks disagree."""
    ranks.run(cases.train, str(tmp_path), 2, world_size=2)
    damage(tmp_path / NEWEST)
    results = ranks.run(cases.resume_and_save, str(tmp_path), world_size=3)
    assert results == [(1, "step-00000002")] * 3


@pytest.mark.parametrize(
    ("what", "bad_rank", "in_background", "wanted"),
    [
        ("metrics", 0, True, "no number"),
        ("metrics", 1, False, "no number"),
        ("step", 1, True, "is no step"),
        ("claim", 0, False, "being deleted"),
        ("claim", 1, True, "being deleted"),
    ],
)
def test_what_one_rank_refuses_is_told_to_all(
    ranks: RankPool, tmp_path: Path, what: str, bad_rank: int, wanted: str, *, in_background: bool
) -> None:
    """Wrong arguments on one rank, or a name that is being deleted, end the save of all."""
    given = (str(tmp_path), what, bad_rank, in_background)
    results = ranks.run(cases.save_unlike, *given, world_size=2)
    for text, later in results:
        assert f"rank {bad_rank}" in text.lower()
        assert wanted in text
        assert later == "step-00000008", "afterwards all save together again"


def test_metrics_that_cannot_be_are_refused_by_our_errors(tmp_path: Path) -> None:
    """Whatever a number's own conversion raises, the save ends by an error of ours."""
    wrong: list[Any] = [{"x": torch.ones(3)}, {"x": 10**400}, {"x": "much"}, {"x" * 20_000: 1.0}, 7]
    with CheckpointManager(tmp_path, **RUN) as manager:
        for metrics in wrong:
            error = InvalidInputError if isinstance(metrics, dict) else CheckpointError
            with pytest.raises(error):
                manager.save(1, state_of(1), metrics=metrics, sync_files=False)
        assert list(tmp_path.iterdir()) == []
        info = manager.save(1, state_of(1), metrics={"x": math.inf}, sync_files=False)
        assert info.metrics == {"x": math.inf}


def test_ranks_save_prune_and_restore_together(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks see the same; rank 0 deletes; the metrics are those of rank 0."""
    results = ranks.run(cases.train, str(tmp_path), 5, world_size=3)
    assert all(result == results[0] for result in results)
    assert results[0][:-1] == ["step-00000004", "step-00000005"]
    assert cases.names_in(tmp_path) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("noticed", [0, 2])
def test_a_signal_on_one_rank_is_answered_by_all(
    ranks: RankPool, tmp_path: Path, noticed: int
) -> None:
    """All ranks save at the same steps, once for the signal, and know which rank it came to."""
    results = ranks.run(cases.decide, str(tmp_path), noticed, 10_000_000, world_size=3)
    saves, preempted, _ = results[0]
    assert preempted == f"SIGUSR1 on rank {noticed}"
    assert all((found, why) == (saves, preempted) for found, why, _ in results)
    assert len([step for step in saves if step % 10]) <= 1
    assert [taken for *_, taken in results] == [rank == noticed for rank in range(3)]


def test_a_rank_that_was_refused_and_tries_again_meets_the_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Arguments that were wrong on one rank leave no trace: the next manager works with theirs."""
    saved(tmp_path, 1)
    names = ranks.run(cases.make_again, str(tmp_path), world_size=2)
    assert names == ["step-00000001"] * 2


@pytest.mark.parametrize(
    ("method", "given", "other", "named"),
    [
        ("restore", ({}, {}), {"root_url": "memory://elsewhere"}, "the root's URL"),
        ("restore", ({}, {}), {"mirror": "memory://elsewhere"}, "the mirror's URL"),
        ("should_save", (5, 6), {}, "the step"),
        ("should_save", (1, 1), {"preemption": bool}, "preemption"),
        ("should_save", (1, 1), {"every_steps": 4}, "every_steps"),
        ("should_save", (1, 1), {"every_s": 9.0}, "every_s"),
        ("should_save", (1, 1), {"names": "s{step}"}, "names"),
    ],
)
def test_ranks_that_decide_by_other_arguments_are_told(
    ranks: RankPool, tmp_path: Path, method: str, given: Any, other: dict[str, Any], named: str
) -> None:
    """All ranks learn what differs on one of them; none waits for a rank in vain."""
    options = {"root_url": str(tmp_path), "every_steps": 3}
    errors = ranks.run(cases.outcome, method, given, (options, options | other), world_size=2)
    assert all(error.startswith("RankMismatchError") and named in error for error in errors), errors


WAYS = ("first", "middle", "cut", "longer", "removed")


def hurt(path: Path, way: str) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    if way == "removed":
        path.unlink()
        return
    if way == "longer":
        data += b"\0"
    elif way == "cut":
        del data[-1:]
    else:
        data[0 if way == "first" else len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("check", ["read", "deep"])
def test_every_damage_is_passed_over_alike_on_all_ranks(
    ranks: RankPool, tmp_path: Path, check: Check
) -> None:
    """All ranks load the newest whole, or the one before; the coordinator says what it passed.

    Each file of the newest is damaged in each way. What is known to be damaged on one rank is no
    `latest` on any.
    """
    ranks.run(cases.train, str(tmp_path / "run"), 3, world_size=2)
    newest, roots = tmp_path / "run/step-00000003", dict[str, Path]()
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        for way in WAYS:
            root = roots[f"{way} {file.name}"] = tmp_path / str(len(roots))
            shutil.copytree(tmp_path / "run", root)
            hurt(root / newest.name / file.relative_to(newest), way)
    assert len(roots) >= len(WAYS) * 8
    told = ranks.run(cases.resume_each, [*map(str, roots.values())], check, world_size=2)
    (save_folder,) = (newest / "saves").iterdir()
    for what, mine, other in zip(roots, *told, strict=True):
        step, latest, skipped, said = mine
        assert mine[:3] == other[:3], what
        assert (said, other[3]) == (bool(skipped), False), what
        if step == 3:
            assert skipped == [], what
            # What no reader needs tells who clears up how far a save came.
            assert check == "read" or what.endswith(("begun.json", ".metadata")), what
        else:
            assert (step, [name for name, _ in skipped]) == (2, [newest.name]), what
            assert skipped[0][1] in {None, save_folder.name}, what
            assert latest == 2, what
            assert not what.endswith("begun.json"), what
        if what.endswith(".distcp") and what.startswith("removed"):
            assert step == 2, what


@pytest.mark.parametrize("what", ["no .metadata", "no marker", "an export"])
def test_what_no_load_needs_is_no_reason_to_go_back(tmp_path: Path, what: str) -> None:
    """A saver died before it published, or an export is damaged: the newest still counts."""
    saved(tmp_path, 1)
    newest = tmp_path / NEWEST
    ckpt_storage.save(
        state_of(2), newest, sync_files=False, consolidate=what == "an export" or None
    )
    if what == "no .metadata":
        (newest / ".metadata").unlink()
    elif what == "no marker":
        for path in newest.rglob("begun.json"):
            path.write_bytes(b"{")
    else:
        (weights,) = newest.glob("hf/*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-9])
    newest_info = prune(tmp_path, KeepLatest(1)).newest
    assert newest_info is not None
    assert newest_info.step == 2
    with CheckpointManager(tmp_path, **RUN) as manager:
        found = restore(manager, check="deep")
    assert (found.step, found.skipped) == (2, ())


def test_a_check_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steadily bytes arrive, a rank that checks has an end that the others know."""
    saved(tmp_path, 1)

    def moves_for_ever(reader: RangeReader, *_: object, **__: object) -> None:
        while True:
            reader.store.deadline.watch.advanced(1)
            reader.store.deadline.check("The read")
            reader.store.deadline.sleep(0.01)

    monkeypatch.setattr(RangeReader, "run", moves_for_ever)
    with (
        CheckpointManager(tmp_path, timeout=Timeouts(load=1.0)) as manager,
        pytest.raises(PhaseTimeoutError, match="load phase"),
    ):
        manager.restore(cases.blank(), check="deep")


def test_ranks_divide_a_deep_check(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks read a file each of two; what one finds ends the check of one that never ends.

    However many files and ranks: each file is in one part, and parts differ by one at most.
    Each knows the largest part, so that who has nothing to read waits as long as the others.
    """
    saved(tmp_path, 1)
    ranks.run(cases.save_large, str(tmp_path), 2, world_size=2)
    files = sorted((tmp_path / NEWEST).rglob("*.distcp"))
    sizes = [file.stat().st_size for file in files]
    found = ranks.run(cases.resume_watched, str(tmp_path), -1, world_size=2)
    assert sorted(count for *_, count in found) == sorted(sizes)
    refs = [(FileRef(path=f"{n}", size_bytes=n * 7 % 50, crc32c=0), 0) for n in range(9)]
    for count in range(1, 12):
        parts = divided(refs, count)
        held = sorted(pair for part in parts for pair in part.items())
        assert held == [(ref.path, ref.size_bytes) for ref, _ in refs]
        lengths = [sum(part.values()) for part in parts]
        assert max(lengths) - min(lengths) <= 49
    store = open_store(tmp_path / NEWEST)
    assert sorted(part_bytes(store, 3, Deadline("load", 60))) == sorted([*sizes, 0])
    data = bytearray(files[1].read_bytes())
    data[-5000] ^= 1
    files[1].write_bytes(data)
    found = ranks.run(cases.resume_watched, str(tmp_path), 0, world_size=2)
    assert [(step, skipped) for step, skipped, _ in found] == [(1, [NEWEST])] * 2


STEP = "step-00000001"


def full(value: float) -> dict[str, torch.Tensor]:
    """Return a state of which all elements are `value`."""
    return {"w": torch.full((4,), value)}


def overwritten(tmp_path: Path, *, times: int) -> tuple[Path, Path]:
    """Return a root with one checkpoint, and one with what later saves over it make of it."""
    now, later = tmp_path / "now", tmp_path / "later"
    with ckpt_storage.CheckpointManager(now) as manager:
        manager.save(1, full(0))
    shutil.copytree(now, later)
    for value in range(1, times + 1):
        ckpt_storage.save(full(value), later / STEP, overwrite=True)
    return now, later


def put_in_place(now: Path, later: Path) -> None:
    """Let the later saves happen."""
    shutil.copytree(later, now, dirs_exist_ok=True)
    kept = {path.name for path in (later / STEP / "saves").iterdir()}
    for path in (now / STEP / "saves").iterdir():
        if path.name not in kept:
            shutil.rmtree(path)


def load_overwritten(rank: int, now: Path, later: Path, way: str, name: str) -> list[float]:
    """Load while rank 1 opens `name` only once the checkpoint was overwritten."""
    left = [later]
    # Values are opened only after all ranks have told what they found.
    waits = name != ".distcp"

    class Overwriting(FaultPosix):
        """Lets the saves happen when rank 0 knows the older one and rank 1 opens a file."""

        def open_read(self, path: str) -> int:
            if left and rank == 1 and path.endswith(name):
                root = left.pop()
                if waits:
                    dist.barrier()
                put_in_place(now, root)
            found = super().open_read(path)
            if left and rank == 0 and waits and path.endswith("manifest.json"):
                left.pop()
                dist.barrier()
            return found

    state = full(-1)
    with patch("ckpt_storage.store.backends.local.Posix", Overwriting):
        if way == "load":
            ckpt_storage.load(state, now / STEP)
        else:
            with ckpt_storage.CheckpointManager(now) as manager:
                manager.restore(state)
    found: list[float] = state["w"].tolist()
    return found


@pytest.mark.parametrize(
    ("way", "name", "times"),
    [
        ("load", "00000001.json", 1),
        ("load", "manifest.json", 2),
        ("load", ".distcp", 2),
        ("restore", ".distcp", 2),
    ],
)
def test_all_ranks_load_the_new_save_together(
    tmp_path: Path, way: str, name: str, times: int
) -> None:
    """Ranks that find different saves, or one that was freed, all load the one that is there now.

    Rank 1 finds the new save in the first case, and no file of the old one in the others.
    """
    now, later = overwritten(tmp_path, times=times)
    outcomes = run_ranks(2, load_overwritten, now, later, way, name)
    assert [outcome.value for outcome in outcomes] == [[float(times)] * 4] * 2, outcomes
