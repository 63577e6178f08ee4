"""A background save that fails on one rank fails on all, says why, and the next one works."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from dcp_cases import same
from saver_cases import (
    END_S,
    MODES,
    BrokenPlanner,
    ExitingPlanner,
    Hold,
    held,
    is_alive,
    loaded,
    quick_saver,
    quick_timeouts,
    save_step,
    state_of,
    told,
    until,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_storage import (
    AsyncSaver,
    CheckpointError,
    ConsolidateOptions,
    ConsolidationError,
    InvalidInputError,
    PhaseTimeoutError,
    SaveState,
    StorageError,
    list_checkpoints,
    save,
)
from ckpt_storage.background import saver
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.saves import session
from ckpt_storage.testing.ranks import RankPool


class Unpicklable(DefaultSavePlanner):
    """A planner that no process but its own can have."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unreadable(DefaultSavePlanner):
    """A planner that pickles and cannot be read."""

    def __setstate__(self, state: dict[str, Any]) -> NoReturn:
        raise ZeroDivisionError("read divides by zero")


def _begin(saver: AsyncSaver, folder: str, rank: int, what: str) -> Any:
    """Begin a save that fails on rank 1; return its error."""
    planners: dict[str, Callable[[], Any]] = {
        "planner raises": BrokenPlanner,
        "planner exits": ExitingPlanner,
        "planner does not pickle": Unpicklable,
        "planner cannot be read": Unreadable,
    }
    values: dict[str, Callable[[], Any]] = {
        "value does not pickle": threading.Lock,
        "tensor cannot be staged": lambda: torch.empty(3, device="meta"),
    }
    url = f"{folder}/broken"
    options: dict[str, Any] = {"sync_files": False}
    state: dict[str, Any] = state_of(rank, 0)
    if rank == 1:
        if what in planners:
            options["planner"] = planners[what]()
        if what in values:
            state["value"] = values[what]()
        if what == "wrong option":
            options["part_bytes"] = -5
        if what == "other place":
            url += "-other"
    if what == "storage refuses":
        blocker = Path(folder) / "blocker"
        blocker.touch()
        url = f"{blocker}/below-a-file"
    try:
        return saver.save(state, url, **options).exception(END_S)
    except CheckpointError as error:
        return error


THREAD_FAILURES = (
    "planner raises",
    "planner exits",
    "tensor cannot be staged",
    "value does not pickle",
    "wrong option",
    "storage refuses",
    "other place",
)
PROCESS_FAILURES = (
    *THREAD_FAILURES,
    "planner does not pickle",
    "planner cannot be read",
)


def _failing(rank: int, folder: str, mode: Any, failures: tuple[str, ...]) -> list[Any]:
    seen = []
    with quick_saver(mode) as saver:
        pid = saver.worker_pid
        for number, what in enumerate(failures):
            error = _begin(saver, folder, rank, what)
            printed = "".join(traceback.format_exception(error))
            seen.append((what, type(error).__name__, str(error), printed))
            step = number + 1
            # No rank is told twice, and a state is not that of an earlier save.
            save_step(saver, folder, rank, step).result(END_S)
            assert same(loaded(f"{folder}/step-{step}", rank), state_of(rank, step))
            dist.barrier()
        # A failure of a save is none of the worker.
        assert saver.worker_pid == pid
    return seen


