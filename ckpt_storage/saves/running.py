"""`save`: one bounded, collective save.

Takes a planner and a `SaveSession` through DCP's steps over an `Operation`, without torch's
collectives.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import (
    Report,
    as_checkpoint_errors,
    place_of,
    told_by,
)
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import COORDINATOR
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.plans import plain_state
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    NotPublishedError,
    PhaseTimeoutError,
    RankFailedError,
    SaveCancelledError,
)
from ckpt_storage.options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)

from .chaining import Chained, chained_job, consolidate_committed
from .options import SaveOptions
from .planning import LocalPlan, PlanExchange
from .refusals import naming_refused
from .session import Granted, SaveSession

log = logging.getLogger("ckpt_storage")

_LOOK = (
    "Open the checkpoint once that rank has ended: the save is committed if and only if the newest "
    "save there has its save id, or a later one replaced it."
)


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
    commit_url: str | None = None,
    stock_metadata: StockMetadata = "auto",
    unsafe_values: UnsafeValues = "warn",
    retry: RetryPolicy | None = None,
) -> CheckpointInfo:
    """Save `state` as one checkpoint and return what was committed; all ranks of the group call.

    Does what `dcp.save` does, and besides: no collective runs on any process group, so no
    watchdog of the trainer counts; each phase has its own deadline; a rank that fails, dies or
    hangs is named by an error on every live rank. Before a byte is written all ranks agree on
    `url` and options. On return the checkpoint is committed and durable.

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
        commit_url: where commit records go if not below `url`.
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
            begun; and with `ConsolidationError`: only its consolidation failed.

    """

    def options() -> SaveOptions:
        return SaveOptions(
            timeouts=Timeouts.of(timeout),
            overwrite=overwrite,
            consolidate=consolidate,
            storage_options=storage_options,
            planner=planner,
            thread_count=thread_count,
            part_bytes=part_bytes,
            memory_limit_bytes=memory_limit_bytes,
            page_cache=page_cache,
            sync_files=sync_files,
            commit_url=commit_url,
            stock_metadata=stock_metadata,
            unsafe_values=unsafe_values,
            retry=retry,
            progress=progress,
        )

    return save_on(RankGroup.of(process_group), lambda: plain_state(state), url, options)


def save_on(
    ranks: RankGroup,
    state: Callable[[], dict[str, Any]],
    url: str | os.PathLike[str],
    options: Callable[[], SaveOptions],
) -> CheckpointInfo:
    """Save in an operation of all `ranks`; as `save`.

    What `state` and `options` raise reaches all ranks.
    """
    try:
        chosen, refusal = options(), None
    except CheckpointError as error:
        # The other ranks are waiting to be told.
        chosen, refusal = SaveOptions(), error
    with save_operation(ranks, url, chosen) as operation:
        if refusal is not None:
            raise refusal
        return run_save(operation, url, chosen, state)


@contextmanager
def save_operation(
    ranks: RankGroup, url: str | os.PathLike[str], options: SaveOptions
) -> Iterator[Operation]:
    """Run a save as one operation of all ranks.

    What a void one wrote is deleted at the end, if nobody writes any more; else it is freed as that
    of a dead save.
    """
    operation: Operation | None = None
    what = f"the save to {place_of(url)}"
    try:
        with ranks.operation(what, timeouts=options.timeouts) as operation:
            yield operation
    finally:
        if operation is not None and operation.save_id is not None and operation.is_void:
            _session(operation, url, options).discard(operation.save_id, is_whole=True)


def _session(
    operation: Operation, url: str | os.PathLike[str], options: SaveOptions
) -> SaveSession:
    return SaveSession(
        url,
        options,
        rank=operation.rank,
        is_coordinator=operation.is_coordinator,
        phase=operation.phase,
    )


def run_save(
    operation: Operation,
    url: str | os.PathLike[str],
    options: SaveOptions,
    state: Callable[[], dict[str, Any] | LocalPlan],
    *,
    in_background: bool = False,
) -> CheckpointInfo:
    """Run one save as the whole of `operation`.

    `state` may return this rank's part of planning, made before. Raises as `save`; with
    `in_background` an exit that a planner asks for is an error like any other.
    """
    what = f"the save to {place_of(url)}"
    with as_checkpoint_errors(what, operation.rank, in_background=in_background):
        session = _session(operation, url, options)
        operation.what = f"the save to {session.url}"
        job = chained_job(
            options.consolidate,
            session.location,
            commits=options.commits,
            page_cache=options.page_cache,
            timeouts=options.timeouts,
            retry=options.retry,
            progress=options.progress,
        )
        terms = {**session.terms(), **(job.terms() if job else {"consolidate": "no"})}
        save = _Save(operation, session, options, in_background=in_background)
        info = save.run(state(), terms)
        if job is None:
            return info
        operation.committed = info
        job = replace(job, slot=info.slot)
        report = consolidate_committed(operation, job, info, in_background=in_background)
        return replace(info, export=report.output_url)


class _Save:
    """One save on one rank, step by step."""

    def __init__(
        self,
        operation: Operation,
        session: SaveSession,
        options: SaveOptions,
        *,
        in_background: bool,
    ) -> None:
        self._operation = operation
        self._session = session
        self._options = options
        self._granted: Granted | None = None
        self._metadata: Metadata | None = None
        self._in_background = in_background

    def run(self, state: dict[str, Any] | LocalPlan, terms: Mapping[str, str]) -> CheckpointInfo:
        operation = self._operation
        operation.meet(terms)
        if not operation.is_coordinator:
            written = self._write_part(state)
            write = operation.deadline
            self._send(written)
            # The last rank may take the whole write phase, and only then the commit begins.
            operation.phase("commit", write.remaining_s() + self._options.timeouts.commit)
            return hear_outcome(operation, self._session)
        try:
            gathered = self._gathered(state)
            info = self._commit(gathered)
        except CheckpointError as error:
            # Whoever waits for the commit learns that there will be none, or that it is in doubt.
            told = self._with_reason(error)
            self._announce(told)
            if told is error:
                raise
            raise told from error
        except BaseException as error:
            if operation.deadline.phase == "commit":
                # An interrupt leaves the request that commits on its way.
                doubt = self._in_doubt(error)
                self._announce(doubt)
                if self._in_background:
                    raise doubt from error
            raise
        self._announce(info)
        return info

    def _gathered(self, state: dict[str, Any] | LocalPlan) -> list[bytes]:
        """Write this rank's part; return what all ranks tell of theirs, on the coordinator."""
        try:
            return self._operation.gather(self._write_part(state))
        except CheckpointError as error:
            is_silence = isinstance(error, RankFailedError) and error.is_silent
            # A storage or a rank that hangs would keep this one waiting once more.
            hangs = is_silence or isinstance(error, PhaseTimeoutError)
            self._operation.is_void = self._granted is not None and not hangs
            raise

    def _in_doubt(self, error: BaseException) -> CommitUnknownError:
        save_id, url = self._operation.save_id or "", self._session.url
        return CommitUnknownError(
            f"{type(error).__name__} ended rank {COORDINATOR} while it committed; whether save "
            f"{save_id} to {url} is or will be committed cannot be told.",
            save_id=save_id,
            rank=COORDINATOR,
            phase="commit",
            next_step=_LOOK,
        )

    def _with_reason(self, error: CheckpointError) -> CheckpointError:
        """Return `error`; if it was given up on the way, with what made the coordinator do so."""
        failure = self._operation.failure()
        if failure is None or failure is error:
            return error
        told = f"{error} It was given up for this reason: {failure}"
        if isinstance(error, NotPublishedError):
            return NotPublishedError(
                told, info=error.info, rank=failure.rank, phase=error.phase, path=error.path
            )
        if not isinstance(error, CommitUnknownError):
            return error
        return CommitUnknownError(
            told,
            save_id=error.save_id,
            slot=error.slot,
            rank=failure.rank,
            phase=error.phase,
            path=error.path,
        )

    def _send(self, written: bytes) -> None:
        """Tell the coordinator what this rank wrote."""
        operation = self._operation
        try:
            operation.gather(written)
        except SaveCancelledError:
            raise  # before anything was sent; so the coordinator cannot have committed
        except CheckpointError as error:
            # It may have arrived all the same, and then the save is committed.
            operation.phase("commit", self._options.timeouts.commit)
            raise _without_coordinator(operation, self._session, error) from error

    def _write_part(self, state: dict[str, Any] | LocalPlan) -> bytes:
        """Plan and write; return what the coordinator is to know of it."""
        operation, session = self._operation, self._session
        operation.phase("plan")
        with naming_refused({} if isinstance(state, LocalPlan) else state):
            local = (
                state
                if isinstance(state, LocalPlan)
                else LocalPlan.of(
                    state,
                    self._options.planner,
                    url=session.url,
                    rank=operation.rank,
                    world_size=operation.world_size,
                )
            )
            exchange = PlanExchange(operation, session, local)
            plan, granted = exchange.run()
        self._metadata, self._granted = exchange.metadata, granted
        # Before the phase is told to anyone who watches.
        operation.save_id = granted.grant.save_id
        return pickle.dumps(session.write(granted, plan, local.source, local.ties))

    def _commit(self, gathered: list[bytes]) -> CheckpointInfo:
        granted, metadata = self._granted, self._metadata
        assert granted is not None and metadata is not None  # noqa: S101, PT018  # planning set both
        reports = [pickle.loads(packed) for packed in gathered]  # noqa: S301  # our own ranks
        return self._session.finish(granted, metadata, reports)

    def _announce(self, outcome: CheckpointInfo | CheckpointError) -> None:
        try:
            self._operation.announce(pickle.dumps(outcome))
        except CheckpointError as error:
            # The outcome stands; ranks that do not hear of it look for themselves.
            log.warning("Telling the ranks what became of the save failed: %s", error)


