"""Copying the checkpoints of one root to another, its mirror."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    IntegrityError,
    NotPublishedError,
)
from ckpt_storage.export.copy import copy
from ckpt_storage.store.deadline import Deadline, stalling_deadline

from .folders import FolderState
from .policies import Keep, begun_s
from .prune import Pruner
from .retention import plan_retention
from .root import Root

log = logging.getLogger("ckpt_storage")


class Mirror:
    """Copies the checkpoints of `root` that `target` lacks, and that `keep` would keep there.

    A copy is made by the export engine: it keeps the save id, and is visible when it is complete.
    The two roots are compared each time, so that after a crash the next process goes on.
    """

    def __init__(self, root: Root, target: Root, keep: Keep | None) -> None:
        self._root = root
        self._target = target
        self._keep = keep
        self._pruner = None if keep is None else Pruner(target, keep)
        # A copy has another save id where the mirror once deleted that of the original.
        self._copied: set[tuple[str, str | None]] = set()

    def pending(self, states: Collection[FolderState], deadline: Deadline) -> Mapping[str, str]:
        """Return which checkpoints of the root have no copy yet, each with a reason to keep it."""
        sound = {state.name: state for state in states if state.is_sound}
        listed = self._target.steps_of(self._target.list_folders(deadline))
        common = [name for name in listed if name in sound]
        copies = self._target.read_states(common, deadline, fresh=True)
        missing = {
            name: state for name, state in sound.items() if self._lacks(copies.get(name), state)
        }
        if self._keep is not None and missing:
            others = [name for name in listed if name not in copies]
            copies |= self._target.read_states(others, deadline, fresh=False)
            kept = plan_retention({**copies, **missing}.values(), self._keep).kept
            missing = {
                decision.name: missing[decision.name]
                for decision in kept
                if decision.name in missing
            }
        return dict.fromkeys(missing, "the mirror has no copy of it yet")

    def _lacks(self, copied: FolderState | None, state: FolderState) -> bool:
        """Return whether the mirror has no copy of a checkpoint, or a copy of an older save."""
        if (state.name, state.save_id) in self._copied:
            return False
        if copied is None or copied.info is None:
            return True
        # The mirror keeps what was dropped here until its own policy drops it there.
        whole_id = None if state.info is None else state.info.part.get("of")
        is_same = copied.status == "foreign" or copied.save_id in {state.save_id, whole_id}
        return not is_same and begun_s(copied.info) <= begun_s(state.info)

    def fill(self, job: Deadline) -> bool:
        """Copy what the mirror lacks, newest first, then prune it.

        Return whether there was anything to copy. Raises the first failure.
        """
        tried: set[str] = set()
        failures: list[CheckpointError] = []
        while not job.has_failed() and (info := self._next(tried)) is not None:
            tried.add(info.name)
            try:
                self._copy(info)
            except CheckpointGoneError as error:
                log.info("%s was not copied: %s", info.url, error)
            except CheckpointError as error:
                log.warning("%s has no copy in the mirror yet: %s", info.url, error)
                failures.append(error)
        if self._pruner is not None and not job.has_failed():
            try:
                self._pruner.prune(Deadline.of(self._root.timeouts, "commit"))
            except CheckpointError as error:
                log.warning("%s was not pruned: %s", self._target.location.url, error)
                failures.append(error)
        if failures:
            raise failures[0]
        return bool(tried)

    def _next(self, tried: Collection[str]) -> CheckpointInfo | None:
        """Return the newest checkpoint that has no copy and was not tried."""
        deadline = Deadline.of(self._root.timeouts, "load")
        links = self._root.links()
        steps = [
            name
            for name in self._root.steps_of(self._root.list_folders(deadline))
            if name not in links
        ]
        states = self._root.read_states(steps, deadline, fresh=True)
        pending = self.pending(states.values(), deadline)
        untried = [name for name in steps if name in pending and name not in tried]
        return states[untried[-1]].info if untried else None

    def _copy(self, info: CheckpointInfo) -> None:
        """Copy one checkpoint, which is in use meanwhile: no pruner of this manager deletes it."""
        reason = "it is being copied to the mirror"
        release = self._root.in_use.acquire(info.name, reason, timeout_s=self._root.timeouts.plan)
        try:
            copy(
                self._root.location.child(info.name).target,
                self._target.location.child(info.name).target,
                storage_options=self._root.location.storage_options,
                destination_storage_options=self._target.location.storage_options or {},
                overwrite=True,
                timeout=self._root.timeouts,
                retry=self._root.retry,
            )
        except NotPublishedError as error:
            # The copy is committed, and only torch's own readers do not see it.
            log.warning("%s", error)
        except IntegrityError:
            # A damaged original keeps no place in the root.
            deadline = stalling_deadline("load", self._root.timeouts.load, f"Checking {info.url}")
            with suppress(CheckpointError):
                self._root.check_sound(info, deadline, deep=True)
            raise
        finally:
            release()
            self._target.forget(info.name)
        self._copied.add((info.name, info.save_id))
