"""Tensors that torch's planners describe wrongly or not at all: several boxes, or parts inside.

A `DTensor` with a `_StridedShard` may hold rows that are not neighbours in the whole tensor. A
subclass with `__tensor_flatten__` holds other tensors, and has no elements of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_storage.errors import InvalidInputError

from .tensors import PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBox:
    """One box of the whole tensor, and where its elements begin in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box as torch has it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return its elements in the local tensor."""
        stops = map(sum, zip(self.local_offsets, self.sizes, strict=True))
        return local[tuple(map(slice, self.local_offsets, stops))]


def boxes_of(tensor: object) -> list[LocalBox] | None:
    """Return the boxes of a `DTensor` whose local part is several; None for all others."""
    # By type: torch's `isinstance` for placements runs Python, and this is asked for each tensor.
    if type(tensor) is not DTensor or _StridedShard not in map(type, tensor.placements):
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    runs = [_runs_of(tensor, dim, coordinate) for dim in range(tensor.ndim)]
    if all(len(of_dim) <= 1 for of_dim in runs):
        return None
    return [
        LocalBox(
            offsets=tuple(start for start, _, _ in box),
            sizes=tuple(length for _, length, _ in box),
            local_offsets=tuple(local for _, _, local in box),
        )
        for box in product(*runs)
        # An empty one may begin where another rank's begins, and would take its place.
        if all(length for _, length, _ in box) or not tensor.numel()
    ]


def _runs_of(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of neighbours in one dimension: start, length, start in the local tensor."""
    indices = torch.arange(tensor.shape[dim], device="cpu")
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        count = tensor.device_mesh.size(mesh_dim)
        place: Any = placement
        along = (
            _StridedShard(0, split_factor=place.split_factor)
            if isinstance(placement, _StridedShard)
            else type(place)(0)
        )
        shards, _ = along._split_tensor(indices, count, with_padding=False)  # noqa: SLF001  # the placement's own rule
        indices = shards[coordinate[mesh_dim]]
    if not indices.numel():
        return [(0, 0, 0)]
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, indices.numel()]
    return [
        (int(indices[start]), end - start, start) for start, end in zip(starts, ends, strict=True)
    ]


def box_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor | None:
    """Return the elements of the box at `index`; None unless the tensor has several boxes."""
    boxes = boxes_of(tensor)
    if boxes is None:
        return None
    offsets = tuple(index.offset or ())
    box = next(box for box in boxes if box.offsets == offsets)
    return box.view_of(tensor.to_local())


def check_layout(fqn: str, state: object, *, act: str, way_out: str) -> None:
    """Refuse a value of a planner's flat state that torch's own plan describes wrongly."""
    value = state.get(fqn) if isinstance(state, Mapping) else None
    if type(value) is DTensor and boxes_of(value) is not None:
        raise InvalidInputError(
            f"{fqn} cannot be {act} by a planner of torch: its placements "
            f"{list(value.placements)} give this rank several separate parts of the tensor.",
            next_step=way_out,
        )


def has_parts(value: object) -> bool:
    """Return whether a value is a tensor that is made of others."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN
        and not isinstance(value, DTensor | ShardedTensor)
        and hasattr(value, "__tensor_flatten__")
        and not hasattr(value, "__create_write_items__")
        # A nested tensor is no tensor that its parts could be put back into.
        and value.layout is torch.strided
    )


def unwrap(state: dict[str, Any], paths: dict[str, Any]) -> None:
    """Replace each tensor that is made of others by these, in a flat state and its paths."""
    wrapped = [fqn for fqn, value in state.items() if type(value) not in PLAIN and has_parts(value)]
    for fqn in wrapped:
        value, path = state.pop(fqn), paths.pop(fqn)
        for names, part in _parts_of(value):
            name = ".".join((fqn, *names))
            if name in state:
                raise InvalidInputError(
                    f"{name} cannot be saved or loaded: it is a part of {fqn}, a "
                    f"{type(value).__qualname__}, and another value of the state has this name.",
                    phase="plan",
                    next_step="Rename the other value.",
                )
            state[name], paths[name] = part, (*path, *names)


def _parts_of(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:  # noqa: ANN401  # a subclass of torch's
    names, _ = value.__tensor_flatten__()
    for name in names:
        part = getattr(value, name)
        if has_parts(part):
            yield from (((name, *inner), tensor) for inner, tensor in _parts_of(part))
        else:
            yield (name,), part
