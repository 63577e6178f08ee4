"""What a trainer does with the words of its worker, and without them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import types
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ckpt_storage.background import link
from ckpt_storage.background.link import WorkerLink
from ckpt_storage.background.worker import GoOn, Reply
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    RankFailedError,
    SaveCancelledError,
)
from ckpt_storage.options import Phase, Timeouts

SILENCE_S = 1.0
END_S = 10.0


class Scripted(WorkerLink):
    """A worker that does what a test says, in a thread; its process is said to live."""

    def __init__(self, does: Callable[[Connection], object], last_word: str = "") -> None:
        self._pipe, self._theirs = multiprocessing.Pipe()
        self._lives, self.ends = os.pipe()
        self.process = types.SimpleNamespace(  # type: ignore[assignment]  # as far as it is asked
            pid=1, sentinel=self._lives, join=lambda _: None, exitcode=-9, kill=self._kill
        )
        self._silence_s, self.has_spoken, self.was_closed = SILENCE_S, True, False
        self._last_word = last_word
        self.close = self._close  # type: ignore[assignment]  # no finalizer
        threading.Thread(target=self._serve, args=(does,), daemon=True).start()

    def _serve(self, does: Callable[[Connection], object]) -> None:
        self._theirs.recv()
        does(self._theirs)
        if not self._last_word:
            self._theirs.close()

    def _kill(self) -> None:
        if self._last_word:
            self._theirs.send(self._last_word)
            self._theirs.close()

    def _close(self) -> None:
        self.was_closed = True
        self._pipe.close()


def operation_of(rank: int = 1) -> Operation:
    operation = Operation(RankGroup.alone(rank, 2), "the save", Timeouts(silence=SILENCE_S))
    operation.id = "1"
    return operation


def called(worker: WorkerLink, operation: Operation, progress: Any = None) -> Any:
    return worker._call(GoOn(), operation, progress)  # noqa: SLF001  # the unit


def staged_job() -> Any:
    arena = types.SimpleNamespace(size_bytes=1, file=None)
    staging = types.SimpleNamespace(staged=None, arena=arena)
    options = types.SimpleNamespace(progress=None)
    return types.SimpleNamespace(options=options, url="/x", packed=b"", staging=staging)


def beat(phase: Phase, done_bytes: int) -> RankProgress:
    return RankProgress(rank=1, phase=phase, done_bytes=done_bytes, total_bytes=4, done_files=1)


def test_each_byte_and_file_of_a_worker_counts_and_shows_once() -> None:
    """What a beat tells again, or late, is no progress; the phase is that of the worker."""
    operation, shown = operation_of(), list[tuple[int, int]]()

    def does(pipe: Connection) -> None:
        for word in ("write", *(beat("write", done) for done in (1, 1, 4)), Reply(7)):
            pipe.send(word)

    show = lambda event: shown.append((event.done_bytes, event.total_bytes))  # noqa: E731
    assert called(Scripted(does), operation, show) == 7
    own = operation.heartbeats.own()
    assert (own.phase, own.done_bytes, own.total_bytes, own.done_files) == ("write", 4, 4, 1)
    assert (operation.deadline.phase, shown) == ("write", [(1, 4), (4, 4)])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_is_told_before_the_call_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """What hangs afterwards keeps no rank waiting; nor does a store that does not answer."""
    operation, told = operation_of(), list[CheckpointError]()

    def tell(error: CheckpointError) -> None:
        told.append(error)
        if is_lost:
            raise LostStoreError("no answer in 3 s") from error

    def does(pipe: Connection) -> None:
        pipe.send(CheckpointError("the disk is full"))
        if not is_lost:
            assert "disk is full" in str(pipe.recv())  # its own deadlines are over, too
        pipe.send(Reply(CheckpointError("given up")))

    monkeypatch.setattr(operation, "_tell", tell)
    worker = Scripted(does)
    with pytest.raises(CheckpointError, match="given up"):
        called(worker, operation)
    assert ["disk is full" in str(error) for error in told] == [True]
    assert not worker.was_closed


@pytest.mark.parametrize(("is_silent", "has_spoken"), [(False, True), (True, True), (True, False)])
def test_a_worker_that_does_not_give_up_is_ended(
    *, is_silent: bool, has_spoken: bool, monkeypatch: Any
) -> None:
    """It is told that the save fails elsewhere; whether it then beats or not, it is not trusted.

    One that is still starting, which may take long, is no longer waited for.
    """
    monkeypatch.setattr(link, "_GRACE_S", 0.5)
    monkeypatch.setattr(link, "_START_S", END_S)
    operation, has_ended = operation_of(), threading.Event()

    def does(pipe: Connection) -> None:
        pipe.recv()
        while not has_ended.wait(0.2):
            if not is_silent:
                pipe.send(beat("plan", 0))

    operation._failure = CheckpointError("rank 0 failed")  # noqa: SLF001  # as it is told
    worker = Scripted(does)
    worker.has_spoken = has_spoken
    begin, is_noticed = time.monotonic(), is_silent and has_spoken
    with pytest.raises(link.GoneError, match="no sign of life" if is_noticed else "give up"):
        called(worker, operation)
    assert time.monotonic() - begin < END_S
    has_ended.set()
    assert worker.was_closed


def test_an_error_of_the_trainer_itself_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it goes on to tell is not taken for the next save's, and its end is no news."""
    operation, told = operation_of(), list[CheckpointError]()

    def broken(*_given: object, **_more: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(operation, "phase", broken)
    monkeypatch.setattr(operation, "_tell", told.append)
    worker = Scripted(lambda pipe: pipe.send("write"))
    with pytest.raises(RuntimeError, match="can't start"):
        called(worker, operation)
    assert worker.was_closed
    assert told == []


@pytest.mark.parametrize(
    ("phase", "last_word", "kind"),
    [
        ("write", "", RankFailedError),
        ("write", "write", RankFailedError),
        ("write", "commit", CommitUnknownError),
        ("commit", "", CommitUnknownError),
    ],
)
def test_a_worker_that_is_lost_leaves_only_a_commit_in_doubt(
    phase: Phase, last_word: str, kind: type[CheckpointError]
) -> None:
    """Before its own word that it commits, nothing was committed; after it, the storage tells."""
    operation = operation_of(0)
    operation.save_id = "a"
    session: Any = types.SimpleNamespace(outcome=lambda _: None, url="/x")
    job = staged_job()
    worker = Scripted(lambda pipe: pipe.send(phase), last_word)
    with pytest.raises(kind, match="sign of life" if last_word else "SIGKILL"):
        next(worker.steps(operation, session, job))
    assert worker.was_closed
    session.outcome = lambda _: "what was committed"
    if phase == "commit":
        worker = Scripted(lambda pipe: pipe.send(phase))
        assert next(worker.steps(operation, session, job)) == "what was committed"


class Plans:
    """What all ranks sent."""


def test_words_that_the_trainer_passes_on_are_not_kept() -> None:
    """Those of all ranks are many: while one call is carried out, those of the last are gone."""
    operation, kept = operation_of(0), list[bool]()

    def does(pipe: Connection) -> None:
        pipe.send(Reply(Plans()))
        pipe.recv()
        kept.append(answered() is not None)
        pipe.send(Reply(Plans()))

    steps = Scripted(does).steps(operation, types.SimpleNamespace(), staged_job())  # type: ignore[arg-type]
    answered = weakref.ref(next(steps))
    given = Plans()
    passed_on = weakref.ref(given)
    answered = weakref.ref(steps.send(given))
    del given
    assert kept == [False]
    assert passed_on() is answered() is None
    with pytest.raises(CheckpointError, match="end of the test"):
        steps.throw(CheckpointError("the end of the test"))


def test_a_worker_that_is_lost_in_a_save_that_has_failed_is_not_the_reason() -> None:
    """A save that was cancelled ends so on all ranks, whatever becomes of one that gives it up."""
    operation = operation_of()
    operation._failure = SaveCancelledError("on rank 0")  # noqa: SLF001  # as it is told
    steps = Scripted(lambda pipe: pipe.recv()).steps(operation, None, staged_job())  # type: ignore[arg-type]
    with pytest.raises(SaveCancelledError):
        next(steps)
