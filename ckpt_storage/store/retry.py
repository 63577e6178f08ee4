"""A wrapper that gives every operation of a store a deadline and repeats what may be repeated.

A thread that was given up may still end its call: a read then fills the target it was
given, a part is then sent from the buffers it was given. After an error of kind "timeout"
from `read_into` or `write_part` that memory must therefore not be used for anything else,
neither operation is repeated, and an upload so hit can only be aborted.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Protocol, TypeVar, runtime_checkable

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy

from .base import (
    Arrived,
    Capabilities,
    Copied,
    CopySource,
    Entry,
    PathFilter,
    Plain,
    SharedUpload,
    Stat,
    Store,
    Upload,
    Version,
)
from .deadline import Deadline
from .retry_upload import SYNC_BYTES_PER_S, Repeat, RetrySharedUpload, RetryUpload
from .timed import AbandonedError, TimedPool, abandoned_thread_count

__all__ = [
    "SYNC_BYTES_PER_S",
    "AbandonedError",
    "Refreshable",
    "RetryStore",
    "abandoned_thread_count",
]

T = TypeVar("T")

# Answers, which waiting does not change; credentials are repeated only after a refresh.
_NEVER = frozenset({"credentials", "exists", "not-found", "precondition", "unsupported"})

# Ranks forked from one process must not share a sequence of delays.
_random = SystemRandom().random

CLEAN_UP_S = 3.0
"""What discarding a failed upload may take: its saver must report within 5 s of its deadline.

