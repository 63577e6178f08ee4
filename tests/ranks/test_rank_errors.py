"""What ranks are told when they disagree, fail or are killed; groups of all kinds coordinate.

Each rank is a process. What it must be told follows from what the test lets go wrong. Regressions
are of own clocks, own folders (accelerate 969) and own waits (Fast-LLM 543).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import front_door_cases as cases
import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.distributed.fake_pg  # registers it
from dcp_cases import assert_holds, errors_by_rank, load_stock, resolving, same, seeded
from front_door_cases import caught, default_group, state_of
from limits import HANG_S
from on_ranks import gathered, on_ranks
from rank_pool import RankPool
from s3_server import FaultRule, S3Server
from saver_cases import until
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import AsyncSaver, CheckpointManager, CheckpointStorageWriter, errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import store_of
from ckpt_storage.options import Timeouts

WITHIN_S = 10.0
"""What is promised where another rank of the host lives."""


@on_ranks()
def test_all_ranks_hear_of_what_one_means_otherwise(rank: int, tmp_path: Path) -> None:
    """A wrong argument names the rank that gave it."""
    ckpt_storage.save({"step": 1}, tmp_path / "step-00000001", sync_files=False)
    with CheckpointManager(tmp_path, timeout=HANG_S) as manager:
        refused = caught(manager.restore, {"step": 0}, check="reed" if rank else "read")
    assert type(refused) is (errors.InvalidInputError if rank else errors.RankFailedError)
    assert refused.rank == 1
    assert "'reed'" in str(refused)


@on_ranks()
def test_all_ranks_hear_where_to_resume_and_why_not(tmp_path: Path) -> None:
    """`resume_info` gives all ranks one answer; what rank 0 fails with in it, all ranks raise."""
    for step in (1, 12):
        ckpt_storage.save({"step": step}, tmp_path / f"two/step-{step:08}", sync_files=False)
    (tmp_path / "file").touch()
    for name, newest in (("empty", None), ("two", "step-00000012")):
        with CheckpointManager(tmp_path / name, timeout=HANG_S) as manager:
            info = manager.resume_info()
        assert (info and info.name) == newest
    with CheckpointManager(tmp_path / "file", timeout=HANG_S) as manager:
        refused = caught(manager.resume_info)
    assert refused.rank == 0
    assert str(tmp_path / "file") in str(refused)


@on_ranks()
def test_who_has_not_come_is_logged_while_one_waits(rank: int, tmp_path: Path) -> None:
    """Long before the deadline, by default four minutes, rank 0 logs whom it waits for."""
    assert Timeouts().plan == pytest.approx(240.0)
    if rank == 1:
        return
    with patch.object(logging.getLogger("ckpt_storage"), "warning") as warning:
        caught(ckpt_storage.save, {"step": 1}, tmp_path / "run", timeout=2.0)
    texts = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert any("Rank 1" in text and f"{tmp_path}/run" in text for text in texts), texts


@on_ranks()
def test_what_one_rank_makes_alone_shifts_nothing(rank: int, tmp_path: Path) -> None:
    """Managers that only look and idle savers may be rank 0's alone; names are open once."""
    given: dict[str, Any] = {"mode": "thread", "timeout": HANG_S}
    if rank == 0:
        for _ in range(2):
            with CheckpointManager(tmp_path, timeout=HANG_S) as alone:
                assert alone.latest() is None
        AsyncSaver(**given).close()
    for step in (1, 2):
        with CheckpointManager(tmp_path, every_steps=1, **given) as manager:
            assert manager.should_save(step)
            manager.save_async(step, {"step": step}, sync_files=False).result(HANG_S)
            info = manager.resume_info()
            assert info is not None
            assert info.step == step
    with AsyncSaver(**given) as saver, AsyncSaver(name="other", **given) as other:
        saver.save({"step": 1}, tmp_path / "other-1", sync_files=False).result(HANG_S)
        refusal = caught(AsyncSaver, **given)
        other.save({"step": 1}, tmp_path / "run", sync_files=False).result(HANG_S)
        ckpt_storage.save_async({"step": 1}, tmp_path / "run-2", sync_files=False).result(HANG_S)
    assert isinstance(refusal, errors.InvalidInputError)
    assert "'default'" in str(refusal)
    assert "name=" in str(refusal)


