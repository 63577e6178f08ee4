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
from dataclasses import dataclass
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


class _Gauge:
    """A number that several threads count up and down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self, step: int) -> None:
        with self._lock:
            self.value += step

    def reset(self) -> None:
        self._lock = threading.Lock()
        self.value = 0


_ABANDONED = _Gauge()
# A child of fork has none of its parent's threads.
os.register_at_fork(after_in_child=_ABANDONED.reset)


_HALT = threading.Event()


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
    return _ABANDONED.value


_serving = threading.local()


class _Worker:
    """One daemon thread and the two queues to talk to it; one call at a time."""

    __slots__ = ("_abandoned", "_inbox", "_late", "_lock", "_outbox", "moved_s", "thread")

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._abandoned = False
        self._late: Callable[[Any], None] | None = None
        self.moved_s = 0.0
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        _serving.worker = self
        while (call := self._inbox.get()) is not None:
            value, error = None, None
            try:
                value = call()
            except BaseException as caught:  # noqa: BLE001  # raised again by the caller
                error = caught
            del call
            with self._lock:
                if not self._abandoned:
                    self._outbox.put((value, error))
                    # Held in no variable while waiting: both may keep much memory alive.
                    del value, error
                    continue
            self._end_late(value, error)
            return

    def _end_late(self, value: object, error: BaseException | None) -> None:
        try:
            if error is None and self._late is not None:
                self._late(value)
        except Exception:  # noqa: BLE001, S110  # nobody waits for this call any more
            pass
        finally:
            _ABANDONED.add(-1)

    @property
    def was_left(self) -> bool:
        """Whether nobody waits for its call any more."""
        return self._abandoned

    def call(self, call: Callable[[], Any]) -> None:
        self._inbox.put(call)

    def result(self, timeout_s: float | None) -> tuple[Any, BaseException | None]:
        """Return value and error of the call; raise `queue.Empty` when time is up."""
        return self._outbox.get(timeout=timeout_s)

    def abandon(self, name: str, late: Callable[[Any], None] | None) -> bool:
        """Leave the thread to itself unless its call has just ended; return whether it was left."""
        with self._lock:
            if not self._outbox.empty():
                return False
            self._abandoned = True
            self._late = late
            _ABANDONED.add(1)
        self.thread.name = name
        return True

    def stop(self) -> None:
        self._inbox.put(None)


def _result(
    worker: _Worker, timeout_s: float, most_s: float, cancelled: Callable[[], bool]
) -> tuple[Any, BaseException | None]:
    """Return what the call gave; raise `queue.Empty` when time is up or it is not wanted."""
    start = time.monotonic()
    worker.moved_s = start
    while True:
        end = min(worker.moved_s + timeout_s, start + most_s)
        left_s = max(0.0, end - time.monotonic())
        try:
            return worker.result(left_s if cancelled is _never else min(_LOOK_S, left_s))
        except queue.Empty:
            if cancelled() or time.monotonic() >= min(worker.moved_s + timeout_s, start + most_s):
                raise


def moved() -> None:
    """Say that the call of this thread has come further: its time begins anew.

    For calls of many requests, such as a listing of many pages: each has the time of one. Raises
    `AbandonedError` if the call was given up, so that it does no more.
    """
    worker: _Worker | None = getattr(_serving, "worker", None)
    if worker is not None:
        if worker.was_left:
            raise AbandonedError("Nobody waits for this call any more.")
        worker.moved_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One call: what it does, and when it is given up."""

    what: str
    timeout_s: float
    repeatable: bool
    cancelled: Callable[[], bool]

    @property
    def left_name(self) -> str:
        """The name of a thread that was left behind in this call."""
        return f"ckpt-storage abandoned: {self.what}"

    def error(self) -> AbandonedError:
        """Return what whoever waited for it raises."""
        if self.cancelled():
            return AbandonedError(
                f"The {self.what} was given up, because what it belongs to has failed.",
                kind="timeout",
                next_step="Look at the first failure.",
            )
        return AbandonedError(
            f"The {self.what} did not end within {self.timeout_s:.3g} s and was given up.",
            kind="timeout",
            retryable=self.repeatable,
            next_step="Check that the storage answers; if it is only slow, raise "
            "Timeouts(request=...).",
        )


def _stop_all(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().stop()


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
        weakref.finalize(self, _stop_all, self._idle).atexit = False

    def run(
        self,
        call: Callable[[], T],
        *,
        timeout_s: float,
        most_s: float = math.inf,
        what: str,
        repeatable: bool,
        late: Callable[[T], None] | None = None,
        cancelled: Callable[[], bool] = _never,
    ) -> T:
        """Return what `call` returns, or raise what it raises, within `timeout_s` seconds.

        They count from the last `moved`, but `most_s` (seconds) is the limit of it all.

        Raises `AbandonedError` naming `what` when time is up, retryable if `repeatable`, or soon
        after `cancelled` returned True. If the call returns after all, `late` gets its value, in
        the abandoned thread.
        """
        halted()
        request = _Request(
            what=what, timeout_s=timeout_s, repeatable=repeatable, cancelled=cancelled
        )
        worker = self._take()
        worker.call(call)
        try:
            value, error = _result(worker, timeout_s, most_s, cancelled)
        except queue.Empty:
            if worker.abandon(request.left_name, late):
                raise request.error() from None
            value, error = worker.result(None)
        except BaseException:
            # An interrupt of the main thread: the call goes on without anyone waiting.
            if not worker.abandon(request.left_name, late):
                worker.stop()
            raise
        self._give_back(worker)
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback leads to this frame, and the frame must not lead back.
            del error
        result: T = value
        return result

    def close(self) -> None:
        """End the waiting threads and join them; idempotent."""
        with self._lock:
            self._closed = True
            idle = self._idle[:]
            self._idle.clear()
        for worker in idle:
            worker.stop()
        for worker in idle:
            worker.thread.join(_JOIN_S)

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
        worker.stop()
