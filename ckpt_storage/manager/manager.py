"""`CheckpointManager`: when to save, under which name, what to keep, where to resume."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt_storage.background.handle import SaveHandle
from ckpt_storage.background.saver import AsyncSaver, Mode, OnError
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.loads.load import load
from ckpt_storage.options import (
    PageCache,
    Progress,
    Replicas,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
    check_choice,
)
from ckpt_storage.saves.options import Chained
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .job import BackgroundJob
from .mirror import Mirror
from .names import DEFAULT_TEMPLATE, StepNames
from .notices import PreemptionNotices
from .policies import Candidate, Keep, KeepBest, seconds_of
from .prune import Pruner, delete_step
from .resume import Check, Restored, Resumer
from .retention import PruneReport
from .root import Root, all_of, newest_of
from .schedule import Schedule
from .step_save import StepSave

__all__ = ["CheckpointManager", "Pruning"]

log = logging.getLogger("ckpt_storage")

Pruning = Literal["background", "manual"]
"""When a manager prunes: after each save on a thread of its own, or by its method only."""

_CLOSE_S = 60.0


class CheckpointManager:
    """Keeps house below one root; a context manager. Every rank makes one with equal arguments.

    Each checkpoint is a folder of the root, named after its step. Folders with other names, and
    what other tools wrote, are left alone. After a save the coordinator deletes in the background
    what no policy keeps: never the newest sound checkpoint, never one that this manager saves or
    loads. One manager a root is meant to delete; more do no harm.

    Args:
        root_url: folder or URL that holds the checkpoints; the same on every rank.
        keep: policies, combined by `|` or in a sequence; None: nothing is ever deleted.
        names: template of the folders' names.
        every_steps: `should_save` at each multiple.
        every_s: `should_save` so many seconds (or `timedelta`) after the last save began.
        signals: such as `signal.SIGTERM`: `should_save` once any rank gets one. A handler that
            was there is called as well; without one the signal no longer ends the process. Python's
            own handler of SIGINT raises KeyboardInterrupt only at a second SIGINT, a second or more
            after the first.
        preemption: called a few times a second on each rank, on a thread of its own, so it must
            not call collectives; `should_save` once it has returned something true on any rank.
            No step waits for it, and it may hang.
        pruning: "background": on the coordinator, after each save. "manual": by `prune` only.
        mirror: a second, slower root. The coordinator copies each committed checkpoint there in
            the background. Until then it stays at the first root, whatever `keep` says.
        mirror_keep: policies of the mirror, for what is copied; None: all, and for good.
        mirror_storage_options: passed to the fsspec file system of `mirror`.
        process_group: the ranks; default: the default group; without one, this process.
        storage_options: passed to the fsspec file system.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase (`plan`: four minutes).
        retry: how failed storage requests are repeated.
        mode: of the `AsyncSaver` that `save_async` uses, made by its first call.
        max_pending: background saves that may be in flight.
        on_error: "raise": a background save that failed is raised by the next `save_async` or
            `close`; "warn": it is logged.

    Raises:
        InvalidInputError: for arguments that cannot be.

    """

    def __init__(  # the public surface, all keyword-only
        self,
        root_url: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        names: str = DEFAULT_TEMPLATE,
        every_steps: int | None = None,
        every_s: float | timedelta | None = None,
        signals: Sequence[int] = (),
        preemption: Callable[[], object] | None = None,
        pruning: Pruning = "background",
        mirror: str | os.PathLike[str] | None = None,
        mirror_keep: Keep | None = None,
        mirror_storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | timedelta | Timeouts | None = None,
        retry: RetryPolicy | None = None,
        mode: Mode = "process",
        max_pending: int = 1,
        on_error: OnError = "raise",
    ) -> None:
        check_choice("pruning", pruning, Pruning)
        self._timeouts = Timeouts.of(timeout)
        self._retry = retry
        self._process_group = process_group
        places = [Location.of(root_url, storage_options)]
        places += [] if mirror is None else [Location.of(mirror, mirror_storage_options)]
        make = partial(Root, names=StepNames(names), timeouts=self._timeouts, retry=retry)
        self._roots = [make(place) for place in places]
        self._root = self._roots[0]
        copies = None if mirror is None else Mirror(self._root, self._roots[1], mirror_keep)
        self._pruner: Pruner | None = None
        if keep is not None:
            others = (lambda *_: {}) if copies is None else copies.waiting
            self._pruner = Pruner(self._root, keep, others=others, sweeps=True)
        self._terms = {
            "the root's URL": self.url,
            "the names of steps": names,
            "the mirror's URL": self._roots[-1].location.url,
        }
        # Not a count of managers: one that a rank makes alone, to look, must shift nothing.
        what = f"{self.url}\n{names}".encode()
        channel = f"manager/{hashlib.sha256(what).hexdigest()[:16]}"
        self._has_met = False
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._ranks = RankGroup.of(process_group, lane=channel)
            undo.callback(self._ranks.close)
            self._notices = PreemptionNotices(signals, preemption)
            undo.callback(self._notices.close)
            self._schedule = Schedule(
                self._ranks,
                self._notices,
                every_steps=every_steps,
                every_s=None if every_s is None else seconds_of(every_s, what="every_s"),
                timeouts=self._timeouts,
            )
            undo.pop_all()
        is_first = self._ranks.is_coordinator
        self._mirror = copies if is_first else None
        self._prunes = is_first and pruning == "background" and keep is not None
        self._restore_count = 0
        self._highest_saved = -1
        self._has_warned = False
        self._tidying, self._copying = (
            BackgroundJob(
                work, name=f"ckpt-storage {what} {self.url}", timeout_s=self._timeouts.commit
            )
            for what, work in (("prune", self._tidy), ("mirror", self._copy))
        )
        if self._mirror is not None:
            # What an earlier process has left.
            self._copying.wake()
        self._saver: AsyncSaver | None = None
        self._make_saver = partial(
            AsyncSaver,
            process_group,
            mode=mode,
            timeout=self._timeouts,
            max_pending=max_pending,
            on_error=on_error,
            name=channel,
        )

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.url!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Closing the manager failed too: {failure}")

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return self._root.location.url

    def url_of(self, step: int) -> str:
        """Return the URL of the checkpoint of a step, there or not; without user and password.

        Raises `InvalidInputError` for what is no step.
        """
        return self._place(step).url

    def target_of(self, step: int) -> str:
        """Return what to give to `ckpt_storage.load`: `url_of` with user and password."""
        return self._place(step).target

    def _place(self, step: int) -> Location:
        return self._root.location.child(self._root.names.name_of(step))

    def should_save(self, step: int) -> bool:
        """Return whether to save at `step`: the same on every rank; all ask at the same steps.

        At the first call ranks meet, and compare what their managers were made with. Later on
        multiples of `every_steps` cost nothing; for the rest ranks meet about once a second.
        Raises `RankMismatchError`, `RankFailedError`, `PhaseTimeoutError`.
        """
        self._check_open()
        self._root.names.name_of(step)
        self._meet()
        return self._schedule.is_due(step)

    @property
    def preempted(self) -> str | None:
        """What notice `should_save` answered, and on which rank; the same on every rank."""
        return self._schedule.preempted

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        consolidate: Chained = None,
        planner: SavePlanner | None = None,
        progress: Progress = None,
        thread_count: int | None = None,
        part_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        page_cache: PageCache = "keep",
        sync_files: bool = True,
        stock_metadata: StockMetadata = "auto",
        unsafe_values: UnsafeValues = "warn",
        replicas: Replicas = "warn",
    ) -> CheckpointInfo:
        """Save `state` as the checkpoint of `step` and return what was committed; all ranks call.

        `metrics` maps names to numbers; those of the coordinator are kept with the commit, for
        `KeepBest` and for `all`. A committed checkpoint of that step is replaced with `overwrite`
        only; or if it is the save that `restore` passed over as damaged, so that training which
        comes to its step again goes on. The rest, and what is raised, as for `ckpt_storage.save`.
        """
        return self._new_save(locals()).run(RankGroup.of(self._process_group), state)

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        consolidate: Chained = None,
        planner: SavePlanner | None = None,
        progress: Progress = None,
        thread_count: int | None = None,
        part_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        page_cache: PageCache = "keep",
        sync_files: bool = True,
        stock_metadata: StockMetadata = "auto",
        unsafe_values: UnsafeValues = "warn",
        replicas: Replicas = "warn",
        block_until_staged: bool = True,
    ) -> SaveHandle:
        """Begin to save as `save`, in the background, as `AsyncSaver.save` does it."""
        save = self._new_save(locals())
        return save.begin(self.saver, state, block_until_staged=block_until_staged)

    def _new_save(self, arguments: Mapping[str, Any]) -> StepSave:
        """Return the save of a call with these arguments."""
        self._check_open()
        self._schedule.restart_timer()
        is_preemption = self._schedule.preempted is not None
        arguments = {**arguments, "is_preemption": is_preemption}
        return StepSave(self._root, arguments, self._on_commit, restores=self._restore_count)

    def _on_commit(self, name: str) -> None:
        """Start the prune and the copy that follow a commit; from any thread."""
        self._highest_saved = max(self._root.names.step_of(name) or 0, self._highest_saved)
        if self._pruner is not None:
            # Its step may be lower than those of a run that was given up.
            self._pruner.last_saved = name
        if self._prunes:
            self._tidying.wake()
        if self._mirror is not None:
            self._copying.wake()

    def _copy(self, deadline: Deadline) -> None:
        may_go = True
        try:
            may_go = self._mirror is not None and self._mirror.fill(deadline)
        finally:
            if may_go and self._prunes:
                # What waited for its copy, or is found to be damaged, may go now.
                self._tidying.wake()

    def _tidy(self, deadline: Deadline) -> None:
        newest = None if self._pruner is None else self._pruner.prune(deadline).newest
        saved, step = self._highest_saved, -1 if newest is None else newest.step or 0
        if newest is not None and 0 <= saved < step and not self._has_warned:
            self._has_warned = True
            log.warning(
                "Step %d was saved below step %d of %s. restore() and latest() go by step, so they "
                "still choose step %d, and KeepLatest counts the higher ones. If those are given "
                "up, delete them, or save to another root.",
                *(saved, step, newest.url, step),
            )

    @property
    def saver(self) -> AsyncSaver:
        """The saver behind `save_async`, made when it is first asked for; see its `step_guard`."""
        self._check_open()
        self._saver = self._saver or self._make_saver()
        return self._saver

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every background save has ended; as `AsyncSaver.wait`."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def all(self) -> list[CheckpointInfo]:
        """Return all committed checkpoints, oldest first; any rank, not collective.

        Those of other names, or of other tools, come first; `step` is None for other names. Costs
        a listing, and two reads for each. Raises `StorageError`, `PhaseTimeoutError`.
        """
        return all_of(self._roots, Deadline.of(self._timeouts, "load"))

    def latest(self) -> CheckpointInfo | None:
        """Return the committed checkpoint of the highest step; any rank, not collective.

        None if there is none. It is the one that `restore` would try first: those that are known to
        be damaged do not count, and one that this release cannot read is an error. Mostly costs a
        listing and two reads. Raises `StorageError`, `PhaseTimeoutError`, `FormatError`.
        """
        return newest_of(self._roots, Deadline.of(self._timeouts, "load"))

    def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
        """Return the committed checkpoint with the smallest or largest `metric`; as `all`.

        Of equal ones the later step; None if none has the metric, as a finite number.
        """
        by_name = {info.name: info for info in self.all() if info.step is not None}
        candidates = [Candidate.of(info, info.step or 0) for info in by_name.values()]
        return next((by_name[name] for name in KeepBest(metric, mode).kept(candidates)), None)

    def resume_info(self) -> CheckpointInfo | None:
        """Return what `restore` would try first; all ranks call, and get the same answer.

        Rank 0 looks, as `latest` does, and tells the others. What it fails with, all ranks raise.
        """
        self._check_open()
        self._meet()
        return Resumer(self._ranks, self._roots).first()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        check: Check = "read",
        planner: LoadPlanner | None = None,
        progress: Progress = None,
        verify: bool = True,
        thread_count: int | None = None,
        memory_limit_bytes: int | None = None,
        shared_reads: Literal["auto", "never"] = "auto",
        unsafe_pickle: bool = False,
        allow_lossy: bool = False,
    ) -> Restored | None:
        """Load the committed checkpoint of the highest step that is whole; all ranks call.

        All ranks load the same one. Returns None if nothing was ever committed. Loaded bytes are
        verified; `check="deep"` first verifies the whole checkpoint, split over the ranks. One that
        is damaged, or was deleted meanwhile, is skipped with a warning, and the next older one is
        loaded. The step of a damaged one may be saved again. With `step`, that one is loaded and no
        other. The rest as for `ckpt_storage.load`.

        Raises:
            CheckpointError: on every live rank. `IntegrityError` if there are checkpoints and none
                can be loaded; `CheckpointNotFoundError` if `step` is not there; what
                `ckpt_storage.load` raises that is no fault of a checkpoint.

        """
        given = locals().copy()
        for own in ("self", "state", "step", "check"):
            del given[own]
        self._check_open()
        # Counted before anything can fail, so that it is the same on every rank.
        self._restore_count += 1
        self._meet()
        given |= {"process_group": self._process_group, "retry": self._retry}
        one = partial(load, state, timeout=self._timeouts, **given)
        return Resumer(self._ranks, self._roots, check=check, step=step).run(one)

    def _meet(self) -> None:
        """Compare root and names on all ranks, once: managers of other roots would never meet."""
        if self._has_met or self._ranks.world_size == 1:
            return
        what = f"the first use of the manager of {self.url}"
        with (
            contextlib.closing(RankGroup.of(self._process_group, lane="manager")) as ranks,
            ranks.operation(what, timeouts=self._timeouts) as operation,
        ):
            operation.meet(self._terms)
        self._has_met = True

    def delete(self, step: int) -> bool:
        """Delete the checkpoint of a step, and its copy in the mirror; return whether it was there.

        One rank calls it. Raises `CheckpointInProgressError` while this manager saves, loads or
        copies it, and what `ckpt_storage.delete` raises.
        """
        self._check_open()
        return delete_step(self._roots, step)

    def prune(self, *, dry_run: bool = False) -> PruneReport | None:
        """Delete what no policy keeps, now; on the coordinator; others return None at once.

        `dry_run` only plans, and writes nothing, so its ages go by this machine's clock. The
        report has a reason for every checkpoint. Not collective; the mirror is pruned by itself.
        Raises `InvalidInputError` without policies, `StorageError`, `PhaseTimeoutError`.
        """
        self._check_open()
        if self._pruner is None:
            what = "This manager has no policy of retention."
            raise InvalidInputError(what, next_step="Pass keep=, such as keep=KeepLatest(3).")
        if not self._ranks.is_coordinator:
            return None
        return self._pruner.prune(Deadline.of(self._timeouts, "commit"), dry_run=dry_run)

    @property
    def last_prune(self) -> PruneReport | None:
        """What the last prune of this manager did; None before there was one."""
        return None if self._pruner is None else self._pruner.last

    def wait_pruned(self, timeout: float | None = None) -> bool:
        """Wait until the prune after the last save has ended; return whether it has."""
        return self._tidying.wait(self._timeouts.commit if timeout is None else timeout)

    def wait_mirrored(self, timeout: float | None = None) -> bool:
        """Wait until the mirror has what was saved so far; on the coordinator.

        Return whether it has: False after `timeout` seconds, or if the copy failed; it is tried
        again after the next save. Others, and managers without a mirror, return True at once.
        """
        limit_s = self._timeouts.commit if timeout is None else timeout
        return self._copying.wait(limit_s) and self._copying.error is None

    def close(self, timeout: float | None = None) -> None:
        """Wait for all saves as `wait`, then for mirror and pruning; put signal handlers back.

        Waits `timeout` seconds at most for the mirror (default: `Timeouts.commit`) and for a prune
        (default: a minute). What is stopped then is gone on with by the next manager. Idempotent.
        Raises what `AsyncSaver.close` raises.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as ending:
            ending.callback(self._ranks.close)
            ending.callback(self._notices.close)
            ending.callback(self._tidying.close, _CLOSE_S if timeout is None else timeout)
            limit_s = self._timeouts.commit if timeout is None else timeout
            ending.callback(self._copying.close, limit_s)
            if self._saver is not None:
                ending.callback(self._saver.close, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("The CheckpointManager is closed.", next_step="Make a new one.")
