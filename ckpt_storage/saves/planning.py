"""How the ranks of a save come to their plans: planned anew, or as the last time.

Kept plans are used only if every rank sends the same id and the coordinator has kept it too.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from ckpt_storage.commit.attempt import Grant
from ckpt_storage.coordination.failures import spell_ranks
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError
from ckpt_storage.format.names import DTYPES
from ckpt_storage.loads.resolving import PLAIN, Placements, dtype_name, parts_of, placements_key
from ckpt_storage.options import STOCK_ENTRY_LIMIT

from .items import MAKE_PLAIN, Items, LiveItems, fault_of, named_tensors, ties_of
from .session import SaveSession

Structure = tuple[int, int, tuple[object, ...], Mapping[str, object]]
"""Rank, world size, all that `DefaultSavePlanner` looks at of a flat state, and paths of names.

A DTensor's write item follows from its shape, mesh, placements and this rank's place in the mesh,
and from dtype, layout and `requires_grad` of the local tensor. Strides and devices are in no plan.
"""


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
        if type(value) in PLAIN and parts_of(value) is None:
            shape = one.setdefault(value.shape, value.shape)
            values.append((fqn, shape, value.dtype, value.layout, value.requires_grad))
        elif type(value) is DTensor:
            local = value._local_tensor  # noqa: SLF001  # to_local() is differentiable, and slow
            if type(local) not in PLAIN:
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
    return rank, world_size, tuple(values), dict(paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What was planned: its id, the rank's final plan, how many items all ranks have.

    `metadata` is there on the coordinator only. Of more than `STOCK_ENTRY_LIMIT` items it has no
    chunks, which only `.metadata` needs: they are an object for every item of every rank.
    """

    plan_id: str
    plan: SavePlan
    structure: Structure | None
    item_count: int = 0
    metadata: Metadata | None = None


PLANS: deque[Kept] = deque(maxlen=2)
"""What this process keeps: of a model and one thing besides, an object for every item each."""


