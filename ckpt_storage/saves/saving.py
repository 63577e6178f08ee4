"""`save`: one bounded, collective save.

Takes a planner and a `SaveSession` through DCP's steps over an `Operation`, without torch's
collectives.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.tiednames import settled_ties
from ckpt_storage.coordination.failures import (
    COORDINATOR,
    Report,
    as_checkpoint_errors,
    place_of,
    told_by,
)
from ckpt_storage.coordination.frontdoor import plain_state, takes
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    NotPublishedError,
    PhaseTimeoutError,
    RankFailedError,
)
from ckpt_storage.export.consolidation.options import ConsolidateOptions
from ckpt_storage.options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.store import Location, anchored
from ckpt_storage.store.deadline import Deadline

from .chaining import Chained, chained_job, consolidate_committed
from .planexchange import PlanExchange
from .refusals import refusal_of_plan
from .session import SaveSession, SaveSettings
from .tiedmemory import StateMemory

log = logging.getLogger("ckpt_storage")

_RESOLVE_S = 1.5
"""How long a rank whose coordinator died looks for the outcome."""

_LOOK = (
    "Load, or list the checkpoints, once that rank has ended: the save is committed if and only "
    "if it shows there."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Everything a save is told besides state, place and ranks; as `CheckpointStorageWriter`.

    `user` goes into the commit record. `replaces` are ids of saves that are replaced even without
    `overwrite`. Of both, what the coordinator has counts.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    overwrite: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    planner: SavePlanner | None = None
    thread_count: int | None = None
    part_bytes: int | None = None
    memory_limit_bytes: int | None = None
    page_cache: PageCache = "keep"
    sync_files: bool = True
    commit_url: str | None = None
    stock_metadata: StockMetadata = "auto"
    unsafe_values: UnsafeValues = "warn"
    retry: RetryPolicy | None = None
    progress: Progress = None
    consolidate: Chained = None
    user: Mapping[str, Any] = field(default_factory=dict)
    replaces: frozenset[str] = frozenset()

    def anchored(self) -> SaveOptions:
        """Return options that mean the same in every working folder. Raises `InvalidInputError`."""
        chained = self.consolidate
        if isinstance(chained, str | os.PathLike):
            chained = anchored(chained)
        elif isinstance(chained, ConsolidateOptions) and chained.output is not None:
            chained = replace(chained, output=anchored(chained.output))
        commit_url = anchored(self.commit_url) if self.commit_url else None
        return replace(self, commit_url=commit_url, consolidate=chained)

    def settings(self, url: str | os.PathLike[str]) -> SaveSettings:
        """Return what these options mean for a save to `url`. Raises `InvalidInputError`."""
        return SaveSettings.of(
            url,
            storage_options=self.storage_options,
            overwrite=self.overwrite,
            thread_count=self.thread_count,
            part_bytes=self.part_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
            page_cache=self.page_cache,
            sync_files=self.sync_files,
            commit_url=self.commit_url,
            stock_metadata=self.stock_metadata,
            unsafe_values=self.unsafe_values,
            timeout=self.timeouts,
            retry=self.retry,
            progress=self.progress,
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
    coordinator = Ranks.of(process_group)

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

    return run_save(coordinator, lambda: plain_state(state), url, options)


def run_save(
    coordinator: Ranks,
    state: Callable[[], dict[str, Any]],
    url: str | os.PathLike[str],
    options: Callable[[], SaveOptions],
    *,
    watch: Callable[[Operation], None] = lambda _: None,
    number: int | None = None,
    in_background: bool = False,
) -> CheckpointInfo:
    """Run one save; what `state` and `options` raise reaches all ranks as well.

    `watch` gets the operation as soon as there is one, to look at its signs of life; `number` is
    that of the operation, where the ranks' saves are counted elsewhere. Raises as `save`; with
    `in_background` nothing but `CheckpointError`, also where a planner calls `sys.exit`.
    """
    try:
        chosen, refusal = options(), None
    except CheckpointError as error:
        # The other ranks are waiting to be told.
        chosen, refusal = SaveOptions(), error
    what = f"the save to {place_of(url)}"
    with (
        # Others hear of a failure first, and end what they write.
        ExitStack() as leaving,
        coordinator.operation(what, timeouts=chosen.timeouts, number=number) as operation,
        as_checkpoint_errors(what, operation.rank, in_background=in_background),
    ):
        if refusal is not None:
            raise refusal
        session = SaveSession(
            chosen.settings(url),
            is_coordinator=operation.is_coordinator,
            rank=operation.rank,
            user=chosen.user,
            replaces=chosen.replaces,
        )
        operation.what = f"the save to {session.url}"
        watch(operation)
        commit_url, storage_options = chosen.commit_url, chosen.storage_options
        job = chained_job(
            chosen.consolidate,
            session.location,
            commits=Location.of(commit_url, storage_options) if commit_url else None,
            rank=operation.rank,
            page_cache=chosen.page_cache,
            timeouts=chosen.timeouts,
            retry=chosen.retry,
            progress=chosen.progress,
        )
        terms = {**session.terms(), **(job.terms() if job else {"consolidate": "no"})}
        save = _Save(operation, session, chosen, in_background=in_background)
        leaving.callback(save.clean_up)
        info = save.run(state(), terms)
        if job is None:
            return info
        operation.committed = info
        operation.on_phase()
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
        self._planner = options.planner or DefaultSavePlanner()
        self._timeouts = options.timeouts
        self._plans = PlanExchange(operation, session, self._planner, keeps=options.planner is None)
        self._write = operation.phase("plan")
        self._is_given_up = False
        self._in_background = in_background

    def run(self, state: dict[str, Any], terms: Mapping[str, str]) -> CheckpointInfo:
        operation = self._operation
        operation.meet(terms)
        if not operation.is_coordinator:
            self._send(self._write_part(state))
            # The last rank may take the whole write phase, and only then the commit begins.
            operation.phase("commit", self._write.remaining_s() + self._timeouts.commit)
            return self._await_outcome()
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
            if operation.current_phase == "commit":
                # An interrupt leaves the request that commits on its way.
                doubt = self._in_doubt(error)
                self._announce(doubt)
                if self._in_background:
                    raise doubt from error
            raise
        self._announce(info)
        return info

    def _gathered(self, state: dict[str, Any]) -> list[bytes]:
        """Write this rank's part; return what all ranks tell of theirs, on the coordinator."""
        try:
            return self._operation.gather(self._write_part(state))
        except CheckpointError as error:
            is_silence = isinstance(error, RankFailedError) and error.is_silent
            # A storage or a rank that hangs would keep this one waiting once more.
            self._is_given_up = not (is_silence or isinstance(error, PhaseTimeoutError))
            raise

    def clean_up(self) -> None:
        """Delete what all ranks wrote if the save failed before its commit; on the coordinator."""
        if self._is_given_up:
            self._session.discard(is_whole=True)

    def _in_doubt(self, error: BaseException) -> CommitUnknownError:
        save_id, url = self._session.save_id or "", self._session.url
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
        except CheckpointError as error:
            # It may have arrived all the same, and then the save is committed.
            operation.phase("commit", self._timeouts.commit)
            raise self._without_coordinator(error) from error

    def _write_part(self, state: dict[str, Any]) -> bytes:
        """Plan and write; return what the coordinator is to know of it.

        Ties ride along: with the plans what each rank ties, back what any rank does, with the
        results what speaks against that.
        """
        operation, session, planner = self._operation, self._session, self._planner
        operation.phase("plan")
        try:
            self._set_up_planner(state)
            memory = StateMemory(state)
            plan, tied = self._plans.run(memory.ties())
        except CheckpointError:
            raise
        except Exception as error:
            refusal = refusal_of_plan(error, state)
            if refusal is None:
                raise
            raise refusal from error
        session.candidates = [name for group in tied for name in group]
        # Before the phase is told to anyone who watches.
        operation.save_id = session.granted().grant.save_id
        self._write = operation.phase("write")
        results = session.write(plan, planner, self._write)
        return pickle.dumps((results, memory.objections(tied)))

    def _set_up_planner(self, state: dict[str, Any]) -> None:
        planner, is_coordinator = self._planner, self._operation.is_coordinator
        if takes(planner.set_up_planner, "storage_meta"):
            planner.set_up_planner(
                state_dict=state,
                storage_meta=StorageMeta(checkpoint_id=self._session.url),
                is_coordinator=is_coordinator,
            )
        else:
            planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]  # old

    def _commit(self, gathered: list[bytes]) -> CheckpointInfo:
        assert self._plans.metadata is not None  # noqa: S101  # the planning step set it
        written = [pickle.loads(packed) for packed in gathered]  # noqa: S301  # our own ranks
        objections = [against for _, against in written]
        session, results = self._session, [result for result, _ in written]
        session.settled_ties = settled_ties(self._plans.tied, objections)
        return session.commit(self._plans.metadata, results, self._operation.phase("commit"))

    def _announce(self, outcome: CheckpointInfo | CheckpointError) -> None:
        try:
            self._operation.announce(pickle.dumps(outcome))
        except CheckpointError as error:
            # The outcome stands; ranks that do not hear of it look for themselves.
            log.warning("Telling the ranks what became of the save failed: %s", error)

    def _await_outcome(self) -> CheckpointInfo:
        operation = self._operation
        try:
            outcome = pickle.loads(operation.outcome())  # noqa: S301  # our own ranks
        except CheckpointError as error:
            if operation.is_last_word(error):
                raise
            raise self._without_coordinator(error) from error
        if isinstance(outcome, CommitUnknownError | NotPublishedError):
            # Not `failure`: what is in doubt, or only not published, has not failed.
            raise told_by(Report(rank=COORDINATOR, error=outcome, decides=True), operation.what)
        if isinstance(outcome, CheckpointError):
            raise operation.failure() or told_by(
                Report(rank=COORDINATOR, error=outcome, decides=True), operation.what
            )
        info: CheckpointInfo = outcome
        return info

    def _without_coordinator(self, error: CheckpointError) -> CheckpointError:
        """Return what became of a save whose coordinator was lost after all was written."""
        session = self._session
        save_id = session.save_id or ""
        try:
            record = session.record_of(save_id, Deadline("commit", _RESOLVE_S))
        except CheckpointError as failure:
            record = None
            error.add_note(f"Looking for the outcome failed too: {failure}")
        where = f"Rank {COORDINATOR}, which commits, gave no word of it in the commit phase"
        if record is not None:
            return RankFailedError(
                f"{where}; save {save_id} to {session.url} is committed. {error}",
                failures={COORDINATOR: str(error)},
                rank=COORDINATOR,
                phase="commit",
                info=CheckpointInfo.of(session.url, record),
            )
        return CommitUnknownError(
            f"{where}; whether save {save_id} to {session.url} is or will be committed "
            f"cannot be told. {error}",
            save_id=save_id,
            rank=COORDINATOR,
            phase="commit",
            next_step=_LOOK,
        )
