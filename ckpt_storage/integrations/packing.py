"""Any nest of values as one checkpoint: tensors under names of their own, the rest as one value.

Tensors get names, so that `open_checkpoint`, `consolidate` and stock DCP see them; how they hung
together is a tuple of plain values beside them, which loads under torch's `weights_only` rules.
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
"""The key of what is no tensor. Everything else in a packed state is."""

_Path = tuple[object, ...]


def pack(
    values: Mapping[str, Any], *, is_taken: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """Return a state dict for `save` that `unpack` makes `values` of again; copies no tensor.

    A tensor is named after the keys that lead to it, joined by dots. Where its first part is
    `OUTLINE`, or `is_taken` says that the caller has that key for something else, a name in
    brackets replaces it. Tensors inside objects of other classes stay in them, and travel in the
    pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[_Path, str] = {}

    def taken_out(value: object, path: _Path) -> object:
        if isinstance(value, torch.Tensor):
            names[path] = named(value, path)
            return None
        return _like(value, path, taken_out)

    def named(tensor: torch.Tensor, path: _Path) -> str:
        head, _, rest = ".".join(map(str, path)).partition(".")
        wish = f"[{head}]" if head == OUTLINE or is_taken(head) else head
        wish += f".{rest or 'value'}"
        # "a.b" and "a" with "b" in it spell one name.
        name, count = wish, 1
        while name in tensors:
            count += 1
            name = f"{wish}#{count}"
        tensors[name] = tensor
        return name

    rest = taken_out(dict(values), ())
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

    def put_back(value: object, path: _Path) -> Any:
        return tensors[names[path]] if path in names else _like(value, path, put_back)

    try:
        rest, names = outline
        return dict(put_back(rest, ()))
    except (KeyError, TypeError, ValueError) as error:
        what = f"The outline of the checkpoint is not one of ours: {error!r}."
        raise FormatError(what, next_step="Load it with what it was saved with.") from error


def _like(value: Any, path: _Path, change: Callable[[object, _Path], object]) -> object:
    """Return a container of the same class, of changed items; what is no container as it is."""
    kind: Any = type(value)
    if kind in {dict, OrderedDict}:
        return kind((key, change(item, (*path, key))) for key, item in value.items())
    if kind in {list, tuple}:
        return kind(change(item, (*path, at)) for at, item in enumerate(value))
    return value


class WholePlanner(DefaultLoadPlanner):
    """Loads the targets given to it, and all else that the checkpoint has, on the CPU.

    What was loaded is in `loaded`: the nested targets, and the rest under flat names. `wanted`
    tells whether a name is loaded for which there is no target; default: all are.
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
        """Make targets for what has none."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        known: Mapping[str, Any] = self.state_dict
        found = {} if metadata is None else metadata.state_dict_metadata
        self.loaded = dict(state_dict)
        for fqn, item in found.items():
            if fqn in known or not self._wanted(fqn):
                continue
            self.loaded[fqn] = None
            if isinstance(item, TensorStorageMetadata):
                self.loaded[fqn] = torch.empty(item.size, dtype=item.properties.dtype)
        super().set_up_planner(self.loaded, metadata, is_coordinator)
