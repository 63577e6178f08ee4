"""A background save that fails on one rank fails on all, says why, and the next one works."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import saver_cases as cases
import torch
import torch.distributed as dist
from dcp_cases import same
from limits import HANG_S
from rank_pool import RankPool
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt_storage
from ckpt_storage.background import saver
from ckpt_storage.background.staging import StagingJob
from ckpt_storage.commit import assembly
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.saves import session, shards


def _saved_in(folder: Path) -> set[str]:
    return {info.name for info in ckpt_storage.list_checkpoints(folder)}


class Unpicklable(DefaultSavePlanner):
    """A planner that no process but its own can have."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unreadable(DefaultSavePlanner):
    """A planner that pickles and cannot be read."""

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
        raise ZeroDivisionError("read divides by zero")


FAILURES: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "planner raises": ({"planner": cases.BrokenPlanner}, "divides by zero"),
    "planner exits": ({"planner": cases.ExitingPlanner}, "SystemExit: 3"),
    "tensor cannot be staged": ({"value": lambda: torch.empty(3, device="meta")}, "meta"),
    "value does not pickle": ({"value": threading.Lock}, "lock"),
    "wrong option": ({"part_bytes": lambda: -5}, "part_bytes"),
    "storage refuses": ({}, "below-a-file"),
    "other place": ({}, "broken-other"),
    "planner does not pickle": ({"planner": Unpicklable}, "pickle"),
    "planner cannot be read": ({"planner": Unreadable}, "read divides by zero"),
}
"""What rank 1 gives another value or option, and what the error says; the last two in a process."""


def _error_of(
    saver: ckpt_storage.AsyncSaver, folder: str, rank: int, step: int
) -> BaseException | None:
    """Save; return what that raised, or its handle."""
    try:
        return cases.save_step(saver, folder, rank, step).exception(HANG_S)
    except ckpt_storage.CheckpointError as error:
        return error


def _begin(saver: ckpt_storage.AsyncSaver, folder: str, rank: int, what: str) -> Any:
    """Begin a save that fails on rank 1; return its error."""
    url, state = f"{folder}/broken", cases.state_of(rank, 0)
    options: dict[str, Any] = {"sync_files": False}
    if rank == 1:
        made = {name: make() for name, make in FAILURES[what][0].items()}
        (state if "value" in made else options).update(made)
        url += "-other" * (what == "other place")
    if what == "storage refuses":
        blocker = Path(folder) / "blocker"
        blocker.touch()
        url = f"{blocker}/below-a-file"
    try:
        return saver.save(state, url, **options).exception(HANG_S)
    except ckpt_storage.CheckpointError as error:
        return error


def _failing(rank: int, folder: str, mode: Any) -> list[Any]:
    seen = []
    with cases.quick_saver(mode) as saver:
        pid = saver.worker_pid
        for number, what in enumerate([*FAILURES][: 7 if mode == "thread" else None]):
            error = _begin(saver, folder, rank, what)
            printed = "".join(traceback.format_exception(error))
            seen.append((what, type(error).__name__, str(error), printed))
            step = number + 1
            # No rank is told twice, and a state is not that of an earlier save.
            cases.save_step(saver, folder, rank, step).result(HANG_S)
            assert same(cases.loaded(f"{folder}/step-{step}", rank), cases.state_of(rank, step))
            dist.barrier()
        # A failure of a save is none of the worker.
        assert saver.worker_pid == pid
    return seen


