"""Resuming: the newest checkpoint that can be loaded whole, the same one on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import picklable_copy
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    RankFailedError,
)
from ckpt_storage.inspect.verify import check_part, part_bytes
from ckpt_storage.options import check_choice
from ckpt_storage.store.deadline import Deadline

from .retention import FolderState
from .root import USELESS, Root, damage_of, newest_first, newest_of

log = logging.getLogger("ckpt_storage")

Check = Literal["read", "deep"]
"""read: what is loaded is checked on its way. deep: before that the ranks read every byte."""

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_S = 16 << 20
"""Of one rank that checks. Who is slower, and longer at it than a load may take, hangs."""

_MOST_AGAIN = 5
"""How often a checkpoint may be saved anew while it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A committed checkpoint that could not be loaded, and why.

    `save_id` is None if its commit record could not be read, or another tool wrote it.
    """

    name: str
    url: str
    reason: str
    save_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was loaded, and what was newer but of no use, newest first."""

    info: CheckpointInfo
    step: int
    skipped: tuple[SkippedCheckpoint, ...] = ()


_Choice = tuple[CheckpointInfo | None, int, list[SkippedCheckpoint]]
"""What the coordinator chose, the number of its root, and what it passed over."""

Load = Callable[..., None]
"""Loads what lies at a URL, with `storage_options`, on all ranks, and raises on all of them."""


