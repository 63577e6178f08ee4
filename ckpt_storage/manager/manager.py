"""`CheckpointManager`: when to save, under which name, what to keep, where to resume."""

from __future__ import annotations

import contextlib
import hashlib
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
    DEFAULT_GROUPS,
    Casts,
    PageCache,
    Progress,
    Replicas,
    RetryPolicy,
    Shared,
    StockMetadata,
    Timeouts,
    UnsafeValues,
    check_choice,
)
from ckpt_storage.saves.hashes import check_hashes
from ckpt_storage.saves.options import Chained
from ckpt_storage.source.renaming import Rename
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .delete import delete_step
from .listing import find_newest, list_all
from .names import DEFAULT_TEMPLATE, StepNames
from .notices import PreemptionNotices
from .policies import Candidate, Keep, KeepBest, seconds_of
from .resume import Check, Restored, Resumer
from .retention import PruneReport
from .root import Root
from .schedule import Schedule
from .selection import find_own
from .step_save import StepSave
from .upkeep import Upkeep

__all__ = ["CheckpointManager", "Pruning"]

Pruning = Literal["background", "manual"]
"""When a manager prunes: after each save on a thread of its own, or by its method only."""


class CheckpointManager:
    """Manages the checkpoints below one root; a context manager.

    Every rank makes it with equal arguments. Each checkpoint is a folder of the root, named after
    its step. Folders with other names, and files of other tools, are never changed. After a save
    the coordinator deletes in the background what no policy keeps: never the newest sound
    checkpoint, never a checkpoint that this manager saves or loads. A single manager a root
    suffices; more do no harm.

    Args:
        root_url: folder or URL that holds the checkpoints; the same on every rank.
        keep: policies, combined by `|` or in a sequence; None: nothing is ever deleted.
        names: template of the folders' names.
        every_steps: `should_save` at each multiple.
        every_s: `should_save` so many seconds (or `timedelta`) after the last save began.
        signals: such as `signal.SIGTERM`: `should_save` once any rank gets it. An earlier
            handler is called as well; without one, the signal no longer ends the process.
            Python's own handler of SIGINT raises KeyboardInterrupt only at a second SIGINT, a
            second or more after the first.
        preemption: called a few times a second on each rank, on a thread of its own, so it must
            not call collectives; `should_save` once it has returned a true value on any rank.
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
        reuse: what has not changed is not written again: the `base` of each save is the checkpoint
            that this manager saved or restored last; see `save`. If a restore or a prune meets a
            damaged checkpoint, the next save has no base.
        stable: as for `ckpt_storage.save`.
        full_every: write a file anew once so many checkpoints have it, so that one damaged file
            does not hurt a whole run; None: never.

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
        reuse: bool = False,
        stable: str | Sequence[str] = (),
        full_every: int | None = None,
    ) -> None:
        check_choice("pruning", pruning, Pruning)
        if full_every is not None and full_every < 1:
            raise InvalidInputError(
                f"full_every is {full_every!r}.", next_step="Give a number of saves, or None."
            )
        if reuse:
            check_hashes()
        elif stable or full_every is not None:
            raise InvalidInputError(
                "stable and full_every need reuse=True.", next_step="Give it, or leave them out."
            )
        self._timeouts = Timeouts.of(timeout)
        self._retry = retry
        self._process_group = process_group
        locations = [Location.of(root_url, storage_options)]
        locations += [] if mirror is None else [Location.of(mirror, mirror_storage_options)]
        make_root = partial(Root, names=StepNames(names), timeouts=self._timeouts, retry=retry)
        self._roots = [make_root(location) for location in locations]
        self._root = self._roots[0]
        self._terms = {
            "the root's URL": self.url,
            "the names of steps": names,
            "the mirror's URL": self._roots[-1].location.url,
        }
        # Not a count of managers: a manager on a single rank must not change the lanes of others.
        identity = f"{self.url}\n{names}".encode()
        digest = hashlib.sha256(identity).hexdigest()[:16]
        channel = f"manager/{digest}"
        self._has_met = False
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._ranks = RankGroup.of(process_group, lane=channel)
            # A rank that is late for a choice comes too late for no step.
            self._restoring_ranks = RankGroup.of(process_group, lane=f"restore/{digest}")
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
        self._restore_count = 0
        self._upkeep = Upkeep(
            self._roots,
            keep=keep,
            mirror_keep=mirror_keep,
            prunes=pruning == "background",
            is_coordinator=self._ranks.is_coordinator,
        )
        self._reuse: dict[str, Any] = {}
        if reuse:
            self._reuse = {"has_reuse": True, "stable": stable, "full_every": full_every}
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
        """Return the URL of the checkpoint of a step, without user and password.

        The checkpoint need not exist. Raises `InvalidInputError` for a value that is no step.
        """
        return self._location_of(step).url

    def target_of(self, step: int) -> str:
        """Return the argument for `ckpt_storage.load`: `url_of` with user and password."""
        return self._location_of(step).target

    def step_of(self, url: str | os.PathLike[str]) -> int | None:
        """Return the step whose `url_of` this is, in the root or its mirror; None for other URLs.

        The checkpoint need not exist. Raises `InvalidInputError` for a value that is no URL.
        """
        checkpoint = find_own(self._roots, Location.of(url))
        return None if checkpoint is None else self._root.names.step_of(checkpoint[1])

    def _location_of(self, step: int) -> Location:
        return self._root.location.child(self._root.names.name_of(step))

    def should_save(self, step: int) -> bool:
        """Return whether to save at `step`: the same on every rank; all ask at the same steps.

        At the first call ranks meet, and compare what their managers were made with. Later on
        multiples of `every_steps` cost nothing; for the rest each rank checks a few times a second
        whether another rank requests a save, and ranks meet only then.
        Raises `RankMismatchError`, `RankFailedError`, `PhaseTimeoutError`.
        """
        self._check_open()
        self._root.names.name_of(step)
        self._meet()
        return self._schedule.is_due(step)

    @property
    def preempted(self) -> str | None:
        """The notice that `should_save` answered, and its rank; the same on every rank."""
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
        groups: Sequence[str] = DEFAULT_GROUPS,
    ) -> CheckpointInfo:
        """Save `state` as the checkpoint of `step` and return what was committed; all ranks call.

        `metrics` maps names to numbers; those of the coordinator are stored with the commit, for
        `KeepBest` and for `all`. A committed checkpoint of that step is replaced with `overwrite`
        only, or if `restore` skipped it as damaged, so that training which reaches its step again
        goes on. Other arguments, and errors, as for `ckpt_storage.save`.
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
        groups: Sequence[str] = DEFAULT_GROUPS,
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
        arguments = {**arguments, **self._reuse, "is_preemption": is_preemption}
        return StepSave(
            self._root, arguments, self._upkeep.record_save, restores=self._restore_count
        )

    @property
    def saver(self) -> AsyncSaver:
        """The saver of `save_async`, made on first use; see its `step_guard`."""
        self._check_open()
        self._saver = self._saver or self._make_saver()
        return self._saver

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every background save has ended; as `AsyncSaver.wait`."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def all(self) -> list[CheckpointInfo]:
        """Return all committed checkpoints, by step; any rank, not collective.

        Folders with other names, whose `step` is None, come first. Costs a listing, and two reads
        for each. Raises `StorageError`, `PhaseTimeoutError`.
        """
        return list_all(self._roots, Deadline.of(self._timeouts, "load"))

    def latest(self) -> CheckpointInfo | None:
        """Return the committed checkpoint of the highest step; any rank, not collective.

        None if there is none. `restore` would try it first: checkpoints that are known to be
        damaged do not count, and a format that this release cannot read is an error. Mostly costs a
        listing and two reads. Raises `StorageError`, `PhaseTimeoutError`, `FormatError`.
        """
        return find_newest(self._roots, Deadline.of(self._timeouts, "load"))

    def best(self, metric: str, mode: Literal["min", "max"]) -> CheckpointInfo | None:
        """Return the committed checkpoint with the smallest or largest `metric`; as `all`.

        Of equal values the later step; None if no checkpoint has the metric as a finite number.
        """
        by_name = {info.name: info for info in self.all() if info.step is not None}
        candidates = [Candidate.of(info, info.step or 0) for info in by_name.values()]
        return next((by_name[name] for name in KeepBest(metric, mode).kept(candidates)), None)

    def resume_info(self) -> CheckpointInfo | None:
        """Return the checkpoint that `restore` would try first; all ranks call, and get the same.

        Rank 0 reads, as `latest` does, and broadcasts; its error is raised on all ranks. The call
        counts as a restore: the caller may load that checkpoint.
        """
        self._check_open()
        self._meet()
        resumer = Resumer(self._restoring_ranks, self._roots, restore_count=self._restore_count)
        info = resumer.first()
        self._restore_count = resumer.restore_count
        return info

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        url: str | os.PathLike[str] | None = None,
        part: bool = False,
        check: Check = "read",
        planner: LoadPlanner | None = None,
        rename: Rename | None = None,
        progress: Progress = None,
        verify: bool = True,
        thread_count: int | None = None,
        memory_limit_bytes: int | None = None,
        shared_reads: Shared = "auto",
        unsafe_pickle: bool = False,
        casts: Casts = "checked",
    ) -> Restored | None:
        """Load the committed checkpoint of the highest step that is whole; all ranks call.

        All ranks load the same one. Returns None if nothing was ever committed. Loaded bytes are
        verified; `check="deep"` first verifies the whole checkpoint, split over the ranks. A
        checkpoint that is damaged, or was deleted meanwhile, is skipped with a warning, and the
        next older one is loaded. The step of a damaged checkpoint may be saved again.

        With `step` that checkpoint is loaded and no other; with `url` the checkpoint there, also
        below another root, which `storage_options` must fit. Thin checkpoints are skipped, and an
        error if they are named, unless `part` asks for what is there. Other arguments as for
        `ckpt_storage.load`.

        Raises:
            CheckpointError: on every live rank. `IntegrityError` if there are checkpoints and none
                can be loaded; `CheckpointNotFoundError` if there is none of `step` or at `url`; and
                errors of `ckpt_storage.load` that no damage causes.

        """
        options = locals().copy()
        for name in ("self", "state", "step", "url", "part", "check"):
            del options[name]
        self._check_open()
        self._meet()
        options |= {"process_group": self._process_group, "retry": self._retry}
        resumer = Resumer(
            self._restoring_ranks,
            self._roots,
            check=check,
            step=step,
            url=url,
            part=part,
            restore_count=self._restore_count,
        )
        restored = resumer.run(partial(load, state, timeout=self._timeouts, **options))
        # Only a restore that succeeded counts; if a single rank calls it, it fails there.
        self._restore_count = resumer.restore_count
        return restored

    def _meet(self) -> None:
        """Compare root and names on all ranks, once: else different roots wait in vain."""
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
        """Delete the checkpoint of a step, and its copy in the mirror; return whether it existed.

        One rank calls it. Raises `CheckpointInProgressError` while this manager saves, loads or
        copies it, and what `ckpt_storage.delete` raises.
        """
        self._check_open()
        return delete_step(self._roots, step)

    def prune(self, *, dry_run: bool = False) -> PruneReport | None:
        """Delete what no policy keeps, now; on the coordinator; others return None at once.

        `dry_run` only plans, and writes nothing, so its ages are by this machine's clock. The
        report has a reason for every checkpoint. Not collective; the mirror is pruned separately.
        Raises `InvalidInputError` without policies, `StorageError`, `PhaseTimeoutError`.
        """
        self._check_open()
        return self._upkeep.prune(dry_run=dry_run)

    @property
    def last_prune(self) -> PruneReport | None:
        """The report of this manager's last prune, None before the first."""
        return self._upkeep.last_prune

    def wait_pruned(self, timeout: float | None = None) -> bool:
        """Wait until the prune after the last save has ended; return whether it has."""
        return self._upkeep.wait_pruned(timeout)

    def wait_mirrored(self, timeout: float | None = None) -> bool:
        """Wait until the mirror has all committed saves; on the coordinator.

        Return whether it has: False after `timeout` seconds, or if a copy failed, which is retried
        after the next save. Other ranks, and managers without a mirror, return True at once.
        """
        return self._upkeep.wait_mirrored(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait for all saves as `wait`, then for mirror and pruning; restore signal handlers.

        Waits `timeout` seconds at most for the mirror (default: `Timeouts.commit`) and for a prune
        (default: a minute). The next manager continues what is stopped then. Idempotent. Raises as
        `AsyncSaver.close`.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as ending:
            ending.callback(self._ranks.close)
            ending.callback(self._notices.close)
            ending.callback(self._upkeep.close, timeout)
            if self._saver is not None:
                ending.callback(self._saver.close, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("The CheckpointManager is closed.", next_step="Make another.")
