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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.tensor import DTensor

from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.plans import exchange_plans, takes
from ckpt_storage.errors import CheckpointError, RankMismatchError
from ckpt_storage.loads.resolving import Placements, parts_of, placements_key
from ckpt_storage.options import STOCK_ENTRY_LIMIT

from .items import ItemSource, LiveItems
from .refusals import check_plan
from .session import Granted, SaveSession
from .ties import ties_of

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
    # By identity; tensors of one layer often share one tuple.
    spelt: dict[int, Placements] = {}
    # Equal parts are one object: the collector's passes cost more than everything else here.
    one: dict[Any, Any] = {}
    for fqn, value in state.items():
        if type(value) in _PLAIN and parts_of(value) is None:
            shape = one.setdefault(value.shape, value.shape)
            values.append((fqn, shape, value.dtype, value.layout, value.requires_grad))
        elif type(value) is DTensor:
            local = value._local_tensor  # noqa: SLF001  # to_local() is differentiable, and slow
            if type(local) not in _PLAIN:
                return None
            mesh, placements = value.device_mesh, value.placements
            key = meshes.get(id(mesh))
            if key is None:
                key = meshes[id(mesh)] = (mesh.mesh.tolist(), mesh.get_coordinate())
            if id(placements) not in spelt:
                spelling = placements_key(placements)
                spelt[id(placements)] = one.setdefault(spelling, spelling)
            shape, local_shape = value.shape, local.shape
            values.append(
                (
                    *(fqn, one.setdefault(shape, shape), value.dtype, value.requires_grad),
                    *(one.setdefault(local_shape, local_shape), local.dtype),
                    *(local.layout, local.requires_grad),
                    *(spelt[id(placements)], key),
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


PLANS = PlanMemory()
"""What this process keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """One rank's part of planning: what it can say before it hears of other ranks.

    `plan` makes the local plan, `planner` those for all ranks and the final one, and `source` gives
    its items. `ties` maps alias to target. `structure` is that of the state, None where plans are
    not kept.
    """

    plan: Callable[[], SavePlan]
    planner: SavePlanner
    source: ItemSource
    ties: Mapping[str, str]
    structure: Structure | None

    @classmethod
    def of(
        cls,
        state: dict[str, Any],
        planner: SavePlanner | None,
        *,
        url: str,
        rank: int,
        world_size: int,
    ) -> LocalPlan:
        """Set up a planner, by default torch's, with a state that is there while it is written.

        Raises what the planner raises.
        """
        chosen = planner or DefaultSavePlanner()
        _set_up(chosen, state, url, is_coordinator=rank == 0)
        structure = None
        if planner is None:
            paths: Mapping[str, Any] = chosen.mappings  # type: ignore[attr-defined]  # torch's
            structure = structure_of(
                chosen.state_dict,  # type: ignore[attr-defined]  # torch's own
                paths,
                rank=rank,
                world_size=world_size,
            )
        return cls(
            plan=chosen.create_local_plan,
            planner=chosen,
            source=LiveItems(chosen),
            ties=ties_of(chosen),
            structure=structure,
        )


def _set_up(planner: SavePlanner, state: dict[str, Any], url: str, *, is_coordinator: bool) -> None:
    if takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(
            state_dict=state,
            storage_meta=StorageMeta(checkpoint_id=url),
            is_coordinator=is_coordinator,
        )
    else:
        planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]  # old


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """What a rank sends: its plan, or the id of one that it kept."""

    plan: SavePlan
    plan_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a rank is told: its plan, under which id to keep it, and the leave or the refusal.

    Without `plan` the rank has to propose one: another rank has kept none.
    """

    plan: SavePlan | None
    plan_id: str = ""
    item_count: int = 0
    leave: Granted | CheckpointError | None = None


class PlanExchange:
    """One exchange of plans, on one rank. `metadata` is there on the coordinator afterwards."""

    def __init__(self, operation: Operation, session: SaveSession, local: LocalPlan) -> None:
        self._operation = operation
        self._session = session
        self._local = local
        self._kept: Kept | None = None
        self.metadata: Metadata | None = None

    def run(self) -> tuple[SavePlan, Granted]:
        """Return this rank's final plan and the coordinator's leave.

        Raises on all ranks what the coordinator refused the save for; no byte was written then.
        """
        structure = self._local.structure
        kept = self._kept = None if structure is None else PLANS.find(structure)
        answer = self._exchange(kept)
        if answer.plan is None:
            kept = self._kept = None
            answer = self._exchange(None)
        assert answer.plan is not None  # noqa: S101  # who proposed a plan gets one
        if kept is not None and kept.plan_id == answer.plan_id:
            plan = kept.plan
        else:
            plan = self._local.planner.finish_plan(answer.plan)
            if structure is not None:
                self._keep(structure, plan, answer)
        if not isinstance(answer.leave, Granted):
            assert answer.leave is not None  # noqa: S101  # it comes with a plan
            raise answer.leave
        return plan, answer.leave

    def _keep(self, structure: Structure, plan: SavePlan, answer: _Answer) -> None:
        has_chunks = answer.item_count <= STOCK_ENTRY_LIMIT
        metadata = self.metadata
        kept = Kept(
            plan_id=answer.plan_id,
            plan=plan,
            item_count=answer.item_count,
            metadata=metadata if has_chunks or metadata is None else without_chunks(metadata),
            has_chunks=has_chunks,
        )
        PLANS.keep(structure, kept)

    def _exchange(self, kept: Kept | None) -> _Answer:
        plan = SavePlan([]) if kept else checked(self._local.plan())
        proposal = _Proposal(plan=plan, plan_id=kept.plan_id if kept else None)
        return exchange_plans(self._operation, proposal, self._decide)

    def _decide(self, proposals: Sequence[_Proposal]) -> list[_Answer]:
        plans = [proposal.plan for proposal in proposals]
        ids = {proposal.plan_id for proposal in proposals}
        kept = self._kept
        refusal = unlike([plan.items for plan in plans])
        if ids == {None}:
            plans, self.metadata = self._local.planner.create_global_plan(plans)
            plan_id, item_count = os.urandom(16).hex(), sum(len(plan.items) for plan in plans)
        elif kept is not None and kept.metadata is not None and self._suffices(kept, ids):
            self.metadata, plan_id, item_count = kept.metadata, kept.plan_id, kept.item_count
        else:
            return [_Answer(plan=None) for _ in proposals]
        leave: Granted | CheckpointError
        try:
            leave = refusal or self._session.begin(len(plans), item_count)
        except CheckpointError as error:
            leave = error
        return [
            _Answer(plan=plan, plan_id=plan_id, item_count=item_count, leave=leave)
            for plan in plans
        ]

    def _suffices(self, kept: Kept, ids: set[str | None]) -> bool:
        """Return whether all ranks kept this plan, and all that this save's documents need."""
        is_whole = kept.has_chunks or not self._session.options.is_stock_wanted(kept.item_count)
        return is_whole and ids == {kept.plan_id}


def checked(plan: SavePlan) -> SavePlan:
    """Return a plan that can be stored, in which what is equal of many items is one object.

    So plans of many small tensors travel small, and keep the garbage collector idle. Raises
    `InvalidInputError` for tensors of whose elements nobody knows the bytes.
    """
    check_plan(plan)
    known: dict[object, Any] = {}
    items = []
    for item in plan.items:
        data = item.tensor_data
        if data is not None and type(data) is TensorWriteData:
            chunk, kind = data.chunk, data.properties
            key = (
                *(tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size), kind.dtype),
                *(kind.layout, kind.requires_grad, kind.memory_format, kind.pin_memory),
            )
            data = known.setdefault(key, data)
        items.append(replace(item, tensor_data=data))
    return replace(plan, items=items)


def unlike(items_of: Sequence[Sequence[WriteItem]]) -> RankMismatchError | None:
    """Return the error that a name means other kinds, shapes or dtypes on other ranks, if it does.

    Of a value that is not sharded planners keep one rank's, which must stand for all.
    """
    first: dict[str, tuple[object, ...]] = {}
    for items in items_of:
        for item in items:
            kind = _kind_of(item)
            if first.setdefault(item.index.fqn, kind) != kind:
                return _unlike_values(items_of, item.index.fqn)
    return None


def _kind_of(item: WriteItem) -> tuple[object, ...]:
    data = item.tensor_data
    return (item.type.name,) if data is None else (item.type.name, data.size, data.properties.dtype)


def _unlike_values(items_of: Sequence[Sequence[WriteItem]], fqn: str) -> RankMismatchError:
    ranks_of: dict[str, list[int]] = {}
    for rank, items in enumerate(items_of):
        for kind in {_kind_of(item) for item in items if item.index.fqn == fqn}:
            text = "no tensor"
            if len(kind) > 1:
                how = "sharded " if kind[0] == "SHARD" else ""
                text = f"{how}{str(kind[2]).removeprefix('torch.')} {list(kind[1])}"  # type: ignore[call-overload]  # a size
            ranks_of.setdefault(text, []).append(rank)
    listing = "; ".join(f"{text}: ranks {spell_ranks(ranks)}" for text, ranks in ranks_of.items())
    return RankMismatchError(
        f"Ranks hold unlike values by the name {fqn}: {listing}. Nothing was written.",
        values=ranks_of,
        phase="plan",
        next_step="Give each rank's value a name of its own, or make it the same on all ranks.",
    )
