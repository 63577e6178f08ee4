"""`CheckpointManager` on several ranks, and loads of what is damaged or overwritten meanwhile."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import manager_cases as cases
import pytest
import torch
import torch.distributed as dist
from limits import HANG_S
from manager_cases import damage, restore, saved, state_of
from on_ranks import gathered, on_ranks
from posix_faults import FaultPosix

import ckpt_storage
from ckpt_storage import CheckpointManager, KeepLatest, Timeouts, errors, prune
from ckpt_storage.format.documents import FileRef
from ckpt_storage.inspect import verify
from ckpt_storage.manager.resume import Check
from ckpt_storage.store import open_store
from ckpt_storage.transfer.ranges import RangeReader

RUN: dict[str, Any] = {"mode": "thread", "timeout": 60}
NEWEST = "step-00000002"


def assert_restores(root: Path, step: int, check: Check = "read") -> None:
    """Assert that a new manager restores a step, and skips none for it."""
    with CheckpointManager(root, **RUN) as manager:
        found = restore(manager, check=check)
    assert (found.step, found.skipped) == (step, ())


@pytest.mark.parametrize(("check", "in_background"), [("read", True), ("deep", False)])
@on_ranks(1, 3)
def test_training_that_falls_back_past_damage_comes_by_its_step_again(
    rank: int, tmp_path: Path, check: Any, *, in_background: bool
) -> None:
    """The job that resumed from step 1 saves step 2 again, is told of it, and resumes from that.

    No rank needs to know of `overwrite`, and no two ranks disagree.
    """
    saved(tmp_path, 1, 2)
    if rank == 0:
        damage(tmp_path / NEWEST)
    gathered()
    with CheckpointManager(tmp_path, keep=KeepLatest(3), **RUN) as manager:
        assert restore(manager, check=check).step == 1
        with patch.object(logging.getLogger("ckpt_storage"), "warning") as warning:
            if in_background:
                manager.save_async(2, state_of(2), sync_files=False).result(60)
            else:
                manager.save(2, state_of(2), sync_files=False)
        texts = [call.args[0] for call in warning.call_args_list]
        assert sum("is to replace it" in text for text in texts) == (rank == 0)
        with pytest.raises(errors.CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
    assert_restores(tmp_path, 2, check="deep")


def test_a_sound_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    """What another job saved since under the name of the damaged step stays."""
    saved(tmp_path, 1, 2)
    damage(tmp_path / NEWEST)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager).step == 1
        ckpt_storage.save(state_of(2), tmp_path / NEWEST, overwrite=True, sync_files=False)
        with pytest.raises(errors.CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
        with pytest.raises(errors.CheckpointExistsError):
            manager.save(1, state_of(1), sync_files=False)
    assert_restores(tmp_path, 2)


@pytest.mark.parametrize(
    ("what", "bad_rank", "in_background", "wanted"),
    [
        ("metrics", 0, True, "not a number"),
        ("metrics", 1, False, "not a number"),
        ("step", 1, True, "is no step"),
        ("claim", 0, False, "being deleted"),
        ("claim", 1, True, "being deleted"),
    ],
)
@on_ranks()
def test_what_one_rank_refuses_is_told_to_all(
    rank: int, tmp_path: Path, what: str, bad_rank: int, wanted: str, *, in_background: bool
) -> None:
    """Wrong arguments on one rank, or a name that is being deleted, end the save of all."""
    waits = Timeouts(plan=2.0 if what == "claim" else 60.0)
    wrong = what if rank == bad_rank else ""
    with CheckpointManager(tmp_path, timeout=waits, mode="thread") as manager:
        uses = manager._root.in_use  # noqa: SLF001  # nothing public stops in the middle
        metrics: Any = {"loss": None if wrong == "metrics" else 1.0}
        given: Any = -1 if wrong == "step" else 7, state_of(7)
        claimed = uses.reserved_for_deletion("step-00000007") if wrong == "claim" else nullcontext()
        with claimed, pytest.raises(errors.CheckpointError) as caught:  # noqa: PT012  # one of two calls
            if in_background:
                manager.save_async(*given, metrics=metrics, sync_files=False).result(60)
            else:
                manager.save(*given, metrics=metrics, sync_files=False)
        assert f"rank {bad_rank}" in f"rank {caught.value.rank}: {caught.value}".lower()
        assert wanted in str(caught.value)
        # Afterwards all save together again.
        assert manager.save(8, state_of(8), sync_files=False).name == "step-00000008"


def test_metrics_that_cannot_be_are_refused_by_our_errors(tmp_path: Path) -> None:
    """Whatever a number's own conversion raises, the save ends by an error of ours."""
    wrong: list[Any] = [{"x": torch.ones(3)}, {"x": 10**400}, {"x": "much"}, {"x" * 20_000: 1.0}, 7]
    with CheckpointManager(tmp_path, **RUN) as manager:
        for metrics in wrong:
            with pytest.raises(errors.CheckpointError) as caught:
                manager.save(1, state_of(1), metrics=metrics, sync_files=False)
            assert isinstance(caught.value, errors.InvalidInputError) or metrics == 7
        assert list(tmp_path.iterdir()) == []
        info = manager.save(1, state_of(1), metrics={"x": math.inf}, sync_files=False)
        assert info.metrics == {"x": math.inf}


