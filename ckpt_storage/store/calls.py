"""One storage as it is called: each call ends in time, and is repeated where that is right.

Below it is a backend that may raise anything, above it there are only `CheckpointError`s.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from random import SystemRandom
from typing import Literal, NoReturn, Self, TypeVar

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.options import RetryPolicy

from .backend import Backend, Capabilities
from .deadline import LOOK_S, Deadline
from .problems import explain
from .threads import TimedPool, moved

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

Repeat = Literal["always", "unless-abandoned", "if-nothing-done"]
"""When a call that failed is made again.

"always": it is idempotent. "unless-abandoned": it is, but uses the caller's memory.
"if-nothing-done": only after an error that proves the storage did nothing.
"""

# Answers, which waiting does not change; credentials are repeated only after a refresh.
_NEVER = frozenset({"credentials", "exists", "not-found", "precondition", "refused", "unsupported"})

# Ranks forked from one process must not share a sequence of delays.
_system_random = SystemRandom().random

CLEAN_UP_S = 3.0
"""What discarding a failed upload may take: its saver must report within 5 s of its deadline."""


class Calls:
    """Makes the calls of one root, in any thread and in children of fork."""

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        url: str,
        scrub: Callable[[str], str] = str,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = 300.0,
        scope: Callable[[], Hashable] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = _system_random,
    ) -> None:
        """Take a backend, or what makes it in the first call; an attempt has `request_timeout_s`.

        `url` names the root for messages, `scrub` takes credentials out of them, and `scope` tells
        what is one storage. `clock`, `sleep` and `random` stand in for time in tests.
        """
        self.url, self.scope, self.policy = url, scope, policy or RetryPolicy()
        self.deadline = Deadline("commit", math.inf)
        self._scrub, self._request_timeout_s = scrub, request_timeout_s
        self._clock, self._sleep, self._random = clock, sleep, random
        self._deadlines: tuple[Deadline, ...] = ()
        self._cancelled: Callable[[], bool] = bool
        self._throttled: Callable[[], object] = bool
        self._is_view = False
        # From here on shared by all views. Of two threads that open it at once, both go on with one
        # backend; of renewed credentials there is an entry for each time.
        self._open = backend
        self._opened: list[Backend] = [backend] if isinstance(backend, Backend) else []
        self._pool = TimedPool("ckpt-storage io")
        self._refreshing = threading.Lock()
        self._refreshed: list[None] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Store is not pickled; open it again from its Location.")

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
        """Return this store with every call, repeats included, ending by `deadline`.

        Closing it does nothing. Once `cancelled` returns True no attempt is begun any more. Once
        what the deadline belongs to has failed, those under way are left behind, too. `throttled`
        is called after every answer that asks for fewer requests.
        """
        return self._view(
            deadline=deadline,
            _deadlines=(*self._deadlines, deadline),
            _cancelled=cancelled or self._cancelled,
            _throttled=throttled or self._throttled,
        )

    def cleaning_up(self) -> Self:
        """Return this store with a deadline of its own, near and for discarding what failed."""
        return self._view(_deadlines=(Deadline("write", CLEAN_UP_S, self._clock),), _cancelled=bool)

    def _view(self, **changed: object) -> Self:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _is_view=True, **changed)
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
        """Return what `call` makes of the backend, within deadline and repeated if that is right.

        `operation` names it for messages. `extra_s` (seconds) lengthens each attempt.
        """
        seen_count, may_refresh = len(self._refreshed), True
        start_s, attempt = self._clock(), 1
        while True:
            try:
                return self._once(operation, path, call, repeat=repeat, extra_s=extra_s)
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
            for deadline in self._deadlines[-1:]:
                deadline.monitor.retried()

    def _once(
        self,
        operation: str,
        path: str,
        call: Callable[[Backend], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
    ) -> T:
        what, left_s = f"{operation} of {self.shown(path)}", self._left_s()
        if self._is_over():
            text = f"The {what} was not begun, because what it belongs to has failed."
            raise StorageError(text, kind="not-begun", next_step="Look at the first failure.")
        if left_s <= 0:
            text = f"The {what} was not begun, because its deadline has passed."
            step = "Raise the timeout of the phase, or find out what was slow."
            raise StorageError(text, kind="not-begun", next_step=step)
        return self._pool.run(
            lambda: self._bordered(operation, path, call),
            timeout_s=min(self._request_timeout_s + extra_s, left_s),
            most_s=left_s,
            what=what,
            repeatable=repeat == "always",
            cancelled=self._has_failed if self._is_watched() else None,
        )

    def _bordered(self, operation: str, path: str, call: Callable[[Backend], T]) -> T:
        """Return what `call` returns; every foreign exception leaves as a `StorageError`."""
        try:
            if not self._opened and not isinstance(self._open, Backend):
                self._opened.append(self._open())
            return call(self._opened[0])
        except Exception as error:  # noqa: BLE001  # backends raise any type
            failure = [self.explain(error, operation, path)]
        # Not raised where it was caught: the foreign one may carry credentials, and its traceback
        # the caller's buffers. That of this one leads here, and nothing here leads back to it.
        raise failure.pop()

    def explain(self, error: Exception, operation: str, path: str) -> CheckpointError:
        """Return what an exception of the backend means, without credentials."""
        known = self._opened[0] if self._opened else None
        if known is not None and not isinstance(error, CheckpointError):
            try:
                error = known.explain(error) or error
            except Exception as failure:  # noqa: BLE001  # backends raise any type
                error.add_note(f"The backend could not explain it: {failure!r}")
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            return error
        where, limit_s = "" if known is None else known.endpoint, self._request_timeout_s
        what = operation, self.shown(path)
        return explain(error, *what, endpoint=where, timeout_s=limit_s, scrub=self._scrub)

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

    def _is_watched(self) -> bool:
        return any(deadline.is_monitored for deadline in self._deadlines)

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
                self._once("refresh of the credentials", "", lambda backend: backend.refresh())
                self._refreshed.append(None)
        finally:
            self._refreshing.release()

    def close(self) -> None:
        """Let go of connections and end the waiting threads; idempotent; nothing for a view.

        A backend that cannot be closed, or not in time, is left as it is, with a warning.
        """
        if self._is_view:
            return
        try:
            if self._opened and type(self._opened[0]).close is not Backend.close:
                last = self.cleaning_up()
                last.run("closing", "", lambda backend: backend.close(), repeat="unless-abandoned")
        except CheckpointError as error:
            log.warning("%s was not closed: %s", self.url, error)
        finally:
            self._pool.close()


def nothing_was_done(error: StorageError) -> bool:
    """Return whether an error proves that the storage did not carry out the request.

    It was not sent, no connection was made, or the storage refused it.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        # __context__ may be an earlier attempt's error, which proves nothing of this one.
        cause = cause.__cause__
    return cause is not None or error.kind in {"not-begun", "refused", "throttled"}
