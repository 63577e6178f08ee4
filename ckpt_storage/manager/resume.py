"""Resuming: the newest checkpoint that can be loaded, the same on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import picklable_copy
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidInputError,
    RankFailedError,
)
from ckpt_storage.inspect.verify import check_part, part_bytes
from ckpt_storage.options import check_choice
from ckpt_storage.store import redacted_url
from ckpt_storage.store.deadline import Deadline

from .folders import FolderState, damage_of
from .listing import find_newest, newest_first
from .root import UNUSABLE, Root
from .selection import select

log = logging.getLogger("ckpt_storage")

Check = Literal["read", "deep"]
"""read: loaded bytes are verified. deep: before that, the ranks verify the whole checkpoint."""

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_S = 16 << 20
"""A rank that verifies more slowly, and for longer than a load may take, counts as hanging."""

_MAX_RELOADS = 5
"""How often a checkpoint may be replaced while it is loaded."""


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
    """The checkpoint that was loaded, and newer checkpoints that could not be, newest first.

    `step` is 0 for a checkpoint of another root whose record and name have no step.
    """

    info: CheckpointInfo
    step: int
    skipped: tuple[SkippedCheckpoint, ...] = ()


_Choice = tuple[CheckpointInfo | None, int, list[SkippedCheckpoint]]
"""The coordinator's choice: a checkpoint, the index of its root, and those it skipped."""

Load = Callable[..., object]
"""Loads the checkpoint at a URL, with `storage_options`, on all ranks, and raises on all."""


class Resumer:
    """One restore on one rank, together with the others.

    It loads the newest checkpoint below `roots`, that of `step`, or that at `url`. With `part` a
    checkpoint that holds some values only is loaded, too. `restore_count` is how often this rank
    has restored before; afterwards, the same on all ranks, it includes this restore.
    """

    def __init__(
        self,
        ranks: RankGroup,
        roots: Sequence[Root],
        *,
        check: Check = "read",
        step: int | None = None,
        url: str | os.PathLike[str] | None = None,
        part: bool = False,
        restore_count: int = 0,
    ) -> None:
        self._count_before = self.restore_count = restore_count
        self._ranks = ranks
        self._roots = roots
        self._check: Check = check
        self._selected = "the newest" if step is None else f"step {step}"
        self._selected = self._selected if url is None else redacted_url(url)
        self._step, self._at = step, url
        self._takes_parts = part
        self._name: str | None = None
        self._timeouts = roots[0].timeouts
        self._url = " and ".join(root.location.url for root in roots)
        self._tried: set[tuple[Root, str]] = set()
        self._problem: CheckpointError | None = None
        self._reload_count = 0
        self._release: Callable[[], None] = lambda: None

    def first(self) -> CheckpointInfo | None:
        """Return on all ranks the checkpoint that a restore would try first."""
        return self._agree(lambda deadline: find_newest(self._roots, deadline))

    def run(self, load: Load) -> Restored | None:
        """Load the newest that can be loaded; return None if nothing was ever committed.

        Raises if there are checkpoints and none can be loaded: training must not start over
        unnoticed.
        """
        skipped: list[SkippedCheckpoint] = []
        try:
            while True:
                self._release()
                info, root_index, passed = self._agree(self._next)
                skipped += passed
                if info is None:
                    break
                root = self._roots[root_index]
                problem, present_id = self._try(load, root, info)
                if problem is None and present_id == info.save_id:
                    # Not all values need be in the state: a damaged file may not have been read.
                    if not root.damage_count or self._check == "deep":
                        root.record_sound(info.name, info.save_id)
                        root.base = info.name
                    if skipped and self._ranks.is_coordinator:
                        _report_skipped(info, skipped)
                    step = root.names.step_of(info.name) if info.step is None else info.step
                    return Restored(info=info, step=step or 0, skipped=tuple(skipped))
                if problem is None or present_id not in {"gone", info.save_id}:
                    self._retry(root, info)
                    continue
                if isinstance(problem, IntegrityError):
                    root.record_damaged(info, str(problem))
                skipped.append(_skipped(info, problem))
        finally:
            self._release()
        if skipped:
            raise IntegrityError(
                f"None of the {len(skipped)} committed checkpoints below {self._url} can be "
                f"loaded. {skipped[0].name}: {skipped[0].reason}",
                path=self._url,
                phase="load",
                next_step="Run verify on them, and restore one from a copy; an empty root starts "
                "over.",
            )
        if self._name is None:
            return None
        raise CheckpointNotFoundError(
            f"There is no checkpoint of {self._selected} below {self._url}.",
            path=self._url,
            next_step="ckpt_storage.list_checkpoints(root) lists those that are there.",
        )

    def _agree(self, choose: Callable[[Deadline], _T]) -> _T:
        """Return on all ranks what `choose` returns on the coordinator; compares the arguments."""
        what = f"the choice of a checkpoint below {self._url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            check_choice("check", self._check, Check)
            terms = {"check": self._check, "the checkpoint": self._selected}
            operation.identify(Identity(kind="the choice", url=self._url, is_read=True))
            operation.meet(terms | {"part": str(self._takes_parts)})
            if self._name is None:
                # Here, so that all ranks get its error.
                self._roots, self._name = select(self._roots, step=self._step, url=self._at)
                self._url = " and ".join(root.location.url for root in self._roots)
            deadline = operation.phase("load")
            with deadline.annotate_errors(f"Choosing a checkpoint below {self._url}"):
                choice = choose(deadline) if operation.is_coordinator else None
            agreed: tuple[_T, int]
            agreed = operation.broadcast((choice, self._count_before + 1))  # type: ignore[assignment]  # the coordinator's
        choice, self.restore_count = agreed
        return choice

    def _retry(self, root: Root, info: CheckpointInfo) -> None:
        """Have a checkpoint chosen once more: another save replaced it while it was loaded."""
        self._reload_count += 1
        if self._reload_count > _MAX_RELOADS:
            raise CheckpointInProgressError(
                f"{info.url} was replaced {self._reload_count} times while it was loaded.",
                path=info.url,
                phase="load",
                next_step="Find out which job overwrites it, and restore when that has ended.",
            )
        log.info("%s was replaced while it was loaded; it is loaded again", info.url)
        self._tried.discard((root, info.name))

    def _next(self, deadline: Deadline) -> _Choice:
        """Return the newest usable checkpoint that was not tried yet, marked as in use."""
        skipped: list[SkippedCheckpoint] = []
        candidates = newest_first(self._roots, deadline)
        if self._name is not None:
            step = self._roots[0].names.step_of(self._name)
            named = FolderState(name=self._name, step=step, status="committed")
            candidates = iter([(root, named) for root in self._roots])
        for root, listed in candidates:
            if (root, listed.name) in self._tried:
                continue
            self._tried.add((root, listed.name))
            state = listed
            if listed.status in {"committed", "foreign"}:
                # Read again once this manager's pruner cannot delete it.
                self._release = root.in_use.acquire(
                    listed.name, "it is being loaded", timeout_s=deadline.remaining_s()
                )
                state = root.read_state(listed.name, deadline)
            # The other root may have a copy of a named checkpoint, whatever the problem here.
            problem = damage_of(state) if self._name is None else state.problem
            if problem is None and state.info is not None and state.info.part:
                problem = None if self._takes_parts else _part_problem(state.info)
            if problem is None and state.info is not None:
                return state.info, self._roots.index(root), skipped
            self._release()
            if problem is not None:
                skipped.append(_skipped(state, problem))
                self._problem = self._problem or problem
        if self._name is not None and self._problem is not None:
            raise self._problem
        return None, 0, skipped

    def _read_all(self, root: Root, info: CheckpointInfo) -> None:
        """Read every byte, split over the ranks, in bounded time; an error is raised on all."""
        rank, count = self._ranks.rank, self._ranks.world_size
        what = f"the check of {info.url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            operation.meet(_terms_of(info))
            deadline = operation.phase("load")
            sizes = part_bytes(root.open(deadline, info.name), count)
            # The same on all ranks: a rank with few bytes waits for the rank with most.
            limit_s = max(self._timeouts.load, max(sizes) / _SLOWEST_BYTES_PER_S)
            deadline = operation.phase("load", limit_s, total_bytes=sizes[rank])
            check_part(root.open(deadline, info.name), rank, count, deep=True)
            operation.all_gather(None)

    def _try(
        self, load: Load, root: Root, info: CheckpointInfo
    ) -> tuple[CheckpointError | None, str | None]:
        """Load; return on all ranks why it is unusable, and the save there now, or "gone"."""
        error: CheckpointError | None = None
        try:
            if self._check == "deep":
                self._read_all(root, info)
            place = root.location.child(info.name)
            load(place.target, storage_options=place.storage_options)
        except CheckpointError as failure:
            error = failure
        # A rank may have failed where others succeeded, so all exchange their outcomes.
        what = f"the outcome of loading {info.url}"
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            operation.meet(_terms_of(info))
            outcomes = operation.all_gather(None if error is None else picklable_copy(error))
            errors: list[CheckpointError] = [outcome for outcome in outcomes if outcome is not None]
            causes = [failure for failure in errors if not _is_relayed(failure)] or errors
            fatal = next((cause for cause in causes if not isinstance(cause, UNUSABLE)), None)
            present_id: str | None = None
            if operation.is_coordinator and fatal is None:
                present = root.read_state(info.name, operation.phase("load")).info
                present_id = "gone" if present is None else present.save_id
            present_id = operation.broadcast(present_id)
        if fatal is not None:
            is_own = (
                error is not None and not isinstance(error, UNUSABLE) and not _is_relayed(error)
            )
            raise error if error is not None and is_own else fatal
        return (causes[0] if causes else None), present_id


