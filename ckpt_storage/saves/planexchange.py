"""How the ranks of a front door's save come to their plans: planned anew, or as the last time.

Torch's planner takes some 100 us for each item of each rank, on every save; a state is compared in
about one. So the plans of the last few structures are kept for the process, and no tensor of any
state. A rank that kept a plan for this structure sends its id in place of the plan. Only if every
rank sends the same id, and the coordinator has kept it too, the kept plans are used; so no rank can
go by another plan than the others, whatever failed before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from ckpt_storage.commit.tiednames import Groups, candidate_ties
from ckpt_storage.coordination.frontdoor import exchange_plans
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.loads.resolving import Placements, parts_of, placements_key
from ckpt_storage.options import STOCK_ENTRY_LIMIT

from .session import SaveSession

_KEPT_COUNT = 2
"""A model and one thing besides; each has an object for every item of this rank."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """All of a flat state that `DefaultSavePlanner` looks at, and who plans.

    What a DTensor's write item says follows from its shape, its mesh, this rank's place there and
    its placements; and from dtype, layout and `requires_grad` of the local tensor. Strides and
    devices are in no plan.
    """

    rank: int
    world_size: int
    values: tuple[object, ...]
    paths: Mapping[str, object]


def structure_of(
    state: Mapping[str, Any], paths: Mapping[str, Any], *, rank: int, world_size: int
) -> Structure | None:
    """Return the structure of a flat state; None if it has values that plan for themselves."""
    values: list[object] = []
    meshes: dict[int, object] = {}
    # By identity, and kept alive meanwhile; tensors of one layer often share one tuple.
    spelt: dict[int, tuple[object, Placements]] = {}
    for fqn, value in state.items():
        if type(value) in _PLAIN and parts_of(value) is None:
            values.append((fqn, value.shape, value.dtype, value.layout, value.requires_grad))
        elif type(value) is DTensor:
            local = value._local_tensor  # noqa: SLF001  # to_local() is differentiable, and slow
            if type(local) not in _PLAIN:
                return None
            mesh = value.device_mesh
            key = meshes.get(id(mesh))
            if key is None:
                key = meshes[id(mesh)] = (mesh.mesh.tolist(), mesh.get_coordinate())
            placements = value.placements
            if id(placements) not in spelt:
                spelt[id(placements)] = placements, placements_key(placements)
            values.append(
                (
                    *(fqn, value.shape, value.dtype, value.requires_grad),
                    *(local.shape, local.dtype, local.layout, local.requires_grad),
                    *(spelt[id(placements)][1], key),
                )
            )
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            values.append(fqn)
    return Structure(rank=rank, world_size=world_size, values=tuple(values), paths=dict(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What was planned: under which id, the rank's final plan, how many items all ranks have.

    `metadata` is there on the coordinator only; of many items it `has_chunks` no more, which only
    `.metadata` needs: they are an object for every item of every rank.
    """

    plan_id: str
    plan: SavePlan
    item_count: int
    metadata: Metadata | None
    has_chunks: bool = True


