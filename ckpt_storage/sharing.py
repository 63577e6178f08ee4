"""Who reads what several ranks need, so that the storage sends it once: pure planning.

Knows chunks, regions and ranks; knows no storage, no tensor and no process group. The coordinator
of a load calls `plan_shares`; each rank's part of the answer is executed by `sharedreads`.

The unit is a run of bytes of one chunk's payload. What only one rank wants is left to it. A unit
that several want is read by one of them, the one with the fewest bytes so far, and sent on as it
lies in the file: so each receiver holds it to the checksums of the checkpoint itself.
"""

from __future__ import annotations

import logging
import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .options import MIB
from .regions import Box, run_count, run_extent

__all__ = [
    "MAX_MEMBERS",
    "MIN_SAVED_BYTES",
    "UNIT_BYTES",
    "Key",
    "Run",
    "ShareOrder",
    "Unit",
    "arrived_order",
    "can_plan",
    "forget_orders",
    "plan_shares",
]

log = logging.getLogger("ckpt_storage")

UNIT_BYTES = 8 * MIB
"""Longest unit: what a rank holds of another's bytes at a time, and the grain of the balance.

Units begin at multiples of it, so that blocks of any usual size lie in one unit only."""

MIN_SAVED_BYTES = 64 * MIB
"""Below this, the making of the ranks' group costs more than the reads that it spares."""

MAX_MEMBERS = 1_000_000
"""Above this many pairs of a unit and a rank that wants it nobody shares.

The coordinator plans them alone while all others wait: about a second for so many."""

_WORTH = 1.5
"""Sharing must spare a third of what ranks would read of a chunk."""

_MAX_GAP_BYTES = 512 * 1024
"""Ranks read over smaller gaps; where a region has wider ones, ranks read what they want only."""

Key = tuple[str, tuple[int, ...]]
"""FQN and offsets of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Bytes `[start, stop)` of the payload of the chunk `key`, wanted by `ranks`, read by `owner`.

    `number` tells the units of one load apart.
    """

    number: int
    key: Key
    start: int
    stop: int
    owner: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Units of one chunk that follow one another and are wanted by the same ranks.

    The units are numbered from `number` on, begin at `start` and at multiples of `UNIT_BYTES`
    after it, and end with `stop`; the one at a place is read by `owners` at that place.
    """

    number: int
    key: Key
    start: int
    stop: int
    ranks: tuple[int, ...]
    owners: array[int]

    def units(self) -> Iterator[Unit]:
        """Yield the units."""
        for at, owner in enumerate(self.owners):
            start = self.start + at * UNIT_BYTES
            yield Unit(
                number=self.number + at,
                key=self.key,
                start=start,
                stop=min(start + UNIT_BYTES, self.stop),
                owner=owner,
                ranks=self.ranks,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrder:
    """The units that concern one rank. Takes effect when it is unpickled: see `arrived_order`."""

    rank: int
    runs: tuple[Run, ...]

    @property
    def keys(self) -> frozenset[Key]:
        """The chunks that the units are of."""
        return frozenset(run.key for run in self.runs)

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of their numbers."""
        return [unit for run in self.runs for unit in run.units()]

    def __reduce__(self) -> tuple[object, ...]:
        # By identity: they are few objects, and long to hash.
        groups = {id(run.ranks): run.ranks for run in self.runs}
        group_at = {group: at for at, group in enumerate(groups)}
        packed = [_packed(ranks) for ranks in groups.values()]
        rows = [
            (run.number, run.key, run.start, run.stop, group_at[id(run.ranks)], run.owners)
            for run in self.runs
        ]
        return (_receive, (self.rank, packed, rows))


def _packed(ranks: tuple[int, ...]) -> range | array[int]:
    whole = range(ranks[0], ranks[-1] + 1)
    return whole if len(whole) == len(ranks) else array("i", ranks)


_local = threading.local()


def _receive(
    rank: int,
    packed: Sequence[range | array[int]],
    rows: Iterable[tuple[int, Key, int, int, int, array[int]]],
) -> ShareOrder:
    groups = [tuple(group) for group in packed]
    runs = tuple(
        Run(
            number=number,
            key=key,
            start=start,
            stop=stop,
            ranks=groups[group],
            owners=owners,
        )
        for number, key, start, stop, group, owners in rows
    )
    order = _local.order = ShareOrder(rank=rank, runs=runs)
    return order


def arrived_order(rank: int) -> ShareOrder | None:
    """Return the order for `rank` that was unpickled in this thread since `forget_orders`.

    So it arrives even when a planner drops what the plan carried.
    """
    order: ShareOrder | None = getattr(_local, "order", None)
    return order if order is not None and order.rank == rank else None


def forget_orders() -> None:
    """Forget what arrived in this thread; called before a load's first collective."""
    _local.order = None