What is not discarded in time is a leftover, which the next save that overwrites frees.
"""

_LOOK_S = 0.5


@runtime_checkable
class Refreshable(Protocol):
    """A store that can read its credentials anew.

    It is asked to after a retryable error of kind "credentials", once per operation.
    """

    def refresh(self) -> None:
        """Drop clients and tokens, so that the next operation signs with fresh ones."""


def _nothing_was_done(error: StorageError) -> bool:
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


def _never() -> bool:
    return False


def _unheard() -> None:
    pass


class RetryStore(Plain):
    """A `Store` around another, with deadlines and retries.

    One operation takes at most `request_timeout_s` seconds per attempt (completing an
    upload: longer by what its bytes take to sync) and ends by the deadline of
    `with_deadline`. Delays have full jitter (see `RetryPolicy`). `create` and
    `replace(if_match=...)` are repeated only after errors that prove nothing was done;
    what else they raise, the caller judges by reading back. `clock`, `sleep` and `random`
    stand in for time in tests.
    """

    def __init__(
        self,
        inner: Store,
        *,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = _random,
    ) -> None:
        self._inner = inner
        self._policy = policy or RetryPolicy()
        self._request_timeout_s = request_timeout_s
        # Asked once: to look through a protocol takes longer than a read from a cache.
        self._may_refresh = isinstance(inner, Refreshable)
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._deadline_s: float | None = None
        self._pool = TimedPool("ckpt-storage io")
        self._refreshes = _Refreshes()
        self._known: list[Capabilities] = []
        self._is_view = False
        self._cancelled: Callable[[], bool] = _never
        self._given_up: Callable[[], bool] = _never
        self._throttled: Callable[[], None] = _unheard

    def __repr__(self) -> str:
        return f"RetryStore({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner store's root."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the inner store can do; it is asked once, by the deadline, as a disk may hang."""
        if not self._known:
            found = self.run("look at the storage", "", lambda: self._inner.capabilities)
            self._known.append(found)
        return self._known[0]

    def with_deadline(
        self,
        at_monotonic_s: float,
        cancelled: Callable[[], bool] | None = None,
        given_up: Callable[[], bool] | None = None,
        throttled: Callable[[], None] | None = None,
    ) -> RetryStore:
        """Return this store with every operation ending by a moment of the `clock`.

        It shares the inner store, the threads and a nearer deadline of this one; closing
        it does nothing. Once `cancelled` or `given_up` returns True no attempt is begun any
        more; once `given_up` does, those under way are left behind as if their time were up.
        `throttled` is called after every answer that asks for fewer requests.
        """
        view = copy.copy(self)
        known = self._deadline_s
        nearest_s = at_monotonic_s if known is None else min(known, at_monotonic_s)
        view._deadline_s = nearest_s  # noqa: SLF001  # the same class
        view._is_view = True  # noqa: SLF001  # the same class
        view._cancelled = cancelled or self._cancelled  # noqa: SLF001  # the same class
        view._given_up = given_up or self._given_up  # noqa: SLF001  # the same class
        view._throttled = throttled or self._throttled  # noqa: SLF001  # the same class
        return view

    def bounded(
        self,
        deadline: Deadline,
        cancelled: Callable[[], bool] | None = None,
        *,
        throttled: Callable[[], None] | None = None,
    ) -> RetryStore:
        """Return this store with every operation ending by `deadline`."""
        given_up = deadline.has_failed if deadline.is_watched else None
        return self.with_deadline(deadline.at_monotonic_s, cancelled, given_up, throttled)

    def in_one_thread(self, call: Callable[[Store], T]) -> T:
        """Return what `call` returns, which makes many short operations on the store it gets.

        That is this one, and they share a thread, with each other and with `call`, in place of one
        hand-over each. Deadlines hold as ever; one that is given up ends all of it, and is not
        repeated.
        """
        return self._pool.hold(lambda: call(self))

    def cleaning_up(self) -> RetryStore:
        """Return this store with a deadline of its own, near and for discarding what failed."""
        view = copy.copy(self)
        view._deadline_s = self._clock() + CLEAN_UP_S  # noqa: SLF001  # the same class
        view._cancelled = _never  # noqa: SLF001  # the same class
        view._given_up = _never  # noqa: SLF001  # the same class
        view._is_view = True  # noqa: SLF001  # the same class
        return view

    def prepare(self, folders: Sequence[str]) -> None:
        """Make folders, repeated if need be."""
        self.run("making of folders", "", lambda: self._inner.prepare(folders))

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return a whole object, repeated if need be."""
        return self.run("read", path, lambda: self._inner.read(path, most_bytes=most_bytes))

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return a whole object with its token, repeated if need be."""
        return self.run("read", path, lambda: self._inner.read_version(path, most_bytes=most_bytes))

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill `target`, repeated if need be; not to be used again after kind "timeout"."""

        def attempt() -> None:
            if arrived is not None:
                arrived(0)
            self._inner.read_into(path, start, target, size_bytes=size_bytes, arrived=arrived)

        self.run("read", path, attempt, repeat="unless-abandoned")

    def stat(self, path: str) -> Stat:
        """Return size and time, repeated if need be."""
        return self.run("stat", path, lambda: self._inner.stat(path))

    def write(self, path: str, data: bytes) -> None:
        """Put a whole object at a write-once name, repeated if need be."""
        self.run("write", path, lambda: self._inner.write(path, data))

    def create(self, path: str, data: bytes) -> None:
        """Create exclusively, repeated only if it is proved that nothing was done."""
        self.run(
            "exclusive creation",
            path,
            lambda: self._inner.create(path, data),
            repeat="if-nothing-done",
        )

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Put in place of what is there; with `if_match` repeated only if nothing was done.

        Without it, not repeated after it was given up: the late one might overtake.
        """
        self.run(
            "replace",
            path,
            lambda: self._inner.replace(path, data, if_match=if_match),
            repeat="unless-abandoned" if if_match is None else "if-nothing-done",
        )

    def start_upload(self, path: str, *, part_bytes: int) -> RetryUpload:
        """Begin an upload; one that begins after it was given up is aborted."""
        upload: Upload = self.run(
            "start of the upload",
            path,
            lambda: self._inner.start_upload(path, part_bytes=part_bytes),
            late=lambda late: late.abort(),
        )
        return RetryUpload(self, upload, path)

    def start_shared_upload(self, path: str, *, part_bytes: int) -> RetrySharedUpload:
        """Begin a shared upload; one that begins after it was given up is aborted."""
        return self._shared(
            "start of the upload",
            path,
            lambda: self._inner.start_shared_upload(path, part_bytes=part_bytes),
        )

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> RetrySharedUpload:
        """Join an upload; one that is joined after it was given up is left."""
        return self._shared(
            "joining of the upload",
            path,
            lambda: self._inner.join_upload(path, ticket, part_bytes=part_bytes),
        )

    def copy_source(self, path: str) -> CopySource | None:
        """Return what the inner store says; nothing is asked of a storage."""
        return self._inner.copy_source(path)

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Return what the inner store says; at most a local disk is asked, by the deadline."""
        return self.run(
            "look at the storage",
            "",
            lambda: self._inner.can_copy_from(other, at_any_price=at_any_price),
        )

    def _shared(
        self, operation: str, path: str, call: Callable[[], SharedUpload]
    ) -> RetrySharedUpload:
        upload = self.run(operation, path, call, late=lambda late: late.abort())
        return RetrySharedUpload(self, upload, path)

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return the objects below a folder, repeated if need be."""
        return self.run("listing", prefix, lambda: self._inner.list(prefix, recursive=recursive))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, repeated if need be."""
        shown = paths[0] if len(paths) == 1 else ""
        self.run(f"deletion of {len(paths)} objects", shown, lambda: self._inner.delete(paths))

    def delete_folder(self, path: str) -> None:
        """Delete a folder, repeated if need be."""
        self.run("deletion", path, lambda: self._inner.delete_folder(path))

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Abort what is open below a folder, repeated if need be; return the last count."""
        return self.run(
            "abort of uploads", prefix, lambda: self._inner.abort_uploads(prefix, only=only)
        )

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock, repeated if need be."""
        return self.run("reading of the clock", probe_path, lambda: self._inner.now_s(probe_path))

    def close(self) -> None:
        """Close the inner store and end the waiting threads; idempotent."""
        if self._is_view:
            return
        self._inner.close()
        self._pool.close()

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
        late: Callable[[T], None] | None = None,
    ) -> T:
        """Run `call` with deadline and retries; for this module's own upload.

        `extra_s` (seconds) lengthens each attempt; `late` gets the value of an attempt
        that ended after it was given up.
        """
        what = f"{operation} of {self.url.rstrip('/')}/{path}".rstrip("/")
        refreshed = self._refreshes.count
        may_refresh = self._may_refresh
        start_s = self._clock()
        attempt = 1
        while True:
            try:
                return self._once(call, what, extra_s=extra_s, repeat=repeat, late=late)
            except StorageError as error:
                failure = error
            if failure.kind == "throttled":
                self._throttled()
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

    def _wait(self, delay_s: float) -> None:
        """Sleep before the next attempt, in slices: it may be given up meanwhile."""
        while self._given_up is not _never and delay_s > _LOOK_S and not self._given_up():
            self._sleep(_LOOK_S)
            delay_s -= _LOOK_S
        self._sleep(0.0 if self._given_up() else delay_s)

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
        if self._cancelled() or self._given_up():
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
        return self._pool.run(
            call,
            timeout_s=timeout_s,
            most_s=self._time_left_s(math.inf),
            what=what,
            repeatable=repeat == "always",
            late=late,
            cancelled=self._given_up,
        )

    def _time_left_s(self, limit_s: float) -> float:
        if self._deadline_s is None:
            return limit_s
        return min(limit_s, self._deadline_s - self._clock())

    def _may_repeat(
        self, error: StorageError, repeat: Repeat, attempt: int, delay_s: float
    ) -> bool:
        if error.kind in _NEVER or attempt >= self._policy.attempt_count:
            return False
        if self._cancelled() or self._given_up():
            return False
        if self._deadline_s is not None and self._clock() + delay_s >= self._deadline_s:
            return False
        return error.retryable and (repeat != "if-nothing-done" or _nothing_was_done(error))

    def _delay_s(self, attempt: int) -> float:
        ceiling_s = min(
            self._policy.max_delay_s, self._policy.first_delay_s * 2.0 ** min(attempt - 1, 60)
        )
        return self._random() * ceiling_s

    def _refresh(self, seen_count: int) -> None:
        """Renew credentials unless another thread has done so since `seen_count` was read."""
        inner, shared = self._inner, self._refreshes
        wait_s = max(0.0, self._time_left_s(self._request_timeout_s))
        if not isinstance(inner, Refreshable) or not shared.lock.acquire(timeout=wait_s):
            return
        try:
            if shared.count == seen_count:
                what = f"refresh of the credentials for {self.url}"
                self._once(inner.refresh, what, extra_s=0.0, repeat="always")
                shared.count += 1
        finally:
            shared.lock.release()


class _Refreshes:
    """How often credentials were renewed, shared by a store and its views."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
