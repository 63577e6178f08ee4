"""Layouts that torch's planners describe wrongly or not at all: several boxes, or inner tensors.

A `DTensor` with a `_StridedShard` may hold rows that are not contiguous in the global tensor. A
subclass with `__tensor_flatten__` wraps other tensors, and has no elements of its own. It may also
be the local tensor of a `DTensor`; the names of its inner tensors then begin with that of the box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_storage.errors import InvalidInputError

from .tensors import PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBox:
    """A box of the global tensor, and its offsets in the local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box as torch's metadata of a chunk."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return a view of the elements of the box."""
        stops = map(sum, zip(self.local_offsets, self.sizes, strict=True))
        return local[tuple(map(slice, self.local_offsets, stops))]


def boxes_of(tensor: object) -> list[LocalBox] | None:
    """Return the boxes of a `DTensor` whose local tensor has several; None for other values."""
    # By type: `isinstance` of a placement runs Python code of torch, once for each tensor here.
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
        # An empty box may have the offsets of another rank's box, and would replace it.
        if all(length for _, length, _ in box) or not tensor.numel()
    ]


def _runs_of(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the contiguous runs of a dimension: global start, length, local start."""
    indices = torch.arange(tensor.shape[dim], device="cpu")
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        count = tensor.device_mesh.size(mesh_dim)
        place: Any = placement
        split = (
            _StridedShard(0, split_factor=place.split_factor)
            if isinstance(placement, _StridedShard)
            else type(place)(0)
        )
        shards, _ = split._split_tensor(indices, count, with_padding=False)  # noqa: SLF001  # the placement's own rule
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
    """Raise `InvalidInputError` for a value of a flat state that torch's plan describes wrongly."""
    value = state.get(fqn) if isinstance(state, Mapping) else None
    if type(value) is DTensor and boxes_of(value) is not None:
        raise InvalidInputError(
            f"{fqn} cannot be {act} by a planner of torch: its placements "
            f"{list(value.placements)} give this rank several separate boxes of the tensor.",
            next_step=way_out,
        )


def wraps_tensors(value: object) -> bool:
    """Return whether a value is a subclass that wraps other tensors, or a `DTensor` of such."""
    if type(value) is DTensor:
        # Their boxes are equal on all ranks that hold them.
        if not {*map(type, value.placements)} <= {Shard, Replicate}:
            return False
        value = value._local_tensor  # noqa: SLF001  # to_local() is differentiable, and slow
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN
        and not isinstance(value, DTensor | ShardedTensor | AsyncCollectiveTensor)
        and hasattr(value, "__tensor_flatten__")
        and not hasattr(value, "__create_write_items__")
        # The tensors inside a nested tensor cannot be replaced.
        and value.layout is torch.strided
    )


def unwrap(
    state: dict[str, Any],
    paths: dict[str, Any],
    *,
    stored: Collection[str] = (),
    is_partial: bool = False,
) -> None:
    """Replace each tensor that wraps others by these, in a flat state and its paths.

    Waits for the results of pending collectives. A tensor whose own name is among `stored`, the
    names of a checkpoint, stays: stock DCP pickles it whole. Raises `InvalidInputError` if `stored`
    has other shards of such a tensor only, unless `is_partial`.
    """
    for fqn, value in state.items():
        if type(value) not in PLAIN:
            state[fqn] = _wait_for(value)
    wrapped = [
        fqn
        for fqn, value in state.items()
        if type(value) not in PLAIN and wraps_tensors(value) and fqn not in stored
    ]
    for fqn in wrapped:
        value, path = state.pop(fqn), paths.pop(fqn)
        for names, inner in _inner_tensors(value):
            name = ".".join((fqn, *names))
            if name in state:
                raise InvalidInputError(
                    f"{name} cannot be saved or loaded: it is a tensor inside {fqn}, a "
                    f"{type(value).__qualname__}, and another value of the state has this name.",
                    phase="plan",
                    next_step="Rename the other value.",
                )
            if type(value) is DTensor and not is_partial and name not in stored:
                _check_shards(fqn, value, stored)
            state[name], paths[name] = inner, (*path, *names)


def _wait_for(value: Any) -> Any:  # noqa: ANN401  # any value of a state
    """Return a value in which the result of a pending collective is a plain tensor."""
    if isinstance(value, AsyncCollectiveTensor):
        return _finished(value)
    # `to_local()` may return it pending, and `from_local()` may communicate.
    local = value._local_tensor if type(value) is DTensor else None  # noqa: SLF001  # as above
    if isinstance(local, AsyncCollectiveTensor):
        make: Any = DTensor  # its constructor has no types
        return make(_finished(local), value._spec, requires_grad=value.requires_grad)  # noqa: SLF001  # as above
    return value


def _finished(pending: Any) -> torch.Tensor:  # noqa: ANN401  # its methods have no types
    finished: torch.Tensor = pending.trigger_wait()
    return finished


def _check_shards(fqn: str, tensor: DTensor, stored: Collection[str]) -> None:
    """Refuse a `DTensor` that wraps tensors of which the checkpoint has other shards."""
    start = f"{fqn}.{_SHARD}"
    saved = sorted(
        {name[len(fqn) + 1 :].partition(".")[0] for name in stored if name.startswith(start)}
    )
    if saved:
        kind = type(tensor._local_tensor).__qualname__  # noqa: SLF001  # as in `wraps_tensors`
        raise InvalidInputError(
            f"{fqn} cannot be loaded: it is a DTensor of {kind} that this rank holds as "
            f"{_shard_name(tensor)}, and the checkpoint has the shards {', '.join(saved[:4])}. The "
            "tensors inside a subclass cannot be resharded.",
            phase="plan",
            next_step="Load it with the mesh and placements of the save; to change them, convert "
            "it to plain tensors before the save.",
        )


_SHARD = "shard-"


def _shard_name(tensor: DTensor) -> str | None:
    """Return a name for the box of this rank; None on a rank outside the mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return f"{_SHARD}{'x'.join(map(str, sizes))}-at-{'-'.join(map(str, offsets))}"


def _inner_tensors(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:  # noqa: ANN401  # a subclass of torch's
    if type(value) is DTensor:
        shard = _shard_name(value)
        if shard is not None:
            local = value._local_tensor  # noqa: SLF001  # as in `wraps_tensors`
            yield from (((shard, *names), inner) for names, inner in _inner_tensors(local))
        return
    attributes, _ = value.__tensor_flatten__()
    for name in attributes:
        inner = getattr(value, name)
        if wraps_tensors(inner):
            yield from (((name, *names), tensor) for names, tensor in _inner_tensors(inner))
        else:
            yield (name,), inner
