"""Plans of a save: what a rank's planner makes of its state, and plans kept from earlier saves.

A cached plan is used only if every rank proposes the same id and the coordinator has it too.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from ckpt_storage.coordination.rank_names import spell_ranks
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import Path, int_keys_of
from ckpt_storage.loads.placing import is_hollow
from ckpt_storage.loads.tensors import (
    PLAIN,
    Placements,
    declared_chunks,
    dtype_name,
    placements_key,
)
from ckpt_storage.options import STOCK_ENTRY_LIMIT

from .items import MAKE_PLAIN, Items, LiveItems, fault_of, named_tensors, ties_of
from .replicas import ReplicaSample, sample_of
from .saveplanner import BoxSavePlanner

_RENAME_KEY = "Names are joined by dots, and keys are spelt as text: rename one key."

Structure = tuple[int, int, tuple[object, ...], Mapping[str, object], frozenset[Path]]
"""Rank, world size, all that `DefaultSavePlanner` looks at of a flat state, and `PlannerData`.

A DTensor's write item follows from its shape, mesh, placements and this rank's place in the mesh,
and from dtype, layout and `requires_grad` of the local tensor. Strides and devices are in no plan.
"""


def structure_of(
    state: Mapping[str, Any], paths: Mapping[str, Any], *, rank: int, world_size: int
) -> Structure | None:
    """Return the structure of a flat state; None if it has values that plan for themselves."""
    values: list[object] = []
    meshes: dict[int, object] = {}
    # By identity: the tensors of a layer often share a tuple.
    spelt: dict[int, Placements] = {}
    # Equal values are the same object: the collector's passes cost more than all else here.
    shared: dict[Any, Any] = {}
    for fqn, value in state.items():
        if type(value) in PLAIN and declared_chunks(value) is None:
            shape = shared.setdefault(value.shape, value.shape)
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
                spelt[id(placements)] = shared.setdefault(spelling, spelling)
            shape, local_shape = value.shape, local.shape
            values.append(
                (
                    *(fqn, shared.setdefault(shape, shape), value.dtype, value.requires_grad),
                    *(shared.setdefault(local_shape, local_shape), local.dtype),
                    *(local.layout, local.requires_grad),
                    *(spelt[id(placements)], key),
                )
            )
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            values.append(fqn)
    return rank, world_size, tuple(values), dict(paths), int_keys_of(paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """A plan of an earlier save: its id, this rank's final plan, how many items all ranks have.

    `metadata` is there on the coordinator only. Of more than `STOCK_ENTRY_LIMIT` items it has no
    chunks, which only `.metadata` needs: they are an object for every item of every rank.
    `from_lowest` are the names that the lowest rank stores, because ranks held different values;
    on the coordinator only.
    """

    plan_id: str
    plan: SavePlan
    structure: Structure | None
    item_count: int = 0
    metadata: Metadata | None = None
    from_lowest: frozenset[str] = frozenset()


PLAN_CACHE: deque[CachedPlan] = deque(maxlen=2)
"""The plans that this process keeps: of a model and of one more state."""


def find_cached_plan(cache: deque[CachedPlan], structure: Structure | None) -> CachedPlan | None:
    """Return the last cached plan of an equal structure, None if there is none."""
    return next((plan for plan in reversed(tuple(cache)) if plan.structure == structure), None)


def metadata_to_cache(metadata: Metadata | None, item_count: int) -> Metadata | None:
    """Return the metadata of a plan of so many items, as `CachedPlan` keeps it."""
    if metadata is None or item_count <= STOCK_ENTRY_LIMIT:
        return metadata
    described = {
        fqn: replace(entry, chunks=[]) if isinstance(entry, TensorStorageMetadata) else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return replace(metadata, state_dict_metadata=described)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What a rank plans with: its planner, set up with the state.

    `plan` makes the local plan, `planner` the global and the final ones. `items` yields the items
    of a final plan, `ties` maps aliases. `structure` is None where plans are not cached. `sample`
    reads a sample of the replicated values.
    """

    plan: Callable[[], SavePlan]
    planner: SavePlanner
    items: Items
    ties: Mapping[str, str]
    structure: Structure | None
    sample: Callable[[], ReplicaSample]

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
        chosen: Any = planner or BoxSavePlanner()
        structure = None
        with naming_refused(state):
            if getattr(chosen, "flatten_state_dict", False):
                _check_keys(state)
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

        return cls(
            plan=plan,
            planner=chosen,
            items=LiveItems(chosen).items,
            ties=ties,
            structure=structure,
            sample=partial(sample_of, flat_state(chosen)),
        )


def flat_state(planner: SavePlanner) -> Mapping[str, Any]:
    """Return the flat state of a planner that is set up; {} if it keeps none as DCP's do."""
    state = getattr(planner, "state_dict", None)
    return state if isinstance(state, Mapping) else {}


def take_from_lowest(plans: Sequence[SavePlan], names: AbstractSet[str]) -> list[SavePlan]:
    """Return plans in which only the first that has one of `names` keeps it."""
    if not names:
        return list(plans)
    seen: set[str] = set()
    reduced = []
    for plan in plans:
        items = [item for item in plan.items if item.index.fqn not in seen]
        seen.update(item.index.fqn for item in items if item.index.fqn in names)
        reduced.append(replace(plan, items=items))
    return reduced


