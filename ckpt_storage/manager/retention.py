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
    folders: Iterable[FolderState],
    keep: Keep,
    *,
    protected: Mapping[str, str] = MappingProxyType({}),
) -> PruneReport:
    """Decide which folders below a root are kept, and give every reason.

    Kept is what any policy keeps. So are the newest sound checkpoint, the one that was committed
    last, what is not of this run, what may not be read, and what is `protected`, which maps names
    to reasons. So is the same save as one that is kept, as both names may mean one folder. Damaged
    ones take no place of a sound one. One is kept while nothing sound is newer, and while a policy
    would keep it if it were sound.
    """
    policies, ordered = policies_of(keep), sorted(folders, key=by_step)
    sound = [folder for folder in ordered if folder.is_sound]
    damaged = [folder for folder in ordered if folder.is_damaged and folder.step is not None]
    newest, last = sound[-1] if sound else None, _last_committed(sound)
    reasons: dict[str, list[str]] = {folder.name: [] for folder in ordered}
    for policy in policies:
        for name, reason in policy.kept(_candidates(sound)).items():
            reasons.get(name, []).append(reason)
        for folder in damaged:
            # One failed read is little proof: the fault may be that of one host.
            candidates = _candidates(sorted([*sound, folder], key=by_step))
            if (doubt := policy.kept(candidates).get(folder.name)) is not None:
                reasons[folder.name].append(f"{doubt}, if it is sound after all")
    for folder in ordered:
        reasons[folder.name] += _protections(folder, newest, last)
        reasons[folder.name] += [protected[folder.name]] if folder.name in protected else []
    names_kept = {folder.save_id: folder.name for folder in ordered if reasons[folder.name]}
    kept, planned = list[Decision](), list[Decision]()
    for folder in ordered:
        why = reasons[folder.name]
        twin = names_kept.get(folder.save_id) if folder.save_id else None
        if not why and twin is not None:
            why.append(f"it is the same save as {twin}, and may be the same folder")
        lead = "it is damaged and " if folder.is_damaged else ""
        decision = Decision(
            name=folder.name,
            step=folder.step,
            reasons=tuple(why) or (f"{lead}not kept by {KeepAny(policies)}",),
            info=folder.info,
        )
        if folder.status not in {"uncommitted", "empty"}:
            (kept if why else planned).append(decision)
    return PruneReport(
        kept=tuple(kept),
        planned=tuple(planned),
        newest=newest.info if newest is not None else None,
        leftovers=tuple(folder.name for folder in ordered if folder.status == "uncommitted"),
        is_dry_run=True,
    )


def counted_by(keep: Keep, folders: Collection[FolderState]) -> set[str]:
    """Return the names on which a plan rests: were one of them gone, others would be kept."""
    sound = _candidates(sorted((folder for folder in folders if folder.is_sound), key=by_step))
    policies = (*policies_of(keep), KeepLatest(1))
    return {name for policy in policies for name in policy.rests_on(sound)}


def by_step(one: FolderState | Decision | CheckpointInfo) -> tuple[int, str]:
    """Return the key of the order of steps; what has none comes first."""
    return (-1 if one.step is None else one.step, one.name)


def _candidates(folders: Iterable[FolderState]) -> list[Candidate]:
    return [Candidate.of(one.info, one.step or 0, one.age_s) for one in folders if one.info]


def _last_committed(sound: Sequence[FolderState]) -> FolderState | None:
    """Return the last by the storage's clock; by when saves began, if it does not tell all ages."""
    if all(one.age_s is not None for one in sound):
        return max(sound, key=lambda one: (-(one.age_s or 0.0), by_step(one)), default=None)
    return max(sound, key=lambda one: (begun_s(one.info), by_step(one)))


def _protections(
    folder: FolderState, newest: FolderState | None, last: FolderState | None
) -> Iterator[str]:
    """Yield the reasons that hold whatever the policies say."""
    if folder.step is None:
        yield "it does not belong to this run"
    elif folder.status == "foreign":
        yield f"another tool wrote it ({folder.info.format if folder.info is not None else '?'})"
    elif folder.status == "unreadable":
        yield f"unreadable: {folder.problem}"
    elif folder.status == "committed":
        if newest is None or by_step(folder) > by_step(newest):
            yield "it is damaged, and nothing sound is newer"
        elif folder is newest:
            yield "it is the newest sound checkpoint"
        elif folder is last:
            # After training went back to an earlier step, this is the newest work.
            yield "it was committed last"
