"""The phases of one operation on one rank: deadlines, and messages about ranks that are late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ckpt_storage.errors import PhaseTimeoutError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.monitor import OperationMonitor

from .rank_names import name_ranks

log = logging.getLogger("ckpt_storage")

Late = tuple[Sequence[int], str, str]
"""Global ranks that are late, what they have not done, and what else is known of them."""

_MIN_PATIENCE_S, _EXTRA_PATIENCE_S = 0.5, 1.0
"""Bounds of how long one request may take before the store counts as lost."""

_LOG_S = 60.0
"""How often a waiting rank logs which ranks are missing."""


class Phases:
    """The deadline of the present phase, and how long requests and waits may last in it.

    `grace_s`: how long after the deadline this rank gives up: a late rank reports first, then the
    coordinator names it, then the other members do.
    """

    def __init__(
        self,
        what: str,
        timeouts: Timeouts,
        monitor: OperationMonitor,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.what = what
        self.timeouts = timeouts
        self.grace_s = 0.0
        self._monitor = monitor
        self._rank = rank
        self._world_size = world_size
        self._logged_s = time.monotonic()
        self.deadline = Deadline("plan", timeouts.plan, monitor=monitor)

    def begin(self, phase: Phase, timeout_s: float | None = None) -> Deadline:
        """Begin a phase and return its deadline; by default as `timeouts` say."""
        seconds: float = getattr(self.timeouts, phase) if timeout_s is None else timeout_s
        self.deadline = Deadline(phase, seconds, monitor=self._monitor)
        return self.deadline

    @property
    def end_s(self) -> float:
        """When this rank gives up, on its monotonic clock."""
        return self.deadline.at_monotonic_s + self.grace_s

    @property
    def patience_s(self) -> float:
        """How long one request may take before the store counts as lost."""
        left_s = self.deadline.remaining_s() + _EXTRA_PATIENCE_S
        return max(_MIN_PATIENCE_S, min(self.timeouts.silence, left_s))

    def late(self, ranks: Sequence[int], did_not: str, known: str = "") -> PhaseTimeoutError:
        """Return the error that names global ranks and what they have not done by the deadline."""
        deadline, verb = self.deadline, "has" if len(ranks) == 1 else "have"
        return PhaseTimeoutError(
            f"{name_ranks(ranks)} of the group's {self._world_size} {verb} {did_not} within "
            f"{deadline.timeout_s:g} s in the {deadline.phase} phase of {self.what}{known}.",
            timeout_s=deadline.timeout_s,
            rank=ranks[0] if ranks else None,
            phase=deadline.phase,
            next_step="Look at what those ranks are doing; if they are only slow, raise "
            f"Timeouts.{deadline.phase}.",
        )

    @property
    def log_s(self) -> float:
        """When to log the missing ranks next: once a minute, and four times before the deadline."""
        return self._logged_s + min(_LOG_S, self.deadline.timeout_s / 5)

    def log_late(self, find_late: Callable[[], Late | None]) -> None:
        """If it is time to, log for which global ranks this rank waits, if it knows."""
        if time.monotonic() < self.log_s:
            return
        self._logged_s = time.monotonic()
        late = find_late()
        if late is None:
            return
        ranks, did_not, known = late
        log.warning(
            "%s of the group's %d: %s in %s yet%s; rank %d waits, %.0f s are left.",
            *(name_ranks(ranks), self._world_size, did_not, self.what, known, self._rank),
            self.deadline.remaining_s(),
        )
