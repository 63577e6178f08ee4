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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What ends calls: deadlines, and a reason to stop before them.

    Once `cancelled` returns True, or what a deadline belongs to has failed, no attempt is begun any
    more; by such a failure those under way are left behind, too. `throttled` is called after every
    answer that asks for fewer requests.
    """

    deadlines: tuple[Deadline, ...] = ()
    cancelled: Callable[[], bool] = bool
    throttled: Callable[[], object] = bool  # a default of a field

    @property
    def is_watched(self) -> bool:
        """Whether a failure elsewhere may end calls."""
        return any(deadline.is_watched for deadline in self.deadlines)

    @property
    def is_over(self) -> bool:
        """Whether no attempt may be begun, whatever the time."""
        return self.cancelled() or self.has_failed()

    def has_failed(self) -> bool:
        """Return whether what a deadline belongs to has failed."""
        return any(deadline.has_failed() for deadline in self.deadlines)

    def left_s(self) -> float:
        """Return the seconds until the nearest deadline."""
        return min((deadline.remaining_s() for deadline in self.deadlines), default=math.inf)


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
        deadline = Deadline("write", CLEAN_UP_S, self.clock)
        return self.within(Bounds(deadlines=(deadline,), throttled=self.bounds.throttled))

    def run(
        self,
        what: str,
        call: Callable[[], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
    ) -> T:
        """Return what `call` returns, within deadline and repeated if that is right.

        `what` names it for messages. `extra_s` (seconds) lengthens each attempt.
        """
        seen_count, may_refresh = self._refreshes.count, True
        start_s, attempt = self.clock(), 1
        while True:
            try:
                return self._once(what, call, repeat=repeat, extra_s=extra_s)
            except StorageError as error:
                failure = error
            if failure.kind == "throttled":
                self.bounds.throttled()
            if failure.kind == "credentials" and failure.retryable and may_refresh:
                may_refresh = False
                self._refresh(seen_count)
                continue
            delay_s = self._delay_s(attempt)
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
    ) -> T:
        left_s = self.bounds.left_s()
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
        return self.pool.run(
            call,
            timeout_s=min(self.request_timeout_s + extra_s, left_s),
            most_s=left_s,
            what=what,
            repeatable=repeat == "always",
            **({"cancelled": self.bounds.has_failed} if self.bounds.is_watched else {}),
        )

    def pause(self, attempt: int) -> bool:
        """Sleep as after an attempt that failed; return whether there is time for another one."""
        delay_s = self._delay_s(attempt)
        if delay_s >= self.bounds.left_s():
            return False
        self._wait(delay_s)
        return not self.bounds.is_over

    def _delay_s(self, attempt: int) -> float:
        ceiling_s = self.policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
        return self.random() * min(self.policy.max_delay_s, ceiling_s)

    def _wait(self, delay_s: float) -> None:
        """Sleep before the next attempt, in slices where it may be given up meanwhile."""
        while self.bounds.is_watched and delay_s > _LOOK_S and not self.bounds.is_over:
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
            and delay_s < self.bounds.left_s()
            and (repeat != "if-nothing-done" or nothing_was_done(error))
        )

    def _refresh(self, seen_count: int) -> None:
        """Renew credentials unless another thread has done so since `seen_count` was read."""
        shared = self._refreshes
        left_s = min(self.request_timeout_s, self.bounds.left_s())
        if not shared.lock.acquire(timeout=max(0.0, left_s)):
            return
        try:
            if shared.count == seen_count:
                self._once(f"refresh of the credentials for {self.url}", self.refresh)
                shared.count += 1
        finally:
            shared.lock.release()
