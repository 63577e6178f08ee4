"""What a trainer does with the messages of its worker, and without them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
from limits import HANG_S, SLACK_S

from ckpt_storage.background import worker_save
from ckpt_storage.background.messages import Response, SaveRequest
from ckpt_storage.background.worker import Worker
from ckpt_storage.background.worker_process import WorkerProcess
from ckpt_storage.background.worker_save import WorkerSave
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.heartbeats import RankProgress
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.coordination.lane import Lane
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    RankFailedError,
    SaveCancelledError,
)
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import Phase, Timeouts

STATS = OperationStats(seconds=1.0)
SILENCE_S = 1.0


class Scripted(WorkerProcess):
    """A worker that does what a test says, in a thread; its process is said to live.

    `last_message` is what is still in the pipe when it is killed.
    """

    def __init__(self, act: Callable[[Connection], object], last_message: str = "") -> None:
        self._pipe, self._theirs = multiprocessing.Pipe()
        self._process = types.SimpleNamespace(  # type: ignore[assignment]  # as far as it is asked
            pid=1, poll=lambda: None, wait=lambda _: -9, kill=self._kill
        )
        self.name, self.silence_s, self.has_started = "worker process", SILENCE_S, True
        self.was_closed = False
        self._last_message = last_message
        self.close = self._close  # type: ignore[assignment]  # no finalizer
        threading.Thread(target=self._serve, args=(act,), daemon=True).start()

    def _serve(self, act: Callable[[Connection], object]) -> None:
        self._theirs.recv()
        act(self._theirs)
        if not self._last_message:
            self._theirs.close()

    def _kill(self) -> None:
        if self._last_message:
            self._theirs.send(self._last_message)
            self._theirs.close()

    def _close(self) -> None:
        self.was_closed = True
        self._pipe.close()


def operation_of(rank: int = 1) -> Operation:
    lane = Lane(RankGroup.alone().keys, rank=rank, global_ranks=range(2))
    return Operation(lane, "the save", Timeouts(silence=SILENCE_S))


REQUEST = SaveRequest(url="/x", options=b"", staged=b"", arena_bytes=1, global_ranks=(0, 1))


def save_on(
    worker: WorkerProcess, operation: Operation, progress: Any = None, session: Any = None
) -> WorkerSave:
    """Return a save that the worker has begun."""
    save = WorkerSave(worker, operation, session, REQUEST, None, progress)
    save._request = None  # noqa: SLF001  # as after the first call
    return save


def fail(operation: Operation, error: CheckpointError) -> None:
    """Let the operation fail on another rank."""
    operation._rounds.failure = error  # noqa: SLF001  # as the ranks' store reports it


def beat(phase: Phase, done_bytes: int, done_files: int = 1) -> RankProgress:
    return RankProgress(
        rank=1, phase=phase, done_bytes=done_bytes, total_bytes=4, done_files=done_files
    )


def test_each_byte_and_file_of_a_worker_counts_and_shows_once() -> None:
    """A heartbeat that repeats or comes late is no progress; the phase is that of the worker."""
    operation, shown = operation_of(), list[tuple[int, int]]()

    def act(pipe: Connection) -> None:
        beats = [beat("write", done) for done in (1, 1, 4)]
        for message in ("write", *beats, beat("write", 4, done_files=2), Response(value=7)):
            pipe.send(message)

    show = lambda event: shown.append((event.done_bytes, event.total_bytes))  # noqa: E731
    assert save_on(Scripted(act), operation, show).write() == 7
    own = operation.heartbeats.own()
    assert (own.phase, own.done_bytes, own.total_bytes, own.done_files) == ("write", 4, 4, 2)
    assert (operation.deadline.phase, shown) == ("write", [(1, 4), (4, 4)])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_is_reported_before_the_call_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """What hangs afterwards keeps no rank waiting; nor does a store that does not answer."""
    operation, reported = operation_of(), list[CheckpointError]()
    expected = "no answer" if is_lost else "disk is full"

    def report(error: CheckpointError) -> None:
        reported.append(error)
        if is_lost:
            operation._rounds.lose(LostStoreError("no answer in 3 s"))  # noqa: SLF001  # as above
        else:
            fail(operation, error)

    def act(pipe: Connection) -> None:
        pipe.send(CheckpointError("the disk is full"))
        received = pipe.recv()  # its own requests are to end, too
        pipe.send(Response(value=CheckpointError(f"given up: {received}")))

    monkeypatch.setattr(operation, "failed", report)
    worker = Scripted(act)
    with pytest.raises(CheckpointError, match=f"given up.*{expected}"):
        save_on(worker, operation).write()
    assert ["disk is full" in str(error) for error in reported] == [True]
    assert not worker.was_closed


@pytest.mark.deadline
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_worker_that_does_not_give_up_is_ended(
    *, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the failure of the save; whether it then sends heartbeats or not, it is ended."""
    monkeypatch.setattr(worker_save, "_GRACE_S", 0.5)
    operation, has_ended = operation_of(), threading.Event()

    def act(pipe: Connection) -> None:
        pipe.recv()
        while not has_ended.wait(0.2):
            if not is_silent:
                pipe.send(beat("plan", 0))

    fail(operation, SaveCancelledError("on rank 0"))
    worker = Scripted(act)
    begin_s = time.monotonic()
    with pytest.raises(SaveCancelledError, match="on rank 0"):
        save_on(worker, operation).write()
    assert time.monotonic() - begin_s < 2 * SLACK_S
    has_ended.set()
    assert worker.was_closed


