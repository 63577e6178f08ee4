"""`save`: one bounded, collective save, over an `Operation` in place of torch's collectives."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.slotlog import resolution_steps
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.rounds import UndecidedError
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    ConsolidationError,
    PhaseTimeoutError,
    RankFailedError,
    StorageError,
)
from ckpt_storage.export.consolidate import ConsolidateSpec, run_consolidate
from ckpt_storage.loads.states import plain_state
from ckpt_storage.observe.stats import OperationStats, RankTiming
from ckpt_storage.options import (
    DEFAULT_GROUPS,
    PageCache,
    Progress,
    Replicas,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.store import redacted_url

from .options import Chained, SaveOptions
from .outcome import Cause, Stage, outcome_of
from .planning import LocalPlan
from .rank_save import RankSave
from .session import SaveSession

log = logging.getLogger("ckpt_storage")


def save(  # the public surface, all keyword-only
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    overwrite: bool = False,
    step: int | None = None,
    consolidate: Chained = None,
    storage_options: Mapping[str, Any] | None = None,
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
    base: str | os.PathLike[str] | None = None,
    stable: str | Sequence[str] = (),
    retry: RetryPolicy | None = None,
) -> CheckpointInfo:
    """Save `state` as one checkpoint and return its record; all ranks of the group call this.

    Does what `dcp.save` does. No collective runs on any process group, and each phase has its own
    deadline. A rank that fails, dies or hangs is named by an error on every live rank. Ranks agree
    on `url` and options before a byte is written. On return the checkpoint is durable.

    Args:
        state: state dict as for `dcp.save`: nested dicts of tensors, DTensors, ShardedTensors,
            `Stateful` objects and plain values. Not changed.
        url: URL or local path; the same on every rank.
        process_group: the ranks that save; default: the default group, or this process alone.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: four minutes).
        overwrite: replace a committed checkpoint; at any instant a reader finds the old or the new.
        step: the training step. Ranks with different steps never commit together: the
            save of the lower step fails, so that a rank which skipped a save loses that save only.
            Default with `overwrite`: a plain integer `step`, `global_step` or `iteration` at the
            top of `state`.
        consolidate: True, the URL of an output, or `ConsolidateOptions`: once it is committed, all
            ranks export the checkpoint as Hugging Face safetensors, as `ckpt_storage.consolidate`
            does; default output: `hf` below `url`. The returned `export` is its URL.
        storage_options: passed to the fsspec file system.
        planner: a DCP `SavePlanner`; default `DefaultSavePlanner()`, whose plans are kept for later
            saves of a state of the same structure.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        thread_count: as for `CheckpointStorageWriter`, like all that follow.
        part_bytes: bytes per upload request.
        memory_limit_bytes: ceiling of bytes in flight per rank beyond the state itself.
        page_cache: whether the kernel keeps a copy of local files that are on the disk.
        sync_files: make local files durable before they are referenced.
        stock_metadata: whether torch's own readers are to find `.metadata`.
        unsafe_values: "refuse" values that only pickle can hold; "warn": name them in the log.
        replicas: what is done where ranks hold different values under one name that is not
            sharded. "warn": tensors of 1 MiB or more raise `RankMismatchError`, the rest is named
            in the log once; "raise": any tensor raises; "first": neither. The value of the lowest
            rank that has the name is stored; `PerRank` keeps those of all. Of large tensors
            samples are compared.
        groups: glob patterns of names. What matches one lies in shard files of its own, so that
            it can be copied or left out later without being read; [] for one file a rank.
        base: URL of an earlier save with the same sharding; that of rank 0 counts. Files of which
            all values are unchanged are linked on a file system, and copied by S3, Google Cloud
            Storage and Azure themselves. This save is whole by itself all the same: either can be
            deleted. Needs the package `xxhash`.
        stable: glob patterns of names whose values are expected to stay, such as a frozen base
            model: they lie in files of their own, which the next save can reuse. Without any, a
            value goes there once it equals the base's.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming the rank that failed, the phase and what to
            do: `RankMismatchError` before anything was written, `CheckpointExistsError` before
            anything can be seen, `PhaseTimeoutError`, `RankFailedError`, `StorageError`,
            `CommitConflictError` (not committed), `CommitUnknownError` (not known). The
            checkpoint that was there before stays readable. The checkpoint is committed (`info`)
            with `NotPublishedError`: torch's own readers do not find it, and no consolidation was
            begun; with `ConsolidationError`: only its consolidation failed; and with a
            `RankFailedError` that has `info`: the coordinator was lost after its commit.

    """
    arguments = locals()
    timeouts = Timeouts()
    with suppress(CheckpointError):  # raised by `capture`, which reports it to the other ranks
        timeouts = Timeouts.of(timeout)

    def capture() -> dict[str, Any]:
        Timeouts.of(timeout)
        return plain_state(state)

    options = SaveOptions.of(arguments, timeouts=timeouts).with_step_of(state)
    return save_on(RankGroup.of(process_group), capture, url, options)


class SaveSteps(Protocol):
    """The steps of a save on one rank: `RankSave`, in this process or in a worker."""

    def propose(self) -> object:
        """Return this rank's proposal."""

    def decide(self, proposals: Sequence[Any]) -> object:
        """Return the answer to all proposals; coordinator only."""

    def accept(self, answer: object) -> str | None:
        """Take an answer; return the save id, or None if the ranks are to propose again."""

    def write(self) -> object:
        """Write this rank's files and return its report."""

    def commit(self, reports: Sequence[Any], stats: OperationStats) -> CheckpointInfo:
        """Commit, with `stats` in the record; coordinator only."""

    def close(self) -> None:
        """Release the resources of the steps."""


