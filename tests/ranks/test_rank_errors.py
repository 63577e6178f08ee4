"""What ranks are told when they disagree, fail or are killed; groups of all kinds coordinate.

Each rank is a process. What it must be told follows from what the test lets go wrong.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import front_door_cases as cases
import pytest
import torch
import torch.distributed as dist
from dcp_cases import load_stock, resolving, same, seeded
from saver_cases import until

import ckpt_storage
from ckpt_storage import CheckpointManager, RankFailedError
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import store_of
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.ranks import RankPool

WITHIN_S = 10.0
"""What is promised where another rank of the host lives."""


def told(error: ckpt_storage.CheckpointError) -> dict[str, Any]:
    """Return what a user can see of an error."""
    kind = type(error).__name__
    return {"kind": kind, "text": str(error), "rank": error.rank, "phase": error.phase}


def disagree(rank: int, folder: str) -> list[dict[str, Any]]:
    """Save to another URL on each rank; restore with a `check` that only rank 1 spells wrong."""
    url, check = f"{folder}/from the load of {rank}", "reed" if rank == 1 else "read"
    unlike = cases.caught(ckpt_storage.save, cases.state_of(1), url, timeout=20.0)
    with CheckpointManager(folder, timeout=20.0) as manager:
        return [told(unlike), told(cases.caught(manager.restore, {"step": 0}, check=check))]


def test_all_ranks_hear_of_what_one_means_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    """A URL that mentions a load changes no advice; a wrong argument names the rank."""
    ckpt_storage.save({"step": 1}, tmp_path / "step-00000001", sync_files=False)
    results = ranks.run(disagree, str(tmp_path), world_size=2)
    for unlike, refused in results:
        assert unlike["kind"] == "RankMismatchError"
        assert "Nothing was written" in unlike["text"], unlike
        assert "Load again" not in unlike["text"], unlike
        assert refused["rank"] == 1
        assert "'reed'" in refused["text"]
    assert [one["kind"] for _, one in results] == ["RankFailedError", "InvalidInputError"]


def look_where_to_resume(_rank: int, root: Path) -> list[Any]:
    """Ask what would be restored of each root; a file cannot be listed."""
    found = list[Any]()
    for name in ("empty", "two"):
        with CheckpointManager(root / name, timeout=20.0) as manager:
            info = manager.resume_info()
        found.append(info and info.name)
    with CheckpointManager(root / "file", timeout=20.0) as manager:
        return [*found, told(cases.caught(manager.resume_info))]


def test_all_ranks_hear_where_to_resume_and_why_not(ranks: RankPool, tmp_path: Path) -> None:
    """`resume_info` gives all ranks one answer; what rank 0 fails with in it, all ranks raise."""
    for step in (1, 12):
        ckpt_storage.save({"step": step}, tmp_path / f"two/step-{step:08}", sync_files=False)
    (tmp_path / "file").touch()
    for empty, two, refused in ranks.run(look_where_to_resume, tmp_path, world_size=2):
        assert (empty, two) == (None, "step-00000012")
        assert refused["rank"] == 0, refused
        assert str(tmp_path / "file") in refused["text"]


def wait_for_a_late_rank(rank: int, folder: str) -> list[str]:
    """Save while rank 1 never comes; return what rank 0 logged meanwhile."""
    if rank == 1:
        return []
    with mock.patch.object(logging.getLogger("ckpt_storage"), "warning") as warning:
        cases.caught(ckpt_storage.save, {"step": 1}, f"{folder}/run", timeout=2.0)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_who_has_not_come_is_logged_while_one_waits(ranks: RankPool, tmp_path: Path) -> None:
    """Long before the deadline, by default ten minutes, rank 0 logs whom it waits for."""
    assert ckpt_storage.Timeouts().plan == pytest.approx(600.0)
    texts, _ = ranks.run(wait_for_a_late_rank, str(tmp_path), world_size=2)
    assert any("Rank 1" in text and f"{tmp_path}/run" in text for text in texts), texts


def look_alone_first(rank: int, root: str) -> tuple[list[int | None], str]:
    """Let rank 0 alone make managers and a saver that send nothing; then work together."""
    if rank == 0:
        for _ in range(2):
            with CheckpointManager(root, timeout=20.0) as alone:
                assert alone.latest() is None
        ckpt_storage.AsyncSaver(mode="thread", timeout=20.0).close()
    steps = []
    for step in (1, 2):
        with CheckpointManager(root, timeout=20.0, mode="thread", every_steps=1) as manager:
            assert manager.should_save(step)
            manager.save_async(step, {"step": step}, sync_files=False).result(20.0)
            info = manager.resume_info()
            steps.append(None if info is None else info.step)
    with ckpt_storage.AsyncSaver(mode="thread", timeout=20.0) as saver:
        saver.save({"step": 1}, f"{root}/other-1", sync_files=False).result(20.0)
        refusal = cases.caught(ckpt_storage.AsyncSaver, mode="thread", timeout=20.0)
        with ckpt_storage.AsyncSaver(mode="thread", timeout=20.0, name="other") as other:
            other.save({"step": 1}, f"{root}/run", sync_files=False).result(20.0)
        ckpt_storage.save_async({"step": 1}, f"{root}/run-2", sync_files=False).result(20.0)
    assert isinstance(refusal, ckpt_storage.InvalidInputError)
    return steps, str(refusal)


def test_what_one_rank_makes_alone_shifts_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Managers that only look and idle savers may be rank 0's alone; names are open once."""
    for steps, refusal in ranks.run(look_alone_first, str(tmp_path), world_size=2):
        assert steps == [1, 2]
        assert "'default'" in refusal
        assert "name=" in refusal


