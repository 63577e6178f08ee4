"""Which parts of a global tensor a local one holds, as plain tensors and placements say it.

What torch's `CheckpointableTensor` (`torch.distributed.checkpoint.protocol`, torch 2.15) asks for:
attributes on any tensor. A copy without them would be saved as the whole tensor, once for all
ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

__all__ = ["Parts", "Placements", "mark_parts", "parts_of", "placements_key"]

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


def mark_parts(tensor: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Make a tensor say what another one said; return it."""
    for name, value in zip(_NAMES, parts, strict=True):
        setattr(tensor, name, value)
    return tensor


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
