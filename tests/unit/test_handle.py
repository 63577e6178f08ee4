"""A handle tells the truth about its save."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from reentry import interrupt_each_line

from ckpt_storage import (
    CheckpointError,
    CheckpointInfo,
    CommitUnknownError,
    ConsolidationError,
    InvalidInputError,
    PhaseTimeoutError,
    SaveCancelledError,
    SaveHandle,
    SaveState,
    StorageError,
)
from ckpt_storage.background import interpreter_exit
from ckpt_storage.background.handle import SaveStatus
from ckpt_storage.coordination.heartbeats import Heartbeats, RankProgress
from ckpt_storage.options import Phase, Timeouts

INFO = CheckpointInfo(url="file:///c", name="c", format="ckpt_storage", save_id="s1", slot=1)


@pytest.fixture
def status() -> SaveStatus:
    """A save that has begun, as its saver sees it."""
    return SaveStatus("file:///c", 1, limit_s=0.01)


def sign(rank: int, phase: Phase, done: int = 0, total: int = 0) -> RankProgress:
    return RankProgress(rank=rank, phase=phase, done_bytes=done, total_bytes=total, done_files=rank)


def test_the_first_end_counts(status: SaveStatus) -> None:
    """What ended stays as it ended, whatever is told later."""
    status.succeed(INFO)
    status.fail(StorageError("late"))
    status.mark_staged()
    assert status.state is SaveState.COMMITTED
    assert (status.result(), status.exception(), status.save_id) == (INFO, None, "s1")
    assert not status.cancel()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StorageError("x"), SaveState.FAILED),
        (PhaseTimeoutError("x"), SaveState.TIMED_OUT),
        (SaveCancelledError("x"), SaveState.CANCELLED),
        (CommitUnknownError("x"), SaveState.UNKNOWN),
        (ConsolidationError("x", info=INFO), SaveState.COMMITTED),
    ],
)
def test_error_decides_the_final_state(
    status: SaveStatus, error: CheckpointError, state: SaveState
) -> None:
    """Each kind of failure has a state of its own; one after the commit leaves it committed."""
    status.fail(error)
    assert (status.state, status.exception(), status.done()) == (state, error, True)
    assert not status.cancel()


def test_states_follow_phases_once_the_state_is_staged(status: SaveStatus) -> None:
    """The state is that of this rank's phase; progress names who has most left to do."""
    signs = {0: sign(0, "write", 10, 20), 2: sign(2, "write", 1, 40)}
    status.follow(lambda: (signs, "s7"), lambda _: None)
    phases: dict[Phase, SaveState] = {
        "plan": SaveState.WRITING,
        "write": SaveState.WRITING,
        "commit": SaveState.COMMITTING,
        "consolidate": SaveState.CONSOLIDATING,
    }
    signs[1] = sign(1, "write", 5, 9)
    assert status.state is SaveState.STAGING
    assert not status.is_staged()
    status.mark_staged()
    assert status.is_staged()
    for phase, state in phases.items():
        signs[1] = sign(1, phase, 5, 9)
        assert status.state is state
        assert not status.state.is_final
    assert "consolidating" in repr(status)
    progress = status.progress()
    assert (progress.done_bytes, progress.total_bytes, progress.done_files) == (5, 9, 1)
    assert (progress.rank, progress.save_id, progress.state) == (1, "s7", status.state)
    assert progress.slowest == signs[2]
    assert progress.ranks == signs


def test_waits_end(status: SaveStatus) -> None:
    """Every wait ends at its limit, with an error that names the save, the rank and the state."""
    for call in (status.result, status.exception):
        for limit_s in (None, 0):
            with pytest.raises(
                PhaseTimeoutError, match=r"file:///c has not ended .*staging"
            ) as caught:
                call(limit_s)
            assert caught.value.rank == 1
    assert not status.outcome_is_consumed
    with pytest.raises(PhaseTimeoutError, match="was not staged") as caught:
        status.wait_staged()
    assert caught.value.phase == "stage"
    assert not status.done()


def test_cancel_reaches_the_save_before_and_after_it_listens(status: SaveStatus) -> None:
    """A wish to cancel is kept until the save can hear it; it ends with the save."""
    assert status.cancel()
    heard: list[SaveCancelledError] = []
    status.follow(lambda: ({}, None), heard.append)
    assert status.cancel()
    assert [str(error) for error in heard] == [str(heard[0])] * 2
    assert heard[0].rank == 1
    status.fail(heard[0])
    assert status.state is SaveState.CANCELLED
    assert not status.cancel()
    assert len(heard) == 2


@pytest.mark.parametrize("is_copied", [False, True])
def test_only_staging_that_failed_is_raised_where_staging_is_waited_for(
    status: SaveStatus, *, is_copied: bool
) -> None:
    """Waiting for the copy raises why there is none; not what failed after it."""
    if is_copied:
        status.mark_staged()
    status.fail(StorageError("no memory"))
    if is_copied:
        status.wait_staged()
    else:
        with pytest.raises(StorageError, match="no memory"):
            status.wait_staged()


