"""Calls with a deadline: each runs in a daemon thread that is abandoned when time is up.

A thread that hangs in the kernel cannot be ended from outside, so it is left behind, named after
what it was doing and counted, and the process can still exit. Threads are used again, because
starting one costs more than most calls.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_storage.errors import StorageError

T = TypeVar("T")

_JOIN_S = 5.0

_LOOK_S = 0.2
"""How often a caller that waits looks whether its call is still wanted."""


class AbandonedError(StorageError):
    """The call did not end in time or was given up; its thread may still end it later."""


def _never() -> bool:
    return False


_ABANDONED: set[_Worker] = set()
# A child of fork has none of its parent's threads.
os.register_at_fork(after_in_child=_ABANDONED.clear)

_HALT = threading.Event()
_serving = threading.local()


def halt_threads() -> None:
    """Let daemon threads that come to a call here, or to `halted`, stay there for good.

    For an interpreter that ends. A daemon thread that returns from C++ then is ended in the middle
    of it, which takes the whole process down (pybind11's `gil_scoped_release` is `noexcept`).
    """
    _HALT.set()


def halted() -> None:
    """Stay here for good if the interpreter ends, in a thread that nobody waits for."""
    if _HALT.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def abandoned_thread_count() -> int:
    """Return how many threads of this process are stuck in calls that were given up."""
    return len(_ABANDONED)


def moved() -> None:
    """Say that the call of this thread has come further: its time begins anew.

    For calls of many requests, such as a listing of many pages: each has the time of one. Raises
    `AbandonedError` if the call was given up, so that it does no more.
    """
    worker: _Worker | None = getattr(_serving, "worker", None)
    if worker is not None:
        if worker.is_abandoned:
            raise AbandonedError("Nobody waits for this call any more.")
        worker.moved_s = time.monotonic()


class _Worker(threading.Thread):
    """A daemon thread that makes one call at a time, until it is given None."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.is_abandoned = False
        self.moved_s = 0.0
        self._lock = threading.Lock()
        self.start()

    def run(self) -> None:
        _serving.worker = self
        while (call := self.calls.get()) is not None:
            value, error = None, None
            try:
                value = call()
            except BaseException as caught:  # noqa: BLE001  # raised again by the caller
                error = caught
            del call
            with self._lock:
                if self.is_abandoned:
                    _ABANDONED.discard(self)
                    return
                self.answers.put((value, error))
            # Held in no variable while waiting: both may keep much memory alive.
            del value, error

    def answer(
        self, timeout_s: float, most_s: float, cancelled: Callable[[], bool]
    ) -> tuple[Any, BaseException | None] | None:
        """Return what the call gave; None when time is up or it is not wanted any more."""
        last_s = time.monotonic() + most_s
        while True:
            left_s = min(self.moved_s + timeout_s, last_s) - time.monotonic()
            wait_s = left_s if cancelled is _never else min(_LOOK_S, left_s)
            try:
                return self.answers.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                end_s = min(self.moved_s + timeout_s, last_s)
                if cancelled() or time.monotonic() >= end_s:
                    return None

    def abandon(self, what: str) -> bool:
        """Leave the thread to its call, unless that has just ended; return whether it was left."""
        with self._lock:
            if not self.answers.empty():
                return False
            self.is_abandoned = True
            _ABANDONED.add(self)
        self.name = f"ckpt-storage abandoned: {what}"
        return True


def _end_all(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().calls.put(None)


class TimedPool:
    """Runs calls in threads of its own, as many as there are callers at a time.

    May be used by several threads and survives fork (the child starts afresh). `close`
    ends the threads that wait; those still in a call end after it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process_id = os.getpid()
        weakref.finalize(self, _end_all, self._idle).atexit = False

    def run(
        self,
        call: Callable[[], T],
        *,
        timeout_s: float,
        most_s: float = math.inf,
        what: str,
        repeatable: bool,
        cancelled: Callable[[], bool] = _never,
    ) -> T:
        """Return what `call` returns, or raise what it raises, within `timeout_s` seconds.

        They count from the last `moved`, but `most_s` (seconds) is the limit of it all.

        Raises `AbandonedError` naming `what` when time is up, retryable if `repeatable`, or soon
        after `cancelled` returned True.
        """
        halted()
        worker = self._take()
        worker.moved_s = time.monotonic()
        worker.calls.put(call)
        try:
            answer = worker.answer(timeout_s, most_s, cancelled)
        except BaseException:
            # An interrupt of the main thread: the call goes on without anyone waiting.
            if not worker.abandon(what):
                worker.calls.put(None)
            raise
        if answer is None and worker.abandon(what):
            raise _given_up(what, timeout_s, is_late=not cancelled(), repeatable=repeatable)
        value, error = answer or worker.answers.get()
        self._give_back(worker)
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback leads to this frame, and the frame must not lead back.
            del answer, error
        result: T = value
        return result

    def close(self) -> None:
        """End the waiting threads and join them; idempotent."""
        with self._lock:
            self._closed = True
            idle = self._idle[:]
            _end_all(self._idle)
        for worker in idle:
            worker.join(_JOIN_S)

    def _take(self) -> _Worker:
        if self._process_id != os.getpid():
            self._lock = threading.Lock()
            self._idle.clear()
            self._process_id = os.getpid()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Worker(f"{self._name} {next(self._numbers)}")

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.calls.put(None)


def _given_up(what: str, timeout_s: float, *, is_late: bool, repeatable: bool) -> AbandonedError:
    if is_late:
        return AbandonedError(
            f"The {what} did not end within {timeout_s:.3g} s and was given up.",
            kind="timeout",
            retryable=repeatable,
            next_step="Check that the storage answers; if it is only slow, raise "
            "Timeouts(request=...).",
        )
    return AbandonedError(
        f"The {what} was given up, because what it belongs to has failed.",
        kind="timeout",
        next_step="Look at the first failure.",
    )
