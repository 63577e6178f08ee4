"""How the checkpoints of a run are named; what to keep of them, and why: policies and their plan.

Pure: no I/O and no clock of its own.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Literal, Self, SupportsIndex

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import check_choice

DEFAULT_TEMPLATE = "step-{step:08d}"

_TEMPLATE = re.compile(r"([^{}/\\\0]*)\{step(?::0([1-9][0-9]?)d)?\}([^{}/\\\0]*)")
_MOST_STEP = (1 << 63) - 1


class StepNames:
    """A template with one field, `{step}` or `{step:08d}`; every step has exactly one name.

    Raises `InvalidInputError` for a template by which steps cannot be told apart, or whose names
    are not those of one folder.
    """

    def __init__(self, template: str = DEFAULT_TEMPLATE) -> None:
        found = _TEMPLATE.fullmatch(template)
        before, digits, after = found.groups() if found else (".", None, "")
        if before[:1] == "." or before[-1:].isdigit() or after[:1].isdigit():
            raise InvalidInputError(
                f"The template {template!r} gives no names of checkpoints.",
                next_step="Give a folder's name with one field for the step and no digit beside "
                f"it, such as {DEFAULT_TEMPLATE!r}; not beginning with a dot.",
            )
        self._before, self._after, self._digit_count = before, after, int(digits or 1)
        self._pattern = re.compile(rf"{re.escape(before)}([0-9]{{1,99}}){re.escape(after)}")

    def name_of(self, step: SupportsIndex) -> str:
        """Return the name of a step. Raises `InvalidInputError` for what is no step."""
        number = -1
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):
                number = operator.index(step)
        if not 0 <= number <= _MOST_STEP:
            raise InvalidInputError(
                f"{step!r} is no step.", next_step="Give a whole number from 0 on."
            )
        return f"{self._before}{number:0{self._digit_count}d}{self._after}"

    def step_of(self, name: str) -> int | None:
        """Return the step whose name this is, None for the name of something else."""
        found = self._pattern.fullmatch(name)
        step = int(found[1]) if found else -1
        # Not every spelling of a number is the one that we give.
        return step if 0 <= step <= _MOST_STEP and self.name_of(step) == name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one look at a folder gave.

    committed: `info` is of its newest commit. foreign: another tool wrote it. uncommitted: nothing
    is committed, and something lies there. empty: nothing does, or only slots of what was deleted.
    unreadable: `problem` says why. `slot` is that of the commit, or the last one; `age_s` counts
    from it, None where that is not known.
    """

    name: str
    step: int | None
    status: Literal["committed", "foreign", "uncommitted", "empty", "unreadable"]
    url: str = ""
    info: CheckpointInfo | None = None
    slot: int = 0
    is_damaged: bool = False
    age_s: float | None = None
    problem: CheckpointError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it is a checkpoint of the run that is not known to be damaged."""
        return self.status == "committed" and self.step is not None and not self.is_damaged

    @property
    def save_id(self) -> str | None:
        """The save that is committed, if it is one of ours."""
        return None if self.info is None else self.info.save_id


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
        another call a damaged one is among them, as if it were sound.
        """

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny(policies_of([self, other]))

    def __str__(self) -> str:
        policy: object = self  # a user's own need not be a dataclass
        values = [getattr(self, one.name) for one in fields(policy)] if is_dataclass(policy) else ()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keep the `n` newest, by step. Damaged ones do not count."""

    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return names with the reason."""
        return {one.name: f"{self}" for one in candidates[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(RetentionPolicy):
    """Keep those whose step is a multiple of `n`, for good."""

    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names of multiples."""
        return {one.name: f"{self}" for one in candidates if one.step % self.n == 0}


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keep the `n` whose recorded `metric` is smallest ("min") or largest ("max").

    Of equal ones the later step is better. One without the metric, or with a value that is not
    finite, is never best: training that diverged would be. Damaged ones do not count.
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
        values = [one.metrics.get(self.metric, math.nan) for one in candidates]
        finite = [place for place, value in enumerate(values) if math.isfinite(value)]
        best = sorted(finite, key=lambda place: (sign * values[place], place))[: -self.n - 1 : -1]
        return {
            candidates[place].name: f"{self}: {self.metric} is {values[place]:g}" for place in best
        }


@dataclass(frozen=True, slots=True)
class KeepNewerThan(RetentionPolicy):
    """Keep those that were committed less than `age` (seconds or `timedelta`) ago.

    The storage's clock counts, then and now; one whose age cannot be told is kept.
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
        found = {}
        for one in candidates:
            if one.age_s is None:
                found[one.name] = f"{self}: the storage does not tell its age"
            elif one.age_s < self.age_s:
                found[one.name] = f"{self}: {one.age_s:.0f} s old"
        return found

    def __str__(self) -> str:
        return f"KeepNewerThan({self.age_s:g} s)"


@dataclass(frozen=True, slots=True)
class KeepAny(RetentionPolicy):
    """Keep what any of the policies keeps; what `a | b` makes."""

    policies: tuple[RetentionPolicy, ...]

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names, each with the first reason."""
        pairs = [pair for one in reversed(self.policies) for pair in one.kept(candidates).items()]
        return dict(pairs)

    def __str__(self) -> str:
        return " | ".join(map(str, self.policies))


Keep = RetentionPolicy | Iterable[RetentionPolicy]
"""One policy or several; kept is what any of them keeps."""


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
    given: object = keep.policies if isinstance(keep, KeepAny) else keep
    if isinstance(given, RetentionPolicy):
        return (given,)
    found: tuple[RetentionPolicy, ...] = ()
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        found = tuple(policy for one in given for policy in policies_of(one))
    if not found:
        raise InvalidInputError(
            f"{keep!r} is no policy of retention, so nothing would be kept.",
            next_step="Give one or more, such as KeepLatest(3); or keep=None, which keeps all.",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of one checkpoint, and why; `step` is None for what is not of the run."""

    name: str
    step: int | None
    reasons: tuple[str, ...]
    info: CheckpointInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `is_dry_run` would do, with the reasons.

    kept, planned: what was to stay and what was to go, in the order of steps, oldest first.
    newest: the newest sound checkpoint; nothing is deleted without one.
    deleted: names of checkpoints that are gone. freed: save ids of attempts that nobody needs.
    skipped, failed: by name, why a deletion that was planned was not made, or not ended.
    leftovers: names under which nothing is committed and something lies.
    """

    kept: tuple[Decision, ...] = ()
    planned: tuple[Decision, ...] = ()
    newest: CheckpointInfo | None = None
    deleted: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    is_dry_run: bool = False


def plan_retention(
    found: Iterable[Found], keep: Keep, *, protected: Mapping[str, str] = MappingProxyType({})
) -> PruneReport:
    """Decide what is kept of what was found below a root, and give every reason.

    Kept is what any policy keeps. So are the newest sound checkpoint, the one that was committed
    last, what is not of this run, what may not be read, and what is `protected`, which maps names
    to reasons. So is the same save as one that is kept, as both names may mean one folder. Damaged
    ones take no place of a sound one. One is kept while nothing sound is newer, and while a policy
    would keep it if it were sound.
    """
    policies, everything = policies_of(keep), sorted(found, key=by_step)
    sound = [one for one in everything if one.is_sound]
    damaged = [one for one in everything if one.is_damaged and one.step is not None]
    newest, last = sound[-1] if sound else None, _last_committed(sound)
    reasons: dict[str, list[str]] = {one.name: [] for one in everything}
    for policy in policies:
        for name, reason in policy.kept(_candidates(sound)).items():
            reasons.get(name, []).append(reason)
        for one in damaged:
            # One failed read is little proof: the fault may be that of one host.
            doubt = policy.kept(_candidates(sorted([*sound, one], key=by_step))).get(one.name)
            reasons[one.name] += [] if doubt is None else [f"{doubt}, if it is sound after all"]
    for one in everything:
        reasons[one.name] += _protections(one, newest, last)
        reasons[one.name] += [protected[one.name]] if one.name in protected else []
    twins = {one.save_id: one.name for one in everything if one.save_id and reasons[one.name]}
    kept, planned = list[Decision](), list[Decision]()
    for one in everything:
        told = reasons[one.name]
        if not told and one.save_id in twins:
            told.append(f"it is the same save as {twins[one.save_id]}, and may be the same folder")
        lead = "it is damaged and " if one.is_damaged else ""
        why = tuple(told) or (f"{lead}not kept by {KeepAny(policies)}",)
        decision = Decision(name=one.name, step=one.step, reasons=why, info=one.info)
        if one.status not in {"uncommitted", "empty"}:
            (kept if told else planned).append(decision)
    return PruneReport(
        kept=tuple(kept),
        planned=tuple(planned),
        newest=newest.info if newest is not None else None,
        leftovers=tuple(one.name for one in everything if one.status == "uncommitted"),
        is_dry_run=True,
    )


def counted_by(keep: Keep, found: Collection[Found]) -> set[str]:
    """Return the names on which a plan rests: were one of them gone, others would be kept."""
    sound = _candidates(sorted((one for one in found if one.is_sound), key=by_step))
    policies = [one for one in policies_of(keep) if not isinstance(one, KeepEvery | KeepNewerThan)]
    return {name for policy in (*policies, KeepLatest(1)) for name in policy.kept(sound)}


def by_step(one: Found | Decision | CheckpointInfo) -> tuple[int, str]:
    """Return the key of the order of steps; what has none comes first."""
    return (-1 if one.step is None else one.step, one.name)


def begun_of(info: CheckpointInfo | None) -> int:
    """Return when a save began, as a number that only grows; 0 for those of other tools."""
    save_id = (info.save_id if info is not None else None) or ""
    return int("".join(filter(str.isdigit, save_id[:16])) or 0)


def _candidates(found: Iterable[Found]) -> list[Candidate]:
    return [Candidate.of(one.info, one.step or 0, one.age_s) for one in found if one.info]


def _last_committed(sound: Sequence[Found]) -> Found | None:
    """Return the last by the storage's clock; by when saves began, if it does not tell all ages."""
    if all(one.age_s is not None for one in sound):
        return max(sound, key=lambda one: (-(one.age_s or 0.0), by_step(one)), default=None)
    return max(sound, key=lambda one: (begun_of(one.info), by_step(one)))


def _protections(one: Found, newest: Found | None, last: Found | None) -> Iterator[str]:
    """Yield the reasons that hold whatever the policies say."""
    if one.step is None:
        yield "it does not belong to this run"
    elif one.status == "foreign":
        yield f"another tool wrote it ({one.info.format if one.info is not None else '?'})"
    elif one.status == "unreadable":
        yield f"unreadable: {one.problem}"
    elif one.status == "committed":
        if newest is None or by_step(one) > by_step(newest):
            yield "it is damaged, and nothing sound is newer"
        elif one is newest:
            yield "it is the newest sound checkpoint"
        elif one is last:
            # After training went back to an earlier step, this is the newest work.
            yield "it was committed last"
