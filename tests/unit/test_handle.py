"""A handle tells the truth about its save; a trainer hears its worker, and does without it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import Mock

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
from ckpt_storage.background import exits, link
from ckpt_storage.background.handle import SaveStatus
from ckpt_storage.background.worker import Step
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.coordination.liveness import Heartbeats, RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.options import Phase, Timeouts

INFO = CheckpointInfo(url="file:///c", name="c", format="ckpt_storage", save_id="s1", slot=1)


@pytest.fixture
def status() -> SaveStatus:
    """A save that has begun, as its saver sees it."""
    return SaveStatus("file:///c", 1, limit_s=0.01)


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
def test_error_decides_the_final_state(
    status: SaveStatus, error: CheckpointError, state: SaveState
) -> None:
    """Each kind of failure has a state of its own; one after the commit leaves it committed."""
    status.fail(error)
    assert status.state is state
    assert status.state.is_final
    assert status.done()
    assert status.exception() is error
    with pytest.raises(type(error)) as caught:
        status.result()
    assert caught.value is error
    assert not status.cancel()


def test_first_end_counts(status: SaveStatus) -> None:
    """What ended stays as it ended, whatever is told later."""
    status.succeed(INFO)
    status.fail(StorageError("late"))
    status.mark_staged()
    assert status.state is SaveState.COMMITTED
    assert status.result() is INFO
    assert status.exception() is None
    assert status.save_id == "s1"


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
    assert not status.is_asked_for
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


def test_a_rank_that_is_silent_makes_no_progress_by_hearsay() -> None:
    """What rank 0 passes on of a rank that it no longer hears grows old; an exit waits for none."""
    slow, coordinator, member = (Heartbeats(rank) for rank in (1, 0, 2))
    slow.begin("write", 100)
    coordinator.hear(1, slow.pack())
    begun_s = time.monotonic()
    time.sleep(0.5)
    member.hear(0, coordinator.pack())
    told = member.known()[1]
    assert told.heard_s - told.idle_s < begun_s + 0.2


def test_the_end_of_one_save_gives_time_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is staged while another commits is waited for from the end of that one on."""
    monkeypatch.setattr(handles, "STALL_S", 2.0)
    first, second = (SaveStatus(f"file:///{name}", 0, limit_s=9.0) for name in "ab")
    for save in (first, second):
        handles.flush_at_exit(save, 60.0, Timeouts())
    for save, end_s in ((first, 1.5), (second, 2.7)):
        threading.Timer(end_s, save.succeed, [INFO]).start()
    assert handles.flush([first, second]) == []


class Child:
    """A worker that asks for one step, and is gone before that has ended."""

    has_spoken = True
    process = types.SimpleNamespace(pid=1)

    def __init__(self, committed: object = None) -> None:
        self.committed = committed
        self.gone = threading.Event()
        self.told = threading.Event()

    def send(self, message: object, *, file: int | None = None) -> None:
        """Take what the pipe holds, though nobody reads it."""

    def close(self) -> None:
        """Be ended, and leave time for it to be noticed."""
        self.gone.set()
        self.told.wait(0.5)

    def messages(self, limit_s: float) -> Iterator[Step]:
        """Ask, and be gone."""
        del limit_s
        yield Step(name="gather_bytes", args=(b"part",), facts={"committed": self.committed})
        self.gone.wait()
        raise link.GoneError("gave no sign of life")


def job() -> Any:
    """Return a save that is staged."""
    options = types.SimpleNamespace(timeouts=Timeouts(), progress=None)
    arena = types.SimpleNamespace(size_bytes=1, file=0)
    staging = types.SimpleNamespace(staged=None, arena=arena)
    return types.SimpleNamespace(options=options, url="/x", packed=b"", staging=staging)


def served(child: Child, operation: Operation) -> object:
    """Return what the trainer's thread ends with, within 10 seconds."""
    run = link._Run(cast("Any", child), operation, job())  # noqa: SLF001  # the unit
    ends: list[object] = []

    def serve() -> None:
        try:
            ends.append(run.serve())
        except link.GoneError as error:
            ends.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(10)
    return ends[0] if ends else None


def begun(
    monkeypatch: pytest.MonkeyPatch, gather: Callable[[bytes], object]
) -> tuple[Operation, list[CheckpointError]]:
    """Return an operation of two ranks that gathers so, and what the other rank is told."""
    operation = Operation(RankGroup.alone(1, 2), "the save", Timeouts())
    told: list[CheckpointError] = []
    operation.id = "1"
    monkeypatch.setattr(operation, "gather_bytes", gather)
    monkeypatch.setattr(operation, "_tell", told.append)
    return operation, told


def test_a_worker_that_is_gone_is_noticed_though_others_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store that ranks share may not answer just then."""
    child = Child()

    def gather(part: bytes) -> list[bytes]:
        child.gone.set()
        assert child.told.wait(10)
        return [part]

    def tell(error: CheckpointError) -> None:
        child.told.set()
        raise LostStoreError("no answer in 3 s") from error

    operation, _ = begun(monkeypatch, gather)
    monkeypatch.setattr(operation, "_tell", tell)
    assert isinstance(served(child, operation), link.GoneError)


@pytest.mark.parametrize("committed", [None, "what was committed"])
def test_a_worker_that_dies_once_its_part_is_told_fails_only_a_consolidation(
    monkeypatch: pytest.MonkeyPatch, committed: object
) -> None:
    """Its rank's part is written, and the others commit without it; not so what comes after."""
    child = Child(committed)

    def gather(_: bytes) -> None:
        child.gone.set()
        child.told.wait(0.5)

    operation, told = begun(monkeypatch, gather)
    operation.phase("write")
    assert isinstance(served(child, operation), link.GoneError)
    assert len(told) == (committed is not None)


def test_a_worker_that_is_ended_for_an_error_here_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks are told why a step failed here, not that its worker was killed for it."""
    operation, told = begun(monkeypatch, Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start"):
        link.Worker.run(cast("Any", Child()), operation, job())
    assert told == []


def test_a_beat_of_the_phase_before_counts_for_nothing() -> None:
    """One may be under way while this rank's trainer begins the next phase."""
    operation = Operation(RankGroup.alone(), "the save", Timeouts())
    run = link._Run(cast("Any", Child()), operation, job())  # noqa: SLF001  # the unit
    operation.phase("consolidate")
    with contextlib.ExitStack() as shown:
        phases: list[Phase] = ["commit", "consolidate"]
        for phase, done_bytes in zip(phases, (9, 2), strict=True):
            beat = RankProgress(rank=0, phase=phase, done_bytes=done_bytes)
            run._take_beat(beat, shown)  # noqa: SLF001  # as above
    assert operation.heartbeats.own().done_bytes == 2