def _tell_and_leave(rank: int, folder: Path, error: ckpt_storage.CheckpointError) -> None:
    """Write what a user can see of an error, and when; end without taking the group down.

    That would ask the store, which may be gone.
    """
    seen = {"kind": type(error).__name__, "text": str(error), "at": time.time()}
    text = json.dumps({**seen, "rank": error.rank, "phase": error.phase})
    (folder / f"told-{rank}").write_text(text, encoding="utf-8")
    os._exit(0)


def _die_while_saving(rank: int, folder: Path, victim: int, kind: str) -> None:
    def be_killed(*_: Any) -> None:
        until(lambda: len(list(folder.glob("run/**/__*.distcp"))) >= 2, "the others write")
        time.sleep(0.5)  # all have told which phase they are in
        (folder / "killed").write_text(str(time.time()), encoding="ascii")
        os.kill(os.getpid(), signal.SIGKILL)

    with default_group(folder, kind):
        ckpt_storage.save({"step": 0}, folder / "first", sync_files=False)
        planner = resolving(be_killed) if rank == victim else None
        state = {f"of {rank}": torch.zeros(9)}
        _tell_and_leave(
            rank, folder, caught(ckpt_storage.save, state, folder / "run", planner=planner)
        )


@pytest.mark.deadline
@pytest.mark.parametrize(("victim", "kind"), [(1, "file"), (0, "tcp")], ids=str)
def test_a_rank_that_is_killed_in_its_write_is_named_within_ten_seconds(
    ranks: RankPool, tmp_path: Path, victim: int, kind: str
) -> None:
    """With every deadline at its default, also where rank 0 dies and the store with it."""
    ranks.outcomes(_die_while_saving, tmp_path, victim, kind, world_size=3)
    killed_at = float((tmp_path / "killed").read_text(encoding="ascii"))
    for rank in {0, 1, 2} - {victim}:
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["rank"] == victim, one
        assert one["phase"] in {"write", "commit"}, one
        assert f"{tmp_path}/run" in one["text"], one
        assert one["at"] - killed_at < WITHIN_S, one
    assert_holds(tmp_path / "first", {"step": 0}, [ckpt_storage.load])


def _disagree_and_leave(rank: int, folder: Path) -> None:
    pid = folder / "pid"
    with default_group(folder, "tcp"):
        ckpt_storage.save({"step": 0}, folder / "first", sync_files=False)
        if rank == 1:
            pid.write_text(str(os.getpid()), encoding="ascii")
        else:
            until(pid.exists, "rank 1 comes")
            time.sleep(0.3)  # it says what it means; a second later it reads the verdict
            stopped = pid.read_text(encoding="ascii")
            os.kill(int(stopped), signal.SIGSTOP)
            subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {stopped}"])
        url = folder / f"of {rank}"
        _tell_and_leave(rank, folder, caught(ckpt_storage.save, {"step": 1}, url, timeout=HANG_S))


