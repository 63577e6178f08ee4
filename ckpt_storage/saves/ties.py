"""Which tensors of one rank are the same memory: same first byte, dtype, shape and strides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def ties_of(planner: SavePlanner) -> dict[str, str]:
    """Return alias -> target of a planner's state; {} for one that does not keep it as DCP's do."""
    state = getattr(planner, "state_dict", None)
    return ties_in(state) if isinstance(state, Mapping) else {}


def ties_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return alias -> target of a state; nested names are flattened as DCP does."""
    try:
        tensors = dict(named_tensors(state, ""))
    except RecursionError:
        # A state that holds itself: a planner may still save it, as a blob.
        return {}
    # Few share the byte that they begin at; only those are looked at closely.
    addresses = list(map(_address, tensors.values()))
    shared = {address for address, count in Counter(addresses).items() if address and count > 1}
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    for (fqn, tensor), address in zip(tensors.items(), addresses, strict=True):
        if address in shared and (memory := _memory(tensor)) is not None:
            first = firsts.setdefault(memory, fqn)
            if first != fqn:
                ties[fqn] = first
    return ties


def named_tensors(value: object, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings and lists by the names that DCP flattens them to."""
    items: Iterator[tuple[object, object]]
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    else:
        return
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{prefix}{key}", item
        elif isinstance(item, Mapping | list):
            yield from named_tensors(item, f"{prefix}{key}.")


def _address(tensor: torch.Tensor) -> int:
    """Return where the first local elements begin, 0 if there are none or it cannot be told."""
    try:
        if type(tensor) in _PLAIN:
            return tensor.data_ptr()
        if isinstance(tensor, DTensor):
            return tensor._local_tensor.data_ptr()  # noqa: SLF001  # to_local() costs ten times that
        return next((part.data_ptr() for _, part in _parts(tensor) if part.numel()), 0)
    except RuntimeError:
        return 0


def _memory(tensor: torch.Tensor) -> object:
    """Return what is equal for tensors that are the same memory; None: no elements, or unknown."""
    try:
        parts = [
            (
                *(offsets, part.device, part.data_ptr(), part.dtype, part.shape),
                *(part.stride(), part.is_conj(), part.is_neg()),
            )
            for offsets, part in _parts(tensor)
            if part.numel()
        ]
    except RuntimeError:
        return None
    # Most kinds without memory of their own raise; others begin nowhere.
    return frozenset(parts) if parts and all(part[2] for part in parts) else None


def _parts(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return local tensors and where each lies in the whole; raises `RuntimeError` if unknown."""
    if isinstance(tensor, ShardedTensor):
        return [
            (tuple(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()
        ]
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor  # noqa: SLF001  # as above
        if not local.numel():
            return []
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        # A local tensor of several chunks has no memory of its own, which is noticed later.
        return [(tuple(chunk.offsets), local) for chunk in chunks]
    return [((0,) * tensor.ndim, tensor)]
