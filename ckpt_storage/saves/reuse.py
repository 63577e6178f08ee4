"""What a save does not write again: files of an earlier save, its base, whose values are unchanged.

Each rank writes the values that are expected to stay the same to a stable file for each group.
These are the values that patterns name or, without patterns, the values that equal those of the
base. If a file of the base has the same values, that file is linked or copied by the storage
(`copy_file`). A value that changes after it was in a stable file is *moving* for the rest of the
run: the stable file is written again without it. Each rank decides alone, from its own rank
manifest of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.rank_manifest import NO_HASH, ShardFile
from ckpt_storage.store.deadline import Deadline

from .base import Base, Key, key_of_item
from .groups import group_of
from .items import planned_bytes, tensor_bytes
from .shardfile import Item

_MIN_SHARE = 0.02
_MIN_BYTES = 64 << 10
"""The share of a rank's bytes, and the bytes, from which a stable file is worth its requests.

Values of at most `_MIN_BYTES` are hashed only if patterns name them: to write them costs less than
to hash and compare them.
"""

_MAX_UNLINKED = 3
_RETRY_AT = 30
"""Saves of a process in a row that reused nothing: after the first number of them values are no
longer hashed, and after the second they are hashed again if there is no `full_every`.
"""

Noted = Callable[[SavePlan], Iterable[Item]]
"""Yields the items of a plan, and notes their unsafe values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One shard file of a save, which is written, or reused from the base.

    `stored` is the file of the base that has the items of `plan`; None: the file is written. `age`
    as for `ShardFile`. `moving` are values that changed after they were expected to stay the same.
    `is_hashed` selects the items whose hash goes into the rank manifest.
    """

    group: str
    plan: SavePlan
    stored: ShardFile | None = None
    age: int | None = None
    moving: Collection[Key] = frozenset()
    is_hashed: Callable[[Item], bool] | None = None


class Reuse:
    """The division of a rank's items into files that are written and files that are reused.

    `stable` are patterns of names; without any, values that equal the base's are expected to stay.
    A file is written again once `full_every` saves have it. `noted` yields the items of a plan.
    """

    def __init__(
        self, base: Base | None, stable: Sequence[str], full_every: int | None, *, noted: Noted
    ) -> None:
        # Another process may have other options, or train other values.
        count = base.manifest.unlinked_count if base is not None and base.is_of_this_process else 0
        # Without names, the third save is the first that can reuse a file.
        starts_anew = count >= max(full_every or _RETRY_AT, _MAX_UNLINKED)
        self.base = None if starts_anew else base
        self._count = 0 if starts_anew else count
        self._stable = stable
        self._full_every = full_every
        self._noted = noted
        self._is_idle = self._count >= _MAX_UNLINKED

    def unlinked_count(self, *, has_linked: bool) -> int:
        """Return the `unlinked_count` for the rank manifest of this save."""
        return 0 if has_linked else self._count + 1

    def files(self, plans: Mapping[str, SavePlan], deadline: Deadline) -> list[FilePlan]:
        """Return the files of a rank, at most two for each group of `plans`."""
        if self._is_idle:
            return plain_files(plans)
        least_bytes = max(_MIN_BYTES, _MIN_SHARE * sum(map(planned_bytes, plans.values())))
        return [
            file
            for group, plan in plans.items()
            for file in self._files_of(group, plan, least_bytes, deadline)
        ]

    def _files_of(
        self, group: str, plan: SavePlan, least_bytes: float, deadline: Deadline
    ) -> Iterator[FilePlan]:
        sizes = {_key_of(item): tensor_bytes(item) for item in plan.items}
        moving = set() if self.base is None else self.base.moving & sizes.keys()
        staying, stored = frozenset[Key](), None
        # An item that is in a plan twice has no key of its own.
        if len(sizes) == len(plan.items):
            wanted = {key for key in sizes if key not in moving and self._may_stay(key)}
            if sum(sizes[key] for key in wanted) >= least_bytes:
                equal, changed = self._compare(plan, wanted, deadline)
                moving |= changed
                wanted = wanted - changed if self._stable else equal
                staying, stored = self._choose(wanted, equal, sizes, least_bytes)
        age = 0 if stored is None else 1 + (stored.age or 0)
        if self._full_every is not None and age >= self._full_every:
            age, stored = 0, None
        items = {True: list[WriteItem](), False: list[WriteItem]()}
        for item in plan.items:
            items[_key_of(item) in staying].append(item)
        stable_plan, rest_plan = (replace(plan, items=items[which]) for which in (True, False))
        if stable_plan.items:
            yield FilePlan(
                group=group, plan=stable_plan, stored=stored, age=age, is_hashed=lambda _: True
            )
        if rest_plan.items:
            is_hashed = None if self._stable else partial(_is_followed, moving)
            yield FilePlan(group=group, plan=rest_plan, moving=moving, is_hashed=is_hashed)

    def _choose(
        self,
        wanted: AbstractSet[Key],
        equal: AbstractSet[Key],
        sizes: Mapping[Key, int],
        least_bytes: float,
    ) -> tuple[frozenset[Key], ShardFile | None]:
        """Return the items of the stable file, and the file of the base with these, or None."""

        def is_worth(keys: Iterable[Key]) -> bool:
            return sum(sizes[key] for key in keys) >= least_bytes

        staying = frozenset(wanted)
        stored, reused = self._find_file(equal)
        # To add a few values to the stable file is not worth writing the others again.
        if stored is not None and is_worth(reused) and not is_worth(staying - reused):
            return reused, stored
        return (staying if is_worth(staying) else frozenset()), None

    def _may_stay(self, key: Key) -> bool:
        """Return whether a value that is not moving may go to a stable file."""
        if self._stable:
            return group_of(key[0], self._stable) != ""
        stored = None if self.base is None else self.base.items.get(key)
        return stored is not None and stored.file.hash_of(stored.at) != NO_HASH

    def _compare(
        self, plan: SavePlan, wanted: Collection[Key], deadline: Deadline
    ) -> tuple[set[Key], set[Key]]:
        """Return the items that equal the base's, and those of stable files that changed."""
        equal, changed = set[Key](), set[Key]()
        base = self.base
        if base is None:
            return equal, changed
        items = [item for item in plan.items if _key_of(item) in wanted]
        for item in self._noted(replace(plan, items=items)):
            key = key_of_item(item)
            deadline.check(f"Comparing {item.fqn} with {base.store.url}")
            stored = base.items.get(key)
            if base.has_same(key, item):
                equal.add(key)
            elif stored is not None and stored.file.age is not None:
                changed.add(key)
        return equal, changed

    def _find_file(self, equal: AbstractSet[Key]) -> tuple[ShardFile | None, frozenset[Key]]:
        """Return the largest file of the base of which every item is equal, and its items."""
        if self.base is None or not equal:
            return None, frozenset()
        files = sorted(self.base.manifest.files, key=lambda file: file.size_bytes, reverse=True)
        for file in files:
            keys = self.base.keys_of(file)
            unique = frozenset(keys)
            if file.hashes and len(unique) == len(keys) and unique <= equal:
                return file, unique
        return None, frozenset()


def plain_files(plans: Mapping[str, SavePlan]) -> list[FilePlan]:
    """Return one file for each group."""
    return [FilePlan(group=group, plan=plan) for group, plan in plans.items()]


def _key_of(item: WriteItem) -> Key:
    data = item.tensor_data
    if data is None:
        return item.index.fqn, None
    return item.index.fqn, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def moving_in(file: FilePlan) -> list[int]:
    """Return the positions of the moving values of a file."""
    if not file.moving:
        return []
    return [at for at, item in enumerate(file.plan.items) if _key_of(item) in file.moving]


def _is_followed(moving: Collection[Key], item: Item) -> bool:
    """Return whether the next save is to compare a value that no pattern names."""
    return item.payload_bytes > _MIN_BYTES and key_of_item(item) not in moving