def without_chunks(metadata: Metadata) -> Metadata:
    """Return metadata that says of tensors all but how they are cut."""
    described = {
        fqn: replace(entry, chunks=[]) if isinstance(entry, TensorStorageMetadata) else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return replace(metadata, state_dict_metadata=described)


class PlanMemory:
    """The plans of the last few structures. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[Structure, Kept]] = []

    def find(self, structure: Structure) -> Kept | None:
        """Return what was kept of an equal structure, None if nothing was."""
        with self._lock:
            return next((kept for known, kept in self._kept if known == structure), None)

    def keep(self, structure: Structure, kept: Kept) -> None:
        """Keep a plan in place of what was kept of an equal structure."""
        with self._lock:
            others = [pair for pair in self._kept if pair[0] != structure]
            self._kept = [*others[1 - _KEPT_COUNT :], (structure, kept)]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept = []


_MEMORY = PlanMemory()


def planned_alike() -> PlanMemory:
    """Return the memory of this process."""
    return _MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """What a rank sends: its plan, or the id of one that it kept; and what it ties."""

    plan: SavePlan
    plan_id: str | None
    tied: Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a rank is told: its plan, under which id to keep it, what any rank ties.

    Without `plan` the rank has to propose one: another rank has kept none.
    """

    plan: SavePlan | None
    plan_id: str
    item_count: int
    candidates: Groups


class PlanExchange:
    """One exchange, on one rank. `metadata` and `tied` are there on the coordinator afterwards."""

    def __init__(
        self,
        operation: Operation,
        session: SaveSession,
        planner: SavePlanner,
        *,
        keeps: bool,
    ) -> None:
        self._operation = operation
        self._session = session
        self._planner = planner
        self._keeps = keeps
        self._kept: Kept | None = None
        self.metadata: Metadata | None = None
        self.tied: Sequence[Groups] = ()

    def run(self, tied: Groups) -> tuple[SavePlan, Groups]:
        """Return this rank's final plan, and what could be tied; the planner is set up."""
        structure = self._structure()
        kept = self._kept = None if structure is None else _MEMORY.find(structure)
        answer = self._exchange(SavePlan([]) if kept else None, kept, tied)
        if answer.plan is None:
            kept = self._kept = None
            answer = self._exchange(None, None, tied)
        assert answer.plan is not None  # noqa: S101  # who proposed a plan gets one
        if kept is not None and kept.plan_id == answer.plan_id:
            return kept.plan, answer.candidates
        plan = self._planner.finish_plan(answer.plan)
        if structure is not None:
            has_chunks = answer.item_count <= STOCK_ENTRY_LIMIT
            metadata = self.metadata
            new = Kept(
                plan_id=answer.plan_id,
                plan=replace(plan, storage_data=None),
                item_count=answer.item_count,
                metadata=metadata if has_chunks or metadata is None else without_chunks(metadata),
                has_chunks=has_chunks,
            )
            _MEMORY.keep(structure, new)
        return plan, answer.candidates

    def _suffices(self, kept: Kept, ids: set[str | None]) -> bool:
        """Return whether all ranks kept this plan, and all that this save's documents need."""
        is_whole = kept.has_chunks or not self._session.is_stock_wanted(kept.item_count)
        return is_whole and ids == {kept.plan_id}

    def _structure(self) -> Structure | None:
        planner = self._planner
        if not self._keeps or type(planner) is not DefaultSavePlanner:
            return None
        paths: Mapping[str, Any] = planner.mappings
        return structure_of(
            planner.state_dict,
            paths,
            rank=self._operation.rank,
            world_size=self._operation.world_size,
        )

    def _exchange(self, plan: SavePlan | None, kept: Kept | None, tied: Groups) -> _Answer:
        proposal = _Proposal(
            plan=self._session.propose(plan or self._planner.create_local_plan()),
            plan_id=kept.plan_id if kept else None,
            tied=tied,
        )
        return exchange_plans(self._operation, proposal, self._decide)

    def _decide(self, proposals: Sequence[_Proposal]) -> list[_Answer]:
        self.tied = [proposal.tied for proposal in proposals]
        candidates = candidate_ties(self.tied)
        plans = [proposal.plan for proposal in proposals]
        ids = {proposal.plan_id for proposal in proposals}
        kept = self._kept
        if ids == {None}:
            plans, self.metadata = self._planner.create_global_plan(plans)
            plan_id, item_count = os.urandom(16).hex(), sum(len(plan.items) for plan in plans)
        elif kept is not None and kept.metadata is not None and self._suffices(kept, ids):
            self.metadata, plan_id, item_count = kept.metadata, kept.plan_id, kept.item_count
        else:
            again = _Answer(plan=None, plan_id="", item_count=0, candidates=())
            return [again for _ in proposals]
        session = self._session
        session.item_count = item_count
        deadline = self._operation.phase("plan")
        return [
            _Answer(plan=plan, plan_id=plan_id, item_count=item_count, candidates=candidates)
            for plan in session.decide(plans, deadline)
        ]
