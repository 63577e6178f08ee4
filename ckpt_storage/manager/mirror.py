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

from .policies import Keep, begun_s
from .prune import Pruner
from .retention import FolderState, plan_retention
from .root import Root

log = logging.getLogger("ckpt_storage")


class Mirror:
    """Copies what `root` has and `target` lacks; what `keep` would not keep there is left out.

    A copy is made by the export engine: it keeps the save id, and shows at the end or not at all.
    What is missing is found by comparing the two roots, never by a note. So after a crash at any
    point the next process goes on.
    """

    def __init__(self, root: Root, target: Root, keep: Keep | None) -> None:
        self._root = root
        self._target = target
        self._keep = keep
        self._pruner = None if keep is None else Pruner(target, keep)
        # A copy has another save id where the mirror once deleted that of the original.
        self._copied: set[tuple[str, str | None]] = set()

    def waiting(self, found: Collection[FolderState], deadline: Deadline) -> Mapping[str, str]:
        """Return which checkpoints of the root are still to be copied, each with a reason."""
        ours = {one.name: one for one in found if one.is_sound}
        listed = self._target.steps(self._target.folders(deadline))
        there = self._target.look([one for one in listed if one in ours], deadline, fresh=True)
        missing = {name: one for name, one in ours.items() if self._lacks(there.get(name), one)}
        if self._keep is not None and missing:
            others = [name for name in listed if name not in there]
            there |= self._target.look(others, deadline, fresh=False)
            kept = plan_retention({**there, **missing}.values(), self._keep).kept
            missing = {one.name: missing[one.name] for one in kept if one.name in missing}
        return dict.fromkeys(missing, "the mirror has no copy of it yet")

    def _lacks(self, copied: FolderState | None, found: FolderState) -> bool:
        """Return whether a checkpoint is to be copied: an older save, or none, is in the mirror."""
        if (found.name, found.save_id) in self._copied:
            return False
        if copied is None or copied.info is None:
            return True
        is_same = copied.status == "foreign" or copied.save_id == found.save_id
        return not is_same and begun_s(copied.info) <= begun_s(found.info)

    def fill(self, job: Deadline) -> bool:
        """Copy what the mirror lacks, newest first, then prune it; return whether it tried any."""
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
        """Return the newest that is to be copied and was not tried."""
        deadline = Deadline.of(self._root.timeouts, "load")
        steps, links = self._root.steps(self._root.folders(deadline)), self._root.links()
        own = [name for name in steps if name not in links]
        found = self._root.look(own, deadline, fresh=True)
        waiting = self.waiting(found.values(), deadline)
        left = [name for name in own if name in waiting and name not in tried]
        return found[left[-1]].info if left else None

    def _copy(self, info: CheckpointInfo) -> None:
        """Copy one checkpoint, and keep our own pruner from it meanwhile."""
        by = "it is being copied to the mirror"
        release = self._root.uses.take(info.name, by, timeout_s=self._root.timeouts.plan)
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
            # It is committed, and only torch's own readers do not see it.
            log.warning("%s", error)
        except IntegrityError:
            # If it is damaged, and not its copy, it is waited for no more.
            deadline = stalling_deadline("load", self._root.timeouts.load, f"Checking {info.url}")
            with suppress(CheckpointError):
                self._root.is_sound(info, deadline, deep=True)
            raise
        finally:
            release()
            self._target.forget(info.name)
        self._copied.add((info.name, info.save_id))
