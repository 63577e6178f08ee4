"""One call of a storage: its deadline, and when it is made again."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Literal, TypeVar

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy

from .deadline import Deadline
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


def nothing_was_done(error: StorageError) -> bool:
    """Return whether an error proves that the storage did not carry out the request."""
    if error.kind == "throttled":
        return True
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        # __context__ may be an earlier attempt's error, which proves nothing of this one.
        cause = cause.__cause__
    return cause is not None


def _no() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When calls end: a moment of the clock, and two reasons to stop before it.

    Once `cancelled` or `given_up` returns True no attempt is begun any more; once `given_up`
    does, those under way are left behind as if their time were up. `throttled` is called after
    every answer that asks for fewer requests.
    """

    at_s: float = math.inf
    cancelled: Callable[[], bool] = _no
    given_up: Callable[[], bool] | None = None
    throttled: Callable[[], None] = lambda: None  # a default of a field

    @property
    def is_over(self) -> bool:
        """Whether no attempt may be begun, whatever the time."""
        return self.cancelled() or (self.given_up is not None and self.given_up())

    def nearer(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None,
        throttled: Callable[[], None] | None,
    ) -> Bounds:
        """Return these bounds with what a deadline and its operation add."""
        return Bounds(
            at_s=min(self.at_s, deadline.at_monotonic_s),
            cancelled=cancelled or self.cancelled,
            given_up=deadline.has_failed if deadline.is_watched else self.given_up,
            throttled=throttled or self.throttled,
        )


@dataclass(slots=True)
class _Refreshes:
    """How often credentials were renewed, shared by a caller and its views."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0


@dataclass(kw_only=True)
class Caller:
    """Makes the calls of one store, each within `request_timeout_s` seconds an attempt.

    Delays between attempts have full jitter (see `RetryPolicy`). `refresh` looks credentials up
    again; it is called once for all calls that meet one expiry. `clock`, `sleep` and `random` stand
    in for time in tests.
    """

    url: str
    refresh: Callable[[], None]
    policy: RetryPolicy
    request_timeout_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = system_random
    bounds: Bounds = Bounds()
    pool: TimedPool = field(default_factory=lambda: TimedPool("ckpt-storage io"))
    _refreshes: _Refreshes = field(default_factory=_Refreshes)

    def within(self, bounds: Bounds) -> Caller:
        """Return a caller with other bounds that shares all else."""
        view = copy.copy(self)
        view.bounds = bounds
        return view

    def cleaning_up(self) -> Caller:
        """Return a caller with a deadline of its own, near and for discarding what failed."""
        at_s = self.clock() + CLEAN_UP_S
        return self.within(Bounds(at_s=at_s, throttled=self.bounds.throttled))

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
        seen_count, may_refresh = self._refreshes.count, True
        start_s, attempt = self.clock(), 1
        while True:
            try:
                return self._once(what, call, repeat=repeat, extra_s=extra_s, late=late)
            except StorageError as error:
                failure = error
            if failure.kind == "throttled":
                self.bounds.throttled()
            if failure.kind == "credentials" and failure.retryable and may_refresh:
                may_refresh = False
                self._refresh(seen_count)
                continue
            ceiling_s = self.policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
            delay_s = self.random() * min(self.policy.max_delay_s, ceiling_s)
            if not self._may_repeat(failure, repeat, attempt, delay_s):
                if attempt > 1:
                    failure.add_note(f"Tried {attempt} times in {self.clock() - start_s:.1f} s.")
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
        what: str,
        call: Callable[[], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
        late: Callable[[T], None] | None = None,
    ) -> T:
        left_s = self.bounds.at_s - self.clock()
        if self.bounds.is_over:
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
        given_up = self.bounds.given_up
        return self.pool.run(
            call,
            timeout_s=min(self.request_timeout_s + extra_s, left_s),
            most_s=left_s,
            what=what,
            repeatable=repeat == "always",
            late=late,
            **({"cancelled": given_up} if given_up else {}),
        )

    def _wait(self, delay_s: float) -> None:
        """Sleep before the next attempt, in slices where it may be given up meanwhile."""
        while self.bounds.given_up is not None and delay_s > _LOOK_S and not self.bounds.is_over:
            self.sleep(_LOOK_S)
            delay_s -= _LOOK_S
        self.sleep(0.0 if self.bounds.is_over else delay_s)

    def _may_repeat(
        self, error: StorageError, repeat: Repeat, attempt: int, delay_s: float
    ) -> bool:
        return (
            error.retryable
            and error.kind not in _NEVER
            and attempt < self.policy.attempt_count
            and not self.bounds.is_over
            and delay_s < self.bounds.at_s - self.clock()
            and (repeat != "if-nothing-done" or nothing_was_done(error))
        )

    def _refresh(self, seen_count: int) -> None:
        """Renew credentials unless another thread has done so since `seen_count` was read."""
        shared = self._refreshes
        left_s = min(self.request_timeout_s, self.bounds.at_s - self.clock())
        if not shared.lock.acquire(timeout=max(0.0, left_s)):
            return
        try:
            if shared.count == seen_count:
                self._once(f"refresh of the credentials for {self.url}", self.refresh)
                shared.count += 1
        finally:
            shared.lock.release()