def kept_of(plans: deque[Kept], structure: Structure | None) -> Kept | None:
    """Return what was kept last of an equal structure, None if nothing was."""
    return next((kept for kept in reversed(tuple(plans)) if kept.structure == structure), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """One rank's part of planning; `structure` is None where plans are not kept.

    `plan` makes the local plan, `planner` all others, `items` gives those of a final plan, and
    `ties` maps aliases.
    """

    plan: Callable[[], SavePlan]
    planner: SavePlanner
    items: Items
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
        """Set up a planner with a state that stays while it is written. Raises what it raises."""
        chosen: Any = planner or DefaultSavePlanner()
        structure = None
        with naming_refused(state):
            # DCP added it later; a planner may be older.
            if "storage_meta" in inspect.signature(chosen.set_up_planner).parameters:
                meta = StorageMeta(checkpoint_id=url)
                chosen.set_up_planner(state_dict=state, storage_meta=meta, is_coordinator=rank == 0)
            else:
                chosen.set_up_planner(state, rank == 0)
            if planner is None:
                structure = structure_of(
                    chosen.state_dict, chosen.mappings, rank=rank, world_size=world_size
                )
            ties = ties_of(chosen)

        def plan() -> SavePlan:
            with naming_refused(state):
                return checked(chosen.create_local_plan())

        items = LiveItems(chosen).items
        return cls(plan=plan, planner=chosen, items=items, ties=ties, structure=structure)


_Answer = tuple[SavePlan | None, str, int, Grant | CheckpointError | None]
"""Its plan (None: propose one), the plan's id, the items of all ranks, the leave or the refusal."""

Steps = Generator[Any, Any, None]
"""What one rank does in a save, step by step, while its caller passes words between the ranks."""


def rank_save(
    session: SaveSession,
    part: Callable[[], LocalPlan],
    pack: Callable[[object], Any] = lambda value: value,
) -> Steps:
    """Carry out one rank's part of a save; all words but the coordinator's own are packed.

    Gives its proposal for those of all ranks, then the answers (save id, word) for its own; both
    again if all are to plan anew. Then its report for those of all, and what was committed.
    """
    local, is_first = part(), session.is_coordinator
    kept, metadata = kept_of(PLANS, local.structure), None
    plan: SavePlan | None = None
    while plan is None:
        own: Any = (local.plan(), None) if kept is None else (SavePlan([]), kept.plan_id)
        told = yield None if is_first else pack(own)
        if is_first:
            answers, metadata = _decided(session, local, kept, [own, *map(_unpacked, told[1:])])
            own = answers[0]
            save_id = own[-1].save_id if isinstance(own[-1], Grant) else None
            told = [(save_id, None), *((save_id, pack(answer)) for answer in answers[1:])]
            del answers
        told = yield told
        plan, plan_id, count, leave = own if is_first else _unpacked(told)
        if plan is None:
            kept = None
        elif kept is not None and kept.plan_id == plan_id:
            plan = kept.plan
        else:
            plan = local.planner.finish_plan(plan)
            if local.structure is not None:
                PLANS.append(
                    Kept(
                        plan_id=plan_id,
                        plan=plan,
                        structure=local.structure,
                        item_count=count,
                        metadata=_lasting(metadata, count),
                    )
                )
    if not isinstance(leave, Grant):
        raise leave
    own = session.write(leave, plan, local.items, local.ties)
    told = yield None if is_first else pack(own)
    assert metadata is not None  # noqa: S101  # only the coordinator comes here
    yield session.finish(metadata, [own, *map(_unpacked, told[1:])])


def _decided(
    session: SaveSession,
    local: LocalPlan,
    kept: Kept | None,
    proposals: Sequence[tuple[SavePlan, str | None]],
) -> tuple[list[_Answer], Metadata | None]:
    """Plan for all ranks that sent a plan, or the id of one that they kept; begin the save."""
    plans: Sequence[SavePlan] = [plan for plan, _ in proposals]
    ids = {plan_id for _, plan_id in proposals}
    refusal, wants_stock = unlike([plan.items for plan in plans]), session.options.is_stock_wanted
    if ids == {None}:
        plans, metadata = local.planner.create_global_plan(list(plans))
        plan_id, item_count = os.urandom(16).hex(), sum(len(plan.items) for plan in plans)
    elif (
        kept is not None
        and kept.metadata is not None
        and ids == {kept.plan_id}
        and (kept.item_count <= STOCK_ENTRY_LIMIT or not wants_stock(kept.item_count))
    ):
        metadata, plan_id, item_count = kept.metadata, kept.plan_id, kept.item_count
    else:
        return [(None, "", 0, None) for _ in plans], None
    leave: Grant | CheckpointError
    try:
        leave = refusal or session.begin(len(plans), item_count)
    except CheckpointError as error:
        leave = error
    return [(plan, plan_id, item_count, leave) for plan in plans], metadata


def _unpacked(word: Any) -> Any:  # noqa: ANN401  # what was packed, or is not
    return pickle.loads(word) if isinstance(word, bytes) else word  # noqa: S301  # our own ranks


def _lasting(metadata: Metadata | None, item_count: int) -> Metadata | None:
    """Return metadata to keep; of many items it says of tensors all but how they are cut."""
    if metadata is None or item_count <= STOCK_ENTRY_LIMIT:
        return metadata
    described = {
        fqn: replace(entry, chunks=[]) if isinstance(entry, TensorStorageMetadata) else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return replace(metadata, state_dict_metadata=described)


def checked(plan: SavePlan) -> SavePlan:
    """Return a plan that can be stored, in which what is equal of many items is one object.

    Raises `InvalidInputError` for tensors of whose elements nobody knows the bytes.
    """
    known: dict[object, Any] = {}
    items = []
    for item in plan.items:
        data = item.tensor_data
        if data is not None:
            _check_bytes(item.index.fqn, data)
        if type(data) is TensorWriteData:
            chunk, kind = data.chunk, data.properties
            key = (
                *(tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size), kind.dtype),
                *(kind.layout, kind.requires_grad, kind.memory_format, kind.pin_memory),
            )
            data = known.setdefault(key, data)
        items.append(replace(item, tensor_data=data))
    return replace(plan, items=items)


def _check_bytes(fqn: str, data: TensorWriteData) -> None:
    dtype = dtype_name(data.properties.dtype)
    if any(isinstance(length, torch.SymInt) for length in data.size):
        raise _refusal(fqn, "it is a nested tensor")
    if dtype.startswith(("qint", "quint")):
        raise _refusal(fqn, "it is quantised")
    if dtype not in DTYPES:
        raise _refusal(fqn, f"its dtype {dtype} cannot be stored")


def _refusal(fqn: str, reason: str) -> InvalidInputError:
    told = f"{fqn} cannot be saved: {reason}."
    return InvalidInputError(told, phase="plan", next_step=MAKE_PLAIN)


@contextmanager
def naming_refused(state: Mapping[str, Any]) -> Iterator[None]:
    """Turn what a planner raises at into `InvalidInputError` naming the key, where it is known."""
    try:
        yield
    except CheckpointError:
        raise
    except RecursionError as error:
        circle = _circle_in(state, frozenset({id(state)}))
        told = "The state cannot be saved: it is nested too deeply."
        if circle is not None:
            told = f"{circle} cannot be saved: it is a container that holds itself."
        raise InvalidInputError(told, phase="plan", next_step="Break the circle.") from error
    except Exception as error:
        for fqn, tensor in named_tensors(state, ""):
            reason = fault_of(tensor) or _failure_alone(fqn, tensor)
            if reason is not None:
                raise _refusal(f"{fqn} ({type(tensor).__qualname__})", reason) from error
        raise


def _circle_in(value: Any, opened: frozenset[int]) -> str | None:  # noqa: ANN401  # a container
    """Return the name of a container that one of those around it is; None if there is none."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    with suppress(RecursionError):
        for key, child in items:
            if id(child) in opened:
                return str(key)
            if isinstance(child, Mapping | list | tuple):
                found = _circle_in(child, opened | {id(child)})
                if found is not None:
                    return f"{key}.{found}"
    return None


def _failure_alone(fqn: str, tensor: torch.Tensor) -> str | None:
    """Return what torch's planner says of one tensor that it refuses."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner({fqn: tensor}, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    except Exception as failure:  # noqa: BLE001  # what a kind of tensor raises
        return f"{type(failure).__name__}: {str(failure).rstrip('.')}"
    return None


def unlike(items_of: Sequence[Sequence[WriteItem]]) -> RankMismatchError | None:
    """Return the error that a name means other values on other ranks, if it does."""
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
