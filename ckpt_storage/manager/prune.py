"""Deleting the checkpoints of a run that no policy keeps (invariants I7 and I18).

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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

from ckpt_storage.commit import cleaning
from ckpt_storage.commit.delete import TOMBSTONE_AGE_S, remove_tombstone
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
    PhaseTimeoutError,
)
from ckpt_storage.format.names import COMMITS, probe_path
from ckpt_storage.inspect.verify import Part, check_part
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create

from .delete import delete_commit_and_exports, remove_probes
from .names import DEFAULT_TEMPLATE, StepNames
from .retention import (
    Decision,
    Found,
    Keep,
    KeepLatest,
    RetentionPlan,
    by_step,
    plan_retention,
    policies_of,
    seconds_of,
)
from .root import Root

log = logging.getLogger("ckpt_storage")

OnStep = Callable[[str, int, int], None]
"""Takes the name of what is deleted or freed next, its number from 1 on, and how many there are."""

_A_LINK = "it is a link"
_NO_STEP = "it does not belong to this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `is_dry_run` would do, with the reasons.

    kept, planned: what was to stay and what was to go, in the order of steps, oldest first.
    newest: the newest sound checkpoint; nothing is deleted without one.
    deleted: names of checkpoints that are gone. freed: save ids of attempts that nobody needs.
    skipped, failed: by name, why a deletion that was planned was not made, or not ended.
    leftovers: names under which nothing is committed and something lies.
    """

    kept: tuple[Decision, ...] = ()
    planned: tuple[Decision, ...] = ()
    newest: CheckpointInfo | None = None
    leftovers: tuple[str, ...] = ()
    is_dry_run: bool = False
    deleted: tuple[str, ...] = ()
    freed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def prune(
    root_url: str | os.PathLike[str],
    keep: Keep,
    *,
    names: str = DEFAULT_TEMPLATE,
    dry_run: bool = True,
    min_age: float | timedelta = 0.0,
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
    min_age_s = seconds_of(min_age, what="min_age")
    pruner = Pruner(root, keep, min_age_s=min_age_s, on_step=on_step)
    return pruner.prune(Deadline("commit", timeouts.commit), dry_run=dry_run)


Others = Callable[[Collection[Found], Deadline], Mapping[str, str]]
"""Takes what lies below a root; returns names that nobody may delete, each with the reason."""


class Pruner:
    """Plans and prunes one root, again and again; several threads take turns.

    No plan deletes what `others` protects, nor `last_saved`, which may be set at any time. `last`
    is the report of the last prune that was no dry run.
    """

    def __init__(
        self,
        root: Root,
        keep: Keep,
        *,
        min_age_s: float = 0.0,
        others: Others = lambda *_: {},
        on_step: OnStep = lambda *_: None,
    ) -> None:
        self._root = root
        self._policies = policies_of(keep)
        self._min_age_s = min_age_s
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
            if not dry_run:
                report = self.last = self.execute(report, deadline)
                run = _Execution(self._root, PruneReport(), deadline)
                for name in self._tombstones:
                    run.attempt(name, partial(self._end_tombstone, name, deadline))
            return report

    def execute(self, plan: PruneReport, deadline: Deadline) -> PruneReport:
        """Carry out what a dry run planned. As `prune`."""
        run = _Execution(self._root, plan, deadline)
        jobs = [(one.name, partial(run.delete, one)) for one in plan.planned]
        jobs += [(name, partial(run.free, name)) for name in plan.leftovers]
        with self._in_turn(deadline):
            if jobs:
                # Asked at the root, so that a probe that is cut leaves nothing in a checkpoint.
                probe_exclusive_create(self._root.open(deadline))
            for number, (name, job) in enumerate(jobs, 1):
                self._on_step(name, number, len(jobs))
                run.attempt(name, job)
        return run.report

    def sweep(self, deadline: Deadline) -> PruneReport:
        """Free what saves that died have left beside later ones, in every step's folder.

        Deletes no checkpoint. Costs a few requests a folder: for now and then. As `prune`.
        """
        with self._in_turn(deadline):
            report = self._freed(self._root.steps(self._root.folders(deadline)), deadline)
            remove_probes(self._root.open(deadline))
        return report

    def sweep_next(self, deadline: Deadline) -> PruneReport:
        """Sweep one folder, each time that of the next step that is kept; then from the first on.

        So what died beside later saves goes in time, at the cost of a few requests a prune.
        """
        with self._in_turn(deadline):
            kept = () if self.last is None else self.last.kept
            steps = [(one.step, one.name) for one in kept if one.step is not None]
            later = [one for one in steps if one[0] > self._swept_step] or steps
            self._swept_step = later[0][0] if later else -1
            return self._freed(later[:1], deadline)

    def _freed(self, steps: Sequence[tuple[int, str]], deadline: Deadline) -> PruneReport:
        run = _Execution(self._root, PruneReport(), deadline)
        for _, name in steps:
            run.attempt(name, partial(run.free, name))
        return run.report

    @contextmanager
    def _in_turn(self, deadline: Deadline) -> Iterator[None]:
        if not self._turn.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"Another prune of {self._root.location.url}")
        try:
            yield
        finally:
            self._turn.release()

    def _plan(self, deadline: Deadline, *, is_dry_run: bool) -> PruneReport:
        """Find out what a plan needs to know, and make it.

        Requests: one listing of the root, two reads for each of the newest. For each other step
        that its number does not keep, once in this process, a listing, two reads, and its time.
        """
        root = self._root
        folders, links = root.folders(deadline), root.links()
        # What lies behind a link may be another checkpoint of this root, or of somebody else.
        steps = [(step, name) for step, name in root.steps(folders) if name not in links]
        found = self._newest(steps, deadline)
        checked = set(found)
        asks_all = any("metrics" in policy.needs for policy in self._policies)
        held = {
            name: Decision(name=name, step=step, reasons=(why,))
            for step, name in steps
            if not (asks_all or name in found or root.may_hold_leftovers(name))
            and (why := self._kept_by_step(step)) is not None
        }
        others = [name for _, name in steps if name not in found and name not in held]
        found |= root.look(others, deadline, fresh=False)
        is_by_age = self._min_age_s > 0 or any("age" in one.needs for one in self._policies)
        now_s = time.time()
        if is_by_age and not is_dry_run:
            now_s = root.open(deadline).server_time(probe_path())
        self._tombstones = [name for name, one in found.items() if one.status == "empty"]
        while True:
            dated = root.dated(found.values(), deadline, now_s)
            protected = {**pinned(links), **root.uses.now(), **self._others(dated, deadline)}
            if self.last_saved is not None:
                protected[self.last_saved] = "it is what this manager saved last"
            plan = plan_retention(
                dated, self._policies, protected=protected, min_age_s=self._min_age_s
            )
            if not plan.deleted or self._is_settled(plan, found, checked, deadline):
                break
        of_others = [
            Decision(name=name, step=None, reasons=(_A_LINK if name in links else _NO_STEP,))
            for name in folders
            if name not in found and name not in held
        ]
        kept = sorted((*plan.kept, *held.values(), *of_others), key=by_step)
        return PruneReport(
            kept=tuple(kept),
            planned=plan.deleted,
            newest=plan.newest,
            leftovers=plan.leftovers,
            is_dry_run=is_dry_run,
        )

    def _end_tombstone(self, name: str, deadline: Deadline) -> None:
        """Remove the slots of what was deleted a week ago; one listing each, once in a process.

        This machine's clock says only when to try. The storage's decides.
        """
        store = self._root.open(deadline, name)
        if name not in self._tombstones_due_s:
            times_s = [entry.modified_s or 0.0 for entry in store.list(COMMITS)]
            self._tombstones_due_s[name] = max(times_s, default=time.time()) + TOMBSTONE_AGE_S
        if time.time() >= self._tombstones_due_s[name]:
            self._tombstones_due_s[name] = time.time() + TOMBSTONE_AGE_S
            if remove_tombstone(store):
                remove_probes(store)
                self._root.forget(name)

    def _kept_by_step(self, step: int) -> str | None:
        found = (policy.kept_by_step(step) for policy in self._policies)
        return next((why for why in found if why is not None), None)

    def _newest(self, steps: Sequence[tuple[int, str]], deadline: Deadline) -> dict[str, Found]:
        """Look at the newest, until as many sound ones are known as the policies count."""
        wanted = max([1, *(one.n for one in self._policies if isinstance(one, KeepLatest))])
        found: dict[str, Found] = {}
        names = [name for _, name in reversed(steps)]
        while names and wanted > 0:
            batch, names = names[:wanted], names[wanted:]
            looked = self._root.look(batch, deadline, fresh=True)
            found |= looked
            wanted -= sum(
                one.status == "committed" and not one.is_damaged for one in looked.values()
            )
        return found

    def _is_settled(
        self, plan: RetentionPlan, found: dict[str, Found], checked: set[str], deadline: Deadline
    ) -> bool:
        """Look again at what the plan counts on; return whether all is as it was, and sound."""
        stale = [name for name in plan.counted if name not in checked]
        checked.update(stale)
        fresh = self._root.look(stale, deadline, fresh=True)
        is_same = all(_state(one) == _state(found[name]) for name, one in fresh.items())
        found |= fresh
        if not is_same or plan.newest is None or self._is_sound(plan.newest, deadline):
            return is_same
        found[plan.newest.name] = replace(found[plan.newest.name], is_damaged=True)
        return False

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


