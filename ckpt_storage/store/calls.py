"""One blocking call: a thread that can be left behind, its deadline, and when it is made again.

A thread that hangs in the kernel cannot be ended, so it is left behind, named after what it was
doing and counted, and the process can still exit. Threads are used again.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import SystemRandom
from typing import Any, Literal, TypeVar, cast

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy

from .deadline import LOOK_S, Deadline

T = TypeVar("T")

Repeat = Literal["always", "unless-abandoned", "if-nothing-done"]
"""When a call that failed is made again.

"always": it is idempotent. "unless-abandoned": it is, but uses the caller's memory.
"if-nothing-done": only after an error that proves the storage did nothing.
"""

# Answers, which waiting does not change; credentials are repeated only after a refresh.
_NEVER = frozenset({"credentials", "exists", "not-found", "precondition", "unsupported"})

# Ranks forked from one process must not share a sequence of delays.
system_random = SystemRandom().random

CLEAN_UP_S = 3.0
"""What discarding a failed upload may take: its saver must report within 5 s of its deadline."""

_JOIN_S = 5.0


class AbandonedError(StorageError):
    """The call did not end in time or was given up; its thread may still end it later."""


_ABANDONED: set[_Worker] = set()
# A child of fork has none of its parent's threads.
os.register_at_fork(after_in_child=_ABANDONED.clear)

_HALT = threading.Event()
_serving = threading.local()


def halt_threads() -> None:
    """Let daemon threads that come to a call here, or to `halted`, stay there for good.

    For an interpreter that ends: a daemon thread that returns from C++ then takes the process down.
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


def _is_one_of_many(what: str) -> bool:
    """Return whether this thread makes many calls, of which this is the next."""
    worker: _Worker | None = getattr(_serving, "worker", None)
    if worker is None or not worker.is_of_many:
        return False
    moved()
    worker.what = what
    return True


class _Worker(threading.Thread):
    """A daemon thread that makes one call at a time, until it is given None."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.is_abandoned = False
        # A call of many has the time of each, and is named after the one that is under way.
        self.is_of_many = False
        self.what = ""
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

    def abandon(self) -> bool:
        """Leave the thread to its call, unless that has just ended; return whether it was left."""
        with self._lock:
            if not self.answers.empty():
                return False
            self.is_abandoned = True
            _ABANDONED.add(self)
        self.name = f"ckpt-storage abandoned: {self.what}"
        return True


def _end_all(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().calls.put(None)


class TimedPool:
    """Runs calls in threads of its own, as many as there are callers at a time; survives fork."""

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
        cancelled: Callable[[], bool] | None = None,
    ) -> T:
        """Return what `call` returns, or raise what it raises, within `timeout_s` seconds.

        They count from the last `moved`; `most_s` is the limit of it all. Raises `AbandonedError`
        when time is up, retryable if `repeatable`, or soon after `cancelled` returned True.
        """
        halted()
        worker = self._take()
        worker.moved_s, worker.what = time.monotonic(), what
        last_s = worker.moved_s + most_s
        worker.calls.put(call)
        is_cancelled = False
        try:
            while True:
                left_s = min(worker.moved_s + timeout_s, last_s) - time.monotonic()
                wait_s = left_s if cancelled is None else min(LOOK_S, left_s)
                try:
                    value, error = worker.answers.get(timeout=max(0.0, wait_s))
                    break
                except queue.Empty:
                    is_cancelled = cancelled is not None and cancelled()
                    is_late = time.monotonic() >= min(worker.moved_s + timeout_s, last_s)
                if (is_late or is_cancelled) and worker.abandon():
                    break
        except BaseException:
            # An interrupt of the main thread: the call goes on without anyone waiting.
            if not worker.abandon():
                worker.calls.put(None)
            raise
        if worker.is_abandoned and is_cancelled:
            raise AbandonedError(
                f"The {worker.what} was given up, because what it belongs to has failed.",
                kind="timeout",
                next_step="Look at the first failure.",
            )
        if worker.is_abandoned:
            raise AbandonedError(
                f"The {worker.what} did not end within {timeout_s:.3g} s and was given up.",
                kind="timeout",
                retryable=repeatable,
                next_step="Check that the storage answers; if it is only slow, raise "
                "Timeouts(request=...).",
            )
        with self._lock:
            if self._closed:
                worker.calls.put(None)
            else:
                self._idle.append(worker)
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


def nothing_was_done(error: StorageError) -> bool:
    """Return whether an error proves that the storage did not carry out the request."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        # __context__ may be an earlier attempt's error, which proves nothing of this one.
        cause = cause.__cause__
    return cause is not None or error.kind == "throttled"


