"""The local plan of a staged state, and the place of each item in an arena; pickles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.saves.planning import (
    PLAN_CACHE,
    CachedPlan,
    LocalPlan,
    checked,
    find_cached_plan,
)
from ckpt_storage.saves.replicas import ReplicaSample, staged_sample
from ckpt_storage.saves.saveplanner import BoxSavePlanner
from ckpt_storage.saves.shardfile import Item

_CACHE: deque[CachedPlan] = deque(maxlen=PLAN_CACHE.maxlen)
"""Local plans of the last few structures: planning takes torch some 50 us an item."""


class ItemPlace(NamedTuple):
    """Where an item is in an arena. `dtype` is None for a blob.

    `unsafe` names a type that only pickle can hold, for which `load` refuses the item.
    """

    start: int
    size_bytes: int
    dtype: str | None
    unsafe: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlan:
    """A rank's local plan and the place of each item in an arena; pickles.

    `values` are checksums of all values that are no tensors; {} if one rank saves.
    """

    cached: CachedPlan
    ties: Mapping[str, str]
    values: Mapping[str, int]
    places: dict[MetadataIndex, ItemPlace] = field(default_factory=dict)

    @classmethod
    def of(cls, live: LocalPlan, values: Mapping[str, int]) -> StagedPlan:
        """Return the plan of a planner that is set up, from the cache if nothing changed."""
        cached = find_cached_plan(_CACHE, live.structure)
        if cached is None:
            plan = live.plan()
            if not plan.usable:
                # With torch's plan caching this means "as before", but the items are needed.
                plan = checked(live.planner.plan)  # type: ignore[attr-defined]  # torch's default planner
            cached = CachedPlan(plan_id="", plan=plan, structure=live.structure)
            if live.structure is not None:
                _CACHE.append(cached)
        return cls(cached=cached, ties=live.ties, values=values)

    def local_plan(self, memory: NDArray[np.uint8], planner: SavePlanner | None) -> LocalPlan:
        """Return the local plan of a save whose bytes are in `memory`.

        The default planner is `BoxSavePlanner()`.
        """
        return LocalPlan(
            plan=lambda: self.cached.plan,
            planner=planner or BoxSavePlanner(),
            items=partial(self._items, memoryview(memory)),  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11
            ties=self.ties,
            structure=self.cached.structure,
            sample=partial(self._sample, memoryview(memory)),  # type: ignore[arg-type]  # as above
        )

    def _sample(self, memory: memoryview) -> ReplicaSample:
        """Return the sample of the replicated values in `memory`."""
        places = (
            (item.index.fqn, self.places[item.index])
            for item in self.cached.plan.items
            if item.type is WriteItemType.TENSOR
        )
        tensors = (
            (fqn, memory[place.start : place.start + place.size_bytes]) for fqn, place in places
        )
        return staged_sample(tensors, self.values)

    def _items(self, memory: memoryview, plan: SavePlan) -> Iterator[Item]:
        for item in plan.items:
            place = self.places.get(item.index)
            if place is None:
                raise InvalidInputError(
                    f"{item.index.fqn} is not in the local plan, so it was not copied.",
                    phase="write",
                    next_step="Save with a planner whose finish_plan adds no items.",
                )
            payload = memory[place.start : place.start + place.size_bytes]
            chunk = None if item.tensor_data is None else item.tensor_data.chunk
            yield Item(
                fqn=item.index.fqn,
                dtype=place.dtype,
                offsets=() if chunk is None else tuple(chunk.offsets),
                sizes=() if chunk is None else tuple(chunk.sizes),
                payload_bytes=place.size_bytes,
                views=partial(_windows, payload),
                unsafe=place.unsafe,
            )


def _windows(view: memoryview, window_bytes: int) -> Iterator[memoryview]:
    for at in range(0, len(view), window_bytes):
        yield view[at : at + window_bytes]
