"""Deleting one checkpoint, or those of a run that no policy keeps (I7, I18).

Nothing here needs a lock on the storage. A plan may be old when it is carried out: each deletion
looks again whether the newest sound checkpoint is still there, and is decided by the exclusive
create of a slot that names the save that was meant. Two pruners do the same work twice, or one of
them finds it done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckpt_storage.commit import cleaning, deletion
from ckpt_storage.commit.attempt_files import attempts_there
from ckpt_storage.commit.deletion import TOMBSTONE_AGE_S
from ckpt_storage.commit.deletion import delete as delete_commit
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.export.folder import remove_exports
from ckpt_storage.format.names import probe_path
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import find_abilities
from ckpt_storage.store.store import Store

from .names import DEFAULT_TEMPLATE, StepNames
from .policies import Keep, policies_of
from .retention import Decision, FolderState, PruneReport, by_step, counted_by, plan_retention
from .root import Root

log = logging.getLogger("ckpt_storage")

Others = Callable[[Collection[FolderState], Deadline], Mapping[str, str]]
"""Takes what lies below a root; returns names that nobody may delete, each with the reason."""

_LINK = "it is a link"


def prune(
    root_url: str | os.PathLike[str],
    keep: Keep,
    *,
    names: str = DEFAULT_TEMPLATE,
    dry_run: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
) -> PruneReport:
    """Delete the checkpoints below a root that no policy keeps; without a manager, from anywhere.

    By default it only plans, writes nothing, and takes ages from this machine's clock. Arguments as
    for `CheckpointManager`. Not collective. Raises `StorageError`,
    `PhaseTimeoutError`, `InvalidInputError`.
    """
    place, timeouts = Location.of(root_url, storage_options), Timeouts.of(timeout)
    root = Root(place, StepNames(names), timeouts=timeouts, retry=retry)
    return Pruner(root, keep).prune(Deadline.of(timeouts, "commit"), dry_run=dry_run)


class Pruner:
    """Plans and prunes one root; keeps what `others` protects, and `last_saved`.

    If it `sweeps`, each prune frees what died beside later saves of one kept step, in turn.
    """

    def __init__(
        self, root: Root, keep: Keep, *, others: Others = lambda *_: {}, sweeps: bool = False
    ) -> None:
        self._root = root
        self._policies = policies_of(keep)
        self._others = others
        self._turn = threading.Lock()
        self._tried_tombstones: set[tuple[str, int]] = set()
        self._sweeps = sweeps
        self._swept_step = -1
        self.last_saved: str | None = None
        self.last: PruneReport | None = None

    def prune(self, deadline: Deadline, *, dry_run: bool = False) -> PruneReport:
        """Plan; unless `dry_run`, delete, oldest first. The next prune ends one that was cut."""
        if not self._turn.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"Another prune of {self._root.location.url}")
        try:
            plan, tombstones = self._plan(deadline, is_dry_run=dry_run)
            if dry_run:
                return plan
            self.last = self.execute(plan, deadline, tombstones)
            return self.last
        finally:
            self._turn.release()

    def _plan(
        self, deadline: Deadline, *, is_dry_run: bool
    ) -> tuple[PruneReport, list[FolderState]]:
        """Return a plan, and what was deleted so long ago that its slots may go."""
        root = self._root
        folders, links = root.folders(deadline), root.links()
        # What lies behind a link may be another checkpoint of this root, or of somebody else.
        steps = [name for name in root.steps(folders) if name not in links]
        checked = set(steps) - root.seen()
        now_s = time.time()
        if steps and not is_dry_run:
            with suppress(UnsupportedByStoreError):  # then it tells no ages either
                now_s = root.open(deadline).server_time(probe_path())
        # What the plan counts on is looked at again.
        while True:
            looked = root.look(steps, deadline, fresh=False).values()
            found = root.dated(looked, deadline, now_s)
            protected = {**_pinned(links), **root.uses.now(), **self._others(found, deadline)}
            if self.last_saved is not None:
                protected[self.last_saved] = "it is what this manager saved last"
            plan = plan_retention(found, self._policies, protected=protected)
            if not plan.planned or plan.newest is None:
                break
            stale = counted_by(self._policies, found) - checked
            checked |= stale
            root.look(sorted(stale), deadline, fresh=True)
            if not stale and root.is_sound(plan.newest, deadline):
                break
        empty = [one for one in found if one.status == "empty"]
        tombstones = [one for one in empty if (one.age_s or 0.0) >= TOMBSTONE_AGE_S]
        kept = list(plan.kept)
        for name in sorted(set(folders).difference(steps)):
            why = _LINK if name in links else "it does not belong to this run"
            kept.append(Decision(name=name, step=None, reasons=(why,)))
        plan = replace(plan, kept=tuple(sorted(kept, key=by_step)), is_dry_run=is_dry_run)
        return plan, tombstones

    def execute(
        self, plan: PruneReport, deadline: Deadline, tombstones: Sequence[FolderState] = ()
    ) -> PruneReport:
        """Delete what `plan` says, then free leftovers; one thread at a time. Raises as `prune`.

        What is in use stays. A deletion that fails is noted, and the others go on.
        """
        if plan.planned or plan.leftovers:
            # Asked at the root, so that a probe that is cut leaves nothing in a checkpoint.
            find_abilities(self._root.open(deadline))
        what = f"Pruning {self._root.location.url}"
        deleted, freed = list[str](), list[str]()
        skipped, failed = dict[str, str](), dict[str, str]()
        doomed = {one.name: one for one in plan.planned}
        tried = {one.name: {(one.name, one.slot)} for one in tombstones}
        for name in (*doomed, *plan.leftovers, *self._to_clean(plan.kept, tombstones)):
            deadline.check(what)
            try:
                with self._root.uses.deleting(name) as may:
                    if not may:
                        why_not: str | None = "it is in use by this manager"
                    elif name in doomed:
                        why_not = self._delete(doomed[name], plan.newest, deadline)
                        deleted += [] if why_not else [name]
                    else:
                        why_not = self._free(name, deadline, freed)
            except PhaseTimeoutError:
                raise
            except CheckpointError as error:
                deadline.check(what)
                log.warning("%s was not pruned: %s", name, error)
                self._root.forget(name)
                failed[name] = str(error)
            else:
                skipped |= {name: why_not} if why_not else {}
            self._tried_tombstones |= tried.get(name, set())
        told = replace(plan, is_dry_run=False, skipped=skipped, failed=failed)
        return replace(told, deleted=tuple(deleted), freed=tuple(freed))

    def _to_clean(self, kept: Sequence[Decision], tombstones: Sequence[FolderState]) -> list[str]:
        """Return tombstones, each once in a process, and the kept step whose turn it is."""
        new = {(one.name, one.slot) for one in tombstones} - self._tried_tombstones
        used = self._root.uses.now()
        own = [one for one in kept if self._sweeps and one.info is not None and one.info.save_id]
        steps = [(o.step, o.name) for o in own if o.step is not None and o.name not in used]
        later = [one for one in steps if one[0] > self._swept_step] or steps
        self._swept_step = later[0][0] if later else -1
        return [name for name, _ in sorted(new)] + [name for _, name in later[:1]]

    def _delete(
        self, decision: Decision, newest: CheckpointInfo | None, deadline: Deadline
    ) -> str | None:
        """Delete one checkpoint; return why it was not."""
        name, info = decision.name, decision.info
        if info is None or not info.save_id or newest is None or by_step(info) >= by_step(newest):
            return "nothing sound is newer"
        links = self._root.links()
        pinned = {**dict.fromkeys(links, _LINK), **_pinned(links)}
        if name in pinned:
            return pinned[name]
        # Somebody may have deleted the newest since, and then this may be the last one.
        now = self._root.look_at(newest.name, deadline).info
        if now is None or now.save_id != newest.save_id:
            end = "gone" if now is None else "another save than was judged"
            return f"{newest.name}, the newest, is {end}"
        self._root.forget(name)
        log.info("deleting %s: %s", info.url, "; ".join(decision.reasons))
        store = self._root.open(deadline, name)
        is_deleted = _delete_with_exports(store, info.save_id)
        return None if is_deleted else "it was saved anew, or is gone"

    def _free(self, name: str, deadline: Deadline, freed: list[str]) -> str | None:
        """Free what died saves and cut deletions have left, at last the slots; as `_delete`."""
        if name in self._root.links():
            return _LINK
        status = self._root.look_at(name, deadline).status
        if status == "foreign":
            return "another tool wrote it"
        store = self._root.open(deadline, name)
        if status != "empty":
            # No save has this id: what is committed stays, what was being deleted goes.
            _delete_with_exports(store, "none")
            freed += cleaning.free_leftovers(store)
            self._root.forget(name)
        if deletion.remove_tombstone(store):
            self._root.forget(name)
        return None


def _pinned(links: Mapping[str, str | None]) -> dict[str, str]:
    """Return the folders that links lead into, each with the reason why it stays."""
    pairs = sorted(links.items())
    return {target: f"{name} is a link to it" for name, target in pairs if target is not None}


def delete(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    missing_ok: bool = False,
    expected_save_id: str | None = None,
) -> bool:
    """Delete the checkpoint at `url` and its exports; return whether there was anything to delete.

    The commit goes first, so that no reader meets a half; cut at any point, call it again. A record
    of a few hundred bytes stays, and so does what another tool left there. Of a symbolic link the
    link alone goes. One process calls it; a save that is under way fails with
    `CommitConflictError`. With `expected_save_id` only that save is deleted, not one that has
    replaced it.

    Raises:
        CheckpointNotFoundError: nothing of ours is there, or not that save; unless `missing_ok`.
        InvalidInputError: another tool wrote it; unless `missing_ok`.
        StorageError, PhaseTimeoutError: deleted in part; call it again.

    """
    location, timeouts = Location.of(url, storage_options), Timeouts.of(timeout)
    path = Path(location.path) if location.is_local else None
    if path is not None and _unlinked(path):
        return True
    is_deleted = False
    # To open a store at a path would make the folder.
    if path is None or path.is_dir():
        root = Root(location, StepNames(), timeouts=timeouts, retry=retry)
        store = root.open(Deadline.of(timeouts, "commit"))
        found = read_log(store)
        if not is_foreign(store, found):
            is_there = found.head is not None or bool(attempts_there(store))
            is_deleted = is_there and _delete_with_exports(store, expected_save_id)
        elif not missing_ok:
            raise InvalidInputError(
                f"{location.url} was written by another tool.",
                path=location.url,
                next_step="Delete it with that tool, or as a folder.",
            )
    if not is_deleted and not missing_ok:
        what = "checkpoint" if expected_save_id is None else f"save {expected_save_id}"
        raise CheckpointNotFoundError(
            f"{location.url} holds no {what}.",
            path=location.url,
            next_step="ckpt_storage.list_checkpoints(root) shows what is there.",
        )
    return is_deleted


def delete_step(roots: Sequence[Root], step: int) -> bool:
    """Delete a step below each root; return whether it was there. Raises if it is in use."""
    is_deleted = False
    for root in roots:
        name = root.names.name_of(step)
        place = root.location.child(name)
        with root.uses.deleting(name) as may:
            if not may:
                raise CheckpointInProgressError(
                    f"{place.url} is in use: {root.uses.now().get(name, 'it is being deleted')}.",
                    path=place.url,
                    next_step="Wait for that to end, then delete it.",
                )
            is_deleted |= delete(
                place.target,
                storage_options=place.storage_options,
                timeout=root.timeouts,
                retry=root.retry,
                missing_ok=True,
            )
            root.forget(name)
    return is_deleted


def _delete_with_exports(store: Store, expected_save_id: str | None) -> bool:
    """Delete what lies there, and then its exports; returns and raises as `deletion.delete`."""
    is_deleted = delete_commit(store, expected_save_id=expected_save_id)
    if is_deleted and (others := remove_exports(store)):
        log.info("%s: files of others stay, such as %s", store.url, others[0])
    return is_deleted


def _unlinked(path: Path) -> bool:
    """Remove a link; return whether it was one."""
    if not path.is_symlink():
        return False
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"The link {path} cannot be removed: {error.strerror}.",
            kind="permission" if isinstance(error, PermissionError) else "other",
            path=str(path),
            next_step="Remove it by hand; what it means is left alone.",
        ) from error
    log.info("%s was a link, and what it means stays", path)
    return True
