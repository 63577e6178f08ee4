"""What a manager does around each save: keeps its name in use, then prunes and fills the mirror."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.plans import plain_state
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import save_on
from ckpt_storage.store.deadline import Deadline

from .job import Job
from .mirror import Mirror
from .prune import Pruner
from .root import Root

log = logging.getLogger("ckpt_storage")

Pruning = Literal["background", "manual"]
"""When a manager prunes: after each save on a thread of its own, or by its method only."""

_CLOSE_S = 60.0


@dataclass(slots=True, kw_only=True)
class StepSave:
    """One save under a name that the pruner must leave alone meanwhile.

    `refusal` is raised only by `prepare`, once this rank is in the operation that all ranks are
    in: one that raised before would leave them waiting.
    """

    upkeep: Upkeep
    name: str
    target: str
    options: SaveOptions
    refusal: Exception | None
    release: Callable[[], None] = field(default=lambda: None)

    def prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self.refusal is not None:
            raise self.refusal
        uses, limit_s = self.upkeep.root.uses, self.options.timeouts.plan
        self.release = uses.take(self.name, "it is being saved", timeout_s=limit_s)

    def run(self, ranks: RankGroup, state: Mapping[str, Any]) -> CheckpointInfo:
        """Save now, and return what was committed; as `ckpt_storage.save`."""

        def prepared() -> dict[str, Any]:
            self.prepare()
            return plain_state(state)

        committed: CheckpointInfo | None = None
        try:
            committed = save_on(ranks, prepared, self.target, self.options)
        except CheckpointError as error:
            # The checkpoint counts, whatever went wrong after its commit.
            committed = getattr(error, "info", None)
            raise
        finally:
            self.end(None if committed is None else committed.save_id)
        return committed

    def begin(
        self, saver: AsyncSaver, state: Mapping[str, Any], *, block_until_staged: bool
    ) -> SaveHandle:
        """Begin to save in the background; as `AsyncSaver.save`."""
        try:
            handle = saver.begin(
                state,
                self.target,
                self.options,
                block_until_staged=block_until_staged,
                prepare=self.prepare,
            )
        except BaseException:
            self.release()
            raise
        handle.add_done_callback(
            lambda h: self.end(h.save_id if h.state is SaveState.COMMITTED else None)
        )
        return handle

    def end(self, save_id: str | None) -> None:
        """Note how the save ended, from any thread; only then may its name be deleted."""
        upkeep = self.upkeep
        upkeep.root.forget(self.name)
        if save_id is not None:
            # Every file was looked at before the commit.
            upkeep.root.found_sound(self.name, save_id)
            if upkeep.pruner is not None:
                # Its step may be lower than those of a run that was given up.
                upkeep.pruner.last_saved = self.name
        self.release()
        if save_id is not None:
            upkeep.wake()


class Upkeep:
    """Prunes one root and fills its mirror, on threads of the coordinator only."""

    def __init__(
        self,
        root: Root,
        pruner: Pruner | None,
        mirror: Mirror | None,
        *,
        prunes: bool,
        is_coordinator: bool,
        timeouts: Timeouts,
    ) -> None:
        self.root = root
        self.pruner = pruner
        self._prunes = prunes and is_coordinator
        self._mirror = mirror if is_coordinator else None
        self._timeouts = timeouts
        self._highest_begun: int | None = None
        self._has_warned = False
        url, limit_s = root.location.url, timeouts.commit
        self.tidying = Job(self._tidy, name=f"ckpt-storage prune {url}", timeout_s=limit_s)
        self.copying = Job(self._copy, name=f"ckpt-storage mirror {url}", timeout_s=limit_s)
        if self._mirror is not None:
            # What an earlier process has left.
            self.copying.wake()

    def begin(self, step: int, metrics: Mapping[str, Any], options: SaveOptions) -> StepSave:
        """Return a save with `metrics`, to be run or begun."""
        location = self.root.location
        name, target, refusal, user = "", location.target, None, {}
        try:
            name = self.root.names.name_of(step)
            target = location.child(name).target
            user = user_record(step, metrics)
            if self._highest_begun is None or step > self._highest_begun:
                self._highest_begun = step
        except Exception as error:  # noqa: BLE001  # the other ranks are waiting to be told
            refusal = error
        chosen = replace(
            options,
            retry=self.root.retry,
            storage_options=location.storage_options,
            user=user,
            replaces=self.root.damaged_ids(name),
        )
        return StepSave(upkeep=self, name=name, target=target, options=chosen, refusal=refusal)

    def wake(self) -> None:
        """Let the background do what a commit asks for; from any thread."""
        if self._prunes:
            self.tidying.wake()
        if self._mirror is not None:
            self.copying.wake()

    def close(self, timeout_s: float | None) -> None:
        """Let mirror and prune end, each in this time at most; then stop them."""
        self.copying.close(self._timeouts.commit if timeout_s is None else timeout_s)
        self.tidying.close(_CLOSE_S if timeout_s is None else timeout_s)

    def _copy(self, deadline: Deadline) -> None:
        may_go = True
        try:
            may_go = self._mirror is not None and self._mirror.fill(deadline)
        finally:
            if may_go and self._prunes:
                # What waited for its copy, or is found to be damaged, may go now.
                self.tidying.wake()

    def _tidy(self, deadline: Deadline) -> None:
        if self.pruner is None:
            return
        newest, saved = self.pruner.prune(deadline).newest, self._highest_begun
        is_above = newest is not None and saved is not None and (newest.step or 0) > saved
        if newest is not None and is_above and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Step %d was saved below step %d of %s. restore() and latest() go by step, so they "
                "still choose step %d, and KeepLatest counts the higher ones. If those are given "
                "up, delete them, or save to another root.",
                saved,
                newest.step,
                newest.url,
                newest.step,
            )
        self.pruner.sweep(deadline)
