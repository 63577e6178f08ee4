"""The handle of a background save."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import (
    CheckpointError,
    InvalidInputError,
    PhaseTimeoutError,
    SaveCancelledError,
)

from .events import ReentrantEvent
from .save_state import STATE_OF_PHASE, ProgressSource, SaveProgress, SaveState, state_of_error

log = logging.getLogger("ckpt_storage")


def check_process(process_id: int, what: str) -> None:
    """Raise `InvalidInputError` in a forked child, which has none of the threads of `what`."""
    if os.getpid() != process_id:
        raise InvalidInputError(
            f"{what} belongs to process {process_id}, and this is process {os.getpid()}.",
            next_step="Use it in its own process, and make a new AsyncSaver in a child process.",
        )


class SaveHandle:
    """One background save. Any thread of the process may call any method."""

    def __init__(self, url: str, rank: int, *, limit_s: float) -> None:
        self.url = url
        self.rank = rank
        self._limit_s = limit_s
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # a signal handler may interrupt a method and call another
        self._staged = ReentrantEvent()  # the state is copied, or the save has ended
        self._ended = ReentrantEvent()  # state, info and error are final
        self._state = SaveState.STAGING
        self._info: CheckpointInfo | None = None
        self._error: CheckpointError | None = None
        self._is_copied = False
        self._consumer_count = 0
        self._source: ProgressSource = lambda: ({}, None)
        self._on_cancel: Callable[[SaveCancelledError], object] = lambda _: None
        self._cancelled: SaveCancelledError | None = None
        self._callbacks: list[Callable[[SaveHandle], object]] = []

    def __repr__(self) -> str:
        return f"<SaveHandle {self.url!r} {self.state.value}>"

    @property
    def state(self) -> SaveState:
        """The state of the save."""
        own = self._source()[0].get(self.rank)
        with self._lock:
            if self._state is not SaveState.WRITING or own is None:
                return self._state
            return STATE_OF_PHASE[own.phase]

    @property
    def save_id(self) -> str | None:
        """The save id; None until the ranks have agreed on it."""
        return self._info.save_id if self._info is not None else self._source()[1]

    def done(self) -> bool:
        """Return whether the save has ended, with success or an error."""
        return self._ended.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds until the state is copied and may be changed.

        Raises `PhaseTimeoutError` when time is up, or the error of a copy that failed.
        """
        self._wait_for(self._staged, timeout, "was not staged", "stage")
        if self._error is not None and not self._is_copied:
            raise self._error

    def is_staged(self) -> bool:
        """Return whether the state is copied, or the save has ended."""
        return self._staged.is_set()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait at most `timeout` seconds and return the committed checkpoint.

        Without `timeout` the limit is the sum of the deadlines of the save's phases. Raises the
        error of a failed save (any `CheckpointError`), or `PhaseTimeoutError` when time is up: then
        the save goes on, and `state` is not final.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._info is not None  # noqa: S101  # a committed save has it
        return self._info

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Return the error of a failed save, None of a committed one; waits as `result`."""
        self._count_consumer(1)
        try:
            self._wait_for(self._ended, timeout, "has not ended")
        except BaseException:
            self._count_consumer(-1)
            raise
        return self._error

    def progress(self) -> SaveProgress:
        """Return the progress of the save, without waiting."""
        self._check_process()
        ranks, save_id = self._source()
        own = ranks.get(self.rank)
        begun = [progress for progress in ranks.values() if progress.phase != "plan"]
        return SaveProgress(
            state=self.state,
            rank=self.rank,
            done_bytes=own.done_bytes if own else 0,
            total_bytes=own.total_bytes if own else 0,
            done_files=own.done_files if own else 0,
            save_id=save_id,
            slowest=max(begun, key=lambda progress: progress.left_bytes, default=None),
            ranks=ranks,
        )

    def cancel(self) -> bool:
        """Cancel the save on all ranks; return False if it has ended already.

        Call it on one rank or on several. Does not wait: a commit in flight may still succeed, so
        see `result` or `state` for the outcome.
        """
        self._check_process()
        with self._lock:
            if self._ended.is_set():
                return False
            self._cancelled = self._cancelled or SaveCancelledError(
                f"The save to {self.url} was cancelled on rank {self.rank}.", rank=self.rank
            )
            on_cancel = self._on_cancel
        on_cancel(self._cancelled)
        return True

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call `callback(handle)` when the save ends, in the saver's thread; now if it has ended.

        An exception that the callback raises is logged. In the saver's thread that includes
        `SystemExit` and `KeyboardInterrupt`, which would end the thread and every later save.
        """
        self._check_process()
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback, Exception)

    def _check_process(self) -> None:
        check_process(self._process_id, f"The handle of the save to {self.url}")

    def _wait_for(
        self, event: ReentrantEvent, timeout: float | None, missing: str, phase: str | None = None
    ) -> None:
        self._check_process()
        limit_s = self._limit_s if timeout is None else timeout
        if not event.wait(limit_s):
            raise PhaseTimeoutError(
                f"The save to {self.url} {missing} within {limit_s:g} s; it is {self.state.value}.",
                timeout_s=limit_s,
                rank=self.rank,
                phase=phase,
                next_step="Wait longer, look at progress(), or cancel() it.",
            )

    def _count_consumer(self, count: int) -> None:
        with self._lock:
            self._consumer_count += count

    def _call(self, callback: Callable[[SaveHandle], object], logged: type[BaseException]) -> None:
        try:
            callback(self)
        except logged:
            log.exception("A callback of the save to %s failed.", self.url)


class SaveStatus(SaveHandle):
    """The handle of a save, with the methods of its saver and its queue."""

    @property
    def outcome_is_consumed(self) -> bool:
        """Whether a caller has the outcome or waits for it, so that no other call need raise it."""
        return self._consumer_count > 0

    def mark_outcome_consumed(self) -> None:
        """Record that the caller of `save` has the outcome."""
        self._count_consumer(1)

    def await_end(self, timeout: float | None) -> CheckpointError | None:
        """Return the error as `exception` does, without consuming the outcome."""
        self._wait_for(self._ended, timeout, "has not ended")
        return self._error

    def follow(
        self, source: ProgressSource, on_cancel: Callable[[SaveCancelledError], object]
    ) -> None:
        """Read progress from `source`, and forward cancel requests, also an earlier request."""
        with self._lock:
            self._source, self._on_cancel = source, on_cancel
            error = self._cancelled
        if error is not None:
            on_cancel(error)

    def mark_staged(self) -> None:
        """Record that the state is copied."""
        with self._lock:
            if self._state is SaveState.STAGING:
                self._state = SaveState.WRITING
                self._is_copied = True
        self._staged.set()

    def succeed(self, info: CheckpointInfo) -> None:
        """End the save with a committed checkpoint."""
        self._end(SaveState.COMMITTED, info, None)

    def fail(self, error: CheckpointError) -> None:
        """End the save with an error; the save is committed if the error has an `info`."""
        self._end(state_of_error(error), getattr(error, "info", None), error)

    def _end(
        self, state: SaveState, info: CheckpointInfo | None, error: CheckpointError | None
    ) -> None:
        # The last progress stays; the source holds connections.
        last_progress = self._source()
        with self._lock:
            if self._ended.is_set():
                return
            self._state, self._info, self._error = state, info, error
            self._source, self._on_cancel = lambda: last_progress, lambda _: None
            self._staged.set()
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback, BaseException)
