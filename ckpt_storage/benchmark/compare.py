"""Contenders taking turns: every run of one stands beside a run of each of the others.

Knows how measurements are taken and summed up; knows no storage. Called by `scenarios` on every
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from .memory import Curve
from .meter import Measurement, Meter, Summary


def _nothing() -> None:
    """Do nothing before or after a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do what a scenario measures; every rank calls all three, only `run` is timed.

    `before` makes ready and `after` checks the outcome and cleans up.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a scenario found: a summary for each contender, in the order given.

    `what` names the scenario for people, `moved_bytes` is what it moves. Ratios are against
    `floor`. `deducted`, if any, is the contender whose time the others contain and which is taken
    off before the ratios: torch's planner. Those in `whole` do not contain it. Those in `idle`
    move nothing, and have no ratio. `checked`, if any,
    is a second floor, that does what the first does and checksums what it moves. `curves` has
    how memory went, for contenders that were looked at.
    """

    what: str
    moved_bytes: int
    floor: str
    summaries: Mapping[str, Summary]
    deducted: str | None = None
    whole: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    checked: str | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def net_s(self, name: str) -> float:
        """Return the median seconds of a contender less what is deducted."""
        off = self.summaries[self.deducted].median_s if self.deducted else 0.0
        has_it = name not in {self.deducted, self.floor, *self.whole}
        return self.summaries[name].median_s - (off if has_it else 0.0)

    def ratio(self, name: str) -> float | None:
        """Return how many times the floor's median a contender takes; None: it moves nothing."""
        return self._over(name, self.floor)

    def checked_ratio(self, name: str) -> float | None:
        """Return how many times the median of the floor with checksums a contender takes."""
        return None if self.checked is None else self._over(name, self.checked)

    def _over(self, name: str, floor: str) -> float | None:
        return None if name in self.idle else self.net_s(name) / self.summaries[floor].median_s


def take_turns(
    meter: Meter, contenders: Sequence[Contender], run_count: int, pause_s: float
) -> dict[str, Summary]:
    """Run every contender once to warm up and `run_count` times for good; all ranks.

    The order rotates, so that none always inherits what the same other one leaves behind in
    caches and free memory; `pause_s` seconds before each run let that settle. Raises what a
    contender raises.
    """
    seen: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
    for run in range(run_count + 1):
        turn = run % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            contender.before()
            time.sleep(pause_s)
            measured = meter.measure(contender.run)
            contender.after()
            dist.barrier()
            if run:
                seen[contender.name].append(measured)
    return {name: Summary.of(runs) for name, runs in seen.items()}


def watch_all(meter: Meter, contenders: Sequence[Contender]) -> dict[str, Curve]:
    """Run every contender once and return how memory went; all ranks.

    Raises what a contender raises.
    """
    curves = {}
    for contender in contenders:
        contender.before()
        curve = meter.watch(contender.run)
        contender.after()
        dist.barrier()
        if curve is not None:
            curves[contender.name] = curve
    return curves