def test_an_error_of_the_trainer_itself_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it goes on to send is not taken for the next save's, and its end is no failure."""
    operation, reported = operation_of(), list[CheckpointError]()

    def broken(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(operation, "phase", broken)
    monkeypatch.setattr(operation, "failed", reported.append)
    worker = Scripted(lambda pipe: pipe.send("write"))
    with pytest.raises(RuntimeError, match="can't start"):
        save_on(worker, operation).write()
    assert worker.was_closed
    assert reported == []


@pytest.mark.parametrize(
    ("phase", "last_message", "kind"),
    [
        ("write", "", RankFailedError),
        ("write", "write", RankFailedError),
        ("write", "commit", CommitUnknownError),
        ("commit", "", CommitUnknownError),
    ],
)
def test_a_worker_that_is_lost_leaves_only_a_commit_in_doubt(
    phase: Phase, last_message: str, kind: type[CheckpointError]
) -> None:
    """Before its message that it commits, nothing was committed; after it, the storage knows."""
    operation = operation_of(0)
    operation.save_id = "a"
    session: Any = types.SimpleNamespace(outcome=lambda _: None, url="/x")
    worker = Scripted(lambda pipe: pipe.send(phase), last_message)
    with pytest.raises(kind, match="sent no message" if last_message else "SIGKILL"):
        save_on(worker, operation, session=session).commit([], STATS)
    assert worker.was_closed
    session.outcome = lambda _: "what was committed"
    if phase == "commit":
        worker = Scripted(lambda pipe: pipe.send(phase))
        committed: object = save_on(worker, operation, session=session).commit([], STATS)
        assert committed == "what was committed"


@pytest.mark.parametrize(("phase", "kind"), [("write", None), ("commit", CommitUnknownError)])
def test_an_unexpected_error_of_a_worker_in_the_commit_leaves_it_in_doubt(
    phase: Phase, kind: type[CheckpointError] | None
) -> None:
    """It may have committed before; elsewhere it is an error like others, and the worker stays."""
    operation = operation_of(0)
    session: Any = types.SimpleNamespace(outcome=lambda _: None, url="/x")

    def act(pipe: Connection) -> None:
        pipe.send(phase)
        pipe.send(Response(value=CheckpointError("ZeroDivisionError"), is_unexpected=True))

    worker = Scripted(act, "commit" if kind else "")
    with pytest.raises(kind or CheckpointError, match="ZeroDivisionError"):
        save_on(worker, operation, session=session).commit([], STATS)
    assert worker.was_closed == (kind is not None)


class Plans:
    """What all ranks sent."""


def test_payloads_that_the_trainer_passes_on_are_not_kept() -> None:
    """Those of all ranks are large: during one call, those of the last are freed."""
    operation, kept = operation_of(0), list[bool]()

    def act(pipe: Connection) -> None:
        pipe.send(Response(value=Plans()))
        pipe.recv()
        kept.append(proposal() is not None)
        pipe.send(Response(value=Plans()))

    save = save_on(Scripted(act), operation)
    proposal = weakref.ref(save.propose())
    proposals = [Plans()]
    passed_on = weakref.ref(proposals[0])
    answer = weakref.ref(save.decide(proposals))
    del proposals
    assert kept == [False]
    assert passed_on() is answer() is None


def test_a_worker_that_is_lost_in_a_save_that_has_failed_is_not_the_reason() -> None:
    """A save that was cancelled ends so on all ranks, whatever becomes of a worker."""
    operation = operation_of()
    fail(operation, SaveCancelledError("on rank 0"))
    with pytest.raises(SaveCancelledError):
        save_on(Scripted(lambda pipe: pipe.recv()), operation).propose()


@pytest.mark.deadline
def test_a_trainer_that_was_stopped_reads_what_has_arrived_before_it_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence is counted in looks: heartbeats that lie in the pipe show a live worker."""
    operation, goes_on = operation_of(), threading.Event()

    def act(pipe: Connection) -> None:
        for done_bytes in (1, 2):
            pipe.send(beat("write", done_bytes))
        goes_on.wait(HANG_S)
        time.sleep(SILENCE_S / 2)
        pipe.send(Response(value=7))

    worker = Scripted(act)
    receive = worker.receive

    def stop_first() -> Any:
        if not goes_on.is_set():
            time.sleep(2 * SILENCE_S)
            goes_on.set()
        return receive()

    monkeypatch.setattr(worker, "receive", stop_first)
    assert save_on(worker, operation).write() == 7


def test_silence_counts_from_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sends now and then is alive, however long it takes."""
    quiet: list[Any] = [None] * 8
    messages = iter([*quiet, beat("write", 1), *quiet, beat("write", 2), *quiet, Response(value=7)])
    worker = Scripted(lambda pipe: pipe.recv())
    monkeypatch.setattr(worker, "receive", lambda: next(messages))
    assert save_on(worker, operation_of()).write() == 7


def test_memory_that_a_worker_cannot_map_is_an_error_with_its_reason() -> None:
    """The worker lives on and serves the next call."""
    ours, theirs = multiprocessing.Pipe()
    worker = Worker(0, theirs)
    file = os.memfd_create("arena")
    size_bytes = 1 << 47  # all that a process may address
    os.ftruncate(file, size_bytes)
    request = replace(REQUEST, arena_bytes=size_bytes)
    worker._respond(partial(worker._begin, request, file))  # noqa: SLF001  # without its process
    assert isinstance(ours.recv(), RankProgress)
    error = ours.recv().value
    assert isinstance(error, CheckpointError)
    assert "cannot map" in str(error)
    assert "Cannot allocate memory" in str(error)
    assert error.phase == "plan"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    worker._respond(worker._finish)  # noqa: SLF001  # as above
    assert isinstance(ours.recv(), RankProgress)
    assert ours.recv() == Response(value=True)


def test_the_first_code_of_a_worker_needs_no_torch() -> None:
    """So a worker watches its trainer before it imports what takes long, and may hang."""
    code = "import sys, ckpt_storage.background.start; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)  # our own