@on_ranks(3)
def test_ranks_save_prune_and_restore_together(rank: int, tmp_path: Path) -> None:
    """All ranks see the same; rank 0 deletes; the metrics are those of rank 0."""
    with CheckpointManager(tmp_path, keep=KeepLatest(2), **RUN) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step), metrics={"loss": rank}, sync_files=False)
        manager.save_async(5, state_of(5), sync_files=False).result(60)
        assert manager.wait_pruned(60)
        assert (manager.prune() is None) == (rank != 0)
        found, infos = restore(manager), manager.all()
    assert infos[0].metrics == {"loss": 0.0}
    seen = [*(info.name for info in infos), found.info.save_id]
    assert seen[:-1] == ["step-00000004", "step-00000005"] == cases.names_in(tmp_path)
    assert gathered(seen) == [seen] * 3


@pytest.mark.parametrize("noticed", [0, 2])
@on_ranks(3)
def test_a_signal_on_one_rank_is_answered_by_all(rank: int, tmp_path: Path, noticed: int) -> None:
    """All ranks save at the same steps, once for the signal, and know which rank it came to."""
    taken: list[int] = []
    saves: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: taken.append(number))
    try:
        with CheckpointManager(
            tmp_path, every_steps=10, signals=(signal.SIGUSR1,), timeout=HANG_S
        ) as manager:
            for step in itertools.count(1):
                if step == 5 and rank == noticed:
                    os.kill(os.getpid(), signal.SIGUSR1)
                saves += [step] if manager.should_save(step) else []
                if manager.preempted:
                    break
            preempted = manager.preempted
    finally:
        assert callable(signal.signal(signal.SIGUSR1, before))
    assert preempted == f"SIGUSR1 on rank {noticed}"
    assert bool(taken) == (rank == noticed)
    assert gathered(saves) == [saves] * 3
    assert len([step for step in saves if step % 10]) <= 1


@on_ranks()
def test_a_rank_that_was_refused_and_tries_again_meets_the_others(
    rank: int, tmp_path: Path
) -> None:
    """Arguments that were wrong on one rank leave no trace: the next manager works with theirs."""
    wrong: list[dict[str, Any]] = [
        {"every_steps": 0},
        {"signals": (signal.SIGKILL,)},
        {"every_s": -1.0},
    ]
    for options in wrong if rank else []:
        with pytest.raises(errors.CheckpointError):
            CheckpointManager(tmp_path, timeout=HANG_S, **options)
    with CheckpointManager(tmp_path, timeout=HANG_S) as manager:
        manager.save(1, state_of(1), sync_files=False)
        assert restore(manager).step == 1


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("method", ["restore", "resume_info"])
@on_ranks()
def test_saves_and_restores_go_on_after_a_restore_by_one_rank_alone(
    rank: int, tmp_path: Path, alone: int, method: str
) -> None:
    """The lone call fails and loads nothing; it counts on no rank."""
    limits = Timeouts(plan=1.0, load=HANG_S, write=HANG_S, commit=HANG_S)
    with CheckpointManager(tmp_path, timeout=limits) as manager:
        manager.save(1, state_of(1), sync_files=False)
        manager.resume_info()
        if rank == alone:
            with pytest.raises(errors.PhaseTimeoutError):
                getattr(manager, method)(*([cases.blank()] if method == "restore" else []))
        dist.barrier()
        for step in (2, 3):
            manager.save(step, state_of(step), sync_files=False)
        assert [info.step for info in manager.all()] == [1, 2, 3]
        assert restore(manager).step == 3


