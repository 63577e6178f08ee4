"""Nested values as a state dict: each tensor under its own name, all other values in an outline.

With names of their own, `open_checkpoint`, `consolidate` and stock DCP see the tensors. The outline
is a tuple of plain values, which loads by torch's `weights_only` rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_storage.errors import FormatError

__all__ = ["OUTLINE", "WholePlanner", "pack", "unpack"]

OUTLINE = "outline"
"""The key of the outline. All other values of a packed state are tensors."""

_Path = tuple[object, ...]


def pack(
    values: Mapping[str, Any], *, is_taken: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """Return a state dict for `save`, from which `unpack` restores `values`; copies no tensor.

    The name of a tensor is its keys, joined by dots. If the first key is `OUTLINE`, or `is_taken`
    returns True for it, it is put in brackets. Tensors inside objects of other classes stay in
    them, and are pickled with the outline.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[_Path, str] = {}

    def extract(value: object, path: _Path) -> object:
        if isinstance(value, torch.Tensor):
            names[path] = named(value, path)
            return None
        return _like(value, path, extract)

    def named(tensor: torch.Tensor, path: _Path) -> str:
        head, _, rest = ".".join(map(str, path)).partition(".")
        base = f"[{head}]" if head == OUTLINE or is_taken(head) else head
        base += f".{rest or 'value'}"
        # "a.b" and "a" with "b" in it have the same name.
        name, count = base, 1
        while name in tensors:
            count += 1
            name = f"{base}#{count}"
        tensors[name] = tensor
        return name

    rest = extract(dict(values), ())
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # The first key stays a level of its own: consolidation takes it off a model's weights.
        head, _, inner = name.partition(".")
        state.setdefault(head, {})[inner] = tensor
    return {**state, OUTLINE: (rest, names)}


def unpack(tensors: Mapping[str, torch.Tensor], outline: Any) -> dict[str, Any]:
    """Return what was packed, of `tensors` by name and the outline.

    Raises `FormatError` if the outline is none.
    """

    def insert(value: object, path: _Path) -> Any:
        return tensors[names[path]] if path in names else _like(value, path, insert)

    try:
        rest, names = outline
        return dict(insert(rest, ()))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"The outline of the checkpoint cannot be read: {error!r}.",
            next_step="Load it with the integration that saved it.",
        ) from error


def _like(value: Any, path: _Path, change: Callable[[object, _Path], object]) -> object:
    """Return a container of the same class, of changed items; what is no container as it is."""
    kind: Any = type(value)
    if kind in {dict, OrderedDict}:
        return kind((key, change(item, (*path, key))) for key, item in value.items())
    if kind in {list, tuple}:
        return kind(change(item, (*path, at)) for at, item in enumerate(value))
    return value


class WholePlanner(DefaultLoadPlanner):
    """Loads into the targets, and all other values of the checkpoint into new tensors on the CPU.

    `loaded` holds the nested targets, and other values under flat names. `wanted` says which names
    without a target are loaded; default: all.
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__()
        self.loaded: dict[str, Any] = {}
        self._wanted = wanted

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Make a target for each wanted name that has none."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        known: Mapping[str, Any] = self.state_dict
        stored = {} if metadata is None else metadata.state_dict_metadata
        self.loaded = dict(state_dict)
        for fqn, item in stored.items():
            if fqn in known or not self._wanted(fqn):
                continue
            self.loaded[fqn] = None
            if isinstance(item, TensorStorageMetadata):
                self.loaded[fqn] = torch.empty(item.size, dtype=item.properties.dtype)
        super().set_up_planner(self.loaded, metadata, is_coordinator)