def _part_problem(info: CheckpointInfo) -> InvalidInputError:
    """Return why a checkpoint that was thinned is not loaded unless asked for."""
    dropped = ", ".join(map(str, info.part.get("exclude") or ())) or "some values"
    return InvalidInputError(
        f"{info.url} holds a part of save {info.part.get('of')}: {dropped} were left out.",
        path=info.url,
        phase="load",
        next_step="To load what is there, pass part=True and a state with those names only.",
    )


def _report_skipped(info: CheckpointInfo, skipped: Sequence[SkippedCheckpoint]) -> None:
    """Log what could not be loaded; as an error if training falls back to an older step."""
    is_older = any(checkpoint.name != info.name for checkpoint in skipped)
    lost = " What was trained since then is LOST." if is_older else " It is a copy of this step."
    reasons = "; ".join(f"{checkpoint.name}: {checkpoint.reason}" for checkpoint in skipped)
    level = logging.ERROR if is_older else logging.WARNING
    log.log(level, "Resumed from %s.%s These could not be loaded: %s", info.url, lost, reasons)


def _skipped(checkpoint: FolderState | CheckpointInfo, problem: Exception) -> SkippedCheckpoint:
    return SkippedCheckpoint(
        name=checkpoint.name,
        url=checkpoint.url,
        reason=str(problem),
        save_id=checkpoint.save_id,
    )


def _terms_of(info: CheckpointInfo) -> dict[str, str]:
    return {"the checkpoint": str(info.save_id or info.name)}


def _is_relayed(error: CheckpointError) -> bool:
    """Return whether the error reports the failure of another rank, which reports it itself."""
    return isinstance(error, RankFailedError) and not error.is_silent