def test_callbacks_are_called_once_at_the_end(
    status: SaveStatus, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end, or at once if that has been; an error of one is logged, and harms nobody."""
    called: list[SaveHandle] = []

    def broken(_: SaveHandle) -> None:
        raise ValueError("the user's own")

    status.add_done_callback(broken)
    status.add_done_callback(called.append)
    assert not called
    with caplog.at_level(logging.ERROR, "ckpt_storage"):
        status.succeed(INFO)
        status.add_done_callback(broken)
        status.add_done_callback(called.append)
    assert called == [status, status]
    assert status.result() is INFO
    assert len([record for record in caplog.records if "callback" in record.getMessage()]) == 2


def test_a_callback_that_exits_keeps_no_other_from_its_call(status: SaveStatus) -> None:
    """In the saver's thread an exit would end every later save, so it is logged like an error."""
    called: list[SaveHandle] = []
    status.add_done_callback(lambda _: sys.exit(1))
    status.add_done_callback(called.append)
    status.succeed(INFO)
    assert called == [status]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_child_of_fork_is_refused_the_handle_of_its_parent(status: SaveStatus) -> None:
    """It has no thread that would end the save, so it would wait in vain."""

    def child(pipe: Any) -> None:
        refused = 0
        for call in (status.result, status.wait_staged, status.progress, status.cancel):
            with contextlib.suppress(InvalidInputError):
                call()
                continue
            refused += 1
        pipe.send(refused)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(20)
    assert ours.recv() == 4
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.parametrize("call", ["mark_staged", "succeed", "wait_staged", "result"])
def test_a_signal_handler_may_use_the_handle_it_interrupts(status: SaveStatus, call: str) -> None:
    """Waits in a handler end at their limit, whatever call of the same handle it came in."""

    def handler() -> None:
        with contextlib.suppress(PhaseTimeoutError):
            status.wait_staged(0.001)
        with contextlib.suppress(PhaseTimeoutError):
            status.result(0.001)

    def interrupted() -> None:
        with contextlib.suppress(PhaseTimeoutError):
            getattr(status, call)(*([INFO] if call == "succeed" else []))

    interrupt_each_line(interrupted, handler)
    status.succeed(INFO)
    assert status.result(0) is INFO


@pytest.mark.deadline
def test_a_rank_that_is_silent_makes_no_progress_by_hearsay() -> None:
    """What rank 0 passes on of a rank that it no longer hears grows old; an exit waits for none."""
    slow, coordinator, member = (Heartbeats(rank) for rank in (1, 0, 2))
    slow.begin("write", 100)
    coordinator.receive(slow.pack())
    begun_s = time.monotonic()
    time.sleep(0.5)
    member.receive(coordinator.pack())
    told = member.known()[1]
    assert told.heard_s - told.idle_s < begun_s + 0.2


@pytest.mark.deadline
def test_the_end_of_one_save_gives_time_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is staged while another commits is waited for from the end of that one on."""
    monkeypatch.setattr(interpreter_exit, "STALL_S", 2.0)
    first, second = (SaveStatus(f"file:///{name}", 0, limit_s=9.0) for name in "ab")
    for save in (first, second):
        interpreter_exit.flush_at_exit(save, 60.0, Timeouts())
    for save, end_s in ((first, 1.5), (second, 2.7)):
        threading.Timer(end_s, save.succeed, [INFO]).start()
    assert interpreter_exit.flush([first, second]) == []


@pytest.mark.deadline
def test_an_exit_waits_for_no_rank_that_only_lives(
    status: SaveStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats without progress are none: the save is lost once nothing has moved for long."""
    monkeypatch.setattr(interpreter_exit, "STALL_S", 0.3)
    start_s = time.monotonic()

    def source() -> tuple[dict[int, RankProgress], None]:
        now_s = time.monotonic()
        return {1: replace(sign(1, "write"), heard_s=now_s, idle_s=now_s - start_s)}, None

    status.follow(source, lambda _: None)
    status.mark_staged()
    interpreter_exit.flush_at_exit(status, 20.0, Timeouts())
    assert interpreter_exit.flush([status]) == [status]
    assert time.monotonic() - start_s < 15


def test_a_rank_in_the_commit_has_the_time_of_a_write_as_well(
    status: SaveStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits there for the slowest write; an exit gives it as long."""
    monkeypatch.setattr(interpreter_exit, "_GRACE_S", 0.0)
    own = replace(sign(1, "commit"), heard_s=time.monotonic())
    status.follow(lambda: ({1: own}, None), lambda _: None)
    status.mark_staged()
    interpreter_exit.flush_at_exit(status, 20.0, Timeouts(commit=0.01, write=20.0))
    threading.Timer(1.0, status.succeed, [INFO]).start()
    assert interpreter_exit.flush([status]) == []


def test_a_save_that_has_ended_is_not_lost_while_its_callbacks_run(status: SaveStatus) -> None:
    """An interpreter that ends in the middle of a slow callback reports no committed save."""
    called, go = threading.Event(), threading.Event()

    def slow(_: SaveHandle) -> None:
        called.set()
        go.wait(10)

    status.add_done_callback(slow)
    interpreter_exit.flush_at_exit(status, 60.0, Timeouts())
    thread = threading.Thread(target=status.succeed, args=[INFO])
    thread.start()
    called.wait(10)
    lost = interpreter_exit.flush([status])
    go.set()
    thread.join()
    assert lost == []
