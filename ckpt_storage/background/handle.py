"""The handle of a background save, and the saves that an interpreter waits for at its end."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook before ours, see below
import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidInputError,
    PhaseTimeoutError,
    SaveCancelledError,
)
from ckpt_storage.options import Timeouts
from ckpt_storage.store.threads import halt_threads

from .events import ReentrantEvent

log = logging.getLogger("ckpt_storage")


class SaveState(enum.Enum):
    """The state of a save. The last five are final.

    COMMITTED: the checkpoint exists. FAILED, TIMED_OUT, CANCELLED: it does not exist, and this save
    will not create it. UNKNOWN: the storage did not answer whether it exists.
    """

    STAGING = "staging"
    WRITING = "writing"
    COMMITTING = "committing"
    CONSOLIDATING = "consolidating"
    COMMITTED = "committed"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """Whether the save has ended."""
        return self not in _STATE_OF_PHASE.values()


_STATE_OF_PHASE = {
    "stage": SaveState.STAGING,
    "plan": SaveState.WRITING,
    "write": SaveState.WRITING,
    "commit": SaveState.COMMITTING,
    "consolidate": SaveState.CONSOLIDATING,
}

_STATE_OF_ERROR = {
    CommitUnknownError: SaveState.UNKNOWN,
    SaveCancelledError: SaveState.CANCELLED,
    PhaseTimeoutError: SaveState.TIMED_OUT,
}

ProgressSource = Callable[[], tuple[Mapping[int, RankProgress], str | None]]
"""Returns the progress of each rank that is known, and the save id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """The progress of a save: bytes and files of this rank, and the slowest rank.

    `slowest` is the rank with most bytes left to write, None before its first heartbeat. Rank 0
    receives the heartbeats of all ranks and relays the slowest; other ranks have it from there.
    """

    state: SaveState
    rank: int
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    save_id: str | None = None
    slowest: RankProgress | None = None
    ranks: Mapping[int, RankProgress] = field(default_factory=dict)


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
            return _STATE_OF_PHASE[own.phase]

    @property
    def save_id(self) -> str | None:
        """The save id; None until the ranks have agreed on one."""
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
        assert self._info is not None  # noqa: S101  # there is one or the other
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
        """Whether a caller has the outcome or waits for it, so that nobody else need raise it."""
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
        """Read progress from `source`, and pass cancel requests, an earlier one too, on."""
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
        info: CheckpointInfo | None = getattr(error, "info", None)
        states = (state for kind, state in _STATE_OF_ERROR.items() if isinstance(error, kind))
        state = next(states, SaveState.FAILED) if info is None else SaveState.COMMITTED
        self._end(state, info, error)

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


STALL_S = 30.0
"""An ending interpreter waits no longer than this for a save without progress."""

_GRACE_S = 3.0
"""The time after the deadline of a phase in which a save reports its error to the other ranks."""

_POLL_S = 0.1
_JOIN_S = 5.0
_PARK_S = 0.3
"""Long enough for a running thread to reach the call in which it is parked."""

_in_flight: dict[SaveStatus, tuple[float, Timeouts]] = {}
_lost: list[SaveStatus] = []
_hooks: list[object] = []

# A child of fork has none of the threads that its parent's saves need.
os.register_at_fork(after_in_child=_in_flight.clear)


def flush_at_exit(save: SaveStatus, timeout_s: float, timeouts: Timeouts) -> None:
    """Have the interpreter wait for a save at its end, as `flush` does, and report lost saves."""
    _in_flight[save] = timeout_s, timeouts
    save.add_done_callback(lambda _: _in_flight.pop(save, None))
    if _hooks:
        return
    _hooks.append(atexit.register(_park_threads))
    # Runs before `concurrent.futures` shuts down its executors, which storage clients use: that
    # hook was registered by the import above, and hooks run in reverse order. `atexit` runs after
    # them, and is the fallback for a Python without this function.
    try:
        getattr(threading, "_register_atexit", atexit.register)(_flush_all)
    except RuntimeError:
        log.warning("The interpreter is ending: it does not wait for saves in flight.")


def flush(saves: Sequence[SaveStatus]) -> list[SaveStatus]:
    """Wait for saves in flight; return those that have not ended, which are lost.

    The wait for a save ends at the timeout of its `flush_at_exit`, and earlier if no save has made
    progress for `STALL_S`, or for the timeout of its phase and `_GRACE_S`.
    """
    limits = {save: limit for save in saves if (limit := _in_flight.get(save)) is not None}
    start_s = progress_s = time.monotonic()
    ended_count = 0
    while True:
        now_s = time.monotonic()
        progress_of = {save: save.progress() for save in limits}
        # Progress or the end of one save is progress of the saves queued behind it.
        previous_count, ended_count = ended_count, sum(save.done() for save in limits)
        if ended_count > previous_count:
            progress_s = now_s
        for progress in progress_of.values():
            for rank in progress.ranks.values():
                progress_s = max(progress_s, rank.heard_s - rank.idle_s)
        if all(
            save.done()
            or now_s
            > min(start_s + timeout_s, progress_s + _patience_s(progress_of[save], timeouts))
            for save, (timeout_s, timeouts) in limits.items()
        ):
            break
        time.sleep(_POLL_S)
    for save in limits:
        _in_flight.pop(save, None)
    lost = [save for save in limits if not save.done()]
    _lost.extend(lost)
    return lost


def _patience_s(progress: SaveProgress, timeouts: Timeouts) -> float:
    """Return how long a save may make no progress."""
    own = progress.ranks.get(progress.rank)
    if own is None:
        # The state is being copied, or the save waits for earlier saves or for the other ranks.
        phase_s = max(timeouts.stage, timeouts.plan)
    else:
        # A rank in the commit phase first waits for the slowest write.
        phase_s = getattr(timeouts, own.phase) + (timeouts.write if own.phase == "commit" else 0.0)
    return min(STALL_S, phase_s + _GRACE_S)


def _flush_all() -> None:
    for save in flush(list(_in_flight)):
        message = (
            f"ckpt_storage: the save to {save.url} is lost: the process ended while it was "
            f"{save.state.value}. Call result() or close() before the program ends."
        )
        if log.hasHandlers():
            log.critical(message)
        # Logging may be disabled or shut down by now.
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _park_threads() -> None:
    """Park our daemon threads before the interpreter is finalized."""
    halt_threads()
    end_s = time.monotonic() + (_PARK_S if _lost else _JOIN_S)
    # A thread whose save has ended may still free tensors, in torch's C++.
    names = ("ckpt-storage save", "ckpt-storage watch")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    if threads:
        time.sleep(_PARK_S)