@pytest.mark.parametrize("mode", cases.MODES)
def test_failure_of_one_rank_is_told_to_all_and_the_next_save_works(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    """Whatever fails on rank 1, both ranks raise and name it, nothing is committed, all goes on."""
    first, second = ranks.run(_failing, str(tmp_path), mode, world_size=2)
    for ours, theirs in zip(first, second, strict=True):
        (what, kind, text, printed), (_, other_kind, other_text, other_printed) = ours, theirs
        if what in {"planner raises", "planner exits"}:
            # Where it was raised, which the message refers to, is shown in all processes.
            assert "in finish_plan" in printed
            assert "in finish_plan" in other_printed
        assert kind.endswith("Error"), what
        assert FAILURES[what][1] in text, (what, text)
        assert FAILURES[what][1] in other_text, (what, other_text)
        if what not in {"other place", "storage refuses"}:
            assert "ank 1" in text, (what, text)
        if what == "other place":
            assert {kind, other_kind} == {"RankMismatchError"}
    assert not any("broken" in name for name in _saved_in(tmp_path))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_failure_that_nobody_asked_for_is_raised_once(
    tmp_path: Path, on_error: Any, *, taken: bool
) -> None:
    """The next save has begun and raises it with `on_error="raise"`; "warn" raises nothing."""
    with cases.quick_saver("thread", on_error=on_error) as saver:
        handle = cases.save_step(saver, tmp_path, 0, 0, planner=cases.BrokenPlanner())
        if taken:
            assert "divides by zero" in str(handle.exception(HANG_S))
        if on_error == "raise" and not taken:
            with pytest.raises(ckpt_storage.CheckpointError, match="divides by zero") as caught:
                cases.save_step(saver, tmp_path, 0, 1)
            assert any("step-1 has begun all the same" in note for note in caught.value.__notes__)
        else:
            cases.save_step(saver, tmp_path, 0, 1)
        cases.save_step(saver, tmp_path, 0, 2).result(HANG_S)
    assert _saved_in(tmp_path) == {"step-1", "step-2"}


def test_failure_is_raised_later_if_the_next_save_cannot_begin(tmp_path: Path) -> None:
    """A state that cannot be staged raises its own error, and `close` raises the earlier one."""
    saver = cases.quick_saver("thread")
    cases.save_step(saver, tmp_path, 0, 0, planner=cases.BrokenPlanner())
    with pytest.raises(ckpt_storage.InvalidInputError):
        saver.save([1], tmp_path / "step-1")  # type: ignore[arg-type]  # refused
    with pytest.raises(ckpt_storage.CheckpointError, match="divides by zero"):
        saver.close()


def test_failure_is_raised_by_wait_and_by_close(tmp_path: Path) -> None:
    """`wait` and `close` raise what nobody asked for; `close` closes nevertheless."""
    saver = cases.quick_saver("thread", max_pending=2)
    for end in (saver.wait, saver.close):
        cases.save_step(saver, tmp_path, 0, 0, planner=cases.BrokenPlanner())
        with pytest.raises(ckpt_storage.CheckpointError, match="divides by zero"):
            end(HANG_S)
        end(HANG_S)
    with pytest.raises(ckpt_storage.InvalidInputError, match="closed"):
        cases.save_step(saver, tmp_path, 0, 1)


def test_failure_is_raised_though_a_later_save_goes_on(tmp_path: Path) -> None:
    """A wait that ends at its limit raises the failure that it has met, and says what goes on."""
    with cases.quick_saver("thread", max_pending=2) as saver:
        cases.save_step(saver, tmp_path, 0, 0, planner=cases.BrokenPlanner())
        hold = cases.Hold(tmp_path, "write", 0)
        going = cases.save_step(saver, tmp_path, 0, 1, planner=cases.held(hold))
        hold.reached()
        with pytest.raises(ckpt_storage.CheckpointError, match="divides by zero") as caught:
            saver.wait(0.01)
        assert any("step-1 has not ended" in note for note in caught.value.__notes__)
        hold.go()
        going.result(HANG_S)


def _without_means(rank: int, folder: str, mode: Any) -> list[str]:
    """Let rank 1 have no thread, or no worker process, for its first save."""

    def refused(self: Any, *_args: Any) -> None:
        if mode == "process" or "ckpt-storage save" in self.name:
            raise BlockingIOError("none left") if mode == "process" else RuntimeError("none left")
        start(self)

    kind = BaseProcess if mode == "process" else threading.Thread
    start = kind.start
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(kind, "start", refused)
        saver = cases.quick_saver(mode)
        error = _error_of(saver, folder, rank, 0)
    with saver:
        cases.save_step(saver, folder, rank, 1).result(HANG_S)
    return [type(error).__name__, str(error)]


@pytest.mark.parametrize("mode", cases.MODES)
def test_rank_without_thread_or_process_tells_all(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    """A rank that has no thread or process for its save says so to all, and the next one works."""
    first, second = ranks.run(_without_means, str(tmp_path), mode, world_size=2)
    assert first[0] == "RankFailedError"
    assert second[0] == "CheckpointError"
    for text in (first[1], second[1]):
        assert "none left" in text
        assert "ank 1" in text
    assert _saved_in(tmp_path) == {"step-1"}


def _asked_on_one(rank: int, folder: str) -> list[str]:
    """Ask for the outcome of a failed save on rank 0 only; go on as scripts do."""
    with cases.quick_saver("thread") as saver:
        planner = cases.BrokenPlanner() if rank == 1 else None
        handle = cases.save_step(saver, folder, rank, 0, planner=planner)
        if rank == 0:
            handle.exception(HANG_S)
        return [type(_error_of(saver, folder, rank, step)).__name__ for step in (1, 2)]


def test_rank_that_raises_in_save_is_in_that_save_all_the_same(
    ranks: RankPool, tmp_path: Path
) -> None:
    """If only some ranks raise an earlier failure in `save`, no rank loses the new save by it."""
    first, second = ranks.run(_asked_on_one, str(tmp_path), world_size=2)
    assert second == ["CheckpointError", "NoneType"]
    assert first == ["NoneType", "NoneType"]
    assert _saved_in(tmp_path) == {"step-1", "step-2"}


def test_interrupt_while_staging_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `save` stays one; the save ends, frees its memory, and the next one works."""

    def interrupted(*_args: Any, **_options: Any) -> NoReturn:
        raise KeyboardInterrupt

    with cases.quick_saver("thread") as ours:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "StagingJob", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cases.save_step(ours, tmp_path, 0, 0)
        cases.save_step(ours, tmp_path, 0, 1).result(HANG_S)
    assert _saved_in(tmp_path) == {"step-1"}


def test_exit_after_the_commit_leaves_a_committed_save(tmp_path: Path) -> None:
    """A callable of the chained consolidation that exits ends the handle, which says committed."""

    def rename(_name: str) -> str:
        sys.exit("no name")

    with cases.quick_saver("thread") as ours:
        handle = cases.save_step(
            ours, tmp_path, 0, 0, consolidate=ckpt_storage.ConsolidateOptions(rename=rename)
        )
        error = handle.exception(HANG_S)
    assert isinstance(error, ckpt_storage.ConsolidationError)
    assert "SystemExit: no name" in str(error)
    assert handle.state is ckpt_storage.SaveState.COMMITTED


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_done_callback_that_exits_ends_no_later_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    """A callback that raises an exit or an interrupt is logged, and the next save commits."""
    called = threading.Event()

    def exits(_: ckpt_storage.SaveHandle) -> None:
        called.set()
        raise kind("from a callback")

    with cases.quick_saver("thread") as ours:
        hold = cases.Hold(tmp_path, "write", 0)
        first = cases.save_step(ours, tmp_path, 0, 0, planner=cases.held(hold))
        first.add_done_callback(exits)
        hold.go()
        assert called.wait(HANG_S)
        assert cases.save_step(ours, tmp_path, 0, 1).result(HANG_S).name == "step-1"
    assert "A callback of the save to" in caplog.text


class Forgetful(DefaultSavePlanner):
    """A planner in whose process the memory is full once the save is committed."""

    def create_global_plan(self, all_plans: Any) -> Any:
        commit: Any = assembly.__dict__["commit"]

        def committed(*args: Any, **options: Any) -> NoReturn:
            assembly.__dict__["commit"] = commit
            commit(*args, **options)
            raise MemoryError

        assembly.__dict__["commit"] = committed
        return super().create_global_plan(all_plans)


@pytest.mark.parametrize("mode", cases.MODES)
def test_what_breaks_after_the_commit_is_no_failure(tmp_path: Path, mode: Any) -> None:
    """A committed save never ends FAILED, whatever was raised behind the commit; the next works."""
    with cases.quick_saver(mode, on_error="warn") as ours:
        first = cases.save_step(ours, tmp_path, 0, 0, planner=Forgetful())
        first.exception(HANG_S)
        cases.save_step(ours, tmp_path, 0, 1).result(HANG_S)
    assert first.state in {ckpt_storage.SaveState.UNKNOWN, ckpt_storage.SaveState.COMMITTED}
    assert _saved_in(tmp_path) == {"step-0", "step-1"}


def _copies_late(rank: int, folder: str) -> str:
    """Copy longer than planning may take, on rank 0 in vain; return what is raised."""

    def copied(_job: StagingJob) -> None:
        time.sleep(3.0)
        if rank == 0:
            raise ckpt_storage.CheckpointError("the device is lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingJob, "_copy", copied)
        timeout = cases.quick_timeouts(plan=1.0)
        with cases.quick_saver("thread", timeout=timeout, on_error="warn") as ours:
            handle = cases.save_step(ours, folder, rank, 0, block_until_staged=False)
            return str(handle.exception(HANG_S))


@pytest.mark.deadline
def test_a_copy_that_fails_late_is_told_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """The deadline for planning begins once the state is copied, or is not."""
    for told in ranks.run(_copies_late, str(tmp_path), world_size=2):
        assert "the device is lost" in told


def _told_before_its_word(rank: int, folder: str) -> str:
    """Let rank 0 fail in its write, and rank 1 hear of it just before it would tell of its own."""
    gather, mark = Operation.gather, Path(folder) / "written"

    def broken(*_given: Any, **_more: Any) -> NoReturn:
        cases.until(mark.exists, "the end of rank 1's write")
        raise ckpt_storage.StorageError("the disk is full")

    def late(operation: Operation, payload: bytes) -> list[bytes]:
        if operation.deadline.phase == "commit":
            mark.touch()
            cases.until(operation.failure, "the failure of rank 0")
        return gather(operation, payload)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(shards, "write_shard", broken)
        else:
            patch.setattr(Operation, "gather", late)
        with pytest.raises(ckpt_storage.CheckpointError) as caught:
            ckpt_storage.save(cases.state_of(rank, 0), f"{folder}/a", timeout=HANG_S)
    return type(caught.value).__name__


def test_a_rank_that_has_told_nothing_is_in_no_doubt(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing can be committed without its part: the save failed, for it as for the others."""
    names = ranks.run(_told_before_its_word, str(tmp_path), world_size=2)
    assert names == ["StorageError", "RankFailedError"]


@pytest.mark.parametrize("kind", [ckpt_storage.RankFailedError, MemoryError])
def test_a_save_that_ends_before_its_commit_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """All have written theirs, and whoever is to commit is lost, or breaks, before it begins to."""

    def lost(*_given: Any) -> NoReturn:
        raise kind("it is lost")

    monkeypatch.setattr(session.SaveSession, "finish", lost)
    with pytest.raises(ckpt_storage.CheckpointError, match="is lost"):
        ckpt_storage.save(cases.state_of(0, 0), tmp_path / "a")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