class _Execution:
    """One plan being carried out; `report` is the plan, with what came of it so far."""

    def __init__(self, root: Root, plan: PruneReport, deadline: Deadline) -> None:
        self._root = root
        self._deadline = deadline
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self.report = replace(plan, is_dry_run=False, skipped=self._skipped, failed=self._failed)

    def attempt(self, name: str, work: Callable[[], str | None]) -> None:
        """Do what the plan has for one checkpoint; a failure is noted, and others go on."""
        what = f"Pruning {self._root.location.url}"
        self._deadline.check(what)
        try:
            with self._root.uses.deleting(name) as may:
                why = work() if may else "it is in use by this manager"
        except PhaseTimeoutError:
            raise
        except CheckpointError as error:
            self._deadline.check(what)
            log.warning("%s was not pruned: %s", name, error)
            self._root.forget(name)
            self._failed[name] = str(error)
        else:
            if why is not None:
                self._skipped[name] = why

    def delete(self, decision: Decision) -> str | None:
        """Delete one checkpoint; return why it was not."""
        newest, name, info = self.report.newest, decision.name, decision.info
        if info is None or info.save_id is None or newest is None:
            return "it was not looked at"
        if decision.step is None or newest.step is None or decision.step >= newest.step:
            return "nothing sound is newer"
        links = self._root.links()
        if name in links or name in pinned(links):
            return pinned(links).get(name, _A_LINK)
        # Somebody may have deleted the newest since, and then this may be the last one.
        now = self._root.look_at(newest.name, self._deadline).info
        if now is None or now.save_id != newest.save_id:
            end = "gone" if now is None else "another save than was judged"
            return f"{newest.name}, the newest, is {end}"
        self._root.forget(name)
        log.info("deleting %s: %s", info.url, "; ".join(decision.reasons))
        store = self._root.open(self._deadline, name)
        if not delete_commit_and_exports(store, expected_save_id=info.save_id):
            return "it was saved anew, or is gone"
        self.report = replace(self.report, deleted=(*self.report.deleted, name))
        return None

    def free(self, name: str) -> str | None:
        """Free what a save that died, or a deletion that was cut, has left."""
        store = self._root.open(self._deadline, name)
        if name in self._root.links():
            return _A_LINK
        if self._root.look_at(name, self._deadline).status == "foreign":
            return "another tool wrote it"
        # No save has this id: what is committed stays, what was being deleted goes.
        delete_commit_and_exports(store, expected_save_id="none")
        freed = cleaning.free_leftovers(store)
        remove_probes(store)
        if freed:
            self._root.forget(name)
        self.report = replace(self.report, freed=(*self.report.freed, *freed))
        return None


def _state(one: Found) -> tuple[str, str | None]:
    return (one.status, one.info.save_id if one.info is not None else None)


def pinned(links: Mapping[str, str | None]) -> dict[str, str]:
    """Return the folders that links lead into, each with the reason why it stays."""
    return {
        target: f"{name} is a link to it"
        for name, target in sorted(links.items())
        if target is not None
    }