class _LateLayer(torch.nn.Linear):
    """A layer whose state is read late."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        time.sleep(3.5)
        return super().state_dict(*args, **options)


@on_ranks()
def test_a_rank_that_is_late_in_a_restore_is_named_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """It comes when the load of the others has failed, and waits for no load: they repeat none."""
    layer = torch.nn.Linear(2, 2)
    limits = Timeouts(plan=1.0, load=HANG_S, write=HANG_S, commit=HANG_S)
    with CheckpointManager(tmp_path, timeout=limits) as manager:
        manager.save(1, {"layer": layer}, sync_files=False)
        late = _LateLayer(2, 2) if rank == 1 else layer
        with pytest.raises(errors.PhaseTimeoutError, match=r"Rank 1 .*phase of the load from"):
            manager.restore({"layer": late})


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
@on_ranks()
def test_ranks_that_decide_by_other_arguments_are_told(
    rank: int, tmp_path: Path, method: str, given: Any, other: dict[str, Any], named: str
) -> None:
    """All ranks learn what differs on one of them; none waits for a rank in vain."""
    options: Any = {"root_url": tmp_path, "every_steps": 3} | (other if rank else {})
    with CheckpointManager(timeout=HANG_S, **options) as manager:
        with pytest.raises(errors.RankMismatchError) as caught:
            getattr(manager, method)(given[rank])
        assert named in str(caught.value)


WAYS = ("first", "middle", "cut", "longer", "removed")


def hurt(path: Path, way: str) -> None:
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
@on_ranks()
def test_every_damage_is_passed_over_alike_on_all_ranks(
    rank: int, tmp_path: Path, check: Check
) -> None:
    """All ranks load the newest whole, or the one before; the coordinator says what it passed.

    Each file of the newest is damaged in each way. What is known to be damaged on one rank is no
    `latest` on any.
    """
    run = tmp_path / "run"
    with CheckpointManager(run, **RUN) as manager:
        cases.save(manager, 2, 3)
    newest = run / "step-00000003"
    (save_folder,) = (newest / "saves").iterdir()
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 8
    for number, (file, way) in enumerate(itertools.product(files, WAYS)):
        root, what = tmp_path / str(number), f"{way} {file.name}"
        if rank == 0:
            shutil.copytree(run, root)
            hurt(root / newest.name / file.relative_to(newest), way)
        gathered()
        with (
            patch.object(logging.getLogger("ckpt_storage"), "log") as logged,
            CheckpointManager(root, timeout=HANG_S) as manager,
        ):
            found, latest = restore(manager, check=check), manager.latest()
        said = any("Resumed from" in call.args[1] for call in logged.call_args_list)
        skipped = [(one.name, one.save_id) for one in found.skipped]
        seen = found.step, latest and latest.step, skipped
        assert gathered(seen) == [seen] * 2, what
        assert said == (rank == 0 and bool(skipped)), what
        if found.step == 3:
            assert skipped == [], what
            # What no reader needs tells who clears up how far a save came.
            assert check == "read" or what.endswith(("begun.json", ".metadata")), what
        else:
            assert (found.step, [name for name, _ in skipped]) == (2, [newest.name]), what
            assert skipped[0][1] in {None, save_folder.name}, what
            assert seen[1] == 2, what
            assert not what.endswith("begun.json"), what
        if what.endswith(".distcp") and what.startswith("removed"):
            assert found.step == 2, what


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
    found = prune(tmp_path, KeepLatest(1)).newest
    assert found is not None
    assert found.step == 2
    assert_restores(tmp_path, 2, check="deep")


def test_a_check_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steadily bytes arrive, a rank that checks has an end that the others know."""
    saved(tmp_path, 1)

    def moves_for_ever(reader: RangeReader, *_: object, **__: object) -> None:
        while True:
            reader.store.deadline.monitor.advanced(1)
            reader.store.deadline.check("The read")
            reader.store.deadline.sleep(0.01)

    monkeypatch.setattr(RangeReader, "run", moves_for_ever)
    with (
        CheckpointManager(tmp_path, timeout=Timeouts(load=1.0)) as manager,
        pytest.raises(errors.PhaseTimeoutError, match="load phase"),
    ):
        manager.restore(cases.blank(), check="deep")


