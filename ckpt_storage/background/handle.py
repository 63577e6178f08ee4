"""What the caller of a background save holds, and what an interpreter that ends waits for."""

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
    """Where a save is. The last five are final and true.

    COMMITTED: the checkpoint exists. FAILED, TIMED_OUT, CANCELLED: it does not, and will not.
    UNKNOWN: whether it exists cannot be told.
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

Source = Callable[[], tuple[Mapping[int, RankProgress], str | None]]
"""Tells how far the ranks are, and the save id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """How far a save is: bytes and files of this rank, and the rank with most left to do.

    `slowest` is None until other ranks were heard of; on ranks other than 0 it is what rank 0
    last told.
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
    """Refuse `what` in any process but the one that made it: a fork has none of its threads."""
    if os.getpid() != process_id:
        raise InvalidInputError(
            f"{what} was made in process {process_id}, and this is process {os.getpid()}.",
            next_step="Use it there; a child process makes a saver of its own.",
        )


class SaveHandle:
    """One background save. All methods may be called from any thread of the process."""

    def __init__(self, url: str, rank: int, *, limit_s: float) -> None:
        self.url = url
        self.rank = rank
        self._limit_s = limit_s
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may call in the middle
        self._staged = ReentrantEvent()  # the state is copied, or the save has ended
        self._ended = ReentrantEvent()  # what follows is final
        self._state = SaveState.STAGING
        self._info: CheckpointInfo | None = None
        self._error: CheckpointError | None = None
        self._is_copied = False
        self._asker_count = 0
        self._source: Source = lambda: ({}, None)
        self._on_cancel: Callable[[SaveCancelledError], object] = lambda _: None
        self._cancelled: SaveCancelledError | None = None
        self._callbacks: list[Callable[[SaveHandle], object]] = []

    def __repr__(self) -> str:
        return f"<SaveHandle {self.url!r} {self.state.value}>"

    @property
    def state(self) -> SaveState:
        """Where the save is."""
        own = self._source()[0].get(self.rank)
        with self._lock:
            if self._state is not SaveState.WRITING or own is None:
                return self._state
            return _STATE_OF_PHASE[own.phase]

    @property
    def save_id(self) -> str | None:
        """The id that all ranks agreed on, once they did."""
        return self._info.save_id if self._info is not None else self._source()[1]

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._ended.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied, and may be changed; at most `timeout` seconds.

        Raises `PhaseTimeoutError` if it is not by then, or why it could not be copied.
        """
        self._await(self._staged, timeout, "was not staged", "stage")
        if self._error is not None and not self._is_copied:
            raise self._error

    def is_staged(self) -> bool:
        """Return whether the state is copied, or the save has ended."""
        return self._staged.is_set()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait at most `timeout` seconds and return what was committed.

        Without `timeout` it waits as long as the deadlines of the save's own phases allow, which
        are finite. Raises why the save failed (any `CheckpointError`), or `PhaseTimeoutError` if it
        has not ended by then; it goes on in that case, and `state` is not final.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._info is not None  # noqa: S101  # there is one or the other
        return self._info

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Return why the save failed, None if it did not; waits and raises as `result`."""
        self._count_asker(1)
        try:
            self._await(self._ended, timeout, "has not ended")
        except BaseException:
            self._count_asker(-1)
            raise
        return self._error

    def progress(self) -> SaveProgress:
        """Return how far the save is."""
        self._check_process()
        signs, save_id = self._source()
        own = signs.get(self.rank)
        others = [sign for sign in signs.values() if sign.phase != "plan"]
        return SaveProgress(
            state=self.state,
            rank=self.rank,
            done_bytes=own.done_bytes if own else 0,
            total_bytes=own.total_bytes if own else 0,
            done_files=own.done_files if own else 0,
            save_id=save_id,
            slowest=max(others, key=lambda sign: sign.left_bytes, default=None),
            ranks=signs,
        )

    def cancel(self) -> bool:
        """Ask all ranks to give the save up; return whether it had not ended yet.

        It takes effect soon unless the commit is faster: `state` tells. Called on one rank it
        ends the save on all.
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

    def _await(
        self, event: ReentrantEvent, timeout: float | None, not_yet: str, phase: str | None = None
    ) -> None:
        self._check_process()
        limit_s = self._limit_s if timeout is None else timeout
        if not event.wait(limit_s):
            raise PhaseTimeoutError(
                f"The save to {self.url} {not_yet} within {limit_s:g} s; it is {self.state.value}.",
                timeout_s=limit_s,
                rank=self.rank,
                phase=phase,
                next_step="Wait longer, look at progress(), or cancel() it.",
            )

    def _count_asker(self, count: int) -> None:
        with self._lock:
            self._asker_count += count

    def _call(self, callback: Callable[[SaveHandle], object], logged: type[BaseException]) -> None:
        try:
            callback(self)
        except logged:
            log.exception("A callback of the save to %s failed.", self.url)