def test_all_ranks_read_who_said_what_before_rank_0_leaves(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 hosts the store and raises a mismatch only once the others have read it."""
    ranks.outcomes(_disagree_and_leave, tmp_path, world_size=2)
    for rank in (0, 1):
        one = json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8"))
        assert one["kind"] == "RankMismatchError", one
        assert all(f"of {other}" in one["text"] for other in (0, 1)), one


def assert_heard(group: Any = None) -> None:
    """Run one operation in which every rank sends its rank in the group, and hears all."""
    with RankGroup.of(group).operation("the test", timeouts=Timeouts.of(HANG_S)) as operation:
        operation.meet({"everything": "equal"})
        heard = operation.all_gather(b"%d" % operation.rank)
    assert heard == [b"%d" % rank for rank in range(dist.get_world_size(group))]


@on_ranks(3)
def test_a_group_made_anew_coordinates(tmp_path: Path) -> None:
    """After destroy and init the new group's ranks hear each other."""
    with default_group(tmp_path, "tcp"):
        assert_heard()
        assert_heard()
        with default_group(tmp_path, "tcp"):
            assert_heard()
            assert_heard()


@on_ranks(4)
def test_a_sub_group_saves_while_others_never_call(rank: int, tmp_path: Path) -> None:
    """Ranks 1 and 3 of 4 save and load although 0 and 2 take no part, however late one is."""
    if rank in {0, 2}:
        return
    # A short timeout is for what is tested, not for ranks that begin a moment apart.
    dist.barrier(dist.new_group([1, 3], use_local_synchronization=True))
    short = timedelta(seconds=2)
    group = dist.new_group([1, 3], timeout=short, use_local_synchronization=True)
    time.sleep(2.5 if rank == 3 else 0.0)  # longer than the group's own timeout
    assert_heard(group)
    given: dict[str, Any] = {"process_group": group, "timeout": HANG_S}
    ckpt_storage.save({"w": seeded(2, 100)}, tmp_path, sync_files=False, **given)
    assert_holds(tmp_path, {"w": seeded(2, 100)}, [ckpt_storage.load], **given)
    assert_holds(tmp_path, {"w": seeded(2, 100)}, [load_stock])


@on_ranks()
def test_a_group_without_a_store_uses_the_default_groups() -> None:
    """Where a group has no store of its own, its ranks meet on the default store."""
    with patch.object(dist.ProcessGroup, "get_group_store", side_effect=RuntimeError("none")):
        group = dist.new_group([0, 1])
        assert_heard()
        assert_heard(group)
        assert isinstance(store_of(group), dist.PrefixStore)


@on_ranks()
def test_no_collective_of_the_group_is_needed(rank: int, tmp_path: Path) -> None:
    """Over a backend whose collectives do nothing, ranks agree and save all the same."""
    with default_group(tmp_path, backend="fake"):
        path = tmp_path / "run"
        ckpt_storage.save({"w": seeded(rank, 9)}, path, timeout=HANG_S, sync_files=False)
        assert_heard()
        load_stock(target := {"w": torch.zeros(9)}, path)
    assert same(target["w"], seeded(0, 9))


def _die_before_the_next(rank: int) -> float:
    assert_heard()
    if rank == 0:
        os._exit(3)
    begin_s = time.monotonic()
    with pytest.raises(errors.RankFailedError) as seen:
        assert_heard()
    assert (seen.value.is_silent, seen.value.rank) == (True, 0)
    return time.monotonic() - begin_s


@pytest.mark.deadline
def test_a_rank_that_died_between_operations_is_named_at_once(ranks: RankPool) -> None:
    """Ranks of its host need not wait until the plan phase is over: its process has ended."""
    for outcome in ranks.outcomes(_die_before_the_next, world_size=3)[1:]:
        assert outcome.value is not None, outcome
        assert outcome.value < 15.0


def path_of(rank: int, folder: Path) -> str:
    """Return the path that a rank makes from its clock; that it speaks of a load means nothing."""
    return f"{folder}/from the load of 2026-01-01T00-00-{rank:02}"


@on_ranks()
def test_regression_own_clocks_stock_save_succeeds_and_cannot_be_loaded(
    rank: int, tmp_path: Path
) -> None:
    """The pattern fails here: every rank reports success, and loading misses a file."""
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(path_of(rank, tmp_path)))
    reader = dcp.FileSystemReader(path_of(0, tmp_path))
    raised = errors_by_rank(dcp.load, state_of(1), storage_reader=reader).values()
    assert any(isinstance(one, FileNotFoundError) and ".distcp" in str(one) for one in raised)


@on_ranks(3)
def test_regression_own_clocks_are_refused_on_all_ranks_before_anything_is_made(
    rank: int, tmp_path: Path
) -> None:
    """All ranks raise an error that lists each path with its ranks, and no name was made."""
    path = path_of(rank, tmp_path)
    writer = CheckpointStorageWriter(path)
    for error in (
        caught(ckpt_storage.save, state_of(1), path, timeout=HANG_S),
        errors_by_rank(dcp.save, state_of(1), storage_writer=writer)[rank],
    ):
        assert isinstance(error, errors.RankMismatchError)
        by_end = {value[-2:]: who for value, who in error.values.items()}
        assert by_end == {"00": [0], "01": [1], "02": [2]}
        assert "Nothing was written" in str(error)
        assert "broadcast" in str(error)
        assert "Load again" not in str(error)
        gathered()
        assert list(tmp_path.iterdir()) == []


