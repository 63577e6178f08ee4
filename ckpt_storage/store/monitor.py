"""Monitors of operations: they receive reports of progress and decide when to abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.options import Phase

Clock: TypeAlias = Callable[[], float]


class OperationMonitor(Protocol):
    """The operation that a phase belongs to, as its transfers see it; safe in any thread.

    The default methods do nothing and report no failure.
    """

    def failure(self) -> CheckpointError | None:
        """Return why the operation cannot continue, such as a failure of another rank, or None."""
        return None

    def advanced(self, byte_count: int = 0, *, file_count: int = 0) -> None:
        """Report that so many more bytes and files of the phase are done."""
        del byte_count, file_count

    def expect(self, total_bytes: int) -> None:
        """Report how many bytes the phase has in all."""
        del total_bytes

    def retried(self, count: int = 1) -> None:
        """Report that storage requests are retried."""
        del count

    def failed(self, error: CheckpointError) -> None:
        """Report a failure at once, because the threads that it leaves behind hang."""
        del error


class Unmonitored(OperationMonitor):
    """Work that belongs to no operation."""


class StallDetector(OperationMonitor):
    """A monitor that reports a failure once there was no progress for `timeout_s` seconds.

    It forwards every report to its `parent`, and reports the parent's failures, too.
    """

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        what: str,
        *,
        parent: OperationMonitor | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._parent = parent or Unmonitored()
        self._phase: Phase = phase
        self._timeout_s = timeout_s
        self._what = f"{what} made no progress for"
        self._clock = clock
        self._lock = threading.Lock()
        self._progress_s = clock()
        self._failure: PhaseTimeoutError | None = None

    def failure(self) -> CheckpointError | None:
        """Return the error of work without progress, the same error from then on."""
        with self._lock:
            if self._failure is None and self._clock() - self._progress_s >= self._timeout_s:
                self._failure = phase_timeout(self._phase, self._timeout_s, self._what)
            failure = self._failure
        return self._parent.failure() or failure

    def failed(self, error: CheckpointError) -> None:
        """Report a failure; of requests that were abandoned, the reason for that."""
        self._parent.failed(self.failure() or error)

    def advanced(self, byte_count: int = 0, *, file_count: int = 0) -> None:
        """Report progress, which restarts the timeout."""
        self._progress_s = self._clock()
        self._parent.advanced(byte_count, file_count=file_count)

    def expect(self, total_bytes: int) -> None:
        """Report how many bytes there are in all."""
        self._parent.expect(total_bytes)

    def retried(self, count: int = 1) -> None:
        """Report that storage requests are retried."""
        self._parent.retried(count)


def phase_timeout(phase: Phase, timeout_s: float, what: str) -> PhaseTimeoutError:
    """Return the error of a phase that took too long: `what` is followed by the seconds."""
    text, step = f"{what} {timeout_s:g} s ({phase} phase).", "Check the storage, or raise Timeouts."
    return PhaseTimeoutError(text, phase=phase, timeout_s=timeout_s, next_step=f"{step}{phase}.")