class SaveStatus(SaveHandle):
    """The handle of a save, as its saver and its queue see it."""

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody waits for the outcome or has got it."""
        return self._asker_count > 0

    def take(self) -> None:
        """Note that the outcome is known to whoever began the save."""
        self._count_asker(1)

    def await_end(self, timeout: float | None) -> CheckpointError | None:
        """Return why the save failed, as `exception`, without having asked for it."""
        self._await(self._ended, timeout, "has not ended")
        return self._error

    def follow(self, source: Source, on_cancel: Callable[[SaveCancelledError], object]) -> None:
        """Take from `source` how far the ranks are; tell each `cancel`, also an earlier one."""
        with self._lock:
            self._source, self._on_cancel = source, on_cancel
            error = self._cancelled
        if error is not None:
            on_cancel(error)

    def mark_staged(self) -> None:
        """Note that the state is copied."""
        with self._lock:
            if self._state is SaveState.STAGING:
                self._state = SaveState.WRITING
                self._is_copied = True
        self._staged.set()

    def succeed(self, info: CheckpointInfo) -> None:
        """End the save: it is committed."""
        self._end(SaveState.COMMITTED, info, None)

    def fail(self, error: CheckpointError) -> None:
        """End the save with an error; one that carries `info` leaves it committed."""
        info: CheckpointInfo | None = getattr(error, "info", None)
        states = (state for kind, state in _STATE_OF_ERROR.items() if isinstance(error, kind))
        state = next(states, SaveState.FAILED) if info is None else SaveState.COMMITTED
        self._end(state, info, error)

    def _end(
        self, state: SaveState, info: CheckpointInfo | None, error: CheckpointError | None
    ) -> None:
        # What it followed holds connections: what is known now stays.
        known = self._source()
        with self._lock:
            if self._ended.is_set():
                return
            self._state, self._info, self._error = state, info, error
            self._source, self._on_cancel = lambda: known, lambda _: None
            self._staged.set()
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback, BaseException)


STALL_S = 30.0
"""A save that has made no progress for so long does not hold up an interpreter that ends."""

_GRACE_S = 3.0
"""What a save may take beyond the deadline of its phase, to give up and to tell the other ranks."""

_LOOK_S = 0.1
_END_S = 5.0
_HALT_S = 0.3
"""Long enough for threads that wait for nothing to come to rest."""

_in_flight: dict[SaveStatus, tuple[float, Timeouts]] = {}
_lost: list[SaveStatus] = []
_hooks: list[object] = []

# A child of fork has none of the threads that its parent's saves need.
os.register_at_fork(after_in_child=_in_flight.clear)


def flush_at_exit(save: SaveStatus, timeout_s: float, timeouts: Timeouts) -> None:
    """Let an interpreter that ends wait for a save, as `flush` does, and name what it loses."""
    _in_flight[save] = timeout_s, timeouts
    save.add_done_callback(lambda _: _in_flight.pop(save, None))
    if _hooks:
        return
    _hooks.append(atexit.register(_rest))
    # Before the executors of `concurrent.futures` are shut down, on which clients rely: their
    # hook came with the import above, and the last to register is the first to run. `atexit` runs
    # too late for that, but is all that a Python without this hook offers.
    try:
        getattr(threading, "_register_atexit", atexit.register)(_flush_all)
    except RuntimeError:
        log.warning("The interpreter is ending already: no save is waited for.")


def flush(saves: Sequence[SaveStatus]) -> list[SaveStatus]:
    """Wait for saves in flight; return those that have not ended: nobody waits for them again.

    Each is waited for as long as `flush_at_exit` was told; and no longer without progress than
    `STALL_S`, or than its phase may take and `_GRACE_S`.
    """
    limits = {save: limit for save in saves if (limit := _in_flight.get(save)) is not None}
    start = moved = time.monotonic()
    ended = 0
    while True:
        now, told = time.monotonic(), {save: save.progress() for save in limits}
        # What moves or ends one save brings those behind it nearer, too.
        ranks = [one for progress in told.values() for one in progress.ranks.values()]
        before, ended = ended, sum(save.done() for save in limits)
        moved = max([now if ended > before else moved, *(r.heard_s - r.idle_s for r in ranks)])
        if all(
            save.done() or now > min(start + timeout_s, moved + _patience_s(told[save], timeouts))
            for save, (timeout_s, timeouts) in limits.items()
        ):
            break
        time.sleep(_LOOK_S)
    lost = [save for save in limits if _in_flight.pop(save, None) is not None]
    _lost.extend(lost)
    return lost


def _patience_s(told: SaveProgress, timeouts: Timeouts) -> float:
    """Return how long a save may stand still."""
    own = told.ranks.get(told.rank)
    if own is None:
        # It is staged, or waits for its turn or for the other ranks.
        phase_s = max(timeouts.stage, timeouts.plan)
    else:
        # Who waits for a commit waits first for the slowest write.
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
        # Logging may be off or gone by now, and this must not be missed.
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _rest() -> None:
    """Let our daemon threads come to rest before the interpreter takes itself down."""
    halt_threads()
    end = time.monotonic() + (_HALT_S if _lost else _END_S)
    # One whose save has ended still lets go of tensors, in torch's C++.
    names = ("ckpt-storage save", "ckpt-storage watch")
    ending = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in ending:
        thread.join(max(0.0, end - time.monotonic()))
    if ending:
        time.sleep(_HALT_S)
