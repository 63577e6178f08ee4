"""`load`: one bounded, collective load; DCP's steps without its collectives.

Knows the order of DCP's load steps and drives a planner and `CheckpointStorageReader` through
them over an `Operation`. Called by users.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .coordination_torch import coordinator_of
from .errors import CheckpointError
from .frontdoor import exchange_plans, is_stateful, plain_state
from .loadplanner import OwnChunksLoadPlanner
from .operation import Operation
from .options import Progress, RetryPolicy, Timeouts
from .peers import peers_of
from .reader import CheckpointStorageReader
from .reports import as_checkpoint_errors, place_of
from .sharers import MapLeave, MapWish, OperationSharers, leave_to_map

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
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `load` count); default ten
            minutes and an hour.
        storage_options: passed to the fsspec file system.
        planner: a DCP `LoadPlanner`; by default one that plans what `DefaultLoadPlanner()` does.
            Ranks may differ in it; the coordinator's sees all plans.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        verify: as for `CheckpointStorageReader`, like all that follow.
        thread_count: parallel reads per rank.
        memory_limit_bytes: ceiling of buffers per rank.
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
            shared_reads=shared_reads,
            unsafe_pickle=unsafe_pickle,
            timeout=timeouts,
            retry=retry,
            progress=progress,
        )
        operation.what = f"the load from {reader.checkpoint_id}"
        plain = plain_state(dict(sorted(state.items())))
        sharers = OperationSharers(operation, peers_of(coordinator))
        reader.attend(operation.phase, sharers)
        try:
            _run(operation, reader, planner or OwnChunksLoadPlanner(), plain)
        finally:
            reader.forget_ahead()
        if not sharers.has_ended:
            operation.all_gather(pickle.dumps(None))
        for key, value in plain.items():
            target = state[key]
            if is_stateful(target):
                target.load_state_dict(value)
            else:
                state[key] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """What a rank sends: its plan, without items if nobody else needs them.

    With `is_own` its planner is ours, and no other rank's planner has a say in the plan.
    """

    plan: LoadPlan
    is_own: bool
    wish: MapWish


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a rank is told: its plan, without items if it is as the rank proposed."""

    plan: LoadPlan
    leave: MapLeave | None = None


def _run(
    operation: Operation,
    reader: CheckpointStorageReader,
    planner: LoadPlanner,
    state: dict[str, Any],
) -> None:
    operation.meet(reader.terms())
    operation.phase("load")
    plan = _planned(operation, reader, planner, state)
    reader.read_data(plan, planner).wait()


def _planned(
    operation: Operation,
    reader: CheckpointStorageReader,
    planner: LoadPlanner,
    state: dict[str, Any],
) -> LoadPlan:
    """Return this rank's final plan.

    A planner that was given may look at all ranks' plans, as under `dcp.load`. With ours, ranks
    still agree on what they read, but their plans travel only where reads may be shared, and not
    where all that share find what they want in their kernel's cache. Where some ranks give a
    planner and others none, or only some find it there, all send their plans in full, once that is
    known.
    """
    is_own = type(planner) is OwnChunksLoadPlanner
    metadata = reader.read_lazily() if is_own else reader.read_metadata()
    planner.set_up_planner(state, metadata, operation.is_coordinator)
    reader.set_up_storage_reader(metadata, operation.is_coordinator, rank=operation.rank)
    plan = planner.create_local_plan()
    return _Exchange(operation, reader, planner, plan, is_own=is_own).run()


class _Exchange:
    """How the ranks come to their final plans, on one rank whose planner made `plan`."""

    def __init__(
        self,
        operation: Operation,
        reader: CheckpointStorageReader,
        planner: LoadPlanner,
        plan: LoadPlan,
        *,
        is_own: bool,
    ) -> None:
        self._operation = operation
        self._reader = reader
        self._planner = planner
        self._plan = plan
        self._is_own = is_own
        self._proposal = self._proposed()

    def run(self) -> LoadPlan:
        """Return this rank's final plan; the reader knows what was agreed on besides."""
        operation, reader, plan = self._operation, self._reader, self._plan
        answer = exchange_plans(operation, self._proposal, self._decide, meanwhile=self._ahead)
        reader.may_map(None if answer is None else answer.leave)
        if answer is None:
            final = exchange_plans(operation, reader.prepare_local_plan(plan), self._global)
        elif self._is_own:
            return plan
        else:
            final = answer.plan
        return self._planner.finish_plan(final)

    def _proposed(self) -> _Proposal:
        reader, told, world_size = self._reader, self._plan, self._operation.world_size
        wish = MapWish(host="", maps=None)
        if self._is_own:
            if reader.may_share(world_size, told):
                wish = reader.wish_to_map(told, self._planner, world_size=world_size)
            if wish.maps is not False:
                told = replace(told, items=[])
        return _Proposal(plan=reader.prepare_local_plan(told), is_own=self._is_own, wish=wish)

    def _ahead(self) -> None:
        if self._is_own:
            self._reader.plan_ahead(self._plan, self._planner)

    def _global(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._reader.prepare_global_plan(self._planner.create_global_plan(plans))

    def _decide(self, proposals: list[_Proposal]) -> Sequence[_Answer | None]:
        plans = [proposal.plan for proposal in proposals]
        if len({proposal.is_own for proposal in proposals}) > 1:
            return [None] * len(plans)
        if not self._is_own:
            return [_Answer(plan=answer) for answer in self._global(plans)]
        wishes = [proposal.wish for proposal in proposals]
        leaves: Sequence[MapLeave | None] | None = leave_to_map(wishes)
        if leaves is None:
            if any(wish.maps for wish in wishes):
                return [None] * len(plans)
            leaves = [None] * len(plans)
        # Who reads what for others arrives by itself, and the rest each rank has.
        return [
            _Answer(plan=replace(answer, items=[]), leave=leave)
            for answer, leave in zip(self._reader.prepare_global_plan(plans), leaves, strict=True)
        ]