def _bytes_checked(rank: int, root: Path, hanging_rank: int) -> tuple[int, list[str], int]:
    """Restore after checking all; long reads of the hanging rank, if any, never end."""
    counts: list[int] = []

    class Watched(RangeReader):
        def run(self, reads: Any, **options: Any) -> None:
            counts.append(sum(read.stop - read.start for read in reads))
            while rank == hanging_rank and counts[-1] > 1_000_000:
                self.store.deadline.check("The read")
                self.store.deadline.sleep(0.01)
            super().run(reads, **options)

    with patch.object(verify, "RangeReader", Watched), CheckpointManager(root, **RUN) as manager:
        found = restore(manager, check="deep")
    return found.step, [one.name for one in found.skipped], sum(counts)


@on_ranks()
def test_ranks_divide_a_deep_check(rank: int, tmp_path: Path) -> None:
    """Two ranks read a file each of two; what one finds ends the check of one that never ends."""
    more = {f"t{rank}.{number}": torch.rand(300_000) for number in range(10)}
    with CheckpointManager(tmp_path, **RUN) as manager:
        cases.save(manager, 1)
        manager.save(2, {**state_of(2), **more}, sync_files=False)
    files = sorted((tmp_path / NEWEST).rglob("*.distcp"))
    sizes = sorted(file.stat().st_size for file in files)
    assert sorted(gathered(_bytes_checked(rank, tmp_path, -1)[2])) == sizes
    # Each knows the largest part: who has nothing to read waits as long as the others.
    store = open_store(tmp_path / NEWEST)
    assert sorted(verify.part_bytes(store, 3)) == [0, *sizes]
    if rank == 0:
        data = bytearray(files[1].read_bytes())
        data[-5000] ^= 1
        files[1].write_bytes(data)
    gathered()
    assert _bytes_checked(rank, tmp_path, 0)[:2] == (1, [NEWEST])


def test_parts_of_a_deep_check_differ_little() -> None:
    """However many files and ranks: each file is in one part, and parts differ by one at most."""
    refs = [(FileRef(path=f"{n}", size_bytes=n * 7 % 50, crc32c=0), 0) for n in range(9)]
    for count in range(1, 12):
        parts = verify.divided(refs, count)
        held = sorted(pair for part in parts for pair in part.items())
        assert held == [(ref.path, ref.size_bytes) for ref, _ in refs]
        lengths = [sum(part.values()) for part in parts]
        assert max(lengths) - min(lengths) <= 49


STEP = "step-00000001"


@pytest.mark.parametrize(
    ("way", "name", "times"),
    [
        ("load", "00000001.json", 1),
        ("load", "manifest.json", 2),
        ("load", ".distcp", 2),
        ("restore", ".distcp", 2),
    ],
)
@on_ranks()
def test_all_ranks_load_the_new_save_together(
    rank: int, tmp_path: Path, way: str, name: str, times: int
) -> None:
    """Ranks that find different saves, or one that was freed, all load the one that is there now.

    Rank 1 opens `name` only once it has overwritten the checkpoint. So it finds the new save in the
    first case, and no file of the old one in the others.
    """
    state, left = cases.blank(), [True]
    saved(tmp_path, 1)
    # Values are opened only after all ranks have told what they found.
    waits = name != ".distcp"

    class Overwriting(FaultPosix):
        """Lets the saves happen when rank 0 knows the older one and rank 1 opens a file."""

        def open_read(self, path: str) -> int:
            if left and rank == 1 and path.endswith(name):
                left.pop()
                if waits:
                    dist.barrier()
                for value in range(2, times + 2):
                    dcp_cases.save_alone(state_of(value), tmp_path / STEP, overwrite=True)
            found = super().open_read(path)
            if left and rank == 0 and waits and path.endswith("manifest.json"):
                left.pop()
                dist.barrier()
            return found

    with patch("ckpt_storage.store.backends.local.Posix", Overwriting):
        if way == "load":
            ckpt_storage.load(state, tmp_path / STEP)
        else:
            with CheckpointManager(tmp_path, **RUN) as manager:
                manager.restore(state)
    assert cases.step_in(state) == times + 1
