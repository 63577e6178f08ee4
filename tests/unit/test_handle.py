"""A handle tells the truth about its save, to any number of threads, and never waits for ever."""

from __future__ import annotations

import logging

import pytest

from ckpt_storage import (
    CheckpointError,
    CheckpointInfo,
    CommitUnknownError,
    ConsolidationError,
    PhaseTimeoutError,
    SaveCancelledError,
    SaveHandle,
    SaveState,
    StorageError,
)
from ckpt_storage.background.handle import SaveStatus
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.options import Phase

INFO = CheckpointInfo(url="file:///c", name="c", format="ckpt_storage", save_id="s1", slot=1)

NOW_S = 0.01


def new(limit_s: float = NOW_S) -> tuple[SaveHandle, SaveStatus]:
    """Return a save that has begun, as its user sees it and as its saver does."""
    status = SaveStatus("file:///c", 1, limit_s=limit_s)
    return status, status


def sign(rank: int, phase: Phase, done: int = 0, total: int = 0) -> RankProgress:
    """Return what a rank said last."""
    return RankProgress(rank=rank, phase=phase, done_bytes=done, total_bytes=total, done_files=rank)


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
def test_error_decides_the_final_state(error: CheckpointError, state: SaveState) -> None:
    """Each kind of failure has a state of its own; one after the commit leaves it committed."""
    handle, status = new()
    status.fail(error)
    assert handle.state is state
    assert handle.state.is_final
    assert handle.done()
    assert handle.exception() is error
    with pytest.raises(type(error)) as caught:
        handle.result()
    assert caught.value is error
    assert not handle.cancel()


def test_first_end_counts() -> None:
    """What ended stays as it ended, whatever is told later."""
    handle, status = new()
    status.succeed(INFO)
    status.fail(StorageError("late"))
    status.mark_staged()
    assert handle.state is SaveState.COMMITTED
    assert handle.result() is INFO
    assert handle.exception() is None
    assert handle.save_id == "s1"


def test_states_follow_phases() -> None:
    """The state is that of this rank's phase once the state dict is staged."""
    handle, status = new()
    status.follow(lambda: ({1: sign(1, "write")}, None))
    assert handle.state is SaveState.STAGING
    assert not handle.is_staged()
    status.mark_staged()
    assert handle.is_staged()
    phases: dict[Phase, SaveState] = {
        "plan": SaveState.WRITING,
        "write": SaveState.WRITING,
        "commit": SaveState.COMMITTING,
        "consolidate": SaveState.CONSOLIDATING,
    }
    for phase, state in phases.items():
        status.follow(lambda phase=phase: ({1: sign(1, phase)}, "s7"))  # type: ignore[misc]
        assert handle.state is state
        assert not handle.state.is_final
    assert handle.save_id == "s7"
    assert "committing" not in repr(handle)
    assert "consolidating" in repr(handle)


def test_progress_names_the_slowest() -> None:
    """Progress is this rank's, and the sign of the rank that has most left to do."""
    handle, status = new()
    signs = {0: sign(0, "write", 10, 20), 1: sign(1, "write", 5, 9), 2: sign(2, "write", 1, 40)}
    status.mark_staged()
    status.follow(lambda: (signs, "s3"))
    progress = handle.progress()
    assert (progress.done_bytes, progress.total_bytes, progress.done_files) == (5, 9, 1)
    assert (progress.rank, progress.save_id, progress.state) == (1, "s3", SaveState.WRITING)
    assert progress.slowest == signs[2]
    assert progress.ranks == signs


def test_waits_end() -> None:
    """Every wait ends at its limit, with an error that names the save, the rank and the state."""
    handle, status = new()
    for call in (
        handle.result,
        handle.exception,
        lambda: handle.result(NOW_S),
        lambda: handle.exception(0),
    ):
        with pytest.raises(PhaseTimeoutError, match=r"file:///c has not ended .*staging") as caught:
            call()
        assert caught.value.rank == 1
    assert not status.is_asked_for
    with pytest.raises(PhaseTimeoutError, match="was not staged") as caught:
        handle.wait_staged()
    assert caught.value.phase == "stage"
    assert not handle.done()
    assert handle.state is SaveState.STAGING


def test_cancel_reaches_the_save_before_and_after_it_listens() -> None:
    """A wish to cancel is kept until the save can hear it; it ends with the save."""
    handle, status = new()
    assert handle.cancel()
    heard: list[SaveCancelledError] = []
    status.listen(heard.append)
    assert handle.cancel()
    assert [str(error) for error in heard] == [str(heard[0])] * 2
    assert heard[0].rank == 1
    status.fail(heard[0])
    assert handle.state is SaveState.CANCELLED
    assert not handle.cancel()
    assert len(heard) == 2


def test_only_staging_that_failed_is_raised_where_staging_is_waited_for() -> None:
    """Waiting for the copy raises why there is none; not what failed after it."""
    handle, status = new()
    status.fail(StorageError("no memory"))
    with pytest.raises(StorageError, match="no memory"):
        handle.wait_staged()
    copied, status = new()
    status.mark_staged()
    status.fail(StorageError("the disk is full"))
    copied.wait_staged()
    assert copied.state is SaveState.FAILED


def test_callbacks_are_called_once_at_the_end() -> None:
    """A callback is called when the save ends, or at once if it has."""
    handle, status = new()
    called: list[SaveHandle] = []
    handle.add_done_callback(called.append)
    assert not called
    status.succeed(INFO)
    handle.add_done_callback(called.append)
    assert called == [handle, handle]


def test_callback_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """An error in a user's callback is logged; the others are called and the save stands."""
    handle, status = new()
    called: list[SaveHandle] = []

    def broken(_: SaveHandle) -> None:
        raise ValueError("the user's own")

    handle.add_done_callback(broken)
    handle.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR, "ckpt_storage"):
        status.succeed(INFO)
        handle.add_done_callback(broken)
    assert called == [handle]
    assert handle.result() is INFO
    assert len([record for record in caplog.records if "callback" in record.getMessage()]) == 2
