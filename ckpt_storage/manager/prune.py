"""Deleting one checkpoint, or those of a run that no policy keeps (invariants I7 and I18).

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_storage.commit import cleaning
from ckpt_storage.commit.cleaning import TOMBSTONE_AGE_S, attempts_there, remove_tombstone
from ckpt_storage.commit.cleaning import delete as delete_commit
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
)
from ckpt_storage.export.folder import remove_exports
from ckpt_storage.format.names import COMMITS, probe_path
from ckpt_storage.inspect.verify import check_part
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store

from .retention import (
    DEFAULT_TEMPLATE,
    Decision,
    Found,
    Keep,
    PruneReport,
    StepNames,
    by_step,
    counted_by,
    plan_retention,
    policies_of,
)
from .root import USELESS, Root

log = logging.getLogger("ckpt_storage")

Others = Callable[[Collection[Found], Deadline], Mapping[str, str]]
"""Takes what lies below a root; returns names that nobody may delete, each with the reason."""

_Job = Callable[[], str | list[str] | None]
"""Returns why nothing was done; or the save ids that were freed; None: the checkpoint is gone."""

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

    Only plans unless `dry_run` is False, and writes nothing then: ages go by this machine's clock.
    Arguments as for `CheckpointManager`. Not collective. Raises `StorageError`,
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
        # By name, when to look whether the slots of a deleted checkpoint may go.
        self._tombstones_due_s: dict[str, float] = {}
        self._tombstones: Sequence[str] = ()
        self._sweeps = sweeps
        self._swept_step = -1
        self.last_saved: str | None = None
        self.last: PruneReport | None = None

    def prune(self, deadline: Deadline, *, dry_run: bool = False) -> PruneReport:
        """Plan, and unless `dry_run` carry the plan out, oldest first; cut, the next goes on."""
        with self._in_turn(deadline):
            report = self._plan(deadline, is_dry_run=dry_run)
            if dry_run:
                return report
            self.last = done = self.execute(report, deadline)
            jobs: list[tuple[str, _Job]] = [
                (name, partial(self._end, name, deadline)) for name in self._tombstones
            ]
            swept = self._to_sweep(done.kept)
            jobs += [(name, partial(self._free, name, deadline)) for name in swept]
            freed = self._carry_out(PruneReport(), jobs, deadline).freed
            self.last = replace(done, freed=done.freed + freed)
            return self.last

    def execute(self, plan: PruneReport, deadline: Deadline) -> PruneReport:
        """Carry out what a dry run planned; one thread at a time. As `prune`."""
        jobs: list[tuple[str, _Job]] = [
            (one.name, partial(self._delete, one, plan.newest, deadline)) for one in plan.planned
        ]
        jobs += [(name, partial(self._free, name, deadline)) for name in plan.leftovers]
        if jobs:
            # Asked at the root, so that a probe that is cut leaves nothing in a checkpoint.
            probe_exclusive_create(self._root.open(deadline))
        return self._carry_out(plan, jobs, deadline)

    def _to_sweep(self, kept: Sequence[Decision]) -> list[str]:
        steps = [(one.step, one.name) for one in kept if one.step is not None and self._sweeps]
        later = [one for one in steps if one[0] > self._swept_step] or steps
        self._swept_step = later[0][0] if later else -1
        return [name for _, name in later[:1]]

    @contextmanager
    def _in_turn(self, deadline: Deadline) -> Iterator[None]:
        if not self._turn.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"Another prune of {self._root.location.url}")
        try:
            yield
        finally:
            self._turn.release()

    def _plan(self, deadline: Deadline, *, is_dry_run: bool) -> PruneReport:
        """Look at all steps, and plan; look again at what the plan counts on."""
        root = self._root
        folders, links = root.folders(deadline), root.links()
        # What lies behind a link may be another checkpoint of this root, or of somebody else.
        steps = [name for name in root.steps(folders) if name not in links]
        checked = set(steps) - root.seen()
        now_s = time.time()
        if not is_dry_run and any("age" in one.needs for one in self._policies):
            now_s = root.open(deadline).server_time(probe_path())
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
            if not stale and is_sound(root, plan.newest, deadline):
                break
        self._tombstones = [one.name for one in found if one.status == "empty"]
        kept = list(plan.kept)
        for name in sorted(set(folders).difference(steps)):
            why = _LINK if name in links else "it does not belong to this run"
            kept.append(Decision(name=name, step=None, reasons=(why,)))
        return replace(plan, kept=tuple(sorted(kept, key=by_step)), is_dry_run=is_dry_run)

    def _carry_out(
        self, plan: PruneReport, jobs: Sequence[tuple[str, _Job]], deadline: Deadline
    ) -> PruneReport:
        """Do each job whose checkpoint is not in use; one that fails is noted, others go on."""
        what = f"Pruning {self._root.location.url}"
        deleted, freed = list[str](), list[str]()
        skipped, failed = dict[str, str](), dict[str, str]()
        for name, job in jobs:
            deadline.check(what)
            try:
                with self._root.uses.deleting(name) as may:
                    came = job() if may else "it is in use by this manager"
            except PhaseTimeoutError:
                raise
            except CheckpointError as error:
                deadline.check(what)
                log.warning("%s was not pruned: %s", name, error)
                self._root.forget(name)
                failed[name] = str(error)
            else:
                if came is None:
                    deleted.append(name)
                elif isinstance(came, str):
                    skipped[name] = came
                else:
                    freed += came
        told = replace(plan, is_dry_run=False, skipped=skipped, failed=failed)
        return replace(told, deleted=tuple(deleted), freed=tuple(freed))

    def _delete(
        self, decision: Decision, newest: CheckpointInfo | None, deadline: Deadline
    ) -> str | None:
        """Delete one checkpoint; return why it was not."""
        name, info = decision.name, decision.info
        if info is None or not info.save_id or newest is None or by_step(info) >= by_step(newest):
            return "nothing sound is newer"
        links = self._root.links()
        if name in links or name in _pinned(links):
            return _pinned(links).get(name, _LINK)
        # Somebody may have deleted the newest since, and then this may be the last one.
        now = self._root.look_at(newest.name, deadline).info
        if now is None or now.save_id != newest.save_id:
            end = "gone" if now is None else "another save than was judged"
            return f"{newest.name}, the newest, is {end}"
        self._root.forget(name)
        log.info("deleting %s: %s", info.url, "; ".join(decision.reasons))
        store = self._root.open(deadline, name)
        is_deleted = _delete_with_exports(store, expected_save_id=info.save_id)
        return None if is_deleted else "it was saved anew, or is gone"

    def _free(self, name: str, deadline: Deadline) -> str | list[str]:
        """Free what a save that died, or a deletion that was cut, has left."""
        if name in self._root.links():
            return _LINK
        if self._root.look_at(name, deadline).status == "foreign":
            return "another tool wrote it"
        store = self._root.open(deadline, name)
        # No save has this id: what is committed stays, what was being deleted goes.
        _delete_with_exports(store, expected_save_id="none")
        freed = list(cleaning.free_leftovers(store))
        if freed:
            self._root.forget(name)
        return freed

    def _end(self, name: str, deadline: Deadline) -> list[str]:
        """Remove the slots of what was deleted a week ago, by the storage's clock."""
        store, due_s = self._root.open(deadline, name), self._tombstones_due_s
        if name not in due_s:
            times_s = [entry.modified_s or 0.0 for entry in store.list(COMMITS)]
            due_s[name] = max(times_s, default=time.time()) + TOMBSTONE_AGE_S
        if time.time() >= due_s[name]:
            due_s[name] = time.time() + TOMBSTONE_AGE_S
            if remove_tombstone(store):
                self._root.forget(name)
        return []


