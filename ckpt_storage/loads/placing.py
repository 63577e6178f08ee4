"""Puts loaded values into a nested state, under the target's own keys."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .states import uses_methods_of


class ValuePlacer:
    """Passes loaded objects to a planner; for torch's default planner, keeps keys as they are.

    Torch's planners have paths of strings: they set the value of the key 5 under "5", beside it.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner: Any = planner
        self._is_stock = (
            isinstance(planner, DefaultLoadPlanner)
            and uses_methods_of(planner, DefaultLoadPlanner, ["load_bytes"])
            and planner.flatten_state_dict
        )
        # By id(); the containers live as long as the state.
        self._keys: dict[int, dict[str, Any]] = {}

    def place(self, item: ReadItem, data: io.BytesIO) -> None:
        """Set the value that `data` holds at the target of `item`."""
        planner = self._planner
        if not self._is_stock:
            planner.load_bytes(item, data)
            return
        value = torch.load(data, weights_only=False)
        self._set(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)

    def _set(self, root: Any, path: Sequence[str | int], value: object) -> None:  # noqa: ANN401  # a container
        container = root
        for name, following in pairwise(path):
            default: Any = {} if isinstance(following, str) else []
            key = self._key_in(container, name)
            if isinstance(container, Mapping):
                container = container.setdefault(key, default)  # type: ignore[attr-defined]  # it is mutable
                continue
            _extend(container, key)
            if container[key] is None:
                container[key] = default
            container = container[key]
        key = self._key_in(container, path[-1])
        if not isinstance(container, Mapping):
            _extend(container, key)
        container[key] = value

    def _key_in(self, container: Any, name: str | int) -> Any:  # noqa: ANN401  # of any kind
        """Return the key whose string in a flattened path is `name`."""
        if not isinstance(container, Mapping):
            return name
        if name in container and not is_hollow(container[name]):
            return name
        keys = self._keys.get(id(container))
        if keys is None:
            # Of two keys with the same string, only that of a value with a name counts.
            named = {str(key): key for key, value in container.items() if not is_hollow(value)}
            keys = self._keys[id(container)] = {str(key): key for key in container} | named
        return keys.get(str(name), name)


def is_hollow(value: object) -> bool:
    """Return whether a value is a mapping without leaves, at any depth."""
    return isinstance(value, Mapping) and all(map(is_hollow, value.values()))


def _extend(values: list[Any], index: int) -> None:
    while len(values) <= index:
        values.append(None)
