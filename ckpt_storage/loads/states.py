"""State dicts as saves and loads take them: `Stateful` entries, and values that are plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from .tensors import PLAIN

_PLAIN_VALUES = frozenset({type(None), bool, int, float, str, bytes})

# The check of a protocol takes 10 us; for most values the type suffices.
_NEVER_STATEFUL = PLAIN | _PLAIN_VALUES | {DTensor, dict, list, tuple}

_RESOLVING = ("resolve_data", "lookup_object", "transform_object")


def uses_methods_of(planner: object, base: type, names: Iterable[str]) -> bool:
    """Return whether the methods of these names are those of `base`, not overridden anywhere."""
    kind, own = type(planner), getattr(planner, "__dict__", {})
    return all(getattr(kind, n, None) is getattr(base, n) and n not in own for n in names)


def is_stateful(value: object) -> bool:
    """Return whether DCP asks `value` for a state dict of its own."""
    return type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the state dict of each `Stateful` in its place, as DCP does."""
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


def plain_names(planner: SavePlanner) -> AbstractSet[str]:
    """Return names whose values are certainly plain, so that their pickles need no scan."""
    names = () if getattr(type(planner), "keeps_plain_values", False) else _RESOLVING
    if not uses_methods_of(planner, DefaultSavePlanner, names):
        return frozenset()
    state: Mapping[str, Any] = planner.state_dict  # type: ignore[attr-defined]  # torch's default has it
    return {fqn for fqn, value in state.items() if type(value) in _PLAIN_VALUES}
