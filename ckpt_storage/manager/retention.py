"""What to keep of the checkpoints of a run, and why: policies as values, and the plan they make.

Pure: no I/O and no clock of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError

Save = tuple[str, str]
"""A save under a name: a copy under another name has the same id, and may be damaged alone."""


Need = Literal["metrics", "age"]
"""What of a candidate a policy may decide by, beside its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One committed checkpoint of the run, as policies see it.

    `age_s` counts from its commit; None where that is not known. `info` is None where nothing but
    its name was read.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    age_s: float | None
    info: CheckpointInfo | None


class RetentionPolicy(ABC):
    """One rule of retention; `a | b` keeps what either keeps.

    `needs` says what of the candidates it looks at. Without "age" any age may be None. Without
    "metrics" those may be missing that other policies keep by their step alone. A class that has
    its own `kept` needs both, unless it says otherwise.
    """

    __slots__ = ()
    needs: ClassVar[frozenset[Need]] = frozenset({"metrics", "age"})

    def __init_subclass__(cls) -> None:
        # A rule derived from one of ours may look at more than that does.
        if "kept" in vars(cls) and "needs" not in vars(cls):
            cls.needs = RetentionPolicy.needs

    @abstractmethod
    def kept(self, candidates: Sequence[Candidate]) -> Mapping[str, str]:
        """Return the names that the rule keeps, each with the reason.

        `candidates` are all sound committed checkpoints of the run, the lowest step first.
        """

    def kept_by_step(self, step: int) -> str | None:
        """Return why a step is kept whatever else is known of its checkpoint; None: it may not."""
        del step
        return None

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        return KeepAny(policies_of([self, other]))


@dataclass(frozen=True, slots=True)
class KeepLatest(RetentionPolicy):
    """Keep the `n` newest, by step. Damaged ones do not count."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        return {one.name: f"{self}" for one in candidates[-self.n :]}

    def __str__(self) -> str:
        return f"KeepLatest({self.n})"


@dataclass(frozen=True, slots=True)
class KeepEvery(RetentionPolicy):
    """Keep those whose step is a multiple of `n`, for good."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    n: int

    def __post_init__(self) -> None:
        _check_count(self, self.n)

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        return {one.name: f"{self}" for one in candidates if self.kept_by_step(one.step)}

    def kept_by_step(self, step: int) -> str | None:
        """Return why a step is kept whatever else is known of its checkpoint; None: it may not."""
        return None if step % self.n else f"{self}"

    def __str__(self) -> str:
        return f"KeepEvery({self.n})"


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionPolicy):
    """Keep the `n` whose recorded `metric` is smallest ("min") or largest ("max").

    Of equal ones the later step is better. One without the metric, or with a value that is not
    finite, is never best: training that diverged would be. Damaged ones do not count.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"metrics"})
    metric: str
    mode: Literal["min", "max"]
    n: int = 1

    def __post_init__(self) -> None:
        _check_count(self, self.n)
        if self.mode not in {"min", "max"}:
            raise InvalidInputError(f"mode is {self.mode!r}.", next_step="Give 'min' or 'max'.")

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        sign = 1.0 if self.mode == "max" else -1.0
        ranked = sorted(
            (
                (sign * value, place, one.name, value)
                for place, one in enumerate(candidates)
                if math.isfinite(value := one.metrics.get(self.metric, math.nan))
            ),
            reverse=True,
        )
        return {
            name: f"{self}: {self.metric} is {value:g}" for _, _, name, value in ranked[: self.n]
        }

    def __str__(self) -> str:
        return f"KeepBest({self.metric!r}, {self.mode!r}, {self.n})"


@dataclass(frozen=True, slots=True)
class KeepNewerThan(RetentionPolicy):
    """Keep those that were committed less than `age` (seconds or `timedelta`) ago.

    The storage's clock counts, then and now; one whose age cannot be told is kept.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"age"})
    age: float | timedelta

    def __post_init__(self) -> None:
        seconds_of(self.age, what="The age of KeepNewerThan")

    @property
    def age_s(self) -> float:
        """The age in seconds."""
        return seconds_of(self.age, what="The age of KeepNewerThan")

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
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
        """Return the names that the rule keeps, each with the first reason."""
        found: dict[str, str] = {}
        for policy in self.policies:
            found = {**policy.kept(candidates), **found}
        return found

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
    """Return single policies, `|` and nesting resolved.

    Raises `InvalidInputError` for what is none, and for none at all: that would keep nothing.
    """
    given: object = keep.policies if isinstance(keep, KeepAny) else keep
    if isinstance(given, RetentionPolicy):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidInputError(
            f"{keep!r} is no policy of retention.",
            next_step="Give KeepLatest, KeepEvery, KeepBest or another RetentionPolicy.",
        )
    found = tuple(policy for one in given for policy in policies_of(one))
    if not found:
        raise InvalidInputError(
            "No policy of retention is given, so nothing would be kept.",
            next_step="Give at least one, such as KeepLatest(3); or keep=None, which keeps all.",
        )
    return found