def save_on(
    ranks: RankGroup,
    capture: Callable[[], dict[str, Any]],
    url: str | os.PathLike[str],
    options: SaveOptions,
) -> CheckpointInfo:
    """Save in an operation of all `ranks`, as `save`; an error of `capture` reaches all ranks."""

    def begin(_operation: Operation, session: SaveSession) -> SaveSteps:
        make_plan = partial(
            LocalPlan.of,
            capture(),
            options.planner,
            url=session.url,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return RankSave(session, make_plan)

    return run_save(ranks, url, options, begin)


def run_save(
    ranks: RankGroup,
    url: str | os.PathLike[str],
    options: SaveOptions,
    begin: Callable[[Operation, SaveSession], SaveSteps],
    *,
    in_background: bool = False,
) -> CheckpointInfo:
    """Run a save, and its consolidation, as one operation of all `ranks`.

    `begin` captures the state of this rank. If the save fails before its commit, its files are
    deleted, unless a rank may still be writing. In the background SystemExit and KeyboardInterrupt
    are errors.
    """
    what = f"the save to {redacted_url(url)}"
    operation: Operation | None = None
    try:
        with (
            ranks.operation(what, timeouts=options.timeouts) as operation,
            as_checkpoint_errors(what, ranks.global_rank, in_background=in_background),
        ):
            session = SaveSession(
                url,
                options,
                operation.rank,
                operation.phase,
                is_coordinator=operation.is_coordinator,
                global_ranks=ranks.lane.global_ranks,
            )
            operation.what = f"the save to {session.url}"
            identity = options.identity(session.url)
            if options.step is not None:
                # A save of another step does not fail with this one.
                operation.identify(identity)
            job = options.consolidation(session.location)
            terms = session.terms() | (job.terms() if job else {"consolidate": "no"})
            with closing(begin(operation, session)) as steps:
                operation.identify(identity)
                answer = operation.meet(terms, value=steps.propose(), decide=steps.decide)
                while (save_id := steps.accept(answer)) is None:
                    answer = operation.exchange(steps.propose(), steps.decide)
                operation.save_id = save_id
                info = _write_and_commit(
                    operation, session, steps, in_background=in_background, is_last=job is None
                )
            if job is None:
                return info
            job = replace(job, slot=info.slot)
            return _consolidated(operation, job, info, in_background=in_background)
    finally:
        if operation is not None and operation.save_id is not None and operation.must_discard:
            session.discard(operation.save_id, is_whole=True)


def _write_and_commit(
    operation: Operation,
    session: SaveSession,
    steps: SaveSteps,
    *,
    in_background: bool,
    is_last: bool,
) -> CheckpointInfo:
    """Write this rank's files; commit once all ranks have. Raises as `outcome_of` says."""
    stage: Stage = "writing"

    def commit(written: Sequence[tuple[object, RankTiming]]) -> CheckpointInfo:
        reports, timings = zip(*written, strict=True)
        return steps.commit(reports, operation.stats_of(timings))

    try:
        written = steps.write(), operation.timing()
        if not operation.is_coordinator:
            stage = "reported"
            # The last rank may take the whole write phase, and only then the commit begins.
            limit_s = operation.deadline.remaining_s() + operation.timeouts.commit
            operation.phase("commit", limit_s)
        committed: CheckpointInfo = operation.exchange(
            written, commit, is_commit=True, is_last=is_last
        )
    except BaseException as error:
        if operation.is_coordinator and operation.deadline.phase == "commit":
            stage = "committing"
        cause, info = _cause_of(error), None
        if cause == "undecided" and stage != "writing":
            info = find_outcome(operation, session, error)
        action, discards = outcome_of(
            is_coordinator=operation.is_coordinator,
            stage=stage,
            cause=cause,
            storage="absent" if info is None else "committed",
        )
        operation.must_discard = discards and operation.save_id is not None
        if action == "raise":
            raise
        reason = f"{type(error).__name__} ended rank {operation.global_rank} in its commit"
        if cause == "undecided":
            rank = operation.coordinator_rank
            reason = f"Rank {rank}, which commits, did not report the outcome in the commit phase"
            if info is not None:
                raise RankFailedError(
                    f"{reason}; save {info.save_id} to {session.url} is committed. {error}",
                    failures={rank: str(error)},
                    rank=rank,
                    phase="commit",
                    info=info,
                ) from error
            reason = f"{reason} ({error})"
        unknown = unknown_outcome(reason, operation, session)
        operation.report(unknown)
        if cause == "interrupt" and not in_background:
            raise
        raise unknown from error
    operation.stats = committed.stats
    return committed


def _cause_of(error: BaseException) -> Cause:
    if isinstance(error, UndecidedError):
        return "undecided"
    if not isinstance(error, Exception):
        return "interrupt"
    if not isinstance(error, CheckpointError):
        return "unexpected"
    # Deleting files would make this rank wait again for a storage or a rank that hangs.
    is_hang = isinstance(error, PhaseTimeoutError) or getattr(error, "is_silent", False)
    return "hang" if is_hang else "failure"


def find_outcome(
    operation: Operation, session: SaveSession, cause: BaseException
) -> CheckpointInfo | None:
    """Return the committed save whose commit no rank reports, None if the log does not show it."""
    try:
        return session.outcome(operation.save_id or "")
    except CheckpointError as failure:
        cause.add_note(f"Reading the commit log failed too: {failure}")
        return None


def unknown_outcome(reason: str, operation: Operation, session: SaveSession) -> CommitUnknownError:
    """Return the error of a save that may be committed, or may be committed later."""
    save_id = operation.save_id or ""
    return CommitUnknownError(
        f"{reason}; whether save {save_id} to {session.url} is or will be committed is unknown.",
        save_id=save_id,
        rank=operation.coordinator_rank,
        phase="commit",
        next_step=resolution_steps(session.url),
    )


def _consolidated(
    operation: Operation, job: ConsolidateSpec, info: CheckpointInfo, *, in_background: bool
) -> CheckpointInfo:
    """Consolidate the committed save. Raises `ConsolidationError` with `info`."""
    try:
        what = f"the consolidation of {info.url}"
        with as_checkpoint_errors(what, operation.global_rank, in_background=in_background):
            report = run_consolidate(operation, job)
            return replace(info, export=report.output_url)
    except CheckpointError as caught:
        # A request that was cancelled raises that; the user needs the reason for it.
        failure = operation.failure() if isinstance(caught, StorageError) else None
        error = failure or caught
        message = f"The save to {info.url} is committed, but its consolidation failed: {error}"
        next_step: str | None = "Load the checkpoint, or call consolidate again to continue it."
        if isinstance(error.__cause__, ConsolidationError):
            # Another rank's error has all of this in it already.
            message, next_step = f"Rank {error.rank}: {error.__cause__}", None
        raise ConsolidationError(
            message,
            info=info,
            rank=error.rank,
            phase=error.phase or "consolidate",
            path=error.path,
            next_step=next_step,
        ) from error