@on_ranks()
def test_regression_969_every_rank_preparing_the_folder_crashes_one(
    rank: int, tmp_path: Path
) -> None:
    """The pattern fails here: the rank that comes second finds nothing to remove."""
    folder = tmp_path / "run"
    if rank == 0:
        folder.mkdir()
    gathered()
    assert folder.exists()  # both ranks see it
    gathered()
    if rank == 0:
        shutil.rmtree(folder)
    gathered()
    if rank == 1:
        with pytest.raises(FileNotFoundError):
            shutil.rmtree(folder)


@on_ranks(4)
def test_regression_969_only_the_coordinator_prepares_the_folder(rank: int, tmp_path: Path) -> None:
    """Four ranks save five times to one existing folder; only rank 0 makes or removes folders."""
    note = tmp_path / "note.txt"
    note.write_text("not ours")
    gathered()
    with cases.faulty_disk([]) as made:
        for step in range(5):
            cases.save(tmp_path, step, overwrite=True)
    cases.assert_loads(tmp_path, 4, dcp_cases.load_stock)
    assert note.read_text() == "not ours"
    names = {call.operation for posix in made for call in posix.script.calls}
    assert bool(names & {"mkdir", "rmdir", "remove_folder"}) == (rank == 0)
    assert rank or "mkdir" in names


GROUP_TIMEOUT_S = 2.0
SLOW_S = 5.0

Save = Callable[[int, str, dict[str, Any]], None]


def slow_state(rank: int) -> dict[str, Any]:
    return {"w": seeded(1, 1000), f"of-{rank}": seeded(rank, 10)}


def plainly(rank: int, url: str, options: dict[str, Any]) -> None:
    """Write as rank 0 and wait as the others, on the default group."""
    if rank == 0:
        with fsspec.open(f"{url}/__0_", "wb", **options) as file:
            file.write(b"x" * 1000)
    dist.barrier()


def by_dcp(rank: int, url: str, options: dict[str, Any]) -> None:
    """Save by `dcp.save` with our writer, whose collectives run on the default group."""
    dcp.save(slow_state(rank), storage_writer=CheckpointStorageWriter(url, storage_options=options))


def by_ours(rank: int, url: str, options: dict[str, Any]) -> None:
    """Train on the group, save by `save`, load again, and train on."""
    dist.all_reduce(total := torch.ones(1))
    ckpt_storage.save(slow_state(rank), url, storage_options=options)
    assert_holds(url, slow_state(rank), [ckpt_storage.load], storage_options=options)
    dist.all_reduce(total)
    assert total.item() == 4.0


def _save_slowly(rank: int, folder: Path, save: Save, options: dict[str, Any]) -> str:
    # Under load the imports of a first save alone take longer than the group's timeout.
    ckpt_storage.save(slow_state(rank), "s3://bucket/warm", storage_options=options)
    with default_group(folder, timeout_s=GROUP_TIMEOUT_S):
        try:
            save(rank, "s3://bucket/run", options)
        except (RuntimeError, CheckpointException) as error:
            return str(error)
    return "saved"


@pytest.fixture
def slow_server() -> Iterator[S3Server]:
    """A server whose first write of an object of rank 0 is answered late."""
    with S3Server() as server:
        server.create_bucket("bucket")
        first = r"\brun/(.*/)?__0_"
        rule = FaultRule(op="put|part|complete", key=first, action="delay", delay_s=SLOW_S)
        server.faults([rule])
        yield server
        assert [record.key for record in server.requests if record.fault == "delay"]


@pytest.mark.parametrize(
    ("save", "ends_well"), [(plainly, False), (by_dcp, False), (by_ours, True)]
)
def test_regression_fast_llm_543_save_outlasts_the_training_groups_timeout(
    ranks: RankPool, tmp_path: Path, slow_server: S3Server, save: Save, *, ends_well: bool
) -> None:
    """Storage takes more than twice the timeout of the group that trains; ours succeeds.

    The pattern fails: the waiting rank's collective dies while rank 0 still writes.
    """
    given = tmp_path, save, slow_server.storage_options
    results = ranks.run(_save_slowly, *given, world_size=2)
    assert (results == ["saved", "saved"]) is ends_well, results
    # The rank that waits times out; the other may only hear that it has gone.
    reasons = re.compile("timed out|timeout|closed|reset", re.IGNORECASE)
    assert ends_well or reasons.search("\n".join(results))