def be_killed(folder: Path) -> None:
    """End once the others have written and all have told which phase they are in."""
    until(lambda: len(list(folder.glob("run/**/__*.distcp"))) >= 2, "the others write")
    time.sleep(0.5)
    (folder / "killed").write_text(str(time.time()), encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_saving(rank: int, folder: str, victim: int, kind: str) -> dict[str, Any]:
    """Let one rank be killed in the middle of its write; return what another is told, and when."""
    with cases.default_group(rank, 3, folder, kind=kind):
        ckpt_storage.save({"step": 0}, f"{folder}/first", sync_files=False)
        planner = resolving(lambda *_: be_killed(Path(folder))) if rank == victim else None
        error = cases.caught(
            ckpt_storage.save, {f"of {rank}": torch.zeros(9)}, f"{folder}/run", planner=planner
        )
        seconds = time.time() - float(Path(f"{folder}/killed").read_text(encoding="ascii"))
        Path(f"{folder}/told-{rank}").write_text(
            json.dumps({**told(error), "seconds": seconds}), encoding="utf-8"
        )
        # To take the group down would ask the store that may be gone.
        os._exit(0)


@pytest.mark.parametrize(("victim", "kind"), [(1, "file"), (0, "tcp")], ids=str)
def test_a_rank_that_is_killed_in_its_write_is_named_within_ten_seconds(
    ranks: RankPool, tmp_path: Path, victim: int, kind: str
) -> None:
    """With every deadline at its default, also where rank 0 dies and the store with it."""
    ranks.outcomes(die_while_saving, str(tmp_path), victim, kind, world_size=3, timeout_s=150.0)
    for rank in {0, 1, 2} - {victim}:
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["rank"] == victim, one
        assert one["phase"] in {"write", "commit"}, one
        assert f"{tmp_path}/run" in one["text"], one
        assert one["seconds"] < WITHIN_S, one
    target = {"step": 1}
    ckpt_storage.load(target, tmp_path / "first")
    assert target == {"step": 0}


def disagree_and_leave(rank: int, folder: str) -> None:
    """Disagree on the URL while rank 0, which hosts the store, would leave at once."""
    with cases.default_group(rank, 2, folder, kind="tcp"):
        ckpt_storage.save({"step": 0}, f"{folder}/first", sync_files=False)
        if rank == 1:
            Path(f"{folder}/pid").write_text(str(os.getpid()), encoding="ascii")
        else:
            until(Path(f"{folder}/pid").exists, "rank 1 comes")
            time.sleep(0.3)  # it says what it means; a second later it reads the verdict
            stopped = Path(f"{folder}/pid").read_text(encoding="ascii")
            os.kill(int(stopped), signal.SIGSTOP)
            subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {stopped}"])
        error = cases.caught(ckpt_storage.save, {"step": 1}, f"{folder}/of {rank}", timeout=20.0)
        Path(f"{folder}/told-{rank}").write_text(json.dumps(told(error)), encoding="utf-8")
        os._exit(0)


def test_all_ranks_read_who_said_what_before_rank_0_leaves(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 hosts the store and raises a mismatch only once the others have read it."""
    ranks.outcomes(disagree_and_leave, str(tmp_path), world_size=2)
    for rank in (0, 1):
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["kind"] == "RankMismatchError", one
        assert all(f"of {other}" in one["text"] for other in (0, 1)), one


def speak(group: Any = None) -> list[bytes]:
    """Run one operation in which every rank sends its rank in the group."""
    coordinator = RankGroup.of(group)
    with coordinator.operation("the test", timeouts=Timeouts.of(20.0)) as operation:
        operation.meet({"everything": "equal"})
        return operation.all_gather(b"%d" % operation.rank)


def everybody(world_size: int) -> list[bytes]:
    """Return what every rank sends."""
    return [b"%d" % rank for rank in range(world_size)]


def in_other_groups(rank: int, folder: str) -> list[list[bytes]]:
    """Speak in a group of our own kind, end it, and speak in its successor."""
    heard = []
    for number in range(2):
        inner = Path(folder) / str(number)
        with cases.default_group(rank, 3, str(inner), kind="tcp"):
            heard.append(speak())
            heard.append(speak())
    return heard


def test_a_group_made_anew_coordinates(ranks: RankPool, tmp_path: Path) -> None:
    """After destroy and init the new group's ranks hear each other."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    expected = [[everybody(3)] * 4] * 3
    assert ranks.run(in_other_groups, str(tmp_path), world_size=3) == expected


def in_sub_group(rank: int, path: str) -> str:
    """Save on ranks 1 and 3, while 0 and 2 never call anything and end at once."""
    if rank in {0, 2}:
        return "no member"
    # A short timeout is for what is tested, not for ranks that begin a moment apart.
    dist.barrier(dist.new_group([1, 3], use_local_synchronization=True))
    short = timedelta(seconds=2)
    group = dist.new_group([1, 3], timeout=short, use_local_synchronization=True)
    time.sleep(2.5 if rank == 3 else 0.0)  # longer than the group's own timeout
    assert speak(group) == everybody(2)
    info = ckpt_storage.save(
        {"w": seeded(2, 100)}, path, process_group=group, sync_files=False, timeout=20.0
    )
    target = {"w": torch.zeros(100)}
    ckpt_storage.load(target, path, process_group=group, timeout=20.0)
    assert same(target["w"], seeded(2, 100))
    return info.save_id or ""


def test_a_sub_group_saves_while_others_never_call(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 1 and 3 of 4 save and load although 0 and 2 take no part, however late one is."""
    path = tmp_path / "run"
    first, second, third, fourth = ranks.run(in_sub_group, str(path), world_size=4)
    assert (first, third) == ("no member", "no member")
    assert second == fourth != ""
    target = {"w": torch.zeros(100)}
    load_stock(target, path)
    assert same(target["w"], seeded(2, 100))


def on_the_default_store(_rank: int) -> list[list[bytes]]:
    """Speak in two groups whose backend keeps no store."""
    with patch.object(dist.ProcessGroup, "get_group_store", side_effect=RuntimeError("none")):
        group = dist.new_group([0, 1])
        heard = [speak(), speak(group)]
        assert isinstance(store_of(group), dist.PrefixStore)
    return heard


def test_a_group_without_a_store_uses_the_default_groups(ranks: RankPool) -> None:
    """Where a group has no store of its own, its ranks meet on the default store."""
    assert ranks.run(on_the_default_store, world_size=2) == [[everybody(2)] * 2] * 2


def with_backend_without_collectives(rank: int, folder: str) -> list[bytes]:
    """Speak in a default group whose backend moves nothing, as if its network were down."""
    dist.destroy_process_group()
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  # registers it

    store = dist.FileStore(str(Path(folder) / "rendezvous"), 2)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    try:
        ckpt_storage.save({"w": seeded(rank, 9)}, f"{folder}/run", timeout=20.0, sync_files=False)
        return speak()
    finally:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_no_collective_of_the_group_is_needed(ranks: RankPool, tmp_path: Path) -> None:
    """Over a backend whose collectives do nothing, ranks agree and save all the same."""
    heard = ranks.run(with_backend_without_collectives, str(tmp_path), world_size=2)
    assert heard == [everybody(2)] * 2
    target = {"w": torch.zeros(9)}
    load_stock(target, tmp_path / "run")
    assert same(target["w"], seeded(0, 9))


def die_before_the_next(rank: int, who: int) -> tuple[bool, int | None]:
    """Let one rank vanish after an operation; return what the others are told in the next."""
    speak()
    if rank == who:
        os._exit(3)
    try:
        speak()
    except RankFailedError as error:
        return error.is_silent, error.rank
    return False, None


def test_a_rank_that_died_between_operations_is_named_at_once(ranks: RankPool) -> None:
    """Ranks of its host need not wait until the plan phase is over: its process has ended."""
    begin_s = time.monotonic()
    for outcome in ranks.outcomes(die_before_the_next, 0, world_size=3)[1:]:
        assert outcome.value == (True, 0), outcome
    assert time.monotonic() - begin_s < 15.0
