"""The instant at which a phase gives up, and what tells it to give up sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Phase, Timeouts

# A request that was cut by a phase's deadline ends within this of it.
_CUT_S = 0.05

LOOK_S = 0.2
"""How often whoever waits looks whether its operation has failed elsewhere."""

NEVER_S = 10 * 365 * 86_400.0
"""No work lasts longer; infinity is no number that clocks and locks take."""

Clock: TypeAlias = Callable[[], float]


class Watch(Protocol):
    """The operation that a phase belongs to, as its transfers see it; safe in any thread.

    What a derived class leaves out never fails and hears nothing.
    """

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot go on (another rank failed, say), None while it can."""
        return None

    def advanced(self, byte_count: int = 0, *, file_count: int = 0) -> None:
        """Note that as many more bytes and files of the phase are done."""
        del byte_count, file_count

    def expect(self, total_bytes: int) -> None:
        """Note how many bytes the phase has in all."""
        del total_bytes

    def retried(self, count: int = 1) -> None:
        """Note that storage requests are repeated."""
        del count

    def failed(self, error: CheckpointError) -> None:
        """Note a failure at once, because what it leaves behind hangs."""
        del error


class _Unwatched(Watch):
    """None."""


class Deadline:
    """The instant at which a phase gives up; shared by all its waits.

    With a `watch`, the phase also gives up soon after its operation failed elsewhere.
    """

    __slots__ = ("_clock", "at_monotonic_s", "is_watched", "phase", "timeout_s", "watch")

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        watch: Watch | None = None,
    ) -> None:
        self.phase = phase
        self.timeout_s = timeout_s
        self.watch: Watch = watch or _Unwatched()
        self.is_watched = watch is not None
        self._clock = clock
        self.at_monotonic_s = clock() + timeout_s

    @classmethod
    def of(cls, timeouts: Timeouts, phase: Phase) -> Deadline:
        """Return the deadline of a phase that begins now."""
        return cls(phase, getattr(timeouts, phase))

    def has_failed(self) -> bool:
        """Return whether the operation that the phase belongs to cannot go on."""
        return self.watch.failure() is not None

    def remaining_s(self) -> float:
        """Return the seconds left, 0 when there are none."""
        return max(0.0, self.at_monotonic_s - self._clock())

    def sleep(self, seconds: float) -> None:
        """Pause, for less where the instant or a failure of the operation is nearer."""
        end = time.monotonic() + min(seconds, self.remaining_s())
        while (left_s := end - time.monotonic()) > 0 and not self.has_failed():
            time.sleep(min(left_s, LOOK_S) if self.is_watched else left_s)

    def check(self, what: str) -> None:
        """Raise `PhaseTimeoutError` naming `what` if the instant has passed.

        Raises why the operation cannot go on, if it failed elsewhere.
        """
        failure = self.watch.failure()
        if failure is not None:
            raise failure
        if self._clock() >= self.at_monotonic_s:
            raise self.error(what)

    @contextmanager
    def governs(self, what: str, *, rank: int | None = None) -> Iterator[None]:
        """Give errors inside their rank and phase.

        One caused by this deadline becomes its own, one caused by giving up becomes the reason.
        """
        try:
            yield
        except CheckpointError as error:
            failure = self.watch.failure()
            if error is failure:
                raise
            if failure is not None and isinstance(error, StorageError):
                raise failure from failure.__cause__ or error
            is_late = isinstance(error, StorageError) and error.kind in {"not-begun", "timeout"}
            if is_late and self.remaining_s() < _CUT_S:
                late = self.error(what)
                late.rank, late.path = rank, error.path
                raise late from error
            error.rank = rank if error.rank is None else error.rank
            error.phase = error.phase or self.phase
            raise

    def error(self, what: str) -> PhaseTimeoutError:
        """Return the error that says `what` did not end in time."""
        return _timeout(self.phase, self.timeout_s, f"{what} did not end within")


def _timeout(phase: Phase, timeout_s: float, what: str) -> PhaseTimeoutError:
    text, step = f"{what} {timeout_s:g} s ({phase} phase).", "Check the storage, or raise Timeouts."
    return PhaseTimeoutError(text, phase=phase, timeout_s=timeout_s, next_step=f"{step}{phase}.")


class Stalling(Watch):
    """A `Watch` whose work has failed once nothing has moved for `timeout_s` seconds.

    All that it hears it tells the watch `beside` it, and fails with that, too.
    """

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        what: str,
        *,
        beside: Watch | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._beside = beside or _Unwatched()
        self._phase: Phase = phase
        self._timeout_s = timeout_s
        self._what = f"{what} has not moved for"
        self._clock = clock
        self._lock = threading.Lock()
        self._moved_s = clock()
        self._failure: PhaseTimeoutError | None = None

    def failure(self) -> CheckpointError | None:
        """Return the error of work that stands still, the same one from then on."""
        with self._lock:
            if self._failure is None and self._clock() - self._moved_s >= self._timeout_s:
                self._failure = _timeout(self._phase, self._timeout_s, self._what)
            failure = self._failure
        return self._beside.failure() or failure

    def failed(self, error: CheckpointError) -> None:
        """Note a failure; of requests that were given up, why they were."""
        self._beside.failed(self.failure() or error)

    def advanced(self, byte_count: int = 0, *, file_count: int = 0) -> None:
        """Note that it has moved."""
        self._moved_s = self._clock()
        self._beside.advanced(byte_count, file_count=file_count)

    def expect(self, total_bytes: int) -> None:
        """Note how many bytes there are in all."""
        self._beside.expect(total_bytes)

    def retried(self, count: int = 1) -> None:
        """Note that storage requests are repeated."""
        self._beside.retried(count)


def stalling_deadline(
    phase: Phase, timeout_s: float, what: str, *, beside: Watch | None = None
) -> Deadline:
    """Return a deadline that is over once `what` has not moved for `timeout_s`."""
    return Deadline(phase, NEVER_S, watch=Stalling(phase, timeout_s, what, beside=beside))