def is_sound(root: Root, info: CheckpointInfo, deadline: Deadline, *, deep: bool = False) -> bool:
    """Return whether a checkpoint is sound; it is checked unless that is known, and then noted."""
    if root.is_sound(info) and not deep:
        return True
    try:
        store = root.open(deadline, info.name)
        checked_id = check_part(store, deep=deep, deadline=deadline)
        why = "it was saved anew"
    except USELESS as error:
        checked_id, why = None, str(error)
    if checked_id is not None and checked_id == info.save_id:
        root.found_sound(info.name, info.save_id)
        return True
    root.found_damaged(info, why)
    return False


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
    root = Root(location, StepNames(), timeouts=timeouts, retry=retry)
    is_link = location.is_local and _unlinked(Path(location.path))
    is_deleted = is_link or _deleted(root, None, missing_ok=missing_ok, save_id=expected_save_id)
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
        with root.uses.deleting(name) as may:
            if not may:
                url = root.location.child(name).url
                raise CheckpointInProgressError(
                    f"{url} is in use: {root.uses.now().get(name, 'it is being deleted')}.",
                    path=url,
                    next_step="Wait for that to end, then delete it.",
                )
            is_deleted |= _deleted(root, name, missing_ok=True)
            root.forget(name)
    return is_deleted


def _deleted(root: Root, name: str | None, *, missing_ok: bool, save_id: str | None = None) -> bool:
    """Delete what lies below a root under `name`, or at the root; return whether it was there."""
    location = root.location if name is None else root.location.child(name)
    if location.is_local and not Path(location.path).is_dir():
        # To open a store there would make the folder.
        return False
    store = root.open(Deadline.of(root.timeouts, "commit"), name)
    found = read_log(store)
    if not is_foreign(store, found):
        is_there = found.head is not None or bool(attempts_there(store))
        return is_there and _delete_with_exports(store, expected_save_id=save_id)
    if missing_ok:
        return False
    raise InvalidInputError(
        f"{location.url} was written by another tool.",
        path=location.url,
        next_step="Delete it with that tool, or as a folder.",
    )


def _delete_with_exports(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete what lies there, and then its exports; returns and raises as `cleaning.delete`."""
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
