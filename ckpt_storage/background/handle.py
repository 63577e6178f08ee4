"""What the caller of a background save holds: its state, its progress and its outcome."""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable, Mapping
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
        return self in _FINAL


_FINAL = frozenset(
    {
        SaveState.COMMITTED,
        SaveState.FAILED,
        SaveState.TIMED_OUT,
        SaveState.CANCELLED,
        SaveState.UNKNOWN,
    }
)

_STATE_OF_PHASE = {
    "stage": SaveState.STAGING,
    "plan": SaveState.WRITING,
    "write": SaveState.WRITING,
    "commit": SaveState.COMMITTING,
    "consolidate": SaveState.CONSOLIDATING,
}


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

    def __init__(self, status: SaveStatus) -> None:
        self.url = status.url
        self.rank = status.rank
        self._process_id = os.getpid()
        self._kept = status

    @property
    def _status(self) -> SaveStatus:
        check_process(self._process_id, f"The handle of the save to {self.url}")
        return self._kept

    def __repr__(self) -> str:
        return f"<SaveHandle {self.url!r} {self._kept.state.value}>"

    @property
    def state(self) -> SaveState:
        """Where the save is."""
        return self._status.state

    @property
    def save_id(self) -> str | None:
        """The id that all ranks agreed on, once they did."""
        return self._status.save_id

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._status.ended.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied, and may be changed; at most `timeout` seconds.

        Raises `PhaseTimeoutError` if it is not by then, or why it could not be copied.
        """
        self._status.wait_staged(timeout)

    def is_staged(self) -> bool:
        """Return whether the state is copied, or the save has ended."""
        return self._status.staged.is_set()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait at most `timeout` seconds and return what was committed.

        Without `timeout` it waits as long as the deadlines of the save's own phases allow, which
        are finite. Raises why the save failed (any `CheckpointError`), or `PhaseTimeoutError` if it
        has not ended by then; it goes on in that case, and `state` is not final.
        """
        status = self._status
        error = status.outcome(timeout)
        if error is not None:
            raise error
        assert status.info is not None  # noqa: S101  # `succeed` sets it
        return status.info

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Return why the save failed, None if it did not; waits and raises as `result`."""
        return self._status.outcome(timeout)

    def progress(self) -> SaveProgress:
        """Return how far the save is."""
        return self._status.progress()

    def cancel(self) -> bool:
        """Ask all ranks to give the save up; return whether it had not ended yet.

        It takes effect soon unless the commit is faster: `state` tells. Called on one rank it
        ends the save on all.
        """
        return self._status.cancel()

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call `callback(handle)` once the save has ended, in the thread that ends it.

        What it raises is logged.
        """
        self._status.when_ended(lambda: callback(self))


