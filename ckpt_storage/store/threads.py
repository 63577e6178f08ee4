"""Blocking calls in threads that are abandoned at a deadline, named and counted.

A thread that hangs in the kernel cannot be ended, but the process can still exit.
"""

from __future__ import annotations

import contextlib
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

from .deadline import LOOK_S

T = TypeVar("T")

_JOIN_S = 5.0

_STALL_S = 0.5
"""A wait that is longer by this means that the process was stopped meanwhile."""


class AbandonedError(StorageError):
    """The call did not end in time or was cancelled; its thread may still end it later."""


_ABANDONED: set[_Worker] = set()
# A child of fork has none of its parent's threads.
os.register_at_fork(after_in_child=_ABANDONED.clear)

_halted: set[threading.Thread] = set()
"""The daemon threads of a process that exits. A new thread may get the identifier of an old one."""

_serving = threading.local()


def halt_threads() -> None:
    """From now on park the present daemon threads that begin a call here or call `park_if_exiting`.

    As the interpreter exits, a thread that returns from C++ would crash the process. Threads of a
    save that a later handler of `atexit` makes are not parked.
    """
    _halted.update(thread for thread in threading.enumerate() if thread.daemon)


def park_if_exiting() -> None:
    """Block for ever if the interpreter is exiting and this is a daemon thread of before."""
    if _halted and threading.current_thread() in _halted:
        threading.Event().wait()


def abandoned_thread_count() -> int:
    """Return how many threads of this process are stuck in abandoned calls."""
    return len(_ABANDONED)


def report_progress() -> None:
    """Report progress, such as a page or a deletion: restart the timeout of this thread's call.

    For backends, after each request of a call that makes many. Does nothing outside a call. Raises
    a `StorageError` if the call was abandoned: do not catch it.
    """
    worker: _Worker | None = getattr(_serving, "worker", None)
    if worker is not None:
        if worker.is_abandoned:
            raise AbandonedError("This call was abandoned.")
        worker.progress_s = max(worker.progress_s, time.monotonic())


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise `StorageError` at the system's limit of threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageError(
            f"This process could not start the thread {thread.name!r}: {error}.",
            kind="not-begun",
            retryable=True,
            next_step="It has too many, or is ending: see ulimit -u, the pids limit of its "
            "container, and thread_count. The next call tries again.",
        ) from error


class _Worker(threading.Thread):
    """A daemon thread that makes one call at a time, until it gets None."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.is_abandoned = False
        self.what = ""
        self.progress_s = 0.0
        self._lock = threading.Lock()
        start_thread(self)

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
                self.results.put((value, error))
            # Keep no reference while waiting: both may hold much memory.
            del value, error

    def abandon(self) -> bool:
        """Abandon the running call; return False if it has just ended."""
        with self._lock:
            if not self.results.empty():
                return False
            self.is_abandoned = True
            _ABANDONED.add(self)
        self.name = f"ckpt-storage abandoned: {self.what}"
        return True


def _stall_since(wake_s: float) -> float:
    """Return how long this process was stopped, if it should have woken up at `wake_s`."""
    late_s = time.monotonic() - wake_s
    return late_s if late_s > _STALL_S else 0.0


def _end_all(idle: list[_Worker]) -> list[_Worker]:
    """End idle threads, without waiting; return them."""
    ended = []
    # `pop` is atomic: each worker is taken once, by any thread or signal handler.
    with contextlib.suppress(IndexError):
        while True:
            ended.append(idle.pop())
            ended[-1].calls.put(None)
    return ended


class TimedPool:
    """Runs each call in a thread of its own, which is reused; works after a fork.

    It has no lock, so that a signal handler may make a call during another one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
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
        cancelled: Callable[[], bool] | None = None,
    ) -> T:
        """Return what `call` returns, or raise what it raises, within `timeout_s` seconds.

        Each `report_progress` restarts them; `most_s` limits the whole call. Raises
        `AbandonedError` at the timeout, retryable if `repeatable`, or soon after `cancelled`
        returned True.
        """
        park_if_exiting()
        worker = self._take()
        worker.progress_s, worker.what = time.monotonic(), what
        last_s = worker.progress_s + most_s
        worker.calls.put(call)
        is_cancelled = False
        try:
            while True:
                progress_s = worker.progress_s
                left_s = min(progress_s + timeout_s, last_s) - time.monotonic()
                wait_s = max(0.0, left_s if cancelled is None else min(LOOK_S, left_s))
                wake_s = time.monotonic() + wait_s
                try:
                    value, error = worker.results.get(timeout=wait_s)
                    break
                except queue.Empty:
                    # The time in which the process was stopped does not count.
                    stall_s = _stall_since(wake_s)
                    last_s, worker.progress_s = last_s + stall_s, worker.progress_s + stall_s
                    is_cancelled = cancelled is not None and cancelled()
                    is_late = time.monotonic() >= min(worker.progress_s + timeout_s, last_s)
                if (is_late or is_cancelled) and worker.abandon():
                    break
        except BaseException:
            # An interrupt of the main thread abandons the call.
            if not worker.abandon():
                worker.calls.put(None)
            raise
        if worker.is_abandoned and is_cancelled:
            what = f"The {worker.what} was abandoned, because its operation has failed."
            raise AbandonedError(what, kind="timeout", next_step="Look at the first failure.")
        if worker.is_abandoned:
            what = f"The {worker.what} did not end within {timeout_s:.3g} s and was abandoned."
            step = "Check that the storage answers; if it is slow, raise Timeouts(request=...)."
            raise AbandonedError(what, kind="timeout", retryable=repeatable, next_step=step)
        self._idle.append(worker)
        # `close` may have been called since.
        if self._closed:
            _end_all(self._idle)
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback refers to this frame: break the cycle.
            del error
        result: T = value
        return result

    def close(self) -> None:
        """End the idle threads and join them; idempotent."""
        self._closed = True
        for worker in _end_all(self._idle):
            worker.join(_JOIN_S)

    def _take(self) -> _Worker:
        if self._process_id != os.getpid():
            self._idle.clear()
            self._process_id = os.getpid()
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return _Worker(f"{self._name} {next(self._numbers)}")
