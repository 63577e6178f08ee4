"""Carrying a plan of retention out, in the safe order (invariants I7 and I18).

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from ckpt_storage.commit import cleaning
from ckpt_storage.commit.delete import delete
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.export.removal import remove_exports
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .census import Census
from .claims import Claims
from .pruneplan import Planner, Soundness, pinned
from .retention import Decision, Keep, PrunePlan, seconds_of
from .stepnames import DEFAULT_TEMPLATE, StepNames

log = logging.getLogger("ckpt_storage")

OnStep = Callable[[str, int, int], None]
"""Takes the name of what is deleted or freed next, its number from 1 on, and how many there are."""

_A_LINK = "it is a link"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `is_dry_run` would have done.

    `deleted` are names of checkpoints, `freed` save ids of attempts that nobody needs; `skipped`
    and `failed` say, by name, why a deletion of the plan was not made, or not ended.
    """

    plan: PrunePlan
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
    Arguments as for `CheckpointManager`; `on_step` is told
    of each checkpoint before it is deleted. Not collective.
    Raises `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    timeouts = Timeouts.of(timeout)
    census = Census(
        Location.of(root_url, storage_options), StepNames(names), timeouts=timeouts, retry=retry
    )
    pruner = Pruner(census, keep, min_age_s=seconds_of(min_age, what="min_age"), retry=retry)
    deadline = Deadline("commit", timeouts.commit)
    return pruner.prune(deadline, dry_run=dry_run, on_step=on_step)


class Pruner:
    """Plans and prunes one root, again and again; several threads take turns.

    `soundness` is what this process knows of its checkpoints; others add to it. `last` is the
    report of the last prune that was no dry run.
    """

    def __init__(
        self,
        census: Census,
        keep: Keep,
        *,
        min_age_s: float = 0.0,
        retry: RetryPolicy | None = None,
        claims: Claims | None = None,
        soundness: Soundness | None = None,
    ) -> None:
        self._census = census
        self._retry = retry or RetryPolicy()
        self._claims = claims or Claims()
        self._turn = threading.RLock()
        self.last: PruneReport | None = None
        self._planner = Planner(
            census,
            keep,
            min_age_s=min_age_s,
            claims=self._claims,
            soundness=soundness or Soundness(),
        )

    def protect(self, name: str, why: str) -> None:
        """Let no plan delete `name`, which was saved just now, until another one is protected."""
        self._planner.saved(name, why)

    def prune(
        self,
        deadline: Deadline,
        *,
        dry_run: bool = False,
        on_step: OnStep = lambda *_: None,
    ) -> PruneReport:
        """Plan, and unless `dry_run` carry the plan out, oldest first.

        May be cut at any point; what was left is found by the next one. A checkpoint that cannot
        be deleted does not keep the others. A dry run writes nothing, so its ages go by this
        machine's clock. Raises `StorageError`, `PhaseTimeoutError`.
        """
        with self._in_turn(deadline):
            if dry_run:
                plan = self._planner.plan(deadline, now_s=time.time())
                return PruneReport(plan=plan, is_dry_run=True)
            plan = self._planner.plan(deadline)
            self.last = self.execute(plan, deadline, on_step=on_step)
            self._planner.keep(deadline)
            return self.last

    def execute(
        self, plan: PrunePlan, deadline: Deadline, *, on_step: OnStep = lambda *_: None
    ) -> PruneReport:
        """Carry a plan out. As `prune`."""
        run = _Execution(self._census, self._claims, self._retry, plan, deadline)
        with self._in_turn(deadline):
            jobs = [(one.name, partial(run.delete, one)) for one in plan.deleted]
            jobs += [(name, partial(run.free, name)) for name in plan.leftovers]
            for number, (name, job) in enumerate(jobs, 1):
                on_step(name, number, len(jobs))
                run.attempt(name, job)
        return run.report(plan)

    def sweep(self, deadline: Deadline) -> PruneReport:
        """Free what saves that died have left beside later ones, in every step's folder.

        Deletes no checkpoint; the next prune trusts no note of what was pruned before. Costs a few
        requests a folder: for now and then. As `prune`.
        """
        census = self._census
        with self._in_turn(deadline):
            self._planner.doubt()
            run = _Execution(census, self._claims, self._retry, PrunePlan(), deadline)
            for _, name in census.steps(census.folders(deadline)):
                run.attempt(name, partial(run.free, name))
        return run.report(PrunePlan())

    @contextmanager
    def _in_turn(self, deadline: Deadline) -> Iterator[None]:
        if not self._turn.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"Another prune of {self._census.location.url}")
        try:
            yield
        finally:
            self._turn.release()


class _Execution:
    """One plan being carried out, and what came of it."""

    def __init__(
        self,
        census: Census,
        claims: Claims,
        retry: RetryPolicy,
        plan: PrunePlan,
        deadline: Deadline,
    ) -> None:
        self._census = census
        self._claims = claims
        self._retry = retry
        self._anchor = plan.anchor
        self._deadline = deadline
        self.deleted: list[str] = []
        self.freed: list[str] = []
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def attempt(self, name: str, work: Callable[[], str | None]) -> None:
        """Do what the plan has for one checkpoint; a failure is noted, and others go on."""
        what = f"Pruning {self._census.location.url}"
        self._deadline.check(what)
        try:
            with self._claims.deleting(name) as may:
                why = work() if may else "it is in use by this manager"
        except PhaseTimeoutError:
            raise
        except CheckpointError as error:
            self._deadline.check(what)
            log.warning("%s was not pruned: %s", name, error)
            self._census.forget(name)
            self.failed[name] = str(error)
        else:
            if why is not None:
                self.skipped[name] = why

    def report(self, plan: PrunePlan) -> PruneReport:
        """Return what was done of `plan`."""
        return PruneReport(
            plan=plan,
            deleted=tuple(self.deleted),
            freed=tuple(self.freed),
            skipped=self.skipped,
            failed=self.failed,
        )

    def delete(self, decision: Decision) -> str | None:
        """Delete one checkpoint; return why it was not."""
        census, anchor, name = self._census, self._anchor, decision.name
        if decision.info is None or decision.info.save_id is None or anchor is None:
            return "it was not looked at"
        if decision.step is None or anchor.step is None or decision.step >= anchor.step:
            return "nothing sound is newer"
        if decision.info.save_id == anchor.save_id:
            return f"it is the same save as {anchor.name}, and may be the same folder"
        changed = self._changed(name, anchor)
        if changed is not None:
            return changed
        store = census.store(name, self._deadline)
        census.forget(name)
        log.info("deleting %s: %s", decision.info.url, "; ".join(decision.reasons))
        if not delete(store, expected_save_id=decision.info.save_id):
            return "it was saved anew, or is gone"
        self._end_deletion(store, name)
        self.deleted.append(name)
        return None

    def free(self, name: str) -> str | None:
        """Free what a save that died, or a deletion that was cut, has left."""
        store = self._census.store(name, self._deadline)
        if name in self._census.links():
            return _A_LINK
        if self._census.look_at(name, self._deadline).status == "foreign":
            return "another tool wrote it"
        # No save has this id: what is committed stays, what was being deleted goes.
        if delete(store, expected_save_id=""):
            self._end_deletion(store, name)
        freed = cleaning.free_leftovers(store)
        if freed:
            self._census.forget(name)
        self.freed += freed
        return None

    def _changed(self, name: str, anchor: CheckpointInfo) -> str | None:
        """Return what has changed since the plan was made that forbids to delete `name`."""
        links = self._census.links()
        if name in links or name in pinned(links):
            return pinned(links).get(name, _A_LINK)
        # Somebody may have deleted the newest since, and then this may be the last one.
        newest = self._census.look_at(anchor.name, self._deadline).info
        if newest is None or newest.save_id != anchor.save_id:
            end = "gone" if newest is None else "another save than was judged"
            return f"{anchor.name}, the newest, is {end}"
        return None

    def _end_deletion(self, store: Store, name: str) -> None:
        others = remove_exports(store)
        if others:
            log.info("%s: files of others stay, such as %s", store.url, others[0])
        self._census.settle(name)
