"""Which checkpoints below a root are kept and which are deleted, with every reason. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError

from .policies import Candidate, Keep, KeepAny, KeepLatest, begun_s, policies_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderState:
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
    found: Iterable[FolderState], keep: Keep, *, protected: Mapping[str, str] = MappingProxyType({})
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


def counted_by(keep: Keep, found: Collection[FolderState]) -> set[str]:
    """Return the names on which a plan rests: were one of them gone, others would be kept."""
    sound = _candidates(sorted((one for one in found if one.is_sound), key=by_step))
    policies = (*policies_of(keep), KeepLatest(1))
    return {name for policy in policies for name in policy.rests_on(sound)}


def by_step(one: FolderState | Decision | CheckpointInfo) -> tuple[int, str]:
    """Return the key of the order of steps; what has none comes first."""
    return (-1 if one.step is None else one.step, one.name)


def _candidates(found: Iterable[FolderState]) -> list[Candidate]:
    return [Candidate.of(one.info, one.step or 0, one.age_s) for one in found if one.info]


def _last_committed(sound: Sequence[FolderState]) -> FolderState | None:
    """Return the last by the storage's clock; by when saves began, if it does not tell all ages."""
    if all(one.age_s is not None for one in sound):
        return max(sound, key=lambda one: (-(one.age_s or 0.0), by_step(one)), default=None)
    return max(sound, key=lambda one: (begun_s(one.info), by_step(one)))


def _protections(
    one: FolderState, newest: FolderState | None, last: FolderState | None
) -> Iterator[str]:
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
