"""One call of a storage: its deadline, and when it is made again."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import SystemRandom
from typing import Literal, TypeVar

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy

from .timed import TimedPool

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
"""What discarding a failed upload may take: its saver must report within 5 s of its deadline.

What is not discarded in time is a leftover, which the next save that overwrites frees.
"""

_LOOK_S = 0.5


def _never() -> bool:
    return False


def _unheard() -> None:
    pass


def nothing_was_done(error: StorageError) -> bool:
    """Return whether an error proves that the storage did not carry out the request."""
    if error.kind == "throttled":
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        # __context__ may be an earlier attempt's error, which proves nothing of this one.
        cause = cause.__cause__
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When calls end: a moment of the clock, and two reasons to stop before it.

    Once `cancelled` or `given_up` returns True no attempt is begun any more; once `given_up`
    does, those under way are left behind as if their time were up. `throttled` is called after
    every answer that asks for fewer requests.
    """

    at_s: float | None = None
    cancelled: Callable[[], bool] = _never
    given_up: Callable[[], bool] = _never
    throttled: Callable[[], None] = _unheard


class Caller:
    """Makes the calls of one store, each within `request_timeout_s` seconds an attempt.

    Delays between attempts have full jitter (see `RetryPolicy`). `refresh` looks credentials up
    again; it is called once for all calls that meet one expiry. `clock`, `sleep` and `random` stand
    in for time in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        refresh: Callable[[], None],
        policy: RetryPolicy,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = system_random,
    ) -> None:
        self._url = url
        self._refresh_now = refresh
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self.pool = TimedPool("ckpt-storage io")
        self._refreshes = _Refreshes()
        self._bounds = Bounds()

    def within(
        self,
        at_s: float,
        cancelled: Callable[[], bool] | None = None,
        given_up: Callable[[], bool] | None = None,
        throttled: Callable[[], None] | None = None,
    ) -> Caller:
        """Return a caller with nearer bounds (see `Bounds`) that shares all else."""
        mine = self._bounds
        return self._bounded(
            Bounds(
                at_s=at_s if mine.at_s is None else min(mine.at_s, at_s),
                cancelled=cancelled or mine.cancelled,
                given_up=given_up or mine.given_up,
                throttled=throttled or mine.throttled,
            )
        )

    def cleaning_up(self) -> Caller:
        """Return a caller with a deadline of its own, near and for discarding what failed."""
        return self._bounded(
            Bounds(at_s=self._clock() + CLEAN_UP_S, throttled=self._bounds.throttled)
        )

    def _bounded(self, bounds: Bounds) -> Caller:
        view = copy.copy(self)
        view._bounds = bounds  # noqa: SLF001  # the same class
        return view

    def run(
        self,
        what: str,
        call: Callable[[], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
        late: Callable[[T], None] | None = None,
    ) -> T:
        """Return what `call` returns, within deadline and repeated if that is right.

        `what` names it for messages. `extra_s` (seconds) lengthens each attempt; `late` gets the
        value of an attempt that ended after it was given up.
        """
        refreshed = self._refreshes.count
        may_refresh = True
        start_s = self._clock()
        attempt = 1
        while True:
            try:
                return self._once(call, what, extra_s=extra_s, repeat=repeat, late=late)
            except StorageError as error:
                failure = error
            if failure.kind == "throttled":
                self._bounds.throttled()
            if failure.kind == "credentials" and failure.retryable and may_refresh:
                may_refresh = False
                self._refresh(refreshed)
                continue
            delay_s = self._delay_s(attempt)
            if not self._may_repeat(failure, repeat, attempt, delay_s):
                if attempt > 1:
                    failure.add_note(f"Tried {attempt} times in {self._clock() - start_s:.1f} s.")
                try:
                    raise failure
                finally:
                    # The traceback leads to this frame, and the frame must not lead back.
                    del failure
            # Kept no longer than this, since its traceback holds the caller's buffers.
            del failure
            self._wait(delay_s)
            attempt += 1

    def _once(
        self,
        call: Callable[[], T],
        what: str,
        *,
        extra_s: float,
        repeat: Repeat,
        late: Callable[[T], None] | None = None,
    ) -> T:
        timeout_s = self._time_left_s(self._request_timeout_s + extra_s)
        if self._bounds.cancelled() or self._bounds.given_up():
            raise StorageError(
                f"The {what} was not begun, because what it belongs to has failed.",
                next_step="Look at the first failure.",
            )
        if timeout_s <= 0:
            raise StorageError(
                f"The {what} was not begun, because its deadline has passed.",
                kind="timeout",
                next_step="Raise the timeout of the phase, or find out what was slow.",
            )
        return self.pool.run(
            call,
            timeout_s=timeout_s,
            most_s=self._time_left_s(math.inf),
            what=what,
            repeatable=repeat == "always",
            late=late,
            cancelled=self._bounds.given_up,
        )

    def _wait(self, delay_s: float) -> None:
        """Sleep before the next attempt, in slices: it may be given up meanwhile."""
        given_up = self._bounds.given_up
        while given_up is not _never and delay_s > _LOOK_S and not given_up():
            self._sleep(_LOOK_S)
            delay_s -= _LOOK_S
        self._sleep(0.0 if given_up() else delay_s)

    def _time_left_s(self, limit_s: float) -> float:
        at_s = self._bounds.at_s
        return limit_s if at_s is None else min(limit_s, at_s - self._clock())

    def _may_repeat(
        self, error: StorageError, repeat: Repeat, attempt: int, delay_s: float
    ) -> bool:
        if error.kind in _NEVER or attempt >= self._policy.attempt_count:
            return False
        if self._bounds.cancelled() or self._bounds.given_up():
            return False
        if delay_s >= self._time_left_s(math.inf):
            return False
        return error.retryable and (repeat != "if-nothing-done" or nothing_was_done(error))

    def _delay_s(self, attempt: int) -> float:
        ceiling_s = min(
            self._policy.max_delay_s, self._policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
        )
        return self._random() * ceiling_s

    def _refresh(self, seen_count: int) -> None:
        """Renew credentials unless another thread has done so since `seen_count` was read."""
        shared = self._refreshes
        wait_s = max(0.0, self._time_left_s(self._request_timeout_s))
        if not shared.lock.acquire(timeout=wait_s):
            return
        try:
            if shared.count == seen_count:
                what = f"refresh of the credentials for {self._url}"
                self._once(self._refresh_now, what, extra_s=0.0, repeat="always")
                shared.count += 1
        finally:
            shared.lock.release()


class _Refreshes:
    """How often credentials were renewed, shared by a caller and its views."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
