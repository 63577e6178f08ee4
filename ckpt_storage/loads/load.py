"""`load`: a bounded, collective load; DCP's steps without its collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.coordination.rounds import ByRank
from ckpt_storage.coordination.terms import check_terms
from ckpt_storage.errors import CheckpointError, CheckpointGoneError, RankMismatchError
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import Casts, Progress, RetryPolicy, Shared, Timeouts
from ckpt_storage.source.renaming import Rename
from ckpt_storage.store import Location, redacted_url

from .loadplanner import OwnChunksLoadPlanner
from .per_rank import prepared_targets
from .session import LoadSession, LoadSettings
from .sharing import ShareOrder, joined
from .states import is_stateful, plain_state
from .targets import find_duplicate, find_mismatch

_MAX_LOADS = 8
"""How often a load starts again because a save overwrote the checkpoint."""

_SUPERSEDED = (CheckpointGoneError, RankMismatchError)
"""Errors of an overwriting save: the files are gone, or ranks opened different saves.

Ranks that load different URLs never meet.
"""


def load(  # the public surface, all keyword-only
    state: MutableMapping[str, Any],
    url: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    storage_options: Mapping[str, Any] | None = None,
    planner: LoadPlanner | None = None,
    rename: Rename | None = None,
    progress: Progress = None,
    verify: bool = True,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    shared_reads: Shared = "auto",
    unsafe_pickle: bool = False,
    casts: Casts = "checked",
    retry: RetryPolicy | None = None,
) -> OperationStats:
    """Load the checkpoint at `url` into `state`, in place; all ranks of the group call.

    Does what `dcp.load` does, with the bounds of `save`: no collective runs on any process
    group, each phase has a deadline, and every live rank learns which rank failed. Returns the
    statistics of all ranks when every rank has loaded and verified its values. If a save overwrites
    the checkpoint meanwhile and frees what is read, all ranks load the new checkpoint instead, at
    most eight times, each with the whole timeout.

    Args:
        state: state dict as for `dcp.load`: tensors are filled, `Stateful` objects get their
            `load_state_dict` called, plain values are replaced.
        url: URL or local path of anything that `CheckpointStorageReader` opens.
        process_group: the ranks that load; default: the default group, or this process alone.
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `load` count); default four
            minutes and an hour.
        storage_options: passed to the fsspec file system.
        planner: a DCP `LoadPlanner`; by default the plans are those of `DefaultLoadPlanner()`.
            All ranks pass a planner, or none does; the coordinator's gets all plans.
        rename: names of the checkpoint's values in `state`, as for `CheckpointStorageReader`.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        verify: as for `CheckpointStorageReader`, like all that follow.
        thread_count: parallel reads per rank.
        memory_limit_bytes: ceiling of buffers per rank.
        shared_reads: "auto", "always" or "never", as for `CheckpointStorageReader`.
        unsafe_pickle: hand blobs to the planner without checking that unpickling runs no code.
        casts: "checked", "exact" or "any", as for `CheckpointStorageReader`.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming the rank that failed, the phase and what to
            do: `CheckpointNotFoundError`, `IntegrityError`, `RankMismatchError`,
            `RankFailedError`, `PhaseTimeoutError`, `StorageError`, `UnsafeContentError`. Tensors
            of `state` then hold undefined values, and may change for as long as a storage
            request takes; no `load_state_dict` was called, unless the error is its own.

    """
    arguments = locals()
    ranks = RankGroup.of(process_group, lane="load")
    what = f"the load from {redacted_url(url)}"
    timeouts = Timeouts()
    with suppress(CheckpointError):  # raised below, where it is reported to the other ranks
        timeouts = Timeouts.of(timeout)
    for loads_left in reversed(range(_MAX_LOADS)):
        operation: Operation | None = None
        has_read = False
        try:
            with ranks.operation(what, timeouts=timeouts) as operation:
                operation.begins_anew_after = _SUPERSEDED if loads_left else ()
                settings = LoadSettings.of(arguments, base=Location.to_read(url, storage_options))
                session = LoadSession(settings, begin=operation.phase)
                operation.what = f"the load from {session.url}"
                plain = plain_state(dict(sorted(state.items(), key=lambda item: str(item[0]))))
                with closing(Peers(operation)) as peers, ExitStack() as prepared:
                    _run(operation, session, planner, plain, peers, prepared)
                    operation.save_id = session.open().save_id
                    stats: OperationStats = operation.exchange(
                        operation.timing(), operation.stats_of, is_last=True
                    )
                    operation.stats = stats
                has_read = True
                for key, value in plain.items():
                    target = state[key]
                    if is_stateful(target):
                        target.load_state_dict(value)
                    else:
                        state[key] = value
        except CheckpointError:
            # The verdict, not the error of this rank: all ranks must decide alike.
            verdict = None if operation is None else operation.verdict
            if has_read or not loads_left or not isinstance(verdict, _SUPERSEDED):
                raise
        else:
            return stats
    raise AssertionError("The last load raises or returns.")


@contextmanager
def _explaining_mismatches(
    planner: LoadPlanner, state: Mapping[str, Any], metadata: Metadata, url: str
) -> Iterator[None]:
    """Raise `InvalidInputError` in place of what torch's planner raises for targets that differ."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError) or not isinstance(planner, DefaultLoadPlanner):
            raise
        mismatch = find_duplicate(state)
        flat = getattr(planner, "state_dict", None)
        if mismatch is None and flat is not None:
            mismatch = find_mismatch(flat, metadata.state_dict_metadata, url)
        if mismatch is None:
            raise
        raise mismatch from error


def _run(
    operation: Operation,
    session: LoadSession,
    custom: LoadPlanner | None,
    state: dict[str, Any],
    peers: Peers,
    prepared: ExitStack,
) -> None:
    """Plan and read; ranks exchange plans for a custom planner, or if they may share reads.

    The caller closes `prepared` once all is read.
    """
    terms = session.terms()
    operation.identify(Identity(kind="the load", url=session.url))
    operation.meet({**terms, "planner": "the default" if custom is None else "a custom planner"})
    operation.phase("load")
    planner = custom or OwnChunksLoadPlanner()
    metadata = session.metadata(lazy=custom is None)
    prepared.enter_context(prepared_targets(state, metadata))
    with _explaining_mismatches(planner, state, metadata, session.url):
        planner.set_up_planner(state, metadata, operation.is_coordinator)
        session.set_up(is_coordinator=operation.is_coordinator, rank=operation.rank)
        plan = planner.create_local_plan()
    proposed = plan
    if custom is None and session.share_unit(operation.world_size) is None:
        proposed = replace(plan, items=[])

    def decide(proposals: list[Any]) -> ByRank[tuple[LoadPlan | None, ShareOrder | None]]:
        plans = [proposal for proposal, _, _ in proposals]
        if custom is not None:
            plans = planner.create_global_plan(plans)
        names = operation.lane.global_ranks
        check_terms({names[r]: terms for r, (_, terms, _) in enumerate(proposals)}, phase="load")
        finals = [None] * len(plans) if custom is None else plans
        orders = session.share_orders(plans, [stored for _, _, stored in proposals])
        return ByRank(list(zip(finals, orders, strict=True)))

    proposal = (proposed, session.save_terms(), session.stored_names(proposed))
    final, order = operation.exchange(proposal, decide)
    if final is not None:
        plan = planner.finish_plan(final)
    session.read(plan, planner, None if order is None else partial(joined, operation, peers, order))
