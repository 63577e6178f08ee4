"""Resuming: the newest checkpoint that can be loaded whole, the same one on every rank."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors, travelling
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidInputError,
    RankFailedError,
)
from ckpt_storage.inspect.verify import Part, check_part, part_bytes
from ckpt_storage.options import Timeouts
from ckpt_storage.store.deadline import Deadline

from .census import Census, Sight, damage_of
from .claims import Claims
from .pruneplan import Soundness

log = logging.getLogger("ckpt_storage")

Check = Literal["read", "deep"]
"""read: what is loaded is checked on its way. deep: before that the ranks read every byte."""

_Now = Literal["the same", "another save", "gone"]

_SLOWEST_BYTES_PER_S = 16 << 20
"""Of one rank that checks. Who is slower, and longer at it than a load may take, hangs."""

_MOST_AGAIN = 5
"""How often a checkpoint may be saved anew while it is loaded."""

_USELESS = (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What the coordinator chose; `info` is None if nothing is left to choose.

    `is_checked` says that the coordinator knows it to be sound.
    """

    info: CheckpointInfo | None
    skipped: tuple[SkippedCheckpoint, ...] = ()
    is_checked: bool = False


class Restorer:
    """One restore on one rank: chooses, loads and falls back, together with the others."""

    def __init__(
        self,
        coordinator: Ranks,
        census: Census,
        claims: Claims,
        soundness: Soundness,
        *,
        check: Check,
        timeouts: Timeouts,
    ) -> None:
        self._coordinator = coordinator
        self._census = census
        self._claims = claims
        self._soundness = soundness
        self._check: Check = check
        self._timeouts = timeouts
        self._tried: set[str] = set()
        self._again_count = 0
        self._release: Callable[[], None] = lambda: None

    def run(self, load: Callable[[CheckpointInfo], None]) -> Restored | None:
        """Load the newest that can be; return None if nothing was ever committed.

        `load` loads one, on all ranks, and raises on all of them. Raises `IntegrityError` if
        there are committed ones and none can be loaded: training must not begin anew unnoticed;
        and what `load` raises that is no fault of the checkpoint.
        """
        skipped: list[SkippedCheckpoint] = []
        try:
            while True:
                choice = self._choose()
                skipped += choice.skipped
                if choice.info is None:
                    break
                checks = self._check == "deep" and not choice.is_checked
                reason, now = self._try(load, choice.info, checks=checks)
                if now == "another save" or (reason is None and now == "gone"):
                    self._again(choice.info)
                elif reason is not None:
                    skipped.append(self._skip(choice.info, reason))
                else:
                    self._soundness.found_sound(choice.info.name, choice.info.save_id)
                    return self._restored(choice.info, skipped)
        finally:
            self._release()
        if skipped:
            raise self._none_left(skipped)
        return None

    def first(self, look: Callable[[], CheckpointInfo | None]) -> CheckpointInfo | None:
        """Return on all ranks what the coordinator's `look` returns."""
        with self._operation() as operation:
            packed = pickle.dumps(look()) if operation.is_coordinator else b""
            found: CheckpointInfo | None = pickle.loads(operation.broadcast(packed))  # noqa: S301  # our ranks
        return found

    @contextmanager
    def _operation(self) -> Iterator[Operation]:
        """Meet all ranks below the root, with equal arguments; the load phase begins."""
        what = f"the choice of a checkpoint below {self._census.location.url}"
        with (
            self._coordinator.operation(what, timeouts=self._timeouts) as operation,
            as_checkpoint_errors(what, operation.rank),
        ):
            if self._check not in get_args(Check):
                raise InvalidInputError(
                    f"check is {self._check!r}.", next_step="Give 'read' or 'deep'."
                )
            operation.meet(
                {
                    "the root's URL": self._census.location.url,
                    "the names of steps": self._census.names.template,
                    "check": self._check,
                }
            )
            operation.phase("load")
            yield operation

    def _restored(self, info: CheckpointInfo, skipped: list[SkippedCheckpoint]) -> Restored:
        if skipped and self._coordinator.is_coordinator:
            log.warning(
                "Resumed from %s, which is not the newest: %s",
                info.url,
                "; ".join(f"{one.name} could not be loaded ({one.reason})" for one in skipped),
            )
        return Restored(info=info, step=info.step or 0, skipped=tuple(skipped))

    def _again(self, info: CheckpointInfo) -> None:
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
        self._tried.discard(info.name)

    def _none_left(self, skipped: Sequence[SkippedCheckpoint]) -> IntegrityError:
        first = skipped[0]
        return IntegrityError(
            f"None of the {len(skipped)} committed checkpoints below {self._census.location.url} "
            f"can be loaded. {first.name}: {first.reason}",
            path=self._census.location.url,
            phase="load",
            next_step="Run verify on them, and restore one from a copy; an empty root begins anew.",
        )

    def _choose(self) -> _Choice:
        """Let the coordinator choose the next one; its word reaches all ranks."""
        self._release()
        self._release = lambda: None
        with self._operation() as operation:
            packed = b""
            if operation.is_coordinator:
                packed = pickle.dumps(self._next(operation.deadline))
            choice: _Choice = pickle.loads(operation.broadcast(packed))  # noqa: S301  # our ranks
        return choice

    def _next(self, deadline: Deadline) -> _Choice:
        """Return the newest that was not tried yet and seems to be of use, and keep it in use."""
        skipped: list[SkippedCheckpoint] = []
        for sight in self._census.downwards(deadline):
            if sight.name in self._tried:
                continue
            self._tried.add(sight.name)
            if sight.info is None:
                skipped += self._unreadable(sight)
                continue
            self._release = self._claims.take(
                sight.name, "it is being loaded", timeout_s=deadline.remaining_s()
            )
            # Only now is it safe from our own pruner.
            info = self._census.look_at(sight.name, deadline).info
            if info is not None:
                return _Choice(
                    info=info,
                    skipped=tuple(skipped),
                    is_checked=self._soundness.is_known(info),
                )
            self._release()
        return _Choice(info=None, skipped=tuple(skipped))

    def _unreadable(self, sight: Sight) -> list[SkippedCheckpoint]:
        damage = damage_of(sight)
        if damage is None:
            return []
        url = self._census.location.child(sight.name).url
        return [SkippedCheckpoint(name=sight.name, url=url, reason=str(damage))]

    def _read_all(self, info: CheckpointInfo) -> None:
        """Read every byte of a checkpoint, each rank its part; raises on all what one rank finds.

        However large it is, the time that each rank has is bounded, and known to the others.
        """
        what = f"the check of {info.url}"
        part = Part(self._coordinator.rank, self._coordinator.world_size)
        with (
            self._coordinator.operation(what, timeouts=self._timeouts) as operation,
            as_checkpoint_errors(what, operation.rank),
        ):
            operation.meet({"the checkpoint": str(info.save_id or info.name)})
            deadline = operation.phase("load")
            byte_count = part_bytes(self._census.store(info.name, deadline), part, deadline)
            limit_s = max(self._timeouts.load, byte_count / _SLOWEST_BYTES_PER_S)
            deadline = operation.phase("load", limit_s, total_bytes=byte_count)
            store = self._census.store(info.name, deadline)
            check_part(store, part, deep=True, deadline=deadline)
            operation.all_gather(b"")

    def _try(
        self, load: Callable[[CheckpointInfo], None], info: CheckpointInfo, *, checks: bool
    ) -> tuple[CheckpointError | None, _Now]:
        """Load; return on all ranks why the checkpoint is of no use to them, None if it is.

        With `checks` all of it is read first. Also what is there afterwards: one loads by name,
        and a save id never comes back, so what was there before and is there then was loaded.
        Raises what is no fault of the checkpoint.
        """
        error: CheckpointError | None = None
        try:
            if checks:
                self._read_all(info)
            load(info)
        except CheckpointError as failure:
            error = failure
        # One rank may have failed in what others ended well: all say how it went.
        what = f"the outcome of loading {info.url}"
        with self._coordinator.operation(what, timeouts=self._timeouts) as operation:
            operation.meet({"the checkpoint": str(info.save_id or info.name)})
            packed = pickle.dumps(None if error is None else travelling(error))
            told = operation.all_gather(packed)
            errors = [pickle.loads(one) for one in told]  # noqa: S301  # our own ranks
            found: list[CheckpointError] = [one for one in errors if one is not None]
            # A rank that was told of another's failure while it read says only that.
            causes = [one for one in found if not _is_echo(one)] or found
            grave = next((one for one in causes if not isinstance(one, _USELESS)), None)
            packed = pickle.dumps("the same")
            if operation.is_coordinator and grave is None:
                packed = pickle.dumps(self._now(info, operation.phase("load")))
            now: _Now = pickle.loads(operation.broadcast(packed))  # noqa: S301  # our own ranks
        if grave is not None:
            is_own = error is not None and not isinstance(error, _USELESS) and not _is_echo(error)
            raise error if error is not None and is_own else grave
        return (causes[0] if causes else None), now

    def _now(self, info: CheckpointInfo, deadline: Deadline) -> _Now:
        """Return what lies now where `info` was."""
        sight = self._census.look_at(info.name, deadline)
        if sight.info is None:
            return "gone"
        return "the same" if sight.info.save_id == info.save_id else "another save"

    def _skip(self, info: CheckpointInfo, error: CheckpointError) -> SkippedCheckpoint:
        if isinstance(error, IntegrityError):
            self._soundness.found_damaged(info, str(error))
        return SkippedCheckpoint(
            name=info.name, url=info.url, reason=str(error), save_id=info.save_id
        )


def _is_echo(error: CheckpointError) -> bool:
    """Return whether this is the news of another rank's failure, which that rank tells itself."""
    return isinstance(error, RankFailedError) and not error.is_silent
