"""How the ranks of a front door's save come to their plans: planned anew, or as the last time.

Knows planners, writers and the `Operation` between ranks; knows no storage. Called by `saving`. A
rank that kept a plan for this structure sends its id in place of the plan. Only if every rank
sends the same id, and the coordinator has kept it too, the kept plans are used; so no rank can go
by another plan than the others, whatever failed before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from .frontdoor import exchange_plans
from .operation import Operation
from .options import STOCK_ENTRY_LIMIT
from .planmemory import Kept, PlanMemory, Structure, structure_of, without_chunks
from .tiednames import Groups, candidate_ties
from .writer import CheckpointStorageWriter

__all__ = ["PlanExchange", "planned_alike"]

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
        writer: CheckpointStorageWriter,
        planner: SavePlanner,
        *,
        keeps: bool,
    ) -> None:
        self._operation = operation
        self._writer = writer
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
        is_whole = kept.has_chunks or not self._writer.is_stock_wanted(kept.item_count)
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
            plan=self._writer.prepare_local_plan(plan or self._planner.create_local_plan()),
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
        self._writer.note_item_count(item_count)
        return [
            _Answer(plan=plan, plan_id=plan_id, item_count=item_count, candidates=candidates)
            for plan in self._writer.prepare_global_plan(plans)
        ]
