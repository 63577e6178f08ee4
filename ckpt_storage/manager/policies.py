"""Policies of retention: which checkpoints of a run to keep. Pure: no I/O, and no clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Self

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import check_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One committed checkpoint of the run, as policies see it.

    `age_s` counts from its commit; None where that is not known.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    age_s: float | None
    info: CheckpointInfo | None

    @property
    def is_part(self) -> bool:
        """Whether it holds some values of a save only."""
        return self.info is not None and bool(self.info.part)

    @classmethod
    def of(cls, info: CheckpointInfo, step: int, age_s: float | None = None) -> Self:
        """Return what policies see of a checkpoint."""
        return cls(name=info.name, step=step, metrics=info.metrics, age_s=age_s, info=info)


class RetentionPolicy(ABC):
    """One rule of retention; `a | b` keeps what either keeps."""

    __slots__ = ()

    @abstractmethod
    def kept(self, candidates: Sequence[Candidate]) -> Mapping[str, str]:
        """Return the names that the rule keeps, each with the reason.

        `candidates` are all sound committed checkpoints of the run, the lowest step first; in
        another call a damaged checkpoint is among them, as if it were sound.
        """

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny(policies_of([self, other]))

    def __str__(self) -> str:
        policy: object = self  # a user's own need not be a dataclass
        names = [field.name for field in fields(policy)] if is_dataclass(policy) else []
        values = [getattr(self, name) for name in names]
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keep the `n` newest, by step. Damaged and thin checkpoints do not count."""

    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return names with the reason."""
        whole = [candidate for candidate in candidates if not candidate.is_part]
        return {candidate.name: f"{self}" for candidate in whole[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(RetentionPolicy):
    """Keep the checkpoints whose step is a multiple of `n`, for good."""

    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names of multiples."""
        multiples = [candidate for candidate in candidates if candidate.step % self.n == 0]
        return {candidate.name: f"{self}" for candidate in multiples}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepClosest(RetentionPolicy):
    """Keep, for each multiple of `every_steps` or of `every_s` seconds, the closest checkpoint.

    For runs whose steps are not multiples. Each checkpoint counts for its nearest multiple; of two
    that are equally close, the later counts. Only a closer checkpoint replaces it, so a run that
    prunes after each save keeps the same as a run that never pruned. Seconds count from 1970 (UTC)
    to when the save began, by the clock of its rank 0: `every_s=3600` means full hours.
    """

    every_steps: int | None = None
    every_s: float | timedelta | None = None

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_s is None):
            raise InvalidInputError(
                "KeepClosest has not exactly one interval.",
                next_step="Give every_steps, such as 1000, or every_s, such as 3600.",
            )
        if self.every_s is None:
            _check_count(self, self.every_steps)
        elif not self._interval:
            raise InvalidInputError("every_s of KeepClosest is 0.", next_step="Give more seconds.")

    @property
    def _interval(self) -> float:
        if self.every_s is None:
            return self.every_steps or 0
        return seconds_of(self.every_s, what="every_s of KeepClosest")

    def _position(self, candidate: Candidate) -> float | None:
        return candidate.step if self.every_s is None else begun_s(candidate.info) or None

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names of the closest, each with its distance."""
        interval, kept = self._interval, dict[str, str]()
        closest: dict[float, tuple[float, float, int]] = {}
        for index, candidate in enumerate(candidates):
            position = self._position(candidate)
            if position is None:
                kept[candidate.name] = f"{self}: when its save began is not known"
                continue
            # The higher of two multiples that are equally near. Whole numbers stay exact.
            multiple = (2 * position + interval) // (2 * interval) * interval
            rank = (-abs(position - multiple), position, index)
            closest[multiple] = max(rank, closest.get(multiple, rank))
        unit = "steps" if self.every_s is None else "s"
        for distance, _, index in closest.values():
            kept[candidates[index].name] = f"{self}: {-distance:.12g} {unit} from a multiple"
        return kept

    def __str__(self) -> str:
        return (
            f"KeepClosest(every_{'steps' if self.every_s is None else 's'}={self._interval:.12g})"
        )


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keep the `n` whose recorded `metric` is smallest ("min") or largest ("max").

    Of equal values the later step is better. A checkpoint without the metric, or with a value that
    is not finite, is never best: diverged training would be. Damaged checkpoints do not count.
    """

    metric: str
    mode: Literal["min", "max"]
    n: int = 1

    def __post_init__(self) -> None:
        _check_count(self, self.n)
        check_choice("mode", self.mode, Literal["min", "max"])

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the best names, the best first."""
        sign = 1.0 if self.mode == "max" else -1.0
        values = [candidate.metrics.get(self.metric, math.nan) for candidate in candidates]
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        best = sorted(finite, key=lambda index: (sign * values[index], index))[: -self.n - 1 : -1]
        return {
            candidates[index].name: f"{self}: {self.metric} is {values[index]:g}" for index in best
        }


@dataclass(frozen=True, slots=True)
class KeepNewerThan(RetentionPolicy):
    """Keep the checkpoints that were committed less than `age` (seconds or `timedelta`) ago.

    Both times are of the storage's clock; a checkpoint of unknown age is kept.
    """

    age: float | timedelta

    def __post_init__(self) -> None:
        _ = self.age_s

    @property
    def age_s(self) -> float:
        """The age in seconds."""
        return seconds_of(self.age, what="The age of KeepNewerThan")

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the young names."""
        kept = {}
        for candidate in candidates:
            if candidate.age_s is None:
                kept[candidate.name] = f"{self}: the storage does not report its age"
            elif candidate.age_s < self.age_s:
                kept[candidate.name] = f"{self}: {candidate.age_s:.0f} s old"
        return kept

    def __str__(self) -> str:
        return f"KeepNewerThan({self.age_s:g} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPart(RetentionPolicy):
    """Keep a part of all sound checkpoints that no other policy keeps: thin them.

    `drop` are the names and glob patterns of what is dropped, as for `ckpt_storage.thin`.
    """

    drop: str | tuple[str, ...] = "optim*"

    def __post_init__(self) -> None:
        patterns: tuple[Any, ...] = self.patterns
        if not patterns or not all(isinstance(text, str) and text for text in patterns):
            raise InvalidInputError(
                f"drop of KeepPart is {self.drop!r}.",
                next_step='Give names or patterns, such as "optim*".',
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """`drop` as a tuple."""
        return (self.drop,) if isinstance(self.drop, str) else tuple(self.drop)

    def kept(self, _: Sequence[Candidate]) -> dict[str, str]:
        """Return nothing: it keeps none whole."""
        return {}

    def is_met_by(self, info: CheckpointInfo) -> bool:
        """Return whether what is to be dropped is known to be dropped."""
        dropped = info.part.get("exclude")
        return isinstance(dropped, list | tuple) and {*self.patterns} <= {*dropped}


@dataclass(frozen=True, slots=True)
class KeepAny(RetentionPolicy):
    """Keep what any of the policies keeps; what `a | b` makes."""

    policies: tuple[RetentionPolicy, ...]

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names, each with the first reason."""
        kept: dict[str, str] = {}
        for policy in reversed(self.policies):
            kept |= policy.kept(candidates)
        return kept

    def __str__(self) -> str:
        return " | ".join(map(str, self.policies))


Keep = RetentionPolicy | Iterable[RetentionPolicy]
"""A policy, or several: a checkpoint is kept if any of them keeps it."""


def seconds_of(value: float | timedelta, *, what: str) -> float:
    """Return a length of time in seconds. Raises `InvalidInputError` unless 0 or more, finite."""
    seconds: object = value.total_seconds() if isinstance(value, timedelta) else value
    number = float(seconds) if isinstance(seconds, int | float) else math.nan
    if isinstance(seconds, bool) or not 0 <= number < math.inf:
        raise InvalidInputError(
            f"{what} is {value!r}.",
            next_step="Give seconds or a datetime.timedelta, 0 or more and finite.",
        )
    return number


def _check_count(policy: object, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInputError(
            f"n of {type(policy).__name__} is {n!r}.", next_step="Give 1 or more."
        )


def policies_of(keep: Keep) -> tuple[RetentionPolicy, ...]:
    """Return single policies, `|` and nesting resolved. Raises `InvalidInputError` for none."""
    value: object = keep.policies if isinstance(keep, KeepAny) else keep
    if isinstance(value, RetentionPolicy):
        return (value,)
    policies: tuple[RetentionPolicy, ...] = ()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        policies = tuple(policy for item in value for policy in policies_of(item))
    if not policies:
        raise InvalidInputError(
            f"{keep!r} is no policy of retention, so nothing would be kept.",
            next_step="Give one or more, such as KeepLatest(3); or keep=None, which keeps all.",
        )
    return policies


def begun_s(info: CheckpointInfo | None) -> float:
    """Return when a save began, in seconds since 1970 by the clock of its rank 0; 0 if unknown."""
    stamp = "" if info is None else (info.save_id or "")[:16]
    try:
        return datetime.strptime(stamp, "%Y%m%dT%H%M%S%z").timestamp()
    except ValueError:  # the id of another tool
        return 0.0
