"""`load`: one bounded, collective load; DCP's steps without its collectives.

Knows the order of DCP's load steps and drives a planner and `CheckpointStorageReader` through
them over an `Operation`. Called by users.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .collecting import collector_paused
from .coordination_torch import coordinator_of
from .errors import CheckpointError
from .frontdoor import exchange_plans, is_stateful, plain_state
from .loadplanner import OwnChunksLoadPlanner
from .operation import Operation
from .options import Engine, Progress, RetryPolicy, Timeouts
from .peers import OperationSharers, peers_of
from .reader import CheckpointStorageReader
from .reports import as_checkpoint_errors, place_of

__all__ = ["load"]


def load(  # the public surface, all keyword-only
    state: MutableMapping[str, Any],
    url: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    storage_options: Mapping[str, Any] | None = None,
    planner: LoadPlanner | None = None,
    progress: Progress = None,
    verify: bool = True,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    engine: Engine = "auto",
    shared_reads: Literal["auto", "never"] = "auto",
    unsafe_pickle: bool = False,
    retry: RetryPolicy | None = None,
) -> None:
    """Load the checkpoint at `url` into `state`, in place; all ranks of the group call.

    Does what `dcp.load` does, with the bounds of `save`: no collective runs on any process
    group, each phase has a deadline, and every live rank learns which rank failed. Returns when
    every rank has loaded and verified its part.

    Args:
        state: state dict as for `dcp.load`: tensors are filled, `Stateful` objects get their
            `load_state_dict` called, plain values are replaced.
        url: URL or local path of anything that `CheckpointStorageReader` opens.
        process_group: the ranks that load; default: the default group; without one, this process.
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `load` count); default an hour each.
        storage_options: passed to the fsspec file system.
        planner: a DCP `LoadPlanner`; by default one that plans what `DefaultLoadPlanner()` does.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        verify: as for `CheckpointStorageReader`, like all that follow.
        thread_count: parallel reads per rank.
        memory_limit_bytes: ceiling of buffers per rank.
        engine: data plane.
        shared_reads: "auto" or "never", as for `CheckpointStorageReader`.
        unsafe_pickle: hand blobs to the planner without checking that unpickling runs no code.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming the rank that failed, the phase and what to
            do: `CheckpointNotFoundError`, `IntegrityError`, `RankMismatchError`,
            `RankFailedError`, `PhaseTimeoutError`, `StorageError`, `UnsafeContentError`. Tensors
            of `state` then hold undefined values, and may change for as long as a storage
            request takes; no `load_state_dict` was called, unless the error is from one itself.

    """
    coordinator = coordinator_of(process_group)
    try:
        timeouts, refusal = Timeouts.of(timeout), None
    except CheckpointError as error:
        # The other ranks are waiting to be told.
        timeouts, refusal = Timeouts(), error
    what = f"the load from {place_of(url)}"
    with (
        coordinator.operation(what, timeouts=timeouts) as operation,
        as_checkpoint_errors(what, operation.rank),
    ):
        if refusal is not None:
            raise refusal
        reader = CheckpointStorageReader(
            url,
            storage_options=storage_options,
            verify=verify,
            thread_count=thread_count,
            memory_limit_bytes=memory_limit_bytes,
            engine=engine,
            shared_reads=shared_reads,
            unsafe_pickle=unsafe_pickle,
            timeout=timeouts,
            retry=retry,
            progress=progress,
        )
        operation.what = f"the load from {reader.checkpoint_id}"
        plain = plain_state(dict(sorted(state.items())))
        reader.attend(operation.phase, OperationSharers(operation, peers_of(coordinator)))
        _run(operation, reader, planner or OwnChunksLoadPlanner(), plain)
        for key, value in plain.items():
            target = state[key]
            if is_stateful(target):
                target.load_state_dict(value)
            else:
                state[key] = value


def _run(
    operation: Operation,
    reader: CheckpointStorageReader,
    planner: LoadPlanner,
    state: dict[str, Any],
) -> None:
    operation.meet(reader.terms())
    operation.phase("load")
    if type(planner) is OwnChunksLoadPlanner:
        plan = _own_plan(operation, reader, planner, state)
    else:
        plan = _agreed_plan(operation, reader, planner, state)
    reader.read_data(plan, planner).wait()
    operation.all_gather(pickle.dumps(None))


def _own_plan(
    operation: Operation,
    reader: CheckpointStorageReader,
    planner: OwnChunksLoadPlanner,
    state: dict[str, Any],
) -> LoadPlan:
    """Return this rank's plan, which the planner of no other rank has a say in.

    Ranks still agree on what they read; their plans travel only where reads may be shared.
    """
    metadata = reader.read_lazily()
    with collector_paused():
        planner.set_up_planner(state, metadata, operation.is_coordinator)
        plan = planner.create_local_plan()
    reader.set_up_storage_reader(metadata, operation.is_coordinator, rank=operation.rank)
    told = plan if reader.may_share(operation.world_size, plan) else replace(plan, items=[])

    def decide(plans: list[LoadPlan]) -> list[LoadPlan]:
        # Who reads what for others arrives by itself, and the rest each rank has.
        return [replace(answer, items=[]) for answer in reader.prepare_global_plan(plans)]

    exchange_plans(operation, reader.prepare_local_plan(told), decide)
    return plan


def _agreed_plan(
    operation: Operation,
    reader: CheckpointStorageReader,
    planner: LoadPlanner,
    state: dict[str, Any],
) -> LoadPlan:
    """Return this rank's plan as a planner makes it that may look at all ranks' plans."""
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, operation.is_coordinator)
    reader.set_up_storage_reader(metadata, operation.is_coordinator, rank=operation.rank)

    def decide(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    local = reader.prepare_local_plan(planner.create_local_plan())
    return planner.finish_plan(exchange_plans(operation, local, decide))
