"""`save`: one bounded, collective save, over an `Operation` in place of torch's collectives."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.slotlog import how_to_settle
from ckpt_storage.coordination.failures import Report, as_checkpoint_errors, place_of, told_by
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import COORDINATOR
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    ConsolidationError,
    NotPublishedError,
    PhaseTimeoutError,
    RankFailedError,
    SaveCancelledError,
    StorageError,
)
from ckpt_storage.export.consolidate import ConsolidateJob, run_consolidate
from ckpt_storage.loads.resolving import plain_state
from ckpt_storage.options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)

from .planning import LocalPlan, Steps, rank_save
from .session import Chained, SaveOptions, SaveSession

log = logging.getLogger("ckpt_storage")


def save(  # the public surface, all keyword-only
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    overwrite: bool = False,
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
    retry: RetryPolicy | None = None,
) -> CheckpointInfo:
    """Save `state` as one checkpoint and return what was committed; all ranks of the group call.

    Does what `dcp.save` does. No collective runs on any process group, and each phase has its own
    deadline. A rank that fails, dies or hangs is named by an error on every live rank. Ranks agree
    on `url` and options before a byte is written. On return the checkpoint is durable.

    Args:
        state: state dict as for `dcp.save`: nested dicts of tensors, DTensors, ShardedTensors,
            `Stateful` objects and plain values. Not changed.
        url: URL or local path; the same on every rank.
        process_group: the ranks that save; default: the default group; without one, this process.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: ten minutes).
        overwrite: replace a committed checkpoint; there is no instant without a readable one.
        consolidate: True, the URL of an output, or `ConsolidateOptions`: once it is committed, all
            ranks export the checkpoint as Hugging Face safetensors, as `ckpt_storage.consolidate`
            does; default output: `hf` below `url`. The returned `export` says where.
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
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming the rank that failed, the phase and what to
            do: `RankMismatchError` before anything was written, `CheckpointExistsError` before
            anything can be seen, `PhaseTimeoutError`, `RankFailedError`, `StorageError`,
            `CommitConflictError` (not committed), `CommitUnknownError` (it cannot be told). The
            checkpoint that was there before stays readable. The checkpoint is committed (`info`)
            with `NotPublishedError`: torch's own readers do not find it, and no consolidation was
            begun; with `ConsolidationError`: only its consolidation failed; and with a
            `RankFailedError` that has `info`: the coordinator was lost after its commit.

    """
    given = locals()
    timeouts = Timeouts()
    with suppress(CheckpointError):  # raised by `part`, where the other ranks hear of it
        timeouts = Timeouts.of(timeout)

    def part() -> dict[str, Any]:
        Timeouts.of(timeout)
        return plain_state(state)

    options = SaveOptions.of(given, timeouts=timeouts)
    return save_on(RankGroup.of(process_group), part, url, options)


def save_on(
    ranks: RankGroup,
    state: Callable[[], dict[str, Any]],
    url: str | os.PathLike[str],
    options: SaveOptions,
) -> CheckpointInfo:
    """Save in an operation of all `ranks`; as `save`. What `state` raises reaches all ranks."""

    def part(_operation: Operation, session: SaveSession) -> Steps:
        plan = partial(
            LocalPlan.of,
            state(),
            options.planner,
            url=session.url,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        return rank_save(session, plan)

    return run_save(ranks, url, options, part)


def run_save(
    ranks: RankGroup,
    url: str | os.PathLike[str],
    options: SaveOptions,
    part: Callable[[Operation, SaveSession], Steps],
    *,
    in_background: bool = False,
) -> CheckpointInfo:
    """Run a save of this rank's `part`, and its consolidation, as one operation of all `ranks`.

    The part is taken before the ranks meet, and begun after it. If the save fails before its
    commit, what it wrote is deleted, unless a rank may still be writing. In the background exits
    are errors.
    """
    what = f"the save to {place_of(url)}"
    operation: Operation | None = None
    try:
        with (
            ranks.operation(what, timeouts=options.timeouts) as operation,
            as_checkpoint_errors(what, ranks.rank, in_background=in_background),
        ):
            is_first = operation.is_coordinator
            session = SaveSession(
                url, options, operation.rank, operation.phase, is_coordinator=is_first
            )
            operation.what = f"the save to {session.url}"
            job = options.consolidation(session.location)
            consolidation = job.terms() if job else {"consolidate": "no"}
            with closing(part(operation, session)) as steps:
                operation.meet({**session.terms(), **consolidation})
                if is_first:
                    info = _lead(operation, session, steps, in_background=in_background)
                else:
                    info = _follow(operation, session, steps)
            if job is None:
                return info
            job = replace(job, slot=info.slot)
            return _consolidated(operation, job, info, in_background=in_background)
    finally:
        if operation is not None and operation.save_id is not None and operation.is_void:
            session.discard(operation.save_id, is_whole=True)


def _follow(operation: Operation, session: SaveSession, steps: Steps) -> CheckpointInfo:
    """Write this rank's part; return what the coordinator commits."""
    written, commit_s = _written(operation, steps), session.options.timeouts.commit
    write, is_sent = operation.deadline, False
    try:
        operation.gather(written)
        is_sent = True
        # The last rank may take the whole write phase, and only then the commit begins.
        operation.phase("commit", write.remaining_s() + commit_s)
        outcome = operation.outcome()
    except CheckpointError as error:
        if operation.is_last_word(error):
            raise
        if not is_sent:
            if isinstance(error, SaveCancelledError):
                raise  # before anything was sent; so the coordinator cannot have committed
            # It may have arrived all the same, and then the save is committed.
            operation.phase("commit", commit_s)
        raise _without_coordinator(operation, session, error) from error
    if isinstance(outcome, CheckpointError):
        told = told_by(Report(rank=COORDINATOR, error=outcome, decides=True), operation.what)
        # What is in doubt, or only not published, has not failed.
        is_failure = not isinstance(outcome, CommitUnknownError | NotPublishedError)
        raise (operation.failure() or told) if is_failure else told
    info: CheckpointInfo = outcome
    return info


