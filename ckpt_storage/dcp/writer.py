"""`CheckpointStorageWriter`: DCP's save calls become the steps of one save session.

All state of a save belongs to the thread that runs it: saves of one writer may overlap.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.report import RankReport
from ckpt_storage.coordination.terms import check_terms
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.observe.outcome import Outcome
from ckpt_storage.observe.report import report as report_outcome
from ckpt_storage.observe.stats import OperationStats, RankTiming
from ckpt_storage.observe.timeline import Timeline
from ckpt_storage.options import (
    DEFAULT_GROUPS,
    PageCache,
    Phase,
    Progress,
    Replicas,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.saves.groups import sizes_in_plans
from ckpt_storage.saves.items import LiveItems, ties_of
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.planning import checked, find_mismatch, flat_state
from ckpt_storage.saves.replicas import ReplicaSample, find_differences, sample_of
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.deadline import Deadline

from .border import (
    PiggybackMessage,
    at_dcp_border,
    is_location,
    rank_of_call,
    received_messages,
)


class _ThreadState(threading.local):
    """The target of a thread's next save, and the save that it runs."""

    pending: str | os.PathLike[str] | None = None
    is_reset_consumed = False
    save_id: str | None = None
    session: SaveSession | None = None
    timeline = Timeline()
    nonce = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _ThreadState, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    """What a rank returns to the coordinator: its report, a sample of its replicated values."""

    report: RankReport
    timing: RankTiming
    sample: ReplicaSample | None


