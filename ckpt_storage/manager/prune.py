"""Deleting, or thinning, the checkpoints of a run that no policy keeps (I18).

Pruning needs no lock on the storage. A plan may be old when it is executed: before each deletion
the newest sound checkpoint is read again, and the exclusive create of a slot that names the planned
save decides. Of two pruners that delete the same checkpoint, the second sees that it is gone.
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
from typing import Any

from ckpt_storage.commit import cleaning, deletion
from ckpt_storage.commit.deletion import TOMBSTONE_AGE_S
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, UnsupportedByStoreError
from ckpt_storage.export.thin import thin
from ckpt_storage.format.names import probe_path
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import find_abilities

from .delete import delete_with_exports
from .folders import FolderState, by_step
from .names import DEFAULT_TEMPLATE, StepNames
from .policies import Keep, policies_of
from .retention import PruneDecision, PruneReport, part_policy_of, plan_retention, supports_of
from .root import Root

log = logging.getLogger("ckpt_storage")

Protect = Callable[[Collection[FolderState], Deadline], Mapping[str, str]]
"""Takes the folders below a root; returns names that must stay, each with the reason."""

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
    location, timeouts = Location.of(root_url, storage_options), Timeouts.of(timeout)
    root = Root(location, StepNames(names), timeouts=timeouts, retry=retry)
    return Pruner(root, keep).prune(Deadline.of(timeouts, "commit"), dry_run=dry_run)


class Pruner:
    """Plans and prunes one root. Protects the names that `protect` returns, and the last save.

    With `sweeps`, each prune also frees the dead saves in the folder of one kept step, in turn.
    """

    def __init__(
        self, root: Root, keep: Keep, *, protect: Protect = lambda *_: {}, sweeps: bool = False
    ) -> None:
        self._root = root
        self._policies = policies_of(keep)
        self._thins = part_policy_of(self._policies)
        # Saves of which there is nothing to drop.
        self._undroppable: set[str] = set()
        self._protect = protect
        self._lock = threading.Lock()
        self._tried_tombstones: set[tuple[str, int]] = set()
        self._sweeps = sweeps
        self._swept_step = -1
        self._swept_ids: set[str | None] = set()
        self._last_saved: str | None = None
        self._highest_saved = -1
        self._has_warned = False
        self.last_report: PruneReport | None = None

    def record_save(self, name: str) -> None:
        """Protect the checkpoint that was committed last; from any thread.

        Its step may be lower than those of an abandoned run.
        """
        self._last_saved = name
        self._highest_saved = max(self._root.names.step_of(name) or 0, self._highest_saved)

    def prune(self, deadline: Deadline, *, dry_run: bool = False) -> PruneReport:
        """Plan; unless `dry_run`, delete, oldest first. The next prune finishes after a crash."""
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(f"Another prune of {self._root.location.url}")
        try:
            plan, tombstones = self._plan(deadline, is_dry_run=dry_run)
            if dry_run:
                return plan
            self.last_report = self.execute(plan, deadline, tombstones)
            self._warn_of_higher_steps(plan.newest)
            return self.last_report
        finally:
            self._lock.release()

    def _plan(
        self, deadline: Deadline, *, is_dry_run: bool
    ) -> tuple[PruneReport, list[FolderState]]:
        """Return a plan, and the deleted checkpoints whose slots are old enough to be removed."""
        root = self._root
        folders, links = root.list_folders(deadline), root.links()
        # The target of a link may be another checkpoint of this root, or belong to another job.
        steps = [name for name in root.steps_of(folders) if name not in links]
        fresh = set(steps) - root.known_names()
        now_s = time.time()
        if steps and not is_dry_run:
            with suppress(UnsupportedByStoreError):  # then it has no times of files either
                now_s = root.open(deadline).server_time(probe_path())
        # What the plan rests on is read again, until all of it is fresh.
        while True:
            states = root.with_ages(
                root.read_states(steps, deadline, fresh=False).values(), deadline, now_s
            )
            protected = {
                **_link_targets(links),
                **root.in_use.reasons(),
                **self._protect(states, deadline),
            }
            if self._last_saved is not None:
                protected[self._last_saved] = "it is what this manager saved last"
            plan = plan_retention(
                states, self._policies, protected=protected, undroppable=self._undroppable
            )
            if not (plan.planned or plan.parts) or plan.newest is None:
                break
            stale = supports_of(self._policies, states) - fresh
            fresh |= stale
            root.read_states(sorted(stale), deadline, fresh=True)
            if not stale and root.check_sound(plan.newest, deadline):
                break
        tombstones = [
            state
            for state in states
            if state.status == "empty" and (state.age_s or 0.0) >= TOMBSTONE_AGE_S
        ]
        kept = list(plan.kept)
        for name in sorted(set(folders).difference(steps)):
            reason = _LINK if name in links else "it does not belong to this run"
            kept.append(PruneDecision(name=name, step=None, reasons=(reason,)))
        return replace(plan, kept=tuple(sorted(kept, key=by_step))), tombstones

    def execute(
        self, plan: PruneReport, deadline: Deadline, tombstones: Sequence[FolderState] = ()
    ) -> PruneReport:
        """Delete and thin what `plan` says, then free leftovers. Raises as `prune`.

        One thread at a time. Names in use stay. What fails is reported, and the others go on.
        """
        if plan.planned or plan.parts or plan.leftovers:
            # Probed at the root, so that a crash leaves no probe in a checkpoint.
            find_abilities(self._root.open(deadline))
        what = f"Pruning {self._root.location.url}"
        deleted, thinned, freed = list[str](), list[str](), list[str]()
        skipped, failed = dict[str, str](), dict[str, str]()
        planned = {
            decision.name: (decision, act, done)
            for decisions, act, done in (
                (plan.planned, self._delete, deleted),
                (plan.parts, self._thin, thinned),
            )
            for decision in decisions
        }
        slots = {state.name: {(state.name, state.slot)} for state in tombstones}
        cleaned = self._to_clean(plan.kept, tombstones)
        for name in (*planned, *plan.leftovers, *cleaned):
            deadline.check(what)
            try:
                with self._root.in_use.reserved_for_deletion(name) as is_free:
                    if not is_free:
                        reason: str | None = "it is in use by this manager"
                    elif name in planned:
                        decision, act, done = planned[name]
                        reason = self._refusal(decision, plan.newest, deadline)
                        reason = reason or act(decision, deadline)
                        done += [] if reason else [name]
                    else:
                        reason = self._free(name, deadline, freed)
            except PhaseTimeoutError:
                raise
            except CheckpointError as error:
                deadline.check(what)
                log.warning("%s was not pruned: %s", name, error)
                self._root.forget(name)
                failed[name] = str(error)
            else:
                skipped |= {name: reason} if reason else {}
            self._tried_tombstones |= slots.get(name, set())
        report = replace(plan, is_dry_run=False, skipped=skipped, failed=failed)
        return replace(report, deleted=tuple(deleted), thinned=tuple(thinned), freed=tuple(freed))

    def _warn_of_higher_steps(self, newest: CheckpointInfo | None) -> None:
        saved, step = self._highest_saved, -1 if newest is None else newest.step or 0
        if newest is not None and 0 <= saved < step and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Step %d was saved below step %d of %s. restore() and latest() go by step, so they "
                "still choose step %d, and KeepLatest counts the higher steps. If those are "
                "abandoned, delete them, or save to another root.",
                *(saved, step, newest.url, step),
            )

    def _to_clean(
        self, kept: Sequence[PruneDecision], tombstones: Sequence[FolderState]
    ) -> list[str]:
        """Return tombstones, each once in a process, and the kept steps whose dead saves to free.

        With `sweeps` this is one step in each prune, in turn. Otherwise these are all thin steps,
        each save once in a process, because a thinning that was killed has not freed the whole
        save.
        """
        new = {(state.name, state.slot) for state in tombstones} - self._tried_tombstones
        in_use = self._root.in_use.reasons()
        steps = [
            (decision.step, decision.name, decision.info)
            for decision in kept
            if decision.step is not None
            and decision.name not in in_use
            and decision.info is not None
            and decision.info.save_id
        ]
        if self._sweeps:
            later = [step for step in steps if step[0] > self._swept_step] or steps
            self._swept_step = later[0][0] if later else -1
            swept = later[:1]
        else:
            thin_ids = {info.save_id for *_, info in steps if info.part}
            swept = [step for step in steps if step[2].save_id in thin_ids - self._swept_ids]
            self._swept_ids |= thin_ids
        return [name for name, _ in sorted(new)] + [name for _, name, _ in swept]

    def _delete(self, decision: PruneDecision, deadline: Deadline) -> str | None:
        """Delete one checkpoint; return why it was not deleted, None if it was."""
        info = decision.info
        assert info is not None  # noqa: S101  # else it was refused
        log.info("deleting %s: %s", info.url, "; ".join(decision.reasons))
        is_deleted = delete_with_exports(self._root.open(deadline, info.name), info.save_id)
        return None if is_deleted else "another save replaced it, or it is gone"

    def _thin(self, decision: PruneDecision, _: Deadline) -> str | None:
        """Thin one checkpoint; return why it was not thinned, None if it was."""
        info, policy = decision.info, self._thins
        assert info is not None and policy is not None  # noqa: S101, PT018  # else it was refused
        log.info("thinning %s: %s", info.url, "; ".join(decision.reasons))
        place = self._root.location.child(info.name)
        report = thin(
            place.target,
            drop=policy.patterns,
            expected_save_id=info.save_id,
            storage_options=place.storage_options,
            timeout=self._root.timeouts,
            retry=self._root.retry,
        )
        if report.was_thin:
            self._undroppable.add(report.save_id)
            return "nothing in it matches what is to be dropped"
        return None

    def _refusal(
        self, decision: PruneDecision, newest: CheckpointInfo | None, deadline: Deadline
    ) -> str | None:
        """Return why a planned checkpoint must not be touched, None if it may be."""
        name, info = decision.name, decision.info
        if info is None or not info.save_id or newest is None or by_step(info) >= by_step(newest):
            return "nothing sound is newer"
        links = self._root.links()
        protected = {**dict.fromkeys(links, _LINK), **_link_targets(links)}
        if name in protected:
            return protected[name]
        # Another process may have deleted the newest since, and then this may be the last.
        present = self._root.read_state(newest.name, deadline).info
        if present is None or present.save_id != newest.save_id:
            fate = "gone" if present is None else "replaced by another save"
            return f"{newest.name}, the newest, is {fate}"
        self._root.forget(name)
        return None

    def _free(self, name: str, deadline: Deadline, freed: list[str]) -> str | None:
        """Free the leftovers of dead saves and deletions, and then old slots.

        Returns why nothing was freed, None if it was tried.
        """
        if name in self._root.links():
            return _LINK
        status = self._root.read_state(name, deadline).status
        if status == "foreign":
            return "another tool wrote it"
        store = self._root.open(deadline, name)
        if status != "empty":
            # No save has the id "none", so this deletes no commit, but ends a deletion that began.
            delete_with_exports(store, "none")
            freed += cleaning.free_leftovers(store)
            self._root.forget(name)
        if deletion.remove_tombstone(store):
            self._root.forget(name)
        return None


def _link_targets(links: Mapping[str, str | None]) -> dict[str, str]:
    """Return the folders that links lead into, each with the reason why it stays."""
    pairs = sorted(links.items())
    return {target: f"{name} is a link to it" for name, target in pairs if target is not None}
