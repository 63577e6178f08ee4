"""Statistics of one operation: seconds by phase, bytes, and the slowest rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_args

from ckpt_storage.options import Phase

_TRANSFERS = ("write", "load", "consolidate")
"""Phases in which ranks move bytes, each its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """The share of one rank: seconds by phase, bytes, and how many storage requests it repeated."""

    rank: int
    phase_s: Mapping[str, float]
    done_bytes: int = 0
    retry_count: int = 0

    @property
    def transfer_s(self) -> float:
        """Seconds in the phases in which the rank moved its bytes."""
        return sum(self.phase_s.get(phase, 0.0) for phase in _TRANSFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStats:
    """Statistics of one save, load or export of all ranks.

    total_bytes: of all ranks; of a save those of its shard files. reused_bytes: of a save those of
    files that an earlier save wrote: they were linked, or copied by the storage. phase_s: seconds
    by phase on the coordinator, waits for other ranks included. seconds: their sum. Of a save both
    end where its commit begins, since the commit record holds them. slowest_rank: the global rank
    that took longest for its own bytes, which were `slowest_bytes` in `slowest_s`. retry_count:
    storage requests that were repeated, on all ranks.
    """

    seconds: float
    phase_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    total_bytes: int = 0
    world_size: int = 1
    retry_count: int = 0
    slowest_rank: int = 0
    slowest_s: float = 0.0
    slowest_bytes: int = 0
    reused_bytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the whole operation, 0 for an operation that took no time."""
        return self.total_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest_share(self) -> float:
        """The part of all bytes that the slowest rank moved, from 0 to 1."""
        return self.slowest_bytes / self.total_bytes if self.total_bytes else 0.0

    @classmethod
    def of(cls, timings: Sequence[RankTiming], phase_s: Mapping[str, float]) -> Self:
        """Return the statistics of all ranks; `phase_s` are the seconds of the coordinator."""
        slowest = max(timings, key=lambda timing: timing.transfer_s)
        return cls(
            seconds=_rounded(sum(phase_s.values())),
            phase_s={phase: _rounded(seconds) for phase, seconds in phase_s.items()},
            total_bytes=sum(timing.done_bytes for timing in timings),
            world_size=len(timings),
            retry_count=sum(timing.retry_count for timing in timings),
            slowest_rank=slowest.rank,
            slowest_s=_rounded(slowest.transfer_s),
            slowest_bytes=slowest.done_bytes,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object of a commit record."""
        return {
            "bytes": self.total_bytes,
            "ranks": self.world_size,
            "phase_s": dict(self.phase_s),
            "retries": self.retry_count,
            "slowest": {
                "rank": self.slowest_rank,
                "seconds": self.slowest_s,
                "bytes": self.slowest_bytes,
            },
            **({"reused_bytes": self.reused_bytes} if self.reused_bytes else {}),
        }

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Return the statistics in a commit record; None if they cannot be read."""
        try:
            slowest, phases = value["slowest"], value["phase_s"]  # type: ignore[index]  # caught
            phase_s = {
                phase: _seconds(phases[phase]) for phase in get_args(Phase) if phase in phases
            }
            return cls(
                seconds=_rounded(sum(phase_s.values())),
                phase_s=phase_s,
                total_bytes=_count(value["bytes"]),  # type: ignore[index]  # caught
                world_size=_count(value["ranks"]),  # type: ignore[index]  # caught
                retry_count=_count(value["retries"]),  # type: ignore[index]  # caught
                slowest_rank=_count(slowest["rank"]),
                slowest_s=_seconds(slowest["seconds"]),
                slowest_bytes=_count(slowest["bytes"]),
                reused_bytes=_count(value.get("reused_bytes", 0)),  # type: ignore[attr-defined]  # caught
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return None


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(value)
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    if value < 0:
        raise ValueError(value)
    return value