class CheckpointStorageWriter(StorageWriter):
    """Writes a checkpoint to any storage; pass it to `dcp.save` or `dcp.async_save`.

    Every rank makes a writer with equal arguments. Data lands under names of this attempt
    alone; the checkpoint exists once rank 0 (the coordinator) has created its commit record.
    May be used for many saves, one after another or overlapping, and pickles (without
    `process_group`).

    Args:
        path: URL or local path of the checkpoint, or of its parent when `checkpoint_id` is
            passed to `dcp.save`: that is joined to it; an absolute path or full URL replaces it.
        storage_options: passed to the fsspec file system (as in pandas and Dask).
        overwrite: replace a committed checkpoint; at any instant a reader finds the old or the new.
        step: the training step, for a writer of one save: ranks must agree on it.
        thread_count: parallel uploads per rank; default 1 on local disks, 8 elsewhere.
        part_bytes: bytes per upload request.
        memory_limit_bytes: ceiling of bytes in flight per rank beyond the state itself.
        page_cache: "drop" lets the kernel keep no copy of what is on the disk (local only), so that
            saves do not displace what else is cached.
        sync_files: make files and folders durable before they are referenced (local only).
        stock_metadata: whether `.metadata`, by which torch's own readers load, is written; it has
            some 200 bytes for each item of each rank. "auto": up to 200,000 items. Without it a
            note lies in its place, and `CheckpointInfo.stock_metadata` is False.
        unsafe_values: the reaction to values that only pickle can hold, and that `load`
            therefore refuses: "warn" logs their names and types, "refuse" fails the save.
        replicas: as for `ckpt_storage.save`; but the writer sees values only as it writes them. So
            an error comes before the commit, and the planner chooses whose values are stored.
        groups: as for `ckpt_storage.save`; not with DCP's plan caching, which sends no sizes.
        base: as for `ckpt_storage.save`, like `stable`.
        process_group: the save is refused unless it runs over exactly as many ranks.
        timeout: seconds, `timedelta` or `Timeouts`. Bounds this library's own work; under
            `dcp.save` torch's collectives keep the timeout of the group that they run on.
        retry: how failed storage requests are repeated.
        progress: called with a `ProgressEvent` after each part; True: a bar on the coordinator.

    Raises (from `dcp.save`, inside torch's `CheckpointException`): subclasses of `CheckpointError`.

    """

    def __init__(  # the public surface, all keyword-only
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        step: int | None = None,
        thread_count: int | None = None,
        part_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        page_cache: PageCache = "keep",
        sync_files: bool = True,
        stock_metadata: StockMetadata = "auto",
        unsafe_values: UnsafeValues = "warn",
        replicas: Replicas = "warn",
        groups: Sequence[str] = DEFAULT_GROUPS,
        base: str | os.PathLike[str] | None = None,
        stable: str | Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        timeout: float | Timeouts | Any = None,  # timedelta too; Timeouts.of checks
        retry: RetryPolicy | None = None,
        progress: Progress = None,
    ) -> None:
        arguments = locals()
        super().__init__()
        self._path = path
        self._options = SaveOptions.of(arguments, timeouts=Timeouts.of(timeout))
        self._base = self._options.place(path)
        self._process_group = process_group
        self._state = _ThreadState()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._base.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A group does not pickle; a child process has its own default group.
        return {**vars(self), "_process_group": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is a path or URL this writer could save to."""
        return is_location(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The URL of the save of the calling thread."""
        state = self._state
        if state.session is not None:
            return state.session.url
        return self._base.join(state.pending).url

    @property
    def save_id(self) -> str | None:
        """The id of the calling thread's last save, once it has written; as torch's writer has."""
        return self._state.save_id

    def storage_meta(self) -> StorageMeta | None:
        """Return the target for planners; DCP calls it once before each save.

        The path is the constructor's; the id is that of the thread's last save, None before it.
        """
        state = self._state
        if state.is_reset_consumed:
            # The save that `reset` announced failed before it reached us.
            state.pending = None
        state.is_reset_consumed = True
        where = self._path if state.pending is None else self.checkpoint_id
        return StorageMeta(checkpoint_id=where, save_id=state.save_id)

    @at_dcp_border
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim the calling thread's next save at `checkpoint_id`; DCP calls it on all ranks."""
        state = self._state
        state.session = state.save_id = None
        self._base.join(checkpoint_id)  # raises if it cannot be joined
        state.is_reset_consumed = False
        state.pending = checkpoint_id

    @at_dcp_border
    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ARG002  # torch's signature
        **kwargs: Any,
    ) -> None:
        """Begin a save in the calling thread; all ranks. Raises `InvalidInputError`."""
        if not kwargs.get("use_collectives", True):
            raise InvalidInputError(
                "CheckpointStorageWriter cannot save with use_collectives=False: without "
                "collectives ranks cannot agree on a save.",
                phase="plan",
                next_step="Leave use_collectives at True.",
            )
        state, options, group = self._state, self._options, self._process_group
        checkpoint_id, state.pending, state.is_reset_consumed = state.pending, None, False
        timeline = state.timeline = Timeline()

        def begin(phase: Phase) -> Deadline:
            timeline.begin(phase)
            return Deadline.of(options.timeouts, phase)

        state.session = SaveSession(
            self._path,
            options,
            rank_of_call(kwargs),
            begin,
            is_coordinator=is_coordinator,
            checkpoint_id=checkpoint_id,
            global_ranks=None if group is None else dist.get_process_group_ranks(group),
        )

    def _session(self) -> SaveSession:
        session = self._state.session
        if session is None:
            raise InvalidInputError(
                "No save is under way in this thread.",
                next_step="Pass the writer to dcp.save or dcp.async_save.",
            )
        return session

    @at_dcp_border
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attach this rank's announcement to its plan; all ranks. Raises `InvalidInputError`."""
        session, plan, nonce = self._session(), checked(plan), os.urandom(16).hex()
        # Pickled together, the items of plan and message are sent once.
        announcement = PiggybackMessage(session.rank, (nonce, session.terms(), plan.items))
        received_messages().clear()
        received_messages()[announcement.key] = announcement.content
        self._state.nonce = nonce
        return replace(plan, storage_data=announcement)

    @at_dcp_border
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks agree and begin the save; coordinator only.

        Raises `InvalidInputError` if a rank has another kind of writer. All other errors are sent
        to all ranks and raised by their `write_data`, before a byte is written.
        """
        session, group, world_size = self._session(), self._process_group, len(plans)
        announcements = received_messages().copy()
        # The items of all ranks are large; no reference to them is kept.
        received_messages().clear()
        missing = [rank for rank in range(world_size) if rank not in announcements]
        if missing:
            raise InvalidInputError(
                f"Ranks {missing} of {world_size} sent no announcement with their plans.",
                phase="plan",
                next_step="Give every rank a CheckpointStorageWriter, and use a planner that "
                "keeps SavePlan objects.",
            )
        in_order = (announcements[rank] for rank in range(world_size))
        nonces, terms, items = zip(*in_order, strict=True)
        ticket_or_error: SaveTicket | CheckpointError
        try:
            group_size = world_size if group is None else dist.get_world_size(group)
            if group_size != world_size:
                raise InvalidInputError(
                    f"The save runs on {world_size} ranks; the writer's process_group has "
                    f"{group_size}.",
                    phase="plan",
                    next_step="Pass the same process_group to dcp.save and to the writer.",
                )
            check_terms(dict(enumerate(terms)), phase="plan")
            mismatch = find_mismatch(items)
            # Plans that a planner dropped count as 0.
            item_count = sum(len(plan.items) for plan in plans)
            ticket_or_error = mismatch or session.begin(
                world_size, item_count, sizes_in_plans(plans)
            )
        except CheckpointError as error:
            ticket_or_error = error
        # No exception in the planning step: with plan caching, every later save would fail.
        received_messages()[self._state.nonce] = ticket_or_error
        return [
            replace(plan, storage_data=PiggybackMessage(nonce, ticket_or_error))
            for plan, nonce in zip(plans, nonces, strict=True)
        ]

    @at_dcp_border
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's shard file and rank manifest; all ranks; durable on return.

        Raises the error that the coordinator sent, `StorageError`, `PhaseTimeoutError`,
        `InvalidInputError` (a value that cannot be stored, naming its FQN).
        """
        session, state = self._session(), self._state
        ticket_or_error = received_messages().get(state.nonce)
        received_messages().clear()
        if ticket_or_error is None:
            raise InvalidInputError(
                f"Rank {session.rank} got no save id for this save; it writes nothing.",
                rank=session.rank,
                phase="write",
                next_step="Use a planner that keeps SavePlan objects, or turn plan caching off "
                "(enable_plan_caching=False).",
            )
        if not isinstance(ticket_or_error, SaveTicket):
            raise ticket_or_error
        ticket = ticket_or_error
        report = session.write(ticket, plan, LiveItems(planner).items, ties_of(planner))
        sample = sample_of(flat_state(planner)) if ticket.world_size > 1 else None
        state.save_id = ticket.save_id
        if not session.is_coordinator:
            state.session = None  # its `finish` is on the coordinator
        size_bytes = sum(file.size_bytes for file in report.files)
        result = WriteResult(
            index=MetadataIndex(f"ckpt_storage.rank.{session.rank}"),
            size_in_bytes=size_bytes,
            storage_data=_RankResult(
                report=report,
                timing=RankTiming(
                    rank=session.rank, phase_s=state.timeline.phase_s(), done_bytes=size_bytes
                ),
                sample=sample,
            ),
        )
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([result])
        return future

    @at_dcp_border
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `results[i]` is rank i's list. Raises `RankMismatchError`, `IntegrityError`,
        `RankFailedError` (not committed), `CommitConflictError` (not committed),
        `CommitUnknownError`, `NotPublishedError` (committed).
        """
        session = self._session()
        by_rank = [_rank_result(of_rank) for of_rank in results]
        samples = [result.sample for result in by_rank if result and result.sample]
        if samples and len(samples) == len(by_rank):
            session.settle_written(find_differences(samples))
        timeline, timings = self._state.timeline, [each.timing for each in by_rank if each]
        stats = OperationStats.of(timings, timeline.phase_s()) if timings else None
        reports = [None if each is None else each.report for each in by_rank]
        info = session.finish(metadata, reports, stats)
        self._state.session = None
        timeline.end()
        report_outcome(
            Outcome(
                kind="save",
                url=info.url,
                step=self._options.step,
                save_id=info.save_id,
                world_size=len(results),
                is_coordinator=True,
                coordinator_rank=session.rank,
                timeline=timeline,
                own=replace(timings[0], phase_s=timeline.phase_s()),
                stats=info.stats,
                error=None,
            )
        )


def _rank_result(results: list[WriteResult]) -> _RankResult | None:
    """Return the result of our `write_data` on one rank, None for that of another writer."""
    contents = (result.storage_data for result in results)
    return next((data for data in contents if isinstance(data, _RankResult)), None)