def hear_outcome(
    operation: Operation, session: SaveSession, word: bytes | None = None
) -> CheckpointInfo:
    """Return what the coordinator committed; on the other ranks, once their part is told.

    `word` is what it announced, where that is known. Raises why nothing was committed, or that it
    cannot be told.
    """
    try:
        outcome = pickle.loads(word or operation.outcome())  # noqa: S301  # our own ranks
    except CheckpointError as error:
        if operation.is_last_word(error):
            raise
        raise _without_coordinator(operation, session, error) from error
    if isinstance(outcome, CheckpointError):
        told = told_by(Report(rank=COORDINATOR, error=outcome, decides=True), operation.what)
        # What is in doubt, or only not published, has not failed.
        is_failure = not isinstance(outcome, CommitUnknownError | NotPublishedError)
        raise (operation.failure() or told) if is_failure else told
    info: CheckpointInfo = outcome
    return info


def look_up_outcome(
    operation: Operation, session: SaveSession, error: CheckpointError
) -> CheckpointInfo | CommitUnknownError:
    """Return what became of a save whose coordinator was lost, as `error` says, in its commit."""
    save_id = operation.save_id or ""
    try:
        info = session.outcome(save_id)
    except CheckpointError as failure:
        info = None
        error.add_note(f"Looking for the outcome failed too: {failure}")
    return info or CommitUnknownError(
        f"Rank {COORDINATOR}, which commits, gave no word of it in the commit phase; whether save "
        f"{save_id} to {session.url} is or will be committed cannot be told. {error}",
        save_id=save_id,
        rank=COORDINATOR,
        phase="commit",
        next_step=_LOOK,
    )


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
