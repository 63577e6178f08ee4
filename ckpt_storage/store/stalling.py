"""Work that has failed once nothing moves any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.options import Phase
from ckpt_storage.store.deadline import Deadline

_NEVER_S = 10 * 365 * 86_400.0
"""No work lasts longer; infinity is no number that clocks and locks take."""


class Stalling:
    """A `Watch` whose work has failed once nothing has moved for `timeout_s` seconds.

    `on_bytes` hears of all that moves. Safe in any thread.
    """

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        what: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase: Phase = phase
        self._timeout_s = timeout_s
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._moved_s = clock()
        self._failure: PhaseTimeoutError | None = None
        self.on_bytes: Callable[[int], None] = lambda _: None

    def failure(self) -> CheckpointError | None:
        """Return the error of work that stands still, the same one from then on."""
        with self._lock:
            if self._failure is None and self._clock() - self._moved_s >= self._timeout_s:
                self._failure = PhaseTimeoutError(
                    f"{self._what} has not moved for {self._timeout_s:g} s ({self._phase} phase).",
                    phase=self._phase,
                    timeout_s=self._timeout_s,
                    next_step=f"Check the storage, or raise Timeouts.{self._phase}.",
                )
            return self._failure

    def advanced(self, byte_count: int) -> None:
        """Note that `byte_count` more bytes are done."""
        self._moved()
        self.on_bytes(byte_count)

    def ended_file(self) -> None:
        """Note that one more file is complete."""
        self._moved()

    def expect(self, total_bytes: int) -> None:
        """Nothing depends on how much there is."""

    def failed(self, error: CheckpointError) -> None:
        """Nothing: whoever failed cleans up through the same stores."""

    def _moved(self) -> None:
        with self._lock:
            self._moved_s = self._clock()


def stalling_deadline(phase: Phase, timeout_s: float, what: str) -> tuple[Deadline, Stalling]:
    """Return a deadline that is over once `what` has not moved for `timeout_s`, and its watch."""
    watch = Stalling(phase, timeout_s, what)
    return Deadline(phase, _NEVER_S, watch=watch), watch
