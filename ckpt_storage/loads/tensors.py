"""Tensors and plain values as plans of saves and loads see them: shardings, dtypes, memory."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate, Shard

Placements = tuple[object, ...]
"""A key of placements: class and parameters of each."""

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

Parts = tuple[Any, Any, Any, Any]
"""Global shape; offsets in the global tensor, offsets in the local one and sizes, of each part."""

_is_known = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
"""Releases without it read no attribute: such a tensor is then like any other."""


def parts_of(tensor: torch.Tensor) -> Parts | None:
    """Return the parts that a tensor declares; None if it declares none, or torch ignores them."""
    if not _is_known or not hasattr(tensor, _NAMES[1]):
        return None
    parts = tuple(getattr(tensor, name, None) for name in _NAMES)
    return None if None in parts else parts  # type: ignore[return-value]  # four names


def placements_key(placements: Iterable[object]) -> Placements:
    """Return a key of placements: they compare themselves wrongly on some releases of torch."""
    # By type, because they themselves compare by what they are subclasses of; spelling takes 1 us.
    return tuple(
        [
            (kind, placement.dim)  # type: ignore[attr-defined]  # the kind tells
            if (kind := type(placement)) is Shard
            else kind
            if kind is Replicate
            else (kind.__qualname__, repr(placement))
            for placement in placements
        ]
    )


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_VALUES = frozenset({type(None), bool, int, float, str, bytes})

# Of most values the type alone tells; asking the protocol takes 10 us.
_NEVER_STATEFUL = PLAIN | _PLAIN_VALUES | {DTensor, dict, list, tuple}


def is_stateful(value: object) -> bool:
    """Return whether DCP asks `value` for a state dict of its own."""
    return type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the state dict of each `Stateful` in its place, as DCP does."""
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, as the format spells it."""
    return str(dtype).removeprefix("torch.")


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, but their memory was given back, as FSDP does."""
    return (
        type(tensor) in PLAIN
        and not tensor.untyped_storage().nbytes()
        and tensor.numel() != 0
        and not tensor.is_meta
    )


_RESOLVING = ("resolve_data", "lookup_object", "transform_object")


def plain_names(planner: SavePlanner) -> AbstractSet[str]:
    """Return names whose values are plain for sure, and so need no scan of their pickles."""
    kind, own, torchs = type(planner), getattr(planner, "__dict__", {}), DefaultSavePlanner
    keeps = getattr(kind, "keeps_plain_values", False)
    names = () if keeps else _RESOLVING
    if any(getattr(kind, n, None) is not getattr(torchs, n) or n in own for n in names):
        return frozenset()
    state: Mapping[str, Any] = planner.state_dict  # type: ignore[attr-defined]  # the default one's
    return {fqn for fqn, value in state.items() if type(value) in _PLAIN_VALUES}