def checked(plan: SavePlan) -> SavePlan:
    """Return a plan that can be stored, in which equal values in items are the same object.

    Raises `InvalidInputError` for tensors whose elements have no known bytes.
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
    if data.properties.layout is not torch.strided:
        raise _refusal(fqn, f"its layout is {data.properties.layout}")
    if dtype.startswith(("qint", "quint")):
        raise _refusal(fqn, "it is quantised")
    if dtype not in DTYPES:
        raise _refusal(fqn, f"its dtype {dtype} cannot be stored")


def _refusal(fqn: str, reason: str) -> InvalidInputError:
    message = f"{fqn} cannot be saved: {reason}."
    return InvalidInputError(message, phase="plan", next_step=MAKE_PLAIN)


def _check_keys(value: object, prefix: str = "") -> None:
    """Raise `InvalidInputError` for two keys of a dict that flattening gives the same name.

    Flattening merges dicts under `0` and `"0"` silently. A dict without a value has no name.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, Mapping | list):
                _check_keys(item, f"{prefix}{number}.")
    elif isinstance(value, Mapping):
        keys: dict[str, object] = {}
        for key, item in value.items():
            if is_hollow(item):
                continue
            name = str(key)
            if name in keys:
                raise InvalidInputError(
                    f"{prefix}{name} cannot be saved: two values of the state have this name, "
                    f"those of the keys {keys[name]!r} and {key!r} of one dict.",
                    phase="plan",
                    next_step=_RENAME_KEY,
                )
            keys[name] = key
            if isinstance(item, Mapping | list):
                _check_keys(item, f"{prefix}{name}.")


@contextmanager
def naming_refused(state: Mapping[str, Any]) -> Iterator[None]:
    """Raise a planner's error as `InvalidInputError` that names the value, where it is known."""
    try:
        yield
    except CheckpointError:
        raise
    except RecursionError as error:
        name = _cycle_in(state, frozenset({id(state)}))
        message = "The state cannot be saved: it is nested too deeply."
        if name is not None:
            message = f"{name} cannot be saved: it is a container that holds itself."
        raise InvalidInputError(
            message, phase="plan", next_step="Remove the reference to the container itself."
        ) from error
    except Exception as error:
        duplicate = _duplicate_name_in(state)
        if duplicate is not None:
            raise InvalidInputError(
                f"{duplicate} cannot be saved: two values of the state have this name.",
                phase="plan",
                next_step=_RENAME_KEY,
            ) from error
        for fqn, tensor in named_tensors(state, ""):
            reason = fault_of(tensor) or _failure_alone(fqn, tensor)
            if reason is not None:
                raise _refusal(f"{fqn} ({type(tensor).__qualname__})", reason) from error
        raise


def _duplicate_name_in(state: Mapping[str, Any]) -> str | None:
    """Return a name that flattening gives to two values, None if there is none."""
    seen = Counter[str]()
    traverse_state_dict(dict(state), lambda path, _: seen.update([".".join(map(str, path))]))
    return next((name for name, count in seen.items() if count > 1), None)


def _cycle_in(value: Any, opened: frozenset[int]) -> str | None:  # noqa: ANN401  # a container
    """Return the name of a container that contains itself, None if there is none."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    with suppress(RecursionError):
        for key, child in items:
            if id(child) in opened:
                return str(key)
            if isinstance(child, Mapping | list | tuple):
                name = _cycle_in(child, opened | {id(child)})
                if name is not None:
                    return f"{key}.{name}"
    return None


def _failure_alone(fqn: str, tensor: torch.Tensor) -> str | None:
    """Return the error of torch's planner for a tensor that it refuses."""
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner({fqn: tensor}, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    except Exception as failure:  # noqa: BLE001  # what a kind of tensor raises
        return f"{type(failure).__name__}: {str(failure).rstrip('.')}"
    return None


def find_mismatch(
    items_of: Sequence[Sequence[WriteItem]], names: Sequence[int] | None = None
) -> RankMismatchError | None:
    """Return the error that a name means different values on different ranks, None if none does.

    `names` are the global ranks; default: 0, 1, ...
    """
    first: dict[str, tuple[object, ...]] = {}
    for items in items_of:
        for item in items:
            kind = _kind_of(item)
            if first.setdefault(item.index.fqn, kind) != kind:
                ranks = range(len(items_of)) if names is None else names
                return _mismatch_of(items_of, item.index.fqn, ranks)
    return None


def _kind_of(item: WriteItem) -> tuple[object, ...]:
    data = item.tensor_data
    return (item.type.name,) if data is None else (item.type.name, data.size, data.properties.dtype)


def _mismatch_of(
    items_of: Sequence[Sequence[WriteItem]], fqn: str, names: Sequence[int]
) -> RankMismatchError:
    ranks_of: dict[str, list[int]] = {}
    for rank, items in zip(names, items_of, strict=True):
        for kind in {_kind_of(item) for item in items if item.index.fqn == fqn}:
            text = "no tensor"
            if len(kind) > 1:
                how = "sharded " if kind[0] == "SHARD" else ""
                text = f"{how}{str(kind[2]).removeprefix('torch.')} {list(kind[1])}"  # type: ignore[call-overload]  # a size
            ranks_of.setdefault(text, []).append(rank)
    listing = "; ".join(f"{text}: ranks {spell_ranks(ranks)}" for text, ranks in ranks_of.items())
    return RankMismatchError(
        f"Ranks hold different values under the name {fqn}: {listing}. Nothing was written.",
        values=ranks_of,
        phase="plan",
        next_step="Give each rank's value a name of its own, or make it the same on all ranks.",
    )