class Caller(ABC):
    """Makes the calls of one store, each within `request_timeout_s` seconds an attempt.

    `clock`, `sleep` and `random` stand in for time in tests.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy,
        request_timeout_s: float,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        random: Callable[[], float],
    ) -> None:
        self.url, self.policy, self._request_timeout_s = url, policy, request_timeout_s
        self._clock, self._sleep, self._random = clock, sleep, random
        self._deadlines: tuple[Deadline, ...] = ()
        self._cancelled: Callable[[], bool] = bool
        self._throttled: Callable[[], object] = bool
        # Shared by all views; of renewed credentials there is an entry for each time.
        self._pool = TimedPool("ckpt-storage io")
        self._refreshing = threading.Lock()
        self._refreshed: list[None] = []

    @abstractmethod
    def _look_up(self) -> None:
        """Look credentials up again."""

    def call(
        self, what: str, call: Callable[[], T], *, repeat: Repeat = "always", extra_s: float = 0.0
    ) -> T:
        """Return what `call` returns, within deadline and repeated if that is right.

        `what` names it for messages. `extra_s` (seconds) lengthens each attempt.
        """
        seen_count, may_refresh = len(self._refreshed), True
        start_s, attempt = self._clock(), 1
        while True:
            try:
                return self._once(what, call, repeat=repeat, extra_s=extra_s)
            except StorageError as error:
                failure = error
            if failure.kind == "throttled":
                self._throttled()
            if failure.kind == "credentials" and failure.retryable and may_refresh:
                may_refresh = False
                self._refresh(seen_count)
                continue
            may_repeat = (
                failure.retryable
                and failure.kind not in _NEVER
                and attempt < self.policy.attempt_count
                and (repeat != "if-nothing-done" or nothing_was_done(failure))
            )
            if not may_repeat or not self.pause(attempt):
                if attempt > 1:
                    failure.add_note(f"Tried {attempt} times in {self._clock() - start_s:.1f} s.")
                try:
                    raise failure
                finally:
                    # The traceback leads to this frame, and the frame must not lead back.
                    del failure
            # Kept no longer than this, since its traceback holds the caller's buffers.
            del failure
            attempt += 1

    def in_one_thread(self, what: str, calls: Callable[[], T]) -> T:
        """Return what `calls` returns; the calls that it makes itself take turns in one thread.

        Each has as long as it would have alone. All end by the deadline of this store, and what is
        done between them must end by itself.
        """
        failures: list[BaseException] = []

        def run() -> T | None:
            _serving.worker.is_of_many = True
            try:
                return calls()
            except BaseException as error:  # noqa: BLE001  # its calls were repeated already
                failures.append(error)
                return None
            finally:
                _serving.worker.is_of_many = False

        result = self.call(what, run)
        if failures:
            raise failures.pop()
        return cast("T", result)

    def pause(self, attempt: int) -> bool:
        """Sleep as after an attempt that failed; return whether there is time for another one.

        Delays have full jitter (see `RetryPolicy`).
        """
        ceiling_s = self.policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
        delay_s = self._random() * min(self.policy.max_delay_s, ceiling_s)
        moved()
        if delay_s >= self._left_s():
            return False
        while delay_s > 0 and not self._is_over():
            step_s = min(LOOK_S, delay_s) if self._is_watched() else delay_s
            self._sleep(step_s)
            delay_s -= step_s
        return not self._is_over()

    def _once(
        self, what: str, call: Callable[[], T], *, repeat: Repeat = "always", extra_s: float = 0.0
    ) -> T:
        left_s = self._left_s()
        if self._is_over():
            raise StorageError(
                f"The {what} was not begun, because what it belongs to has failed.",
                next_step="Look at the first failure.",
            )
        if left_s <= 0:
            raise StorageError(
                f"The {what} was not begun, because its deadline has passed.",
                kind="timeout",
                next_step="Raise the timeout of the phase, or find out what was slow.",
            )
        if _is_one_of_many(what):
            return call()
        return self._pool.run(
            call,
            timeout_s=min(self._request_timeout_s + extra_s, left_s),
            most_s=left_s,
            what=what,
            repeatable=repeat == "always",
            cancelled=self._has_failed if self._is_watched() else None,
        )

    def _is_watched(self) -> bool:
        return any(deadline.is_watched for deadline in self._deadlines)

    def _has_failed(self) -> bool:
        return any(deadline.has_failed() for deadline in self._deadlines)

    def _is_over(self) -> bool:
        """Return whether no attempt may be begun, whatever the time."""
        return self._cancelled() or self._has_failed()

    def _left_s(self) -> float:
        return min((deadline.remaining_s() for deadline in self._deadlines), default=math.inf)

    def _refresh(self, seen_count: int) -> None:
        """Renew credentials unless another thread has done so since `seen_count` was read."""
        left_s = min(self._request_timeout_s, self._left_s())
        if not self._refreshing.acquire(timeout=max(0.0, left_s)):
            return
        try:
            if len(self._refreshed) == seen_count:
                self._once(f"refresh of the credentials for {self.url}", self._look_up)
                self._refreshed.append(None)
        finally:
            self._refreshing.release()
