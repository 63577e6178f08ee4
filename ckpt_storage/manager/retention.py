"""Which checkpoints below a root are kept and which are deleted, with every reason. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError

from .folders import FolderState, by_step
from .policies import (
    Candidate,
    Keep,
    KeepAny,
    KeepLatest,
    KeepPart,
    RetentionPolicy,
    begun_s,
    policies_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneDecision:
    """Whether one checkpoint stays, and why; `step` is None for folders that are not of the run."""

    name: str
    step: int | None
    reasons: tuple[str, ...]
    info: CheckpointInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `is_dry_run` would do, with the reasons.

    kept, planned: the decisions to keep and to delete, in the order of steps, oldest first.
    newest: the newest sound, whole checkpoint; nothing is deleted without one.
    parts: the decisions to keep a part: these are to be thinned. thinned: names of those that were.
    deleted: names of checkpoints that are gone. freed: save ids of dead saves whose files are gone.
    skipped, failed: by name, why a planned deletion was not begun, or failed.
    leftovers: names of folders that hold files and no commit.
    """

    kept: tuple[PruneDecision, ...] = ()
    planned: tuple[PruneDecision, ...] = ()
    newest: CheckpointInfo | None = None
    parts: tuple[PruneDecision, ...] = ()
    deleted: tuple[str, ...] = ()
    thinned: tuple[str, ...] = ()
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
    undroppable: Collection[str] = (),
) -> PruneReport:
    """Decide which folders below a root are kept, and give every reason.

    Kept are all that any policy keeps, the newest sound, whole checkpoint, the last commit,
    folders that are not of this run or may not be read, and `protected`, which maps names to
    reasons; also a second copy of a kept save, as both names may mean one folder. Policies count
    sound checkpoints only. A damaged checkpoint is kept while nothing sound is newer, and while a
    policy would keep it if it were sound. With a `KeepPart`, all other sound checkpoints are
    thinned in place of being deleted; of the saves `undroppable` nothing can be dropped.
    """
    policies, ordered = policies_of(keep), sorted(folders, key=by_step)
    sound = [folder for folder in ordered if folder.is_sound]
    whole = [folder for folder in sound if not (folder.info and folder.info.part)]
    newest, last = whole[-1] if whole else None, _last_committed(whole)
    thins = part_policy_of(policies)
    reasons = _reasons(policies, ordered, sound, thins)
    for folder in ordered:
        reasons[folder.name] += _protections(folder, newest, last)
        reasons[folder.name] += [protected[folder.name]] if folder.name in protected else []
    names_kept = {folder.save_id: folder.name for folder in ordered if reasons[folder.name]}
    kept, planned, parts = list[PruneDecision](), list[PruneDecision](), list[PruneDecision]()
    for folder in ordered:
        to_keep = reasons[folder.name]
        twin = names_kept.get(folder.save_id) if folder.save_id else None
        if not to_keep and twin is not None:
            to_keep.append(f"it is the same save as {twin}, and may be the same folder")
        is_part = thins is not None and folder.is_sound and not to_keep
        if is_part and (_is_thin(folder, thins) or folder.save_id in undroppable):
            to_keep.append(f"{thins}")
        lead = "it is damaged and " if folder.is_damaged else ""
        fate = f"{thins}" if is_part else f"{lead}not kept by {KeepAny(policies)}"
        decision = PruneDecision(
            name=folder.name,
            step=folder.step,
            reasons=tuple(to_keep) or (fate,),
            info=folder.info,
        )
        if folder.status not in {"uncommitted", "empty"}:
            (kept if to_keep else parts if is_part else planned).append(decision)
    return PruneReport(
        kept=tuple(kept),
        planned=tuple(planned),
        parts=tuple(parts),
        newest=newest.info if newest is not None else None,
        leftovers=tuple(folder.name for folder in ordered if folder.status == "uncommitted"),
        is_dry_run=True,
    )


def _reasons(
    policies: Sequence[RetentionPolicy],
    ordered: Sequence[FolderState],
    sound: Sequence[FolderState],
    thins: KeepPart | None,
) -> dict[str, list[str]]:
    """Return the reasons of policies to keep each folder whole."""
    reasons: dict[str, list[str]] = {folder.name: [] for folder in ordered}
    damaged = [folder for folder in ordered if folder.is_damaged and folder.step is not None]
    for policy in policies:
        for name, reason in policy.kept(_candidates(sound)).items():
            reasons.get(name, []).append(reason)
        for folder in damaged:
            # A failed read is weak evidence: the fault may be that of one host.
            candidates = _candidates(sorted([*sound, folder], key=by_step))
            doubt = f"{thins}" if policy is thins else policy.kept(candidates).get(folder.name)
            if doubt is not None:
                reasons[folder.name].append(f"{doubt}, if it is sound after all")
    return reasons


def _is_thin(folder: FolderState, policy: KeepPart | None) -> bool:
    return bool(policy and folder.info and policy.is_met_by(folder.info))


def part_policy_of(policies: Iterable[RetentionPolicy]) -> KeepPart | None:
    """Return the policy that thins, None if none does. Raises `InvalidInputError` for several."""
    parts = [policy for policy in policies if isinstance(policy, KeepPart)]
    if len(parts) > 1:
        raise InvalidInputError(
            f"Of {parts[0]} and {parts[1]} it is not clear what stays.",
            next_step="Give one KeepPart, with all that is to be dropped.",
        )
    return parts[0] if parts else None


def supports_of(keep: Keep, folders: Collection[FolderState]) -> set[str]:
    """Return the names that a plan rests on: if one of them were gone, others would be kept."""
    sound = _candidates(sorted((folder for folder in folders if folder.is_sound), key=by_step))
    policies = (*policies_of(keep), KeepLatest(1))
    return {name for policy in policies for name in policy.kept(sound)}


def _candidates(folders: Iterable[FolderState]) -> list[Candidate]:
    return [
        Candidate.of(folder.info, folder.step or 0, folder.age_s)
        for folder in folders
        if folder.info is not None
    ]


def _last_committed(sound: Sequence[FolderState]) -> FolderState | None:
    """Return the youngest by the storage's clock; if it lacks an age, by when saves began."""
    if all(folder.age_s is not None for folder in sound):
        return max(
            sound, key=lambda folder: (-(folder.age_s or 0.0), by_step(folder)), default=None
        )
    return max(sound, key=lambda folder: (begun_s(folder.info), by_step(folder)))


def _protections(
    folder: FolderState, newest: FolderState | None, last: FolderState | None
) -> Iterator[str]:
    """Yield the reasons to keep a folder that no policy can overrule."""
    if folder.step is None:
        yield "it does not belong to this run"
    elif folder.status == "foreign":
        yield f"another tool wrote it ({folder.info.format if folder.info is not None else '?'})"
    elif folder.status == "unreadable":
        yield f"unreadable: {folder.problem}"
    elif folder.status == "committed":
        if newest is None or by_step(folder) > by_step(newest):
            is_part = not folder.is_damaged and folder.info is not None and folder.info.part
            what = "thin, and nothing whole" if is_part else "damaged, and nothing sound"
            yield f"it is {what} is newer"
        elif folder is newest:
            yield "it is the newest sound checkpoint"
        elif folder is last:
            # After training went back to an earlier step, this is the newest work.
            yield "it was committed last"
