"""Tensors as plans of saves and loads describe them: chunks, placements, dtypes, memory."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

Placements = tuple[object, ...]
"""A hashable key of placements: class and parameters of each."""

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

DeclaredChunks = tuple[Any, Any, Any, Any]
"""Global shape; then of each chunk its offsets in the global and in the local tensor, and sizes."""

_torch_reads_chunks = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
"""Older releases ignore these attributes: such a tensor is then like any other."""


def declared_chunks(tensor: torch.Tensor) -> DeclaredChunks | None:
    """Return the chunks that a tensor declares; None if it declares none, or torch ignores them."""
    if not _torch_reads_chunks or not hasattr(tensor, _NAMES[1]):
        return None
    chunks = tuple(getattr(tensor, name, None) for name in _NAMES)
    return None if None in chunks else chunks  # type: ignore[return-value]  # four names


def placements_key(placements: Iterable[object]) -> Placements:
    """Return a key of placements, whose own `__eq__` is wrong in some releases of torch."""
    # By exact type: their `__eq__` accepts subclasses. A `repr` takes 1 us.
    return tuple(
        [
            (kind, placement.dim)  # type: ignore[attr-defined]  # a Shard
            if (kind := type(placement)) is Shard
            else kind
            if kind is Replicate
            else (kind.__qualname__, repr(placement))
            for placement in placements
        ]
    )


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, as in the format."""
    return str(dtype).removeprefix("torch.")


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements without memory: FSDP resizes storages to 0."""
    return (
        type(tensor) in PLAIN
        and not tensor.untyped_storage().nbytes()
        and tensor.numel() != 0
        and not tensor.is_meta
    )