def plan_shares(
    wants: Mapping[Key, Sequence[tuple[int, Box]]],
    shape_of: Callable[[Key], tuple[tuple[int, ...], int]],
    *,
    world_size: int,
    min_saved_bytes: int = MIN_SAVED_BYTES,
    max_members: int = MAX_MEMBERS,
) -> list[ShareOrder] | None:
    """Return each rank's order, None if sharing would not pay.

    `wants` has for each chunk the ranks and the regions (from the chunk's first element) they
    want; `shape_of` returns a chunk's sizes and the bytes of an element. A chunk is shared as a
    whole or not at all. None, too, where the units and their ranks were more than `max_members`.
    """
    common = {key: users for key, users in wants.items() if len(users) > 1}
    if not can_plan(sum(map(len, common.values())), max_members=max_members):
        return None
    drafts: list[_Draft] = []
    saved_bytes = member_count = 0
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, users in common.items():
        if len({rank for rank, _ in users}) < 2:  # noqa: PLR2004  # nobody else
            continue
        for start, stop, found in _runs(*shape_of(key), users):
            # One object for equal ranks: compared and pickled as one.
            ranks = groups.setdefault(found, found)
            drafts.append((key, start, stop, ranks))
            saved_bytes += (len(ranks) - 1) * (stop - start)
            member_count += len(ranks) * -(-(stop - start) // UNIT_BYTES)
        if member_count > max_members:
            break
    if not can_plan(member_count, max_members=max_members):
        return None
    if saved_bytes < min_saved_bytes:
        return None
    mine: list[list[Run]] = [[] for _ in range(world_size)]
    for run in _assigned(drafts, world_size):
        for rank in run.ranks:
            mine[rank].append(run)
    return [ShareOrder(rank=rank, runs=tuple(runs)) for rank, runs in enumerate(mine)]


def can_plan(member_count: int, *, max_members: int = MAX_MEMBERS) -> bool:
    """Return whether so many pairs of a unit and a rank may be planned; say so where not."""
    if member_count <= max_members:
        return True
    log.info(
        "Each rank reads for itself: to share what ranks have in common, one rank would have to "
        "plan more than %d reads.",
        max_members,
    )
    return False


# A chunk, where a run of units begins and ends in its payload, who wants it.
_Draft = tuple[Key, int, int, tuple[int, ...]]


def _runs(
    sizes: tuple[int, ...], item_bytes: int, users: Sequence[tuple[int, Box]]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return start, stop and ranks of runs of units of a chunk; none if it is not to be shared."""
    total = math.prod(sizes) * item_bytes
    reach: dict[int, tuple[int, int]] = {}
    first = users[0][1]
    is_same = all(region == first for _, region in users)
    extent = None
    for rank, region in users:
        if region.is_empty:
            continue
        if extent is None or not is_same:
            extent = run_extent(sizes, region, item_bytes)
            count = run_count(sizes, region)
            gap_bytes = extent.stop - extent.start - region.volume * item_bytes
            if count > 1 and not is_same and gap_bytes / (count - 1) > _MAX_GAP_BYTES:
                return []
        low, high = reach.get(rank, (extent.start, extent.stop))
        reach[rank] = min(low, extent.start), max(high, extent.stop)
    if len(reach) < 2:  # noqa: PLR2004  # nobody to share with
        return []
    low, high = min(start for start, _ in reach.values()), max(stop for _, stop in reach.values())
    if sum(stop - start for start, stop in reach.values()) < _WORTH * (high - low):
        return []
    # Who wants a unit changes only where somebody's reach begins or ends.
    edges = {low - low % UNIT_BYTES}
    for start, stop in reach.values():
        edges |= {start - start % UNIT_BYTES, stop + -stop % UNIT_BYTES}
    runs = []
    for start, stop in pairwise(sorted(edges)):
        ranks = tuple(sorted(r for r, (a, b) in reach.items() if a < stop and start < b))
        if ranks:
            runs.append((start, min(stop, total), ranks))
    return runs


def _assigned(drafts: Sequence[_Draft], world_size: int) -> Iterator[Run]:
    """Give units owners, balanced by bytes; small ones that follow one another stay together."""
    load_bytes = [0] * world_size
    owner, held_bytes, number = 0, UNIT_BYTES, 0
    before: tuple[int, ...] = ()
    for key, start, stop, ranks in drafts:
        owners = array("i")
        for at in range(start, stop, UNIT_BYTES):
            length = min(UNIT_BYTES, stop - at)
            if ranks is not before or held_bytes + length > UNIT_BYTES:
                owner = min(ranks, key=load_bytes.__getitem__)
                held_bytes, before = 0, ranks
            held_bytes += length
            load_bytes[owner] += length
            owners.append(owner)
        yield Run(number=number, key=key, start=start, stop=stop, ranks=ranks, owners=owners)
        number += len(owners)
