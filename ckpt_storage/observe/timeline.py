"""When the phases of one operation on one rank began and ended."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from ckpt_storage.options import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One stretch of a phase, on the monotonic clock of this process."""

    phase: Phase
    start_s: float
    end_s: float


class Timeline:
    """The phases of one operation; the last phase continues until `end`."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self._present: tuple[Phase, float] | None = ("plan", self.start_s)
        self._spans: list[PhaseSpan] = []

    def begin(self, phase: Phase) -> None:
        """Begin a phase, or go on with it."""
        if self._present is None or self._present[0] == phase:
            return
        now_s = time.monotonic()
        self._close(now_s)
        self._present = (phase, now_s)

    def add(self, phase: Phase, start_s: float, end_s: float) -> None:
        """Add a phase that ended before the operation began."""
        self.start_s = min(self.start_s, start_s)
        self._spans.insert(0, PhaseSpan(phase=phase, start_s=start_s, end_s=end_s))

    def end(self) -> None:
        """End the present phase, and the operation."""
        self._close(time.monotonic())
        self._present = None

    def _close(self, now_s: float) -> None:
        if self._present is not None:
            phase, start_s = self._present
            self._spans.append(PhaseSpan(phase=phase, start_s=start_s, end_s=now_s))

    @property
    def spans(self) -> tuple[PhaseSpan, ...]:
        """The phases in order; the present one ends now."""
        if self._present is None:
            return tuple(self._spans)
        phase, start_s = self._present
        now_s = time.monotonic()
        return (*self._spans, PhaseSpan(phase=phase, start_s=start_s, end_s=now_s))

    def phase_s(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            seconds[span.phase] += span.end_s - span.start_s
        return dict(seconds)
