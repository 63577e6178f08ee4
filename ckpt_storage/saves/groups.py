"""Which shard file of a rank an item goes to: files are split by groups of names.

A group has files of its own, so that it can be copied, or left out, without reading a byte of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import MIB

from .items import tensor_bytes

_GROUP_MIN_BYTES = MIB
"""Bytes of a group, a rank on average, from which a file of its own is worth its requests."""


def check_patterns(name: str, value: object) -> None:
    """Raise `InvalidInputError` unless the argument `name` is a list of different patterns."""
    patterns = list(value) if isinstance(value, list | tuple) else [""]
    is_text = all(isinstance(pattern, str) for pattern in patterns)
    if not is_text or len(set(patterns)) != len(patterns) or "" in patterns:
        raise InvalidInputError(
            f"{name} is {value!r:.200}.",
            next_step='Give a list of different patterns of names, such as ["optim*"], or [].',
        )


def group_of(fqn: str, groups: Sequence[str]) -> str:
    """Return the first pattern that matches a name, "" if none does."""
    return next((pattern for pattern in groups if fnmatchcase(fqn, pattern)), "")


def choose_groups(
    sizes: Iterable[tuple[str, int]], groups: Sequence[str], *, world_size: int
) -> tuple[str, ...]:
    """Return the groups that get files of their own, on all ranks; () for one file a rank.

    `sizes` are the names and bytes of the global plan. Two groups or more must have 1 MiB a rank on
    average; values that no pattern matches are a group, which takes the smaller groups.
    """
    if not groups:
        return ()
    bytes_of = Counter[str]()
    known: dict[str, str] = {}
    for fqn, size_bytes in sizes:
        group = known.get(fqn)
        if group is None:
            group = known[fqn] = group_of(fqn, groups)
        bytes_of[group] += size_bytes
    least_bytes = world_size * _GROUP_MIN_BYTES
    large = [group for group in ("", *groups) if bytes_of[group] >= least_bytes]
    return tuple(filter(None, large)) if len(large) > 1 else ()


def sizes_in_plans(plans: Iterable[SavePlan]) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each tensor item of plans."""
    for plan in plans:
        for item in plan.items:
            yield item.index.fqn, tensor_bytes(item)


def sizes_in_metadata(metadata: Metadata) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of each tensor of a global plan."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield fqn, entry.size.numel() * entry.properties.dtype.itemsize


def split_plan(plan: SavePlan, groups: Sequence[str]) -> dict[str, SavePlan]:
    """Return the plan of each group that has items on this rank, that of "" first."""
    if not groups:
        return {"": plan} if plan.items else {}
    items_of: dict[str, list[WriteItem]] = {group: [] for group in ("", *groups)}
    for item in plan.items:
        items_of[group_of(item.index.fqn, groups)].append(item)
    return {group: replace(plan, items=items) for group, items in items_of.items() if items}
