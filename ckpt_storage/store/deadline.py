"""The instant at which a phase gives up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Phase, Timeouts

from .monitor import Clock, OperationMonitor, StallDetector, Unmonitored, phase_timeout

# A request that is ended by a phase's deadline ends within this of it.
_CUT_S = 0.05

LOOK_S = 0.2
"""How often a waiting thread checks whether its operation has failed elsewhere."""

NEVER_S = 10 * 365 * 86_400.0
"""No work lasts longer; clocks and locks do not take infinity."""


class Deadline:
    """The instant at which a phase gives up; shared by all its waits.

    With a `monitor`, the phase also gives up soon after its operation failed elsewhere.
    """

    __slots__ = ("_clock", "at_monotonic_s", "is_monitored", "monitor", "phase", "timeout_s")

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        monitor: OperationMonitor | None = None,
    ) -> None:
        self.phase = phase
        self.timeout_s = timeout_s
        self.monitor: OperationMonitor = monitor or Unmonitored()
        self.is_monitored = monitor is not None
        self._clock = clock
        self.at_monotonic_s = clock() + timeout_s

    @classmethod
    def of(cls, timeouts: Timeouts, phase: Phase) -> Deadline:
        """Return the deadline of a phase that begins now."""
        return cls(phase, getattr(timeouts, phase))

    def has_failed(self) -> bool:
        """Return whether the operation that the phase belongs to cannot continue."""
        return self.monitor.failure() is not None

    def remaining_s(self) -> float:
        """Return the seconds left, 0 when there are none."""
        return max(0.0, self.at_monotonic_s - self._clock())

    def sleep(self, seconds: float) -> None:
        """Sleep, for less if the deadline or a failure of the operation comes first."""
        end = time.monotonic() + min(seconds, self.remaining_s())
        while (left_s := end - time.monotonic()) > 0 and not self.has_failed():
            time.sleep(min(left_s, LOOK_S) if self.is_monitored else left_s)

    def check(self, what: str) -> None:
        """Raise `PhaseTimeoutError` for `what` if the deadline has passed.

        Raises the failure of the operation, if it failed elsewhere.
        """
        failure = self.monitor.failure()
        if failure is not None:
            raise failure
        if self._clock() >= self.at_monotonic_s:
            raise self.error(what)

    @contextmanager
    def annotate_errors(self, what: str, *, rank: int | None = None) -> Iterator[None]:
        """Add rank and phase to the errors of the block.

        An error that this deadline caused becomes its `PhaseTimeoutError`. One that the failure of
        the operation caused becomes that failure.
        """
        try:
            yield
        except CheckpointError as error:
            failure = self.monitor.failure()
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
        return phase_timeout(self.phase, self.timeout_s, f"{what} did not end within")


def stalling_deadline(
    phase: Phase, timeout_s: float, what: str, *, parent: OperationMonitor | None = None
) -> Deadline:
    """Return a deadline that passes once `what` made no progress for `timeout_s`."""
    return Deadline(phase, NEVER_S, monitor=StallDetector(phase, timeout_s, what, parent=parent))
