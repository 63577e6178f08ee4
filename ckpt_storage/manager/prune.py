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
from ckpt_storage.commit.delete import TOMBSTONE_AGE_S, attempts_there, remove_tombstone
from ckpt_storage.commit.delete import delete as delete_commit
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.export.export_folder import remove_exports
from ckpt_storage.format.names import COMMITS, probe_path
from ckpt_storage.inspect.verify import Part, check_part
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
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
from .root import Root

log = logging.getLogger("ckpt_storage")

OnStep = Callable[[str, int, int], None]
"""Takes the name of what is deleted or freed next, its number from 1 on, and how many there are."""

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
    on_step: OnStep = lambda *_: None,
) -> PruneReport:
    """Delete the checkpoints below a root that no policy keeps; without a manager, from anywhere.

    Only plans unless `dry_run` is False, and writes nothing then: ages go by this machine's clock.
    Arguments as for `CheckpointManager`; `on_step` is told of each checkpoint before it is deleted.
    Not collective. Raises `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    timeouts = Timeouts.of(timeout)
    root = Root(
        Location.of(root_url, storage_options), StepNames(names), timeouts=timeouts, retry=retry
    )
    deadline = Deadline("commit", timeouts.commit)
    return Pruner(root, keep, on_step=on_step).prune(deadline, dry_run=dry_run)


class Pruner:
    """Plans and prunes one root; keeps what `others` protects, and `last_saved`."""

    def __init__(
        self,
        root: Root,
        keep: Keep,
        *,
        others: Others = lambda *_: {},
        on_step: OnStep = lambda *_: None,
    ) -> None:
        self._root = root
        self._policies = policies_of(keep)
        self._others = others
        self._on_step = on_step
        self._turn = threading.RLock()
        # By name, when to look whether the slots of a deleted checkpoint may go.
        self._tombstones_due_s: dict[str, float] = {}
        self._tombstones: Sequence[str] = ()
        self._swept_step = -1
        self.last_saved: str | None = None
        self.last: PruneReport | None = None

    def prune(self, deadline: Deadline, *, dry_run: bool = False) -> PruneReport:
        """Plan, and unless `dry_run` carry the plan out, oldest first.

        May be cut at any point; what was left is found by the next one. A checkpoint that cannot
        be deleted does not keep the others. A dry run writes nothing, so its ages go by this
        machine's clock. Raises `StorageError`, `PhaseTimeoutError`.
        """
        with self._in_turn(deadline):
            report = self._plan(deadline, is_dry_run=dry_run)
            if dry_run:
                return report
            report = self.last = self.execute(report, deadline)
            ended = partial(self._end_tombstone, deadline)
            ends = [(name, partial(ended, name)) for name in self._tombstones]
            self._carry_out(PruneReport(), ends, deadline)
            return report

    def execute(self, plan: PruneReport, deadline: Deadline) -> PruneReport:
        """Carry out what a dry run planned. As `prune`."""
        jobs: list[tuple[str, _Job]] = [
            (one.name, partial(self._delete, one, plan.newest, deadline)) for one in plan.planned
        ]
        jobs += [(name, partial(self._free, name, deadline)) for name in plan.leftovers]
        with self._in_turn(deadline):
            if jobs:
                # Asked at the root, so that a probe that is cut leaves nothing in a checkpoint.
                probe_exclusive_create(self._root.open(deadline))
            return self._carry_out(plan, jobs, deadline, self._on_step)

    def sweep(self, deadline: Deadline) -> PruneReport:
        """Free what died beside later saves, below one kept step, the next one each time."""
        with self._in_turn(deadline):
            kept = () if self.last is None else self.last.kept
            steps = [(one.step, one.name) for one in kept if one.step is not None]
            later = [one for one in steps if one[0] > self._swept_step] or steps
            self._swept_step = later[0][0] if later else -1
            jobs = [(name, partial(self._free, name, deadline)) for _, name in later[:1]]
            return self._carry_out(PruneReport(), jobs, deadline)

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
        steps = [name for _, name in root.steps(folders) if name not in links]
        checked = set(steps) - root.seen()
        found = root.look(steps, deadline, fresh=False)
        now_s = time.time()
        if not is_dry_run and any("age" in one.needs for one in self._policies):
            now_s = root.open(deadline).server_time(probe_path())
        self._tombstones = [name for name, one in found.items() if one.status == "empty"]
        while True:
            dated = root.dated(found.values(), deadline, now_s)
            protected = {**_pinned(links), **root.uses.now(), **self._others(dated, deadline)}
            if self.last_saved is not None:
                protected[self.last_saved] = "it is what this manager saved last"
            plan = plan_retention(dated, self._policies, protected=protected)
            stale = counted_by(self._policies, dated) - checked if plan.planned else set[str]()
            checked |= stale
            fresh = root.look(sorted(stale), deadline, fresh=True)
            is_settled = all(_state(one) == _state(found[name]) for name, one in fresh.items())
            found |= fresh
            newest = plan.newest
            if is_settled and plan.planned and newest and not self._is_sound(newest, deadline):
                found[newest.name] = replace(found[newest.name], is_damaged=True)
            elif is_settled:
                break
        of_others = [
            Decision(
                name=name,
                step=None,
                reasons=(_LINK if name in links else "it does not belong to this run",),
            )
            for name in folders
            if name not in found
        ]
        kept = sorted((*plan.kept, *of_others), key=by_step)
        return replace(plan, kept=tuple(kept), is_dry_run=is_dry_run)

    def _is_sound(self, newest: CheckpointInfo, deadline: Deadline) -> bool:
        """Return whether the newest is known to be sound; it is checked once, by its documents."""
        if self._root.is_sound(newest):
            return True
        store = self._root.open(deadline, newest.name)
        try:
            checked_id = check_part(store, Part(), deep=False, deadline=deadline)
        except (
            CheckpointGoneError,
            CheckpointInProgressError,
            CheckpointNotFoundError,
            IntegrityError,
        ) as error:
            why = str(error)
        else:
            if checked_id == newest.save_id:
                self._root.found_sound(newest.name, newest.save_id)
                return True
            why = "it was saved anew"
        self._root.found_damaged(newest, why)
        return False

    def _carry_out(
        self,
        plan: PruneReport,
        jobs: Sequence[tuple[str, _Job]],
        deadline: Deadline,
        on_step: OnStep = lambda *_: None,
    ) -> PruneReport:
        """Do each job whose checkpoint is not in use; one that fails is noted, others go on."""
        what = f"Pruning {self._root.location.url}"
        deleted, freed = list[str](), list[str]()
        skipped, failed = dict[str, str](), dict[str, str]()
        for number, (name, job) in enumerate(jobs, 1):
            on_step(name, number, len(jobs))
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
        return replace(
            plan,
            is_dry_run=False,
            deleted=tuple(deleted),
            freed=tuple(freed),
            skipped=skipped,
            failed=failed,
        )

    def _delete(
        self, decision: Decision, newest: CheckpointInfo | None, deadline: Deadline
    ) -> str | None:
        """Delete one checkpoint; return why it was not."""
        name, info = decision.name, decision.info
        if info is None or info.save_id is None or newest is None:
            return "it was not looked at"
        if decision.step is None or newest.step is None or decision.step >= newest.step:
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
        is_deleted = delete_commit_and_exports(store, expected_save_id=info.save_id)
        return None if is_deleted else "it was saved anew, or is gone"

    def _free(self, name: str, deadline: Deadline) -> str | list[str]:
        """Free what a save that died, or a deletion that was cut, has left."""
        if name in self._root.links():
            return _LINK
        if self._root.look_at(name, deadline).status == "foreign":
            return "another tool wrote it"
        store = self._root.open(deadline, name)
        # No save has this id: what is committed stays, what was being deleted goes.
        delete_commit_and_exports(store, expected_save_id="none")
        freed = list(cleaning.free_leftovers(store))
        if freed:
            self._root.forget(name)
        return freed

    def _end_tombstone(self, deadline: Deadline, name: str) -> list[str]:
        """Remove the slots of what was deleted a week ago, by the storage's clock."""
        store = self._root.open(deadline, name)
        if name not in self._tombstones_due_s:
            times_s = [entry.modified_s or 0.0 for entry in store.list(COMMITS)]
            self._tombstones_due_s[name] = max(times_s, default=time.time()) + TOMBSTONE_AGE_S
        if time.time() >= self._tombstones_due_s[name]:
            self._tombstones_due_s[name] = time.time() + TOMBSTONE_AGE_S
            if remove_tombstone(store):
                self._root.forget(name)
        return []