class Resumer:
    """One restore on one rank, together with the others; with `step` of that step only."""

    def __init__(
        self,
        ranks: RankGroup,
        roots: Sequence[Root],
        *,
        check: Check = "read",
        step: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._roots = roots
        self._check: Check = check
        self._step = step
        self._timeouts = roots[0].timeouts
        self._url = " and ".join(root.location.url for root in roots)
        self._tried: set[tuple[Root, str]] = set()
        self._problem: CheckpointError | None = None
        self._again_count = 0
        self._release: Callable[[], None] = lambda: None

    def first(self) -> CheckpointInfo | None:
        """Return on all ranks what a restore would try first."""
        return self._told(lambda deadline: newest_of(self._roots, deadline))

    def run(self, load: Load) -> Restored | None:
        """Load the newest that can be; return None if nothing was ever committed.

        Training must not begin anew unnoticed: raises if there are some and none can be loaded.
        """
        skipped: list[SkippedCheckpoint] = []
        try:
            while True:
                self._release()
                info, place, passed = self._told(self._next)
                skipped += passed
                if info is None:
                    break
                root = self._roots[place]
                problem, now_id = self._try(load, root, info)
                if problem is None and now_id == info.save_id:
                    root.found_sound(info.name, info.save_id)
                    if skipped and self._ranks.is_coordinator:
                        _report_skipped(info, skipped)
                    return Restored(info=info, step=info.step or 0, skipped=tuple(skipped))
                if problem is None or now_id not in {"gone", info.save_id}:
                    self._again(root, info)
                    continue
                if isinstance(problem, IntegrityError):
                    root.found_damaged(info, str(problem))
                skipped.append(_skipped(info, problem))
        finally:
            self._release()
        if skipped:
            raise IntegrityError(
                f"None of the {len(skipped)} committed checkpoints below {self._url} can be "
                f"loaded. {skipped[0].name}: {skipped[0].reason}",
                path=self._url,
                phase="load",
                next_step="Run verify on them, and restore one from a copy; an empty root begins "
                "anew.",
            )
        if self._step is None:
            return None
        what = f"There is no checkpoint of step {self._step} below {self._url}."
        raise CheckpointNotFoundError(what, path=self._url, next_step="all() lists what is there.")

    def _told(self, choose: Callable[[Deadline], _T]) -> _T:
        """Return on all ranks what the coordinator chooses; all came with equal arguments."""
        what = f"the choice of a checkpoint below {self._url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            check_choice("check", self._check, Check)
            operation.meet({"check": self._check, "the step": str(self._step)})
            if self._step is not None:
                self._roots[0].names.name_of(self._step)  # what is no step is refused on each rank
            deadline = operation.phase("load")
            chosen = choose(deadline) if operation.is_coordinator else None
            found: _T = operation.broadcast(chosen)  # type: ignore[assignment]  # the coordinator's
        return found

    def _again(self, root: Root, info: CheckpointInfo) -> None:
        """Let a checkpoint be chosen once more: which save of it was loaded is not known."""
        self._again_count += 1
        if self._again_count > _MOST_AGAIN:
            raise CheckpointInProgressError(
                f"{info.url} was saved anew {self._again_count} times while it was loaded.",
                path=info.url,
                phase="load",
                next_step="Find out which job overwrites it, and restore when it has ended.",
            )
        log.info("%s was saved anew while it was loaded; it is loaded again", info.url)
        self._tried.discard((root, info.name))

    def _next(self, deadline: Deadline) -> _Choice:
        """Return the newest that was not tried yet and seems to be of use, and keep it in use."""
        skipped: list[SkippedCheckpoint] = []
        candidates = newest_first(self._roots, deadline)
        if self._step is not None:
            name = self._roots[0].names.name_of(self._step)
            meant = FolderState(name=name, step=self._step, status="committed")
            candidates = iter([(root, meant) for root in self._roots])
        for root, found in candidates:
            if (root, found.name) in self._tried:
                continue
            self._tried.add((root, found.name))
            now = found
            if found.status in {"committed", "foreign"}:
                # Kept from our own pruner; what is there then counts.
                by, limit_s = "it is being loaded", deadline.remaining_s()
                self._release = root.uses.take(found.name, by, timeout_s=limit_s)
                now = root.look_at(found.name, deadline)
            # Another copy of the step that is meant may do, whatever is wrong with this one.
            problem = damage_of(now) if self._step is None else now.problem
            if problem is None and now.info is not None:
                return now.info, self._roots.index(root), skipped
            self._release()
            if problem is not None:
                skipped.append(_skipped(now, problem))
                self._problem = self._problem or problem
        if self._step is not None and self._problem is not None:
            raise self._problem
        return None, 0, skipped

    def _read_all(self, root: Root, info: CheckpointInfo) -> None:
        """Read every byte, each rank a part, in bounded time; raises on all what one rank finds."""
        rank, count = self._ranks.rank, self._ranks.world_size
        what = f"the check of {info.url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            operation.meet(_terms_of(info))
            deadline = operation.phase("load")
            sizes = part_bytes(root.open(deadline, info.name), count)
            # Alike on all ranks: who has little to read waits for who has most.
            limit_s = max(self._timeouts.load, max(sizes) / _SLOWEST_BYTES_PER_S)
            deadline = operation.phase("load", limit_s, total_bytes=sizes[rank])
            check_part(root.open(deadline, info.name), rank, count, deep=True)
            operation.all_gather(None)

    def _try(
        self, load: Load, root: Root, info: CheckpointInfo
    ) -> tuple[CheckpointError | None, str | None]:
        """Load; return on all ranks why it is of no use, and the save there then, or "gone"."""
        error: CheckpointError | None = None
        try:
            if self._check == "deep":
                self._read_all(root, info)
            place = root.location.child(info.name)
            load(place.target, storage_options=place.storage_options)
        except CheckpointError as failure:
            error = failure
        # One rank may have failed in what others ended well: all say how it went.
        what = f"the outcome of loading {info.url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            operation.meet(_terms_of(info))
            errors = operation.all_gather(None if error is None else picklable_copy(error))
            found: list[CheckpointError] = [one for one in errors if one is not None]
            # A rank that was told of another's failure while it read says only that.
            causes = [one for one in found if not _is_echo(one)] or found
            grave = next((one for one in causes if not isinstance(one, USELESS)), None)
            now_id: str | None = None
            if operation.is_coordinator and grave is None:
                now = root.look_at(info.name, operation.phase("load")).info
                now_id = "gone" if now is None else now.save_id
            now_id = operation.broadcast(now_id)
        if grave is not None:
            is_own = error is not None and not isinstance(error, USELESS) and not _is_echo(error)
            raise error if error is not None and is_own else grave
        return (causes[0] if causes else None), now_id


def _report_skipped(info: CheckpointInfo, skipped: Sequence[SkippedCheckpoint]) -> None:
    """Log what could not be loaded; as an error if training falls back to an older step."""
    is_older = any(checkpoint.name != info.name for checkpoint in skipped)
    lost = (
        " What was trained since then is LOST." if is_older else " It is a copy of the same step."
    )
    reasons = "; ".join(f"{checkpoint.name}: {checkpoint.reason}" for checkpoint in skipped)
    level = logging.ERROR if is_older else logging.WARNING
    log.log(level, "Resumed from %s.%s These could not be loaded: %s", info.url, lost, reasons)


def _skipped(one: FolderState | CheckpointInfo, problem: CheckpointError) -> SkippedCheckpoint:
    return SkippedCheckpoint(name=one.name, url=one.url, reason=str(problem), save_id=one.save_id)


def _terms_of(info: CheckpointInfo) -> dict[str, str]:
    return {"the checkpoint": str(info.save_id or info.name)}


def _is_echo(error: CheckpointError) -> bool:
    """Return whether this is the news of another rank's failure, which that rank tells itself."""
    return isinstance(error, RankFailedError) and not error.is_silent