@pytest.mark.parametrize(
    ("mode", "failures"), [("thread", THREAD_FAILURES), ("process", PROCESS_FAILURES)]
)
def test_failure_of_one_rank_is_told_to_all_and_the_next_save_works(
    ranks: RankPool, tmp_path: Path, mode: str, failures: tuple[str, ...]
) -> None:
    """Whatever fails on rank 1, both ranks raise and name it, nothing is committed, all goes on."""
    reasons = {
        "planner raises": "divides by zero",
        "planner exits": "SystemExit: 3",
        "planner does not pickle": "pickle",
        "planner cannot be read": "read divides by zero",
        "value does not pickle": "lock",
        "tensor cannot be staged": "meta",
        "wrong option": "part_bytes",
        "storage refuses": "below-a-file",
        "other place": "broken-other",
    }
    first, second = ranks.run(_failing, str(tmp_path), mode, failures, world_size=2, timeout_s=120)
    for ours, theirs in zip(first, second, strict=True):
        (what, kind, text, printed), (_, other_kind, other_text, other_printed) = ours, theirs
        if what in {"planner raises", "planner exits"}:
            # Where it was raised, which the message refers to, is shown in all processes.
            assert "in finish_plan" in printed
            assert "in finish_plan" in other_printed
        assert kind.endswith("Error"), what
        assert reasons[what] in text, (what, text)
        assert reasons[what] in other_text, (what, other_text)
        if what not in {"other place", "storage refuses"}:
            assert "ank 1" in text, (what, text)
        if what == "other place":
            assert {kind, other_kind} == {"RankMismatchError"}
    assert not any("broken" in info.name for info in list_checkpoints(tmp_path))


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_failure_that_nobody_asked_for_is_raised_once(
    tmp_path: Path, on_error: Any, *, taken: bool
) -> None:
    """The next save raises it with `on_error="raise"`, and is not begun; "warn" raises nothing."""
    with quick_saver("thread", on_error=on_error) as saver:
        handle = save_step(saver, tmp_path, 0, 0, planner=BrokenPlanner())
        if taken:
            assert "divides by zero" in str(handle.exception(END_S))
        if on_error == "raise" and not taken:
            with pytest.raises(CheckpointError, match="divides by zero"):
                save_step(saver, tmp_path, 0, 1)
        save_step(saver, tmp_path, 0, 2).result(END_S)
    assert {info.name for info in list_checkpoints(tmp_path)} == {"step-2"}


def test_failure_is_raised_by_wait_and_by_close(tmp_path: Path) -> None:
    """`wait` and `close` raise what nobody asked for; `close` closes nevertheless."""
    saver = quick_saver("thread", max_pending=2)
    save_step(saver, tmp_path, 0, 0, planner=BrokenPlanner())
    with pytest.raises(CheckpointError, match="divides by zero"):
        saver.wait(END_S)
    saver.wait(END_S)
    save_step(saver, tmp_path, 0, 0, planner=BrokenPlanner())
    with pytest.raises(CheckpointError, match="divides by zero"):
        saver.close(END_S)
    with pytest.raises(InvalidInputError, match="closed"):
        save_step(saver, tmp_path, 0, 1)
    saver.close()


def test_failure_is_raised_though_a_later_save_goes_on(tmp_path: Path) -> None:
    """A wait that ends at its limit raises the failure that it has met, and says what goes on."""
    saver = quick_saver("thread", max_pending=2)
    save_step(saver, tmp_path, 0, 0, planner=BrokenPlanner())
    hold = Hold(tmp_path, "write", 0)
    going = save_step(saver, tmp_path, 0, 1, planner=held(hold))
    hold.reached()
    with pytest.raises(CheckpointError, match="divides by zero") as caught:
        saver.wait(0.01)
    assert any("step-1 has not ended" in note for note in caught.value.__notes__)
    hold.go()
    going.result(END_S)
    saver.close()


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
        saver = quick_saver(mode)
        try:
            error = save_step(saver, folder, rank, 0).exception(END_S)
        except CheckpointError as raised:
            error = raised
    with saver:
        save_step(saver, folder, rank, 1).result(END_S)
    return [type(error).__name__, str(error)]


@pytest.mark.parametrize("mode", MODES)
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
    assert {info.name for info in list_checkpoints(tmp_path)} == {"step-1"}


