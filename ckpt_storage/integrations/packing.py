"""Any nest of values as one checkpoint: tensors under names of their own, the rest as one value.

Tensors get names, so that `open_checkpoint`, `consolidate` and stock DCP see them; how they hung
together is a tuple of plain values beside them, which loads under torch's `weights_only` rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt_storage.errors import FormatError

__all__ = ["OUTLINE", "pack", "unpack"]

OUTLINE = "outline"
"""The key of what is no tensor. Everything else in a packed state is."""

_CONTAINERS: tuple[tuple[str, type], ...] = (
    ("dict", dict),
    ("ordered", OrderedDict),
    ("list", list),
    ("tuple", tuple),
)


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
    outline = _outline(
        dict(values), (), _Names(tensors, lambda head: head == OUTLINE or is_taken(head))
    )
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # The first key stays a level of its own: consolidation takes it off a model's weights.
        head, _, rest = name.partition(".")
        state.setdefault(head, {})[rest] = tensor
    return {**state, OUTLINE: outline}


def unpack(tensors: Mapping[str, torch.Tensor], outline: object) -> dict[str, Any]:
    """Return what was packed, of `tensors` by name and the outline.

    Raises `FormatError` if the outline is none.
    """
    try:
        values = _restored(outline, tensors)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"The outline of the checkpoint is not one of ours: {error!r}.",
            next_step="Load it with what it was saved with.",
        ) from error
    if not isinstance(values, dict):
        raise FormatError(
            f"The checkpoint holds a {type(values).__name__}, not a dict.",
            next_step="Load it with what it was saved with.",
        )
    return values


class _Names:
    """Gives tensors names of their own."""

    def __init__(self, tensors: dict[str, torch.Tensor], is_taken: Callable[[str], bool]) -> None:
        self._tensors = tensors
        self._is_taken = is_taken

    def add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        """Note a tensor that was found at `path`; return its name."""
        head, _, rest = ".".join(path).partition(".")
        wish = f"[{head}]" if self._is_taken(head) else head
        wish += f".{rest or 'value'}"
        # "a.b" and "a" with "b" in it spell one name.
        name, count = wish, 1
        while name in self._tensors:
            count += 1
            name = f"{wish}#{count}"
        self._tensors[name] = tensor
        return name


def _outline(value: object, path: tuple[str, ...], names: _Names) -> object:
    if isinstance(value, torch.Tensor):
        return ("tensor", names.add(value, path))
    kind = next((name for name, cls in _CONTAINERS if type(value) is cls), None)
    if kind is None:
        return ("value", value)
    parts = tuple((key, _outline(item, (*path, str(key)), names)) for key, item in _items_of(value))
    return (kind, parts)


def _items_of(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  # one of _CONTAINERS
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)


def _restored(outline: Any, tensors: Mapping[str, torch.Tensor]) -> object:  # noqa: ANN401  # data
    kind, content = outline
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    pairs = [(key, _restored(part, tensors)) for key, part in content]
    if kind in {"dict", "ordered"}:
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    items = [item for _, item in pairs]
    return items if kind == "list" else tuple(items)
