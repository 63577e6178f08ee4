"""What a manager does around each save: keeps its name in use, then prunes and fills the mirror."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.plans import plain_state
from ckpt_storage.errors import CheckpointError
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


class Upkeep:
    """Prunes one root and fills its mirror; without both it does nothing, as on other ranks."""

    def __init__(
        self, root: Root, pruner: Pruner | None, mirror: Mirror | None, *, prunes: bool
    ) -> None:
        self.root = root
        self.pruner = pruner
        self._prunes = prunes
        self._mirror = mirror
        self.highest_begun = -1
        self._has_warned = False
        url, self._timeout_s = root.location.url, root.timeouts.commit
        self.tidying = Job(self._tidy, name=f"ckpt-storage prune {url}", timeout_s=self._timeout_s)
        self.copying = Job(self._copy, name=f"ckpt-storage mirror {url}", timeout_s=self._timeout_s)
        if mirror is not None:
            # What an earlier process has left.
            self.copying.wake()

    def wake(self) -> None:
        """Let the background do what a commit asks for; from any thread."""
        if self._prunes:
            self.tidying.wake()
        if self._mirror is not None:
            self.copying.wake()

    def close(self, timeout_s: float | None) -> None:
        """Let mirror and prune end, each in this time at most; then stop them."""
        self.copying.close(self._timeout_s if timeout_s is None else timeout_s)
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
        newest, saved = self.pruner.prune(deadline).newest, self.highest_begun
        if newest is not None and 0 <= saved < (newest.step or 0) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Step %d was saved below %s. restore() and latest() go by step, so they still "
                "choose step %d, and KeepLatest counts the higher ones. If those are given up, "
                "delete them, or save to another root.",
                *(saved, f"step {newest.step} of {newest.url}", newest.step),
            )


class StepSave:
    """One save under a name that the pruner must leave alone meanwhile."""

    def __init__(self, upkeep: Upkeep, given: Mapping[str, Any]) -> None:
        self._upkeep = upkeep
        self._release: Callable[[], None] = lambda: None
        self._refusal: Exception | None = None
        root, step = upkeep.root, given["step"]
        self._name, place, user = "", root.location, {}
        try:
            self._name = root.names.name_of(step)
            place = place.child(self._name)
            user = user_record(step, given["metrics"] or {})
            upkeep.highest_begun = max(step, upkeep.highest_begun)
        except Exception as error:  # noqa: BLE001  # raised by `prepare`, when all ranks are there
            self._refusal = error
        self.target = place.target
        self.options = replace(
            SaveOptions.of(given, timeouts=root.timeouts),
            retry=root.retry,
            storage_options=place.storage_options,
            user=user,
            replaces=root.damaged_ids(self._name),
        )

    def prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self._refusal is not None:
            raise self._refusal
        uses, limit_s = self._upkeep.root.uses, self.options.timeouts.plan
        self._release = uses.take(self._name, "it is being saved", timeout_s=limit_s)

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
        given: dict[str, Any] = {"block_until_staged": block_until_staged, "prepare": self.prepare}
        try:
            handle = saver.begin(state, self.target, self.options, **given)
        except BaseException:
            self.end(None)
            raise
        handle.add_done_callback(
            lambda h: self.end(h.save_id if h.state is SaveState.COMMITTED else None)
        )
        return handle

    def end(self, save_id: str | None) -> None:
        """Note how the save ended, from any thread; only then may its name be deleted."""
        upkeep = self._upkeep
        upkeep.root.forget(self._name)
        if save_id is not None:
            # Every file was looked at before the commit.
            upkeep.root.found_sound(self._name, save_id)
            if upkeep.pruner is not None:
                # Its step may be lower than those of a run that was given up.
                upkeep.pruner.last_saved = self._name
        self._release()
        if save_id is not None:
            upkeep.wake()
