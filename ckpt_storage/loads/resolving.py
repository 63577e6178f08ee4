"""What DCP's own planners resolve, without their detours of 6 to 8 us for a sharded tensor."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Placements = tuple[object, ...]
"""What tells placements apart: class and parameters of each."""

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

Parts = tuple[Any, Any, Any, Any]
"""Global shape; offsets in the global tensor, offsets in the local one and sizes, of each part."""

_is_known = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
"""Releases without it look at no attribute: then such a tensor is one like any other."""


def parts_of(tensor: torch.Tensor) -> Parts | None:
    """Return what a tensor says of its parts; None if it says nothing, or torch does not ask."""
    if not _is_known or not hasattr(tensor, _NAMES[1]):
        return None
    found = tuple(getattr(tensor, name, None) for name in _NAMES)
    return None if None in found else found  # type: ignore[return-value]  # four names


def placements_key(placements: Iterable[object]) -> Placements:
    """Return what tells placements apart: they themselves do not on all releases of torch."""
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


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_VALUES = frozenset({type(None), bool, int, float, str, bytes})

_SAVE_METHODS = ("resolve_data", "lookup_object", "transform_object")
_LOAD_METHODS = ("resolve_tensor", "lookup_tensor", "transform_tensor")
_KNOWN = {
    **{name: getattr(DefaultSavePlanner, name) for name in _SAVE_METHODS},
    **{name: getattr(DefaultLoadPlanner, name) for name in _LOAD_METHODS},
}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, as the format spells it."""
    return str(dtype).removeprefix("torch.")


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, but their memory was given back, as FSDP does."""
    return (
        type(tensor) in _PLAIN
        and not tensor.untyped_storage().nbytes()
        and tensor.numel() != 0
        and not tensor.is_meta
    )


def _known_state(
    planner: SavePlanner | LoadPlanner, names: tuple[str, ...]
) -> Mapping[str, Any] | None:
    """Return the flat state of a planner of which these methods are those of torch's default."""
    kind, own = type(planner), getattr(planner, "__dict__", {})
    is_known = all(getattr(kind, name, None) is _KNOWN[name] and name not in own for name in names)
    return planner.state_dict if is_known else None  # type: ignore[union-attr]  # the default one's


def plain_names(planner: SavePlanner) -> AbstractSet[str]:
    """Return names whose values are plain for sure, and so need no scan of their pickles."""
    state = _known_state(planner, _SAVE_METHODS) or {}
    return {fqn for fqn, value in state.items() if type(value) in _PLAIN_VALUES}


def data_resolver(planner: SavePlanner) -> Callable[[WriteItem], Any]:
    """Return what does as `planner.resolve_data`; the planner has been set up."""
    state, slow = _known_state(planner, _SAVE_METHODS), planner.resolve_data
    if state is None:
        return slow

    def resolve(item: WriteItem) -> Any:  # noqa: ANN401  # as the planner's
        index = item.index
        if item.type is not WriteItemType.BYTE_IO:
            found = _local(state.get(index.fqn), index.offset)
            if found is not None:
                return found
        return slow(item)

    return resolve


def target_resolver(planner: LoadPlanner) -> Callable[[ReadItem], torch.Tensor]:
    """Return what does as `planner.resolve_tensor`; the planner has been set up."""
    state, slow = _known_state(planner, _LOAD_METHODS), planner.resolve_tensor
    if state is None:
        return slow

    def resolve(item: ReadItem) -> torch.Tensor:
        index = item.dest_index
        found = _local(state.get(index.fqn), index.offset)
        if found is None or found.ndim != len(item.lengths):
            return slow(item)
        return found if found.shape == item.lengths else _part(found, item)

    return resolve


def _part(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    """Return the part of a rank's own tensor that an item fills, as torch's planner does."""
    for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, start, size)
    return tensor


def _local(value: object, offset: torch.Size | None) -> torch.Tensor | None:
    """Return the tensor that holds this rank's elements; None if torch has to be asked."""
    kind = type(value)
    if kind is DTensor:
        spec = value._spec  # type: ignore[attr-defined]  # noqa: SLF001  # its properties are slow
        for placement in spec.placements:
            if isinstance(placement, Partial):
                return None
        local: torch.Tensor = value._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001  # to_local() is differentiable
        return local if type(local) in _PLAIN else None
    if isinstance(value, torch.Tensor) and kind in _PLAIN and parts_of(value) is None:
        is_origin = offset is None or (len(offset) == value.ndim and not any(offset))
        return value if is_origin else None
    return None
