"""Calls of a backend: each ends by its deadline, and is retried where that is safe.

A backend may raise anything; what leaves here is a `CheckpointError`.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable
from operator import methodcaller
from random import SystemRandom
from typing import Literal, Self, TypedDict, TypeVar

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.options import RetryPolicy

from .backend import Backend, Capabilities
from .deadline import LOOK_S, Deadline
from .problems import explain
from .threads import TimedPool, report_progress

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

Repeat = Literal["always", "unless-abandoned", "if-nothing-done"]
"""When a call that failed is retried.

"always": it is idempotent. "unless-abandoned": it is idempotent, but uses the caller's memory.
"if-nothing-done": only after an error that proves that the storage did nothing.
"""

# Waiting does not change these responses; credentials are retried only after a refresh.
_NOT_RETRIED = frozenset(
    {"credentials", "exists", "not-found", "precondition", "refused", "unsupported"}
)

# Ranks forked from one process must not share a sequence of delays.
_system_random = SystemRandom().random

CLEAN_UP_S = 3.0
"""How long discarding a failed upload may take: a save reports within 5 s of its deadline."""


class CallOptions(TypedDict, total=False):
    """Options of `Calls`.

    scrub: removes credentials from messages. request_timeout_s: of one attempt.
    clock, sleep, random: stand in for time in tests.
    """

    scrub: Callable[[str], str]
    policy: RetryPolicy | None
    request_timeout_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    random: Callable[[], float]


class Calls:
    """Calls of the backend of one root, from any thread and from children of fork."""

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        url: str,
        scrub: Callable[[str], str] = str,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = _system_random,
    ) -> None:
        """Take a backend, or a function that makes it in the first call; `url` is for messages."""
        self.url, self.policy = url, policy or RetryPolicy()
        self.deadline = Deadline("commit", math.inf)
        self._scrub, self._request_timeout_s = scrub, request_timeout_s
        self._clock, self._sleep, self._random = clock, sleep, random
        self._deadlines: tuple[Deadline, ...] = ()
        self._cancelled: Callable[[], bool] = bool
        self._throttled: Callable[[], object] = bool
        self._is_view = False
        # The rest is shared by all views. Two threads that open a backend at once both use the
        # first. `_refreshed` has an entry for each time that credentials were renewed.
        self._open = backend
        self._opened: list[Backend] = [backend] if isinstance(backend, Backend) else []
        self._pool = TimedPool("ckpt-storage io")
        self._refreshing = threading.Lock()
        self._refreshed: list[None] = []

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do; nothing is asked of it."""
        known = self._opened[:1] or [self.run("opening", "", lambda backend: backend)]
        return known[0].capabilities

    def shown(self, path: str) -> str:
        """Return the URL of a path, for messages."""
        return f"{self.url.rstrip('/')}/{path}".rstrip("/")

    def bounded(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None = None,
        *,
        throttled: Callable[[], None] | None = None,
    ) -> Self:
        """Return a view whose calls, retries included, end by `deadline`; see `Store.bounded`."""
        return self._view(
            deadline=deadline,
            _deadlines=(*self._deadlines, deadline),
            _cancelled=cancelled or self._cancelled,
            _throttled=throttled or self._throttled,
        )

    def cleaning_up(self) -> Self:
        """Return a view with a short deadline of its own, which no cancellation ends."""
        return self._view(_deadlines=(Deadline("write", CLEAN_UP_S, self._clock),), _cancelled=bool)

    def _view(self, **changes: object) -> Self:
        view = copy.copy(self)
        view.__dict__.update(changes, _is_view=True)
        return view

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[Backend], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
    ) -> T:
        """Return what `call` returns for the backend, by the deadline and retried as `repeat` says.

        `operation` is a noun for messages. `extra_s` (seconds) lengthens each attempt.
        """
        seen_count, may_refresh = len(self._refreshed), True
        start_s, attempt = self._clock(), 1
        while True:
            try:
                return self._once(operation, path, call, repeat, extra_s)
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
                and failure.kind not in _NOT_RETRIED
                and attempt < self.policy.attempt_count
                and (repeat != "if-nothing-done" or nothing_was_done(failure))
            )
            if not may_repeat or not self.pause(attempt):
                if attempt > 1:
                    failure.add_note(f"Tried {attempt} times in {self._clock() - start_s:.1f} s.")
                try:
                    raise failure
                finally:
                    # The traceback refers to this frame: break the cycle.
                    del failure
            # Its traceback holds the caller's buffers: keep it no longer.
            del failure
            attempt += 1
            for deadline in self._deadlines[-1:]:
                deadline.monitor.retried()

    def _once(
        self,
        operation: str,
        path: str,
        call: Callable[[Backend], T],
        repeat: Repeat,
        extra_s: float,
    ) -> T:
        what, left_s = f"{operation} of {self.shown(path)}", self._left_s()
        if self._is_over():
            text = f"The {what} was not begun, because its operation has failed."
            raise StorageError(text, kind="not-begun", next_step="Look at the first failure.")
        if left_s <= 0:
            text = f"The {what} was not begun, because its deadline has passed."
            step = "Raise the timeout of the phase, or find out what was slow."
            raise StorageError(text, kind="not-begun", next_step=step)
        return self._pool.run(
            lambda: self._translate_errors(operation, path, call),
            timeout_s=min(self._request_timeout_s + extra_s, left_s),
            most_s=left_s,
            what=what,
            repeatable=repeat == "always",
            cancelled=self._has_failed if self._is_monitored() else None,
        )

    def _translate_errors(self, operation: str, path: str, call: Callable[[Backend], T]) -> T:
        """Return what `call` returns; translate each foreign exception into a `StorageError`."""
        try:
            if not self._opened and not isinstance(self._open, Backend):
                self._opened.append(self._open())
            return call(self._opened[0])
        except Exception as error:  # noqa: BLE001  # backends raise any type
            failure = [self.explain(error, operation, path)]
        # Raised outside of the handler, so without a context: the foreign exception may hold
        # credentials, and its traceback the caller's buffers. The list keeps no reference to it.
        raise failure.pop()

    def explain(self, error: Exception, operation: str, path: str) -> CheckpointError:
        """Return the error that describes an exception of the backend, without credentials."""
        known = self._opened[0] if self._opened else None
        if known is not None and not isinstance(error, CheckpointError):
            try:
                error = known.explain(error) or error
            except Exception as failure:  # noqa: BLE001  # backends raise any type
                error.add_note(f"The backend could not explain it: {failure!r}")
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            return error
        where, limit_s = "" if known is None else known.endpoint, self._request_timeout_s
        shown = self.shown(path)
        return explain(
            error, operation, shown, endpoint=where, timeout_s=limit_s, scrub=self._scrub
        )

    def pause(self, attempt: int) -> bool:
        """Sleep after a failed attempt, with full jitter; return whether the next may begin."""
        ceiling_s = self.policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
        delay_s = self._random() * min(self.policy.max_delay_s, ceiling_s)
        report_progress()
        if delay_s >= self._left_s():
            return False
        while delay_s > 0 and not self._is_over():
            step_s = min(LOOK_S, delay_s) if self._is_monitored() else delay_s
            self._sleep(step_s)
            delay_s -= step_s
        return not self._is_over()

    def _is_monitored(self) -> bool:
        return any(deadline.is_monitored for deadline in self._deadlines)

    def _has_failed(self) -> bool:
        return any(deadline.has_failed() for deadline in self._deadlines)

    def _is_over(self) -> bool:
        """Return whether no attempt may begin, whatever the deadline."""
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
                refresh = methodcaller("refresh")
                self._once("refresh of the credentials", "", refresh, "always", 0.0)
                self._refreshed.append(None)
        finally:
            self._refreshing.release()

    def close(self) -> None:
        """Close connections and end idle threads; idempotent; does nothing for a view.

        A backend that does not close, or not in time, is logged.
        """
        if self._is_view:
            return
        try:
            if self._opened and type(self._opened[0]).close is not Backend.close:
                self.cleaning_up().run(
                    "closing", "", lambda backend: backend.close(), repeat="unless-abandoned"
                )
        except CheckpointError as error:
            log.warning("%s was not closed: %s", self.url, error)
        finally:
            self._pool.close()


def nothing_was_done(error: StorageError) -> bool:
    """Return whether an error proves that the storage did not carry out the request.

    It was not sent, no connection was established, or the storage refused it.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        # __context__ may be an earlier attempt's error, which proves nothing of this attempt.
        cause = cause.__cause__
    return cause is not None or error.kind in {"not-begun", "refused", "throttled"}
