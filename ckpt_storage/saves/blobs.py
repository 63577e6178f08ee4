"""Values that are pickled: tensors in them that are views do not take their whole storage along."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.loads.states import uses_methods_of
from ckpt_storage.loads.tensors import PLAIN


def pickles_plainly(planner: SavePlanner) -> bool:
    """Return whether a planner pickles the values of its state as torch's default does."""
    names = ("resolve_data", "transform_object")
    return uses_methods_of(planner, DefaultSavePlanner, names)


def pickled(value: object) -> io.BytesIO:
    """Return a value as `torch.save` stores it, without elements that no tensor in it has."""
    data = io.BytesIO()
    torch.save(_compacted(value), data)
    return data


def _compacted(value: object) -> object:
    """Return a value in which views of larger storages are clones; itself if it has none."""
    tensors = {id(tensor): tensor for tensor in _tensors_in(value, set())}
    used_bytes = Counter[int]()
    for tensor in tensors.values():
        used_bytes[_storage_of(tensor)] += tensor.nbytes
    with torch.no_grad():
        clones = {
            key: _clone(tensor)
            for key, tensor in tensors.items()
            if used_bytes[_storage_of(tensor)] < tensor.untyped_storage().nbytes()
        }
    return _with_clones(value, clones, {}) if clones else value


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if type(value) in PLAIN:
        tensor: Any = value
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
            yield tensor
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            if not isinstance(item, int | float | str | bytes):
                yield from _tensors_in(item, seen)


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # as torch.save does


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(clone, requires_grad=tensor.requires_grad)
    return clone.requires_grad_(tensor.requires_grad)


def _with_clones(value: Any, clones: Mapping[int, torch.Tensor], made: dict[int, Any]) -> Any:  # noqa: ANN401  # any value
    """Return a value with clones in place of tensors; containers without any stay themselves."""
    if id(value) in clones:
        return clones[id(value)]
    if type(value) not in {dict, list, tuple} and not isinstance(value, dict | list | tuple):
        return value
    if id(value) in made:
        return made[id(value)]
    # For a container that holds itself.
    made[id(value)] = value
    if isinstance(value, dict):
        entries = {key: _with_clones(item, clones, made) for key, item in value.items()}
        changed = {key: item for key, item in entries.items() if item is not value[key]}
        if changed:
            made[id(value)] = value.copy()
            made[id(value)].update(changed)
        return made[id(value)]
    items = [_with_clones(item, clones, made) for item in value]
    if any(new is not old for new, old in zip(items, value, strict=True)):
        is_named = hasattr(value, "_fields")
        made[id(value)] = type(value)(*items) if is_named else type(value)(items)
    return made[id(value)]
