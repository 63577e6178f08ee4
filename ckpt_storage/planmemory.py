"""Save plans kept for the next save of a state of the same structure.

Knows DCP's plans, and what of a state they depend on; knows no storage and no exchange. Called by
`planexchange`. Torch's planner takes some 100 us for each item of each rank, on every save; a state
is compared in about one. Kept for the process, because `save` has no object that lives longer; a
few structures at most, and no tensor of any state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Replicate, Shard

from .localparts import parts_of

__all__ = [
    "Kept",
    "Placements",
    "PlanMemory",
    "Structure",
    "placements_key",
    "structure_of",
    "without_chunks",
]

Placements = tuple[object, ...]
"""What tells placements apart: class and parameters of each."""

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


def placements_key(placements: Iterable[object]) -> Placements:
    """Return what tells placements apart.

    They themselves do not on all releases of torch: some take a strided shard for a plain one.
    """
    # By type, because they themselves compare by what they are subclasses of; spelling takes 1 us.
    return tuple(
        [
            (kind, one.dim)  # type: ignore[attr-defined]  # the kind tells
            if (kind := type(one)) is Shard
            else kind
            if kind is Replicate
            else (kind.__qualname__, repr(one))
            for one in placements
        ]
    )


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