def newest_count(policies: Iterable[RetentionPolicy]) -> int:
    """Return how many of the newest sound checkpoints must be known before the rest is judged."""
    return max([1, *(policy.n for policy in policies if isinstance(policy, KeepLatest))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of one checkpoint, and why.

    `info` is None where its name alone decided and nothing was read. `step` is None for what does
    not belong to the run.
    """

    name: str
    step: int | None
    reasons: tuple[str, ...]
    info: CheckpointInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What a prune would do. `kept` and `deleted` are in the order of steps, oldest first.

    `anchor` is the newest sound checkpoint; nothing is deleted without one. `counted` are names
    that policies count: were one of them gone, others would be kept. `leftovers` are names under
    which nothing is committed and something lies, perhaps of a save that died.
    """

    kept: tuple[Decision, ...] = ()
    deleted: tuple[Decision, ...] = ()
    anchor: CheckpointInfo | None = None
    counted: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()


def save_of(info: CheckpointInfo) -> Save:
    """Return what stands for a save where several checkpoints are compared."""
    return (info.name, info.save_id or "")


def last_committed(
    infos: Iterable[CheckpointInfo], committed_s: Mapping[str, float | None]
) -> CheckpointInfo | None:
    """Return what was committed last, by the storage's clock; of equal ones the highest step.

    Where the storage does not tell of all of them, the clocks of the savers count.
    """
    given = list(infos)
    times_s = {info.name: committed_s.get(info.name) for info in given}
    if None in times_s.values():
        times_s = {info.name: _time_s(info.created_at) for info in given}
    return max(given, key=lambda info: (times_s[info.name] or 0.0, _order(info)), default=None)


def _time_s(stamp: str | None) -> float:
    try:
        return datetime.fromisoformat(stamp or "").timestamp()
    except ValueError:
        return 0.0


def plan_prune(
    infos: Iterable[CheckpointInfo],
    keep: Keep,
    *,
    now_s: float | None = None,
    committed_s: Mapping[str, float | None] | None = None,
    min_age_s: float = 0.0,
    damaged: Collection[Save] = (),
    in_use: Mapping[str, str] | None = None,
) -> PrunePlan:
    """Decide what of the committed checkpoints `infos` is kept, and give every reason.

    Kept is what any policy keeps; always the newest sound one; what another tool wrote, or has no
    step; what is younger than `min_age_s`, or of an age that cannot be told, if `min_age_s` is not
    0; what is in use; what is the same save as one that is kept, as both names may mean one folder.
    Damaged ones take no place of a sound one; each is kept while nothing sound is newer, and
    while a policy would keep it if it were sound: what one process could not read may be sound.

    Args:
        infos: committed checkpoints with distinct names; `step` None: not of this run.
        keep: policies.
        now_s: the storage's clock, Unix seconds; needed for ages.
        committed_s: by name, when it was committed, by the storage's clock.
        min_age_s: see above.
        damaged: those known to be damaged, by name and save id.
        in_use: by name, by whom it is read or written now.

    Raises:
        InvalidInputError: for policies that are none.

    """
    policies = policies_of(keep)
    times_s, busy = committed_s or {}, in_use or {}
    everything = sorted(infos, key=_order)
    ours = [info for info in everything if info.step is not None and info.format == "ckpt_storage"]
    sound = [info for info in ours if save_of(info) not in damaged]
    anchor = sound[-1] if sound else None
    ages_s = {info.name: _age_s(times_s.get(info.name), now_s) for info in ours}
    candidates = [_candidate(info, ages_s) for info in sound]
    by_policy = [policy.kept(candidates) for policy in policies]
    for info in ours:
        if save_of(info) not in damaged:
            continue
        # One failed read is little proof: the fault may be that of one host.
        as_sound = [_candidate(one, ages_s) for one in sorted([*sound, info], key=_order)]
        found = [policy.kept(as_sound).get(info.name) for policy in policies]
        by_policy += [{info.name: f"{why}, if it is sound after all"} for why in found if why]
    reasons = {
        info.name: [
            *(found[info.name] for found in by_policy if info.name in found),
            *_protections(info, anchor, ages_s, min_age_s, busy),
        ]
        for info in everything
    }
    twins = {info.save_id: info.name for info in ours if reasons[info.name]}
    kept, deleted = [], []
    for info in everything:
        why = reasons[info.name]
        twin = twins.get(info.save_id) if info.format == "ckpt_storage" else None
        if not why and twin is not None:
            why = [f"it is the same save as {twin}, and may be the same folder"]
        if why:
            kept.append(_decision(info, why))
        else:
            lead = "it is damaged and " if save_of(info) in damaged else ""
            deleted.append(_decision(info, [f"{lead}not kept by {KeepAny(policies)}"]))
    counted = [
        name
        for policy, found in zip(policies, by_policy, strict=False)
        if not isinstance(policy, KeepEvery | KeepNewerThan)
        for name in found
    ]
    counted += [anchor.name] if anchor is not None else []
    return PrunePlan(
        kept=tuple(kept),
        deleted=tuple(deleted),
        anchor=anchor,
        counted=tuple(dict.fromkeys(counted)),
    )


def _order(info: CheckpointInfo) -> tuple[int, str]:
    return (-1 if info.step is None else info.step, info.name)


def _age_s(committed_s: float | None, now_s: float | None) -> float | None:
    return None if committed_s is None or now_s is None else now_s - committed_s


def _candidate(info: CheckpointInfo, ages_s: Mapping[str, float | None]) -> Candidate:
    return Candidate(
        name=info.name,
        step=info.step or 0,
        metrics=info.metrics,
        age_s=ages_s[info.name],
        info=info,
    )


def _decision(info: CheckpointInfo, reasons: Sequence[str]) -> Decision:
    return Decision(name=info.name, step=info.step, reasons=tuple(reasons), info=info)


def _protections(
    info: CheckpointInfo,
    anchor: CheckpointInfo | None,
    ages_s: Mapping[str, float | None],
    min_age_s: float,
    in_use: Mapping[str, str],
) -> list[str]:
    """Return the reasons that hold whatever the policies say."""
    if info.step is None:
        return ["it does not belong to this run"]
    if info.format != "ckpt_storage":
        return [f"another tool wrote it ({info.format})"]
    found = []
    if anchor is None or _order(info) > _order(anchor):
        found.append("it is damaged, and nothing sound is newer")
    elif info.name == anchor.name:
        found.append("it is the newest sound checkpoint")
    if info.name in in_use:
        found.append(in_use[info.name])
    if min_age_s > 0:
        age_s = ages_s[info.name]
        if age_s is None:
            found.append("the storage does not tell its age")
        elif age_s < min_age_s:
            found.append(f"it is {age_s:.0f} s old, less than {min_age_s:g} s")
    return found