def _lead(
    operation: Operation, session: SaveSession, steps: Steps, *, in_background: bool
) -> CheckpointInfo:
    """Write this rank's part, commit once all have written theirs, and tell what came of it."""
    try:
        info: CheckpointInfo = steps.send(operation.gather(_written(operation, steps)))
    except BaseException as error:
        is_committing = operation.deadline.phase == "commit"
        if isinstance(error, Exception) and not is_committing:
            # A storage or a rank that hangs would keep this one waiting once more.
            hangs = isinstance(error, PhaseTimeoutError) or getattr(error, "is_silent", False)
            operation.is_void = operation.save_id is not None and not hangs
        if isinstance(error, CheckpointError):
            failure = operation.failure()
            is_open = isinstance(error, CommitUnknownError | NotPublishedError)
            if failure is not None and failure is not error and is_open:
                error.args = (f"{error} It was given up for this reason: {failure}",)
                error.rank = failure.rank
            # Whoever waits for the commit learns that there will be none, or that it is in doubt.
            _announce(operation, error)
        elif is_committing:
            # An interrupt leaves the request that commits on its way.
            told = f"{type(error).__name__} ended rank {COORDINATOR} while it committed"
            doubt = _in_doubt(told, operation, session)
            _announce(operation, doubt)
            if in_background:
                raise doubt from error
        raise
    _announce(operation, info)
    return info


def _written(operation: Operation, steps: Steps) -> Any:  # noqa: ANN401  # a word
    """Plan and write; return this rank's report."""
    operation.phase("plan")
    word = next(steps)
    while operation.save_id is None:
        # In one expression: the plans of all ranks are many, and nobody keeps them.
        operation.save_id, word = operation.scatter(steps.send(operation.gather(word)))
        word = steps.send(word)
    return word


def _announce(operation: Operation, outcome: CheckpointInfo | CheckpointError) -> None:
    try:
        operation.announce(outcome)
    except CheckpointError as error:
        # The outcome stands; ranks that do not hear of it look for themselves.
        log.warning("Telling the ranks what became of the save failed: %s", error)


def _in_doubt(told: str, operation: Operation, session: SaveSession) -> CommitUnknownError:
    save_id = operation.save_id or ""
    return CommitUnknownError(
        f"{told}; whether save {save_id} to {session.url} is or will be committed cannot be told.",
        save_id=save_id,
        rank=COORDINATOR,
        phase="commit",
        next_step=how_to_settle(session.url),
    )


def look_up_outcome(
    operation: Operation, session: SaveSession, error: CheckpointError
) -> CheckpointInfo | CommitUnknownError:
    """Return what became of a save whose coordinator was lost, as `error` says, in its commit."""
    try:
        info = session.outcome(operation.save_id or "")
    except CheckpointError as failure:
        info = None
        error.add_note(f"Looking for the outcome failed too: {failure}")
    told = f"Rank {COORDINATOR}, which commits, gave no word of it in the commit phase ({error})"
    return info or _in_doubt(told, operation, session)


def _without_coordinator(
    operation: Operation, session: SaveSession, error: CheckpointError
) -> CheckpointError:
    found = look_up_outcome(operation, session, error)
    if isinstance(found, CheckpointError):
        return found
    return RankFailedError(
        f"Rank {COORDINATOR}, which commits, gave no word of it in the commit phase; save "
        f"{found.save_id} to {session.url} is committed. {error}",
        failures={COORDINATOR: str(error)},
        rank=COORDINATOR,
        phase="commit",
        info=found,
    )


def _consolidated(
    operation: Operation, job: ConsolidateJob, info: CheckpointInfo, *, in_background: bool
) -> CheckpointInfo:
    """Consolidate what was committed. Raises `ConsolidationError` with `info`."""
    try:
        what = f"the consolidation of {info.url}"
        with as_checkpoint_errors(what, operation.rank, in_background=in_background):
            report = run_consolidate(operation, job)
            return replace(info, export=report.output_url)
    except CheckpointError as caught:
        # Requests that were given up say so; what matters is why.
        failure = operation.failure() if isinstance(caught, StorageError) else None
        error = failure or caught
        told = f"The save to {info.url} is committed, but its consolidation failed: {error}"
        next_step: str | None = "Load the checkpoint, or call consolidate again to go on with it."
        if isinstance(error.__cause__, ConsolidationError):
            # Another rank's error says all of this already.
            told, next_step = f"Rank {error.rank}: {error.__cause__}", None
        raise ConsolidationError(
            told,
            info=info,
            rank=error.rank,
            phase=error.phase or "consolidate",
            path=error.path,
            next_step=next_step,
        ) from error
