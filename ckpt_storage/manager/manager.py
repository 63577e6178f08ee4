"""`CheckpointManager`: when to save, under which name, what to keep, where to resume."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt_storage.background.handle import SaveHandle
from ckpt_storage.background.saver import AsyncSaver, Mode, OnError
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.loads.loading import load
from ckpt_storage.options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.saves.chaining import Chained
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .cadence import Cadence
from .census import Census
from .claims import Claims
from .preemption import Notices
from .pruneplan import Soundness
from .pruning import Pruner, PruneReport
from .restoring import Check, Restored, Restorer
from .retention import Keep, seconds_of
from .stepnames import DEFAULT_TEMPLATE, StepNames
from .stepsaving import StepSaver
from .upkeep import Pruning, Upkeep

__all__ = ["CheckpointManager", "Pruning"]

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
        every_s: `should_save` when so many seconds (or `timedelta`) have passed since the last
            save began, by the coordinator's clock.
        signals: such as `signal.SIGTERM`: `should_save` once any rank gets one. A handler that
            was there is called as well; without one the signal no longer ends the process.
        preemption: called now and then on each rank, on a thread of its own, so it takes part in
            nothing collective; once it returns something true anywhere, `should_save`. One that
            hangs is not waited for.
        pruning: "background": on the coordinator, after each save. "manual": by `prune` only.
        min_age: seconds or `timedelta` for which nothing is deleted after its commit, by the
            storage's clock. By default nothing is too young: a job that reads an older checkpoint
            is given time by `keep`, such as `KeepLatest(3)`.
        process_group: the ranks; default: the default group; without one, this process.
        storage_options: passed to the fsspec file system.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: ten minutes).
        retry: how failed storage requests are repeated.
        mode: of the `AsyncSaver` that `save_async` uses, made by its first call.
        max_pending: background saves that may be in flight.
        on_error: "raise": a background save that failed is raised by the next `save_async` or
            `close`; "warn": it is logged.

    Raises:
        InvalidInputError: for arguments that cannot be.

    """

    def __init__(
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
        min_age: float | timedelta = 0.0,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | timedelta | Timeouts | None = None,
        retry: RetryPolicy | None = None,
        mode: Mode = "process",
        max_pending: int = 1,
        on_error: OnError = "raise",
    ) -> None:
        if pruning not in {"background", "manual"}:
            raise InvalidInputError(
                f"pruning is {pruning!r}.", next_step="Give 'background' or 'manual'."
            )
        self._location = Location.of(root_url, storage_options)
        self._names = StepNames(names)
        self._timeouts = Timeouts.of(timeout)
        self._retry = retry
        self._process_group = process_group
        # Not a count of managers: one that a rank makes alone, to look, must shift nothing.
        what = f"{self._location.url}\n{names}".encode()
        self._channel = f"manager/{hashlib.sha256(what).hexdigest()[:16]}"
        self._has_met = False
        self._census = Census(self._location, self._names, timeouts=self._timeouts, retry=retry)
        self._claims = Claims()
        self._soundness = Soundness()
        pruner: Pruner | None = None
        if keep is not None:
            pruner = Pruner(
                self._census,
                keep,
                min_age_s=seconds_of(min_age, what="min_age"),
                retry=retry,
                claims=self._claims,
                soundness=self._soundness,
            )
        self._upkeep = Upkeep(
            self._census,
            self._soundness,
            pruner,
            claims=self._claims,
            pruning=pruning,
            timeouts=self._timeouts,
        )
        self._saves = StepSaver(
            self._census,
            self._claims,
            process_group,
            make_saver=lambda: AsyncSaver(
                process_group,
                mode=mode,
                timeout=self._timeouts,
                max_pending=max_pending,
                on_error=on_error,
                name=self._channel,
            ),
            damaged=self._soundness.damaged_ids,
            committed=self._upkeep.committed,
            ended=self._upkeep.wake,
        )
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._coordinator = Ranks.of(process_group, lane=self._channel)
            undo.callback(self._coordinator.close)
            self._upkeep.begin(is_coordinator=self._coordinator.is_coordinator)
            self._notices = Notices(signals, preemption)
            undo.callback(self._notices.close)
            self._cadence = Cadence(
                self._coordinator,
                self._notices,
                every_steps=every_steps,
                every_s=None if every_s is None else seconds_of(every_s, what="every_s"),
                timeouts=self._timeouts,
                terms={
                    "the root's URL": self._location.url,
                    "the names of steps": self._names.template,
                },
            )
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<CheckpointManager {self.url!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:
            error.add_note(f"Closing the manager failed too: {failure}")

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return self._location.url

    def url_of(self, step: int) -> str:
        """Return the URL of the checkpoint of a step, whether it is there or not.

        For people: without the user and password that the root's URL may have; see `target_of`.
        Raises `InvalidInputError` for what is no step.
        """
        return self._location.child(self._names.name_of(step)).url

    def target_of(self, step: int) -> str:
        """Return what to give to `ckpt_storage.load` for the checkpoint of a step.

        As `url_of`, but whole: with what the root's URL says of user and password, so it is not
        for logs. Raises `InvalidInputError`.
        """
        return self._location.child(self._names.name_of(step)).target

    # When.

    def should_save(self, step: int) -> bool:
        """Return whether to save at `step`: the same on every rank; all ask at the same steps.

        At the first call ranks meet, and compare what their managers were made with. Later on
        multiples of `every_steps` cost nothing; for the rest ranks meet about once a second.
        Raises `RankMismatchError`, `RankFailedError`, `PhaseTimeoutError`.
        """
        self._check_open()
        self._names.name_of(step)
        self._meet()
        return self._cadence.is_due(step)

    @property
    def preempted(self) -> str | None:
        """What notice `should_save` answered, and on which rank; None if there was none yet.

        The same on every rank: once the save is made, end the loop.
        """
        return self._cadence.preempted

    # Save.

    def save(  # the public surface, all keyword-only
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
    ) -> CheckpointInfo:
        """Save `state` as the checkpoint of `step` and return what was committed; all ranks call.

        `metrics` maps names to numbers; those of the coordinator are kept with the commit, for
        `KeepBest` and for `all`. A committed checkpoint of that step is replaced with `overwrite`
        only; or if it is the save that `restore` passed over as damaged, so that training which
        comes to its step again goes on. The rest, and what is raised, as for `ckpt_storage.save`.
        """
        self._check_open()
        options = SaveOptions(
            timeouts=self._timeouts,
            overwrite=overwrite,
            consolidate=consolidate,
            storage_options=self._location.storage_options,
            planner=planner,
            thread_count=thread_count,
            part_bytes=part_bytes,
            memory_limit_bytes=memory_limit_bytes,
            page_cache=page_cache,
            sync_files=sync_files,
            stock_metadata=stock_metadata,
            unsafe_values=unsafe_values,
            retry=self._retry,
            progress=progress,
        )
        self._cadence.saved()
        return self._saves.save(step, state, metrics or {}, options)

    def save_async(  # the public surface, all keyword-only
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
        block_until_staged: bool = True,
    ) -> SaveHandle:
        """Begin to save `state` as the checkpoint of `step`; all ranks call.

        As `save`, in the background, as `AsyncSaver.save` does it.
        """
        self._check_open()
        options = SaveOptions(
            timeouts=self._timeouts,
            overwrite=overwrite,
            consolidate=consolidate,
            storage_options=self._location.storage_options,
            planner=planner,
            thread_count=thread_count,
            part_bytes=part_bytes,
            memory_limit_bytes=memory_limit_bytes,
            page_cache=page_cache,
            sync_files=sync_files,
            stock_metadata=stock_metadata,
            unsafe_values=unsafe_values,
            retry=self._retry,
            progress=progress,
        )
        self._cadence.saved()
        return self._saves.begin(
            step, state, metrics or {}, options, block_until_staged=block_until_staged
        )

    @property
    def saver(self) -> AsyncSaver:
        """The saver behind `save_async`, made when it is first asked for; see its `step_guard`."""
        self._check_open()
        return self._saves.saver

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every background save has ended; as `AsyncSaver.wait`."""
        self._saves.wait(timeout)

    # What is there.

    def all(self) -> list[CheckpointInfo]:
        """Return all committed checkpoints, oldest first; any rank, not collective.

        Those of other names, or of other tools, come first; `step` is None for other names. Costs
        a listing, and two reads for each that is new to this process, one for each other.
        Raises `StorageError`, `PhaseTimeoutError`.
        """
        return self._census.all(Deadline("load", self._timeouts.load))

    def latest(self) -> CheckpointInfo | None:
        """Return the committed checkpoint of the highest step; any rank, not collective.

        None if there is none. It is the one that `restore` would try first: those that are known to
        be damaged do not count, and one that this release cannot read is an error. Costs a listing
        and two reads as a rule, however many checkpoints there are.
        Raises `StorageError`, `PhaseTimeoutError`, `FormatError`.
        """
        deadline = Deadline("load", self._timeouts.load)
        return self._census.newest(deadline, besides=self._soundness.damaged)

    def resume_info(self) -> CheckpointInfo | None:
        """Return what `restore` would try first; all ranks call, and get the same answer.

        Rank 0 looks, as `latest` does, and tells the others. What it fails with, all ranks raise.
        """
        self._check_open()
        self._meet()
        return self._restorer("read").first(self.latest)

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        check: Check = "read",
        planner: LoadPlanner | None = None,
        progress: Progress = None,
        thread_count: int | None = None,
        memory_limit_bytes: int | None = None,
        unsafe_pickle: bool = False,
        allow_lossy: bool = False,
    ) -> Restored | None:
        """Load the committed checkpoint of the highest step that is whole; all ranks call.

        Returns None if nothing was ever committed. All ranks load the same one. What is loaded is
        checked on its way, with `check="deep"` every byte of the checkpoint before it, each rank an
        equal part of them; one that is damaged or was deleted meanwhile is skipped for the one
        before it, with a warning, and named in the result. The step of a damaged one may be saved
        again. The rest as for `ckpt_storage.load`.

        Raises:
            CheckpointError: on every live rank. `IntegrityError` if there are checkpoints and none
                can be loaded; what `ckpt_storage.load` raises that is no fault of a checkpoint.

        """
        self._check_open()

        def load_one(info: CheckpointInfo) -> None:
            load(
                state,
                self._location.child(info.name).target,
                process_group=self._process_group,
                timeout=self._timeouts,
                storage_options=self._location.storage_options,
                planner=planner,
                progress=progress,
                thread_count=thread_count,
                memory_limit_bytes=memory_limit_bytes,
                unsafe_pickle=unsafe_pickle,
                allow_lossy=allow_lossy,
                retry=self._retry,
            )

        self._meet()
        return self._restorer(check).run(load_one)

    def _meet(self) -> None:
        """Compare root and names on all ranks, once: managers of other roots would never meet."""
        if self._has_met or self._coordinator.world_size == 1:
            return
        ranks = Ranks.of(self._process_group, lane="manager")
        what = f"the first use of the manager of {self.url}"
        try:
            with ranks.operation(what, timeouts=self._timeouts) as operation:
                operation.meet(
                    {
                        "the root's URL": self._location.url,
                        "the names of steps": self._names.template,
                    }
                )
        finally:
            ranks.close()
        self._has_met = True

    def _restorer(self, check: Check) -> Restorer:
        return Restorer(
            self._coordinator,
            self._census,
            self._claims,
            self._soundness,
            check=check,
            timeouts=self._timeouts,
        )

    # What to keep.

    def prune(self, *, dry_run: bool = False) -> PruneReport | None:
        """Delete what no policy keeps, now; on the coordinator; others return None at once.

        `dry_run` only plans, and writes nothing, so its ages go by this machine's clock. The
        report's plan has a reason for every checkpoint. Not collective.
        Raises `InvalidInputError` without policies, `StorageError`, `PhaseTimeoutError`.
        """
        self._check_open()
        return self._upkeep.prune(dry_run=dry_run)

    def sweep(self) -> PruneReport | None:
        """Free what saves that died a day ago left beside later ones; as `prune`, but slower.

        Deletes no checkpoint. Costs a few requests for each, so it is for now and then.
        """
        self._check_open()
        return self._upkeep.sweep()

    @property
    def last_prune(self) -> PruneReport | None:
        """What the last prune of this manager did; None before there was one."""
        return self._upkeep.last

    def wait_pruned(self, timeout: float | None = None) -> bool:
        """Wait until the prune after the last save has ended; return whether it has."""
        return self._upkeep.wait(timeout)

    # The end.

    def close(self, timeout: float | None = None) -> None:
        """Wait for all saves as `wait`, then for pruning; put signal handlers back. Idempotent.

        A prune that does not end within `timeout` seconds (default: a minute) is stopped; that is
        safe at any point. Raises what `AsyncSaver.close` raises.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as ending:
            ending.callback(self._coordinator.close)
            ending.callback(self._notices.close)
            ending.callback(self._upkeep.close, _CLOSE_S if timeout is None else timeout)
            ending.callback(self._saves.close, timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError("The CheckpointManager is closed.", next_step="Make a new one.")