def _asked_on_one(rank: int, folder: str) -> list[str]:
    """Ask for the outcome of a failed save on rank 0 only; go on as scripts do."""
    seen = []
    with quick_saver("thread") as saver:
        planner = BrokenPlanner() if rank == 1 else None
        handle = save_step(saver, folder, rank, 0, planner=planner)
        if rank == 0:
            handle.exception(END_S)
        for step in (1, 2):
            try:
                handle = save_step(saver, folder, rank, step)
                error = handle.exception(END_S)
            except CheckpointError as raised:
                error = raised
            seen.append(type(error).__name__)
    return seen


def test_rank_that_raises_in_save_leaves_nobody_alone(ranks: RankPool, tmp_path: Path) -> None:
    """If only some ranks raise an earlier failure in `save`, the others hear of it, and go on."""
    first, second = ranks.run(_asked_on_one, str(tmp_path), world_size=2)
    assert second == ["CheckpointError", "NoneType"]
    assert first == ["RankFailedError", "NoneType"]
    assert {info.name for info in list_checkpoints(tmp_path)} == {"step-2"}


def test_interrupt_while_staging_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `save` stays one; the save ends, frees its memory, and the next one works."""

    def interrupted(*_args: Any, **_options: Any) -> NoReturn:
        raise KeyboardInterrupt

    with quick_saver("thread") as ours:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "StagingJob", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save_step(ours, tmp_path, 0, 0)
        save_step(ours, tmp_path, 0, 1).result(END_S)
    assert {info.name for info in list_checkpoints(tmp_path)} == {"step-1"}


def test_exit_after_the_commit_leaves_a_committed_save(tmp_path: Path) -> None:
    """A callable of the chained consolidation that exits ends the handle, which says committed."""

    def rename(_name: str) -> str:
        sys.exit("no name")

    with quick_saver("thread") as ours:
        handle = save_step(ours, tmp_path, 0, 0, consolidate=ConsolidateOptions(rename=rename))
        error = handle.exception(END_S)
    assert isinstance(error, ConsolidationError)
    assert "SystemExit: no name" in str(error)
    assert handle.state is SaveState.COMMITTED


@pytest.mark.parametrize("mode", MODES)
def test_save_that_hangs_ends_at_its_deadline(tmp_path: Path, mode: Any) -> None:
    """A write that never ends is TIMED_OUT at its deadline; its memory is not used again."""
    with AsyncSaver(mode=mode, timeout=quick_timeouts(plan=1.0), on_error="warn") as ours:
        hold = Hold(tmp_path, "local plan", 0)
        first = save_step(ours, tmp_path, 0, 0, planner=held(hold), block_until_staged=True)
        hold.reached()
        with pytest.raises(PhaseTimeoutError):
            first.result(0.05)
        assert first.cancel()
        hold.go()
        assert told(first.exception(END_S))[0] in {"SaveCancelledError", "PhaseTimeoutError"}
        save_step(ours, tmp_path, 0, 1).result(END_S)
        pid = ours.worker_pid
    assert pid is None or not is_alive(pid)


def _told_before_its_word(rank: int, folder: str) -> str:
    """Let rank 0 fail in its write, and rank 1 hear of it just before it would tell of its own."""
    gather, mark = Operation.gather, Path(folder) / "written"

    def broken(*_given: Any, **_more: Any) -> NoReturn:
        until(mark.exists, "the end of rank 1's write")
        raise StorageError("the disk is full")

    def late(operation: Operation, payload: bytes) -> list[bytes]:
        if operation.deadline.phase == "write":
            mark.touch()
            until(operation.failure, "the failure of rank 0")
        return gather(operation, payload)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(session, "write_shard", broken)
        else:
            patch.setattr(Operation, "gather", late)
        with pytest.raises(CheckpointError) as caught:
            save(state_of(rank, 0), f"{folder}/a", timeout=END_S)
    return type(caught.value).__name__


def test_a_rank_that_has_told_nothing_is_in_no_doubt(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing can be committed without its part: the save failed, for it as for the others."""
    names = ranks.run(_told_before_its_word, str(tmp_path), world_size=2)
    assert names == ["StorageError", "RankFailedError"]