def _state(one: Found) -> tuple[str, str | None]:
    return (one.status, one.save_id)


def _pinned(links: Mapping[str, str | None]) -> dict[str, str]:
    """Return the folders that links lead into, each with the reason why it stays."""
    return {
        target: f"{name} is a link to it"
        for name, target in sorted(links.items())
        if target is not None
    }


def delete(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    missing_ok: bool = False,
) -> bool:
    """Delete the checkpoint at `url` and its exports; return whether there was anything to delete.

    The commit goes first, so that no reader meets a half; cut at any point, call it again. A record
    of a few hundred bytes stays, and so does what another tool left there. Of a symbolic link the
    link alone goes. One process calls it; a save that is under way fails with
    `CommitConflictError`.

    Raises:
        CheckpointNotFoundError: nothing of ours is there; unless `missing_ok`.
        InvalidInputError: another tool wrote it; unless `missing_ok`.
        StorageError, PhaseTimeoutError: deleted in part; call it again.

    """
    location = Location.of(url, storage_options)
    timeouts, retry = Timeouts.of(timeout), retry or RetryPolicy()
    is_link = location.is_local and _unlinked(Path(location.path))
    is_deleted = is_link or _deleted(location, timeouts, retry, missing_ok=missing_ok)
    if not is_deleted and not missing_ok:
        raise CheckpointNotFoundError(
            f"{location.url} holds no checkpoint.",
            path=location.url,
            next_step="ckpt_storage.list_checkpoints(root) shows what is there.",
        )
    return is_deleted


def _deleted(
    location: Location, timeouts: Timeouts, retry: RetryPolicy, *, missing_ok: bool
) -> bool:
    if location.is_local and not Path(location.path).is_dir():
        # To open a store there would make the folder.
        return False
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry).bounded(deadline)
    found = read_log(store)
    if is_foreign(store, found):
        if missing_ok:
            return False
        raise InvalidInputError(
            f"{location.url} was written by another tool.",
            path=location.url,
            next_step="Delete it with that tool, or as a folder.",
        )
    if found.head is None and not attempts_there(store):
        return False
    return delete_commit_and_exports(store)


def delete_commit_and_exports(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete what lies there, and then its exports; returns and raises as `commit.delete`."""
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


def delete_step(roots: Sequence[Root], step: int, *, timeouts: Timeouts) -> bool:
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
            is_deleted |= _deleted(place, timeouts, root.retry, missing_ok=True)
            root.forget(name)
    return is_deleted