class SaveStatus:
    """One background save, as its saver and its task see it; users hold a `SaveHandle` of it.

    `staged` is set once the state is copied, or the save has ended; `ended` once `info` and
    `error` are final.
    """

    def __init__(self, url: str, rank: int, *, limit_s: float) -> None:
        self.url = url
        self.rank = rank
        self.limit_s = limit_s
        self.ended = threading.Event()
        self.staged = threading.Event()
        self.info: CheckpointInfo | None = None
        self.error: CheckpointError | None = None
        self._lock = threading.RLock()  # a signal's handler may call in the middle
        self._state = SaveState.STAGING
        self._is_copied = False
        self._asker_count = 0
        self._source: Callable[[], tuple[Mapping[int, RankProgress], str | None]] = lambda: (
            {},
            None,
        )
        self._cancel: Callable[[SaveCancelledError], None] | None = None
        self._cancelled: SaveCancelledError | None = None
        self._callbacks: list[Callable[[], object]] = []

    @property
    def state(self) -> SaveState:
        """Where the save is."""
        state = self._state
        if not state.is_final and self.staged.is_set():
            own = self._source()[0].get(self.rank)
            state = SaveState.WRITING if own is None else _STATE_OF_PHASE.get(own.phase, state)
            if self.ended.is_set():
                return self._state
        return state

    @property
    def save_id(self) -> str | None:
        """The id that all ranks agreed on, once they did."""
        return self.info.save_id if self.info is not None else self._source()[1]

    def progress(self) -> SaveProgress:
        """Return how far the save is."""
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

    def wait_staged(self, timeout: float | None) -> None:
        """Wait as `SaveHandle.wait_staged`."""
        limit_s = self.limit_s if timeout is None else timeout
        if not self.staged.wait(limit_s):
            raise self._not_yet("was not staged", limit_s, "stage")
        if self.error is not None and not self._is_copied:
            raise self.error

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody waits for the outcome or has got it."""
        return self._asker_count > 0

    def take(self) -> None:
        """Note that the outcome is known to whoever began the save."""
        self._count_asker(1)

    def outcome(self, timeout: float | None) -> CheckpointError | None:
        """Wait for the end and return why the save failed, for a user, who then knows."""
        self._count_asker(1)
        try:
            return self.await_end(timeout)
        except BaseException:
            self._count_asker(-1)
            raise

    def await_end(self, timeout: float | None) -> CheckpointError | None:
        """Wait for the end and return why the save failed. Raises `PhaseTimeoutError`."""
        limit_s = self.limit_s if timeout is None else timeout
        if not self.ended.wait(limit_s):
            raise self._not_yet("has not ended", limit_s, None)
        return self.error

    def _count_asker(self, count: int) -> None:
        with self._lock:
            self._asker_count += count

    def cancel(self) -> bool:
        """Ask as `SaveHandle.cancel`."""
        with self._lock:
            if self.ended.is_set():
                return False
            if self._cancelled is None:
                self._cancelled = SaveCancelledError(
                    f"The save to {self.url} was cancelled on rank {self.rank}.",
                    rank=self.rank,
                )
            error, cancel = self._cancelled, self._cancel
        if cancel is not None:
            cancel(error)
        return True

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the save has ended, in the thread that ends it, or now."""
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:  # the save has ended, whatever this is
            log.exception("A callback of the save to %s failed.", self.url)

    def on_cancel(self, cancel: Callable[[SaveCancelledError], None] | None) -> None:
        """Set what `cancel` calls from now on; calls it at once if it was called before."""
        with self._lock:
            self._cancel = cancel
            error = self._cancelled
        if error is not None and cancel is not None:
            cancel(error)

    def mark_staged(self) -> None:
        """Note that the state is copied."""
        with self._lock:
            if not self.ended.is_set() and self._state is SaveState.STAGING:
                self._state = SaveState.WRITING
                self._is_copied = True
        self.staged.set()

    def follow(self, source: Callable[[], tuple[Mapping[int, RankProgress], str | None]]) -> None:
        """Take how far the ranks are, and the save id, from `source` from now on."""
        self._source = source

    def succeed(self, info: CheckpointInfo) -> None:
        """End the save: it is committed."""
        self._end(SaveState.COMMITTED, info, None)

    def fail(self, error: CheckpointError) -> None:
        """End the save with an error; one that carries `info` leaves it committed."""
        info: CheckpointInfo | None = getattr(error, "info", None)
        if info is not None:
            state = SaveState.COMMITTED
        elif isinstance(error, CommitUnknownError):
            state = SaveState.UNKNOWN
        elif isinstance(error, SaveCancelledError):
            state = SaveState.CANCELLED
        elif isinstance(error, PhaseTimeoutError):
            state = SaveState.TIMED_OUT
        else:
            state = SaveState.FAILED
        self._end(state, info, error)

    def _end(
        self, state: SaveState, info: CheckpointInfo | None, error: CheckpointError | None
    ) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self._state, self.info, self.error = state, info, error
            self._cancel = None
            # What it followed holds connections: what is known now stays.
            known = self._source()
            self._source = lambda: known
            self.staged.set()
            self.ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _not_yet(self, what: str, limit_s: float, phase: str | None) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            f"The save to {self.url} {what} within {limit_s:g} s; it is {self.state.value}.",
            timeout_s=limit_s,
            rank=self.rank,
            phase=phase,
            next_step="Wait longer, look at progress(), or cancel() it.",
        )
