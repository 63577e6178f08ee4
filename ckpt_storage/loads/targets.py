"""Compares the values of a target with those of a checkpoint: errors and warnings."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.inspect.near_names import find_near_names

from .tensors import declared_chunks

log = logging.getLogger("ckpt_storage")

_SHOWN_COUNT = 10
_SUGGESTED_COUNT = 3

Path = tuple[object, ...]


def find_mismatch(
    state: Mapping[str, Any], saved: Mapping[str, Any], url: str
) -> InvalidInputError | None:
    """Return the error for flattened targets that the entries of a checkpoint cannot fill."""
    missing = [name for name in state if name not in saved]
    if missing:
        return _missing(missing, len(state), saved, url)
    kinds = [
        f"{name} is a tensor there; its target is of type {type(value).__name__}"
        for name, value in state.items()
        if isinstance(saved[name], TensorStorageMetadata) and not hasattr(value, "size")
    ]
    if kinds:
        return InvalidInputError(
            f"{len(kinds)} targets are of another kind than the values of {url}: {_shown(kinds)}.",
            phase="load",
            next_step="Load tensors into tensors of the same shape.",
        )
    shapes = [
        f"{name} has shape {list(saved[name].size)} there and {list(shape)} in the target"
        for name, value in state.items()
        if isinstance(saved[name], TensorStorageMetadata)
        and list(shape := _shape_of(value)) != list(saved[name].size)
    ]
    if shapes:
        return InvalidInputError(
            f"{len(shapes)} targets have other shapes than the tensors of {url}: {_shown(shapes)}.",
            phase="load",
            next_step="Build the model with the configuration that was saved, or remove these from "
            "the target.",
        )
    return None


def _missing(
    missing: Sequence[str], target_count: int, saved: Mapping[str, Any], url: str
) -> InvalidInputError:
    near = ((name, find_near_names(name, saved)) for name in missing[:_SUGGESTED_COUNT])
    hints = "".join(
        f" For {name!r} the checkpoint may mean {' or '.join(map(repr, names))}."
        for name, names in near
        if names
    )
    return InvalidInputError(
        f"{len(missing)} of {target_count} names of the target are not in {url}: "
        f"{_shown(map(repr, missing))}.{hints}",
        phase="load",
        next_step="Map other names with rename=, or load what is there with "
        "planner=DefaultLoadPlanner(allow_partial_load=True) on all ranks.",
    )


def _shown(texts: Iterable[str]) -> str:
    """Return the first ten texts and how many more there are."""
    every = list(texts)
    more = len(every) - _SHOWN_COUNT
    return "; ".join(every[:_SHOWN_COUNT]) + (f"; and {more} more" if more > 0 else "")


def _shape_of(value: Any) -> Sequence[int]:  # noqa: ANN401  # tensors, and torch's ShardedTensor
    chunks = declared_chunks(value) if isinstance(value, torch.Tensor) else None
    shape: Sequence[int] = value.size() if chunks is None else chunks[0]
    return shape


def find_duplicate(state: Mapping[str, Any]) -> InvalidInputError | None:
    """Return the error for two values whose keys, joined by dots, are the same name."""
    paths: dict[str, Path] = {}
    for path, value in _walk((), state):
        if isinstance(value, Mapping | list):
            continue
        name = ".".join(map(str, path))
        if paths.setdefault(name, path) != path:
            return InvalidInputError(
                f"Two values of the target are called {name!r}: those under {list(paths[name])} "
                f"and {list(path)}.",
                phase="load",
                next_step="Rename either value: nested keys are joined by dots.",
            )
    return None


def warn_of_unfilled(state: object, names: Iterable[str], url: str) -> None:
    """Log one warning if the target has an empty dict or a shorter list where `names` has entries.

    `state` is nested, as the caller passed it.
    """
    if not isinstance(state, Mapping):
        return
    prefixes: list[str] = []
    for path, value in _walk((), state):
        if isinstance(value, torch.Tensor):
            continue
        name = ".".join(map(str, path))
        if isinstance(value, list):
            prefixes.append(f"{name}.{len(value)}")
        elif isinstance(value, Mapping) and not value:
            prefixes.append(name)
    if not prefixes:
        return
    ordered = sorted(names)
    for prefix in prefixes:
        first = _first_at(ordered, prefix)
        if first is not None:
            log.warning(
                "%s has %s, but the target has no entry for it: it is not loaded, nor is anything "
                "else in %r. An optimizer creates its state in its first step. Load into "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
                "optimizer), which creates it before.",
                *(url, first, prefix),
            )
            return


def _first_at(ordered: Sequence[str], prefix: str) -> str | None:
    """Return the first of the sorted names that is `prefix` or lies below it."""
    for wanted, matches in ((prefix, str.__eq__), (f"{prefix}.", str.startswith)):
        at = bisect_left(ordered, wanted)
        match: Callable[[str, str], bool] = matches
        if at < len(ordered) and match(ordered[at], wanted):
            return ordered[at]
    return None


def _walk(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """Yield a nested value and all values below it, with their keys; a list has numbers."""
    yield path, value
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = (
            (number, inner)
            for number, inner in enumerate(value)
            if isinstance(inner, Mapping | list | torch.Tensor)
        )
    else:
        return
    for key, inner in items:
        if isinstance(inner, torch.Tensor):
            # Most values are tensors, and a generator for each of them costs more than the rest.
            yield (*path, key), inner
        else:
            yield from _walk((*path, key), inner)
