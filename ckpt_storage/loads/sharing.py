"""Who reads what several ranks need, so that remote storage sends it once: pure planning.

The coordinator of a load calls `plan_shares`; `sharedreads` executes each rank's part of the
answer. The unit is a run of bytes of one chunk's payload. What only one rank wants is left to it. A
unit that several want, whole or in part, is read by one of them, the one with the fewest bytes so
far, and sent on as it lies in the file.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_storage.format.boxes import Box, run_count, run_extent
from ckpt_storage.options import KIB, MIB

log = logging.getLogger("ckpt_storage")

MAX_MEMBERS = 1_000_000
"""Above this many pairs of a unit and a rank that wants it nobody shares.

The coordinator plans them alone while all others wait: about a second for so many."""

_WORTH = 1.5
"""Sharing must spare a third of what ranks would read of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePolicy:
    """When sharing pays.

    `unit_bytes` is the longest unit: what a rank holds of another's bytes at a time, and the
    grain of the balance. Units begin at multiples of it, so that blocks of any usual size lie in
    one unit only. Less than `min_saved_bytes` are not worth the making of links between ranks.
    Ranks alone read over gaps up to `max_gap_bytes`; where a region has wider ones, they read
    what they want only.
    """

    unit_bytes: int = 8 * MIB
    min_saved_bytes: int = 64 * MIB
    max_gap_bytes: int = 512 * KIB


def share_policy(*, part_bytes: int) -> SharePolicy | None:
    """Return the policy for reads in parts of at most `part_bytes`; None: do not share."""
    policy = SharePolicy()
    unit_bytes = policy.unit_bytes
    while unit_bytes > part_bytes:
        unit_bytes //= 2
    if unit_bytes < _LEAST_UNIT_BYTES:
        return None
    return dataclasses.replace(policy, unit_bytes=unit_bytes)


_LEAST_UNIT_BYTES = MIB

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

    The units are numbered from `number` on, begin at `start` and at multiples of `unit_bytes`
    after it, and end with `stop`; the one at a place is read by `owners` at that place.
    """

    number: int
    key: Key
    start: int
    stop: int
    ranks: tuple[int, ...]
    owners: array[int]

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """Yield the units."""
        for at, owner in enumerate(self.owners):
            start = self.start + at * unit_bytes
            yield Unit(
                number=self.number + at,
                key=self.key,
                start=start,
                stop=min(start + unit_bytes, self.stop),
                owner=owner,
                ranks=self.ranks,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrder:
    """The units that concern one rank."""

    rank: int
    runs: tuple[Run, ...]
    unit_bytes: int

    @property
    def keys(self) -> frozenset[Key]:
        """The chunks that the units are of."""
        return frozenset(run.key for run in self.runs)

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of their numbers."""
        return [unit for run in self.runs for unit in run.units(self.unit_bytes)]

    def __reduce__(self) -> tuple[object, ...]:
        # By identity: they are few objects, and long to hash.
        groups = {id(run.ranks): run.ranks for run in self.runs}
        group_at = {group: at for at, group in enumerate(groups)}
        packed = [_packed(ranks) for ranks in groups.values()]
        rows = [
            (run.number, run.key, run.start, run.stop, group_at[id(run.ranks)], run.owners)
            for run in self.runs
        ]
        return (_unpacked, (self.rank, packed, rows, self.unit_bytes))


def _packed(ranks: tuple[int, ...]) -> range | array[int]:
    whole = range(ranks[0], ranks[-1] + 1)
    return whole if len(whole) == len(ranks) else array("i", ranks)


def _unpacked(
    rank: int,
    packed: Sequence[range | array[int]],
    rows: Iterable[tuple[int, Key, int, int, int, array[int]]],
    unit_bytes: int,
) -> ShareOrder:
    groups = [tuple(group) for group in packed]
    runs = tuple(
        Run(number=number, key=key, start=start, stop=stop, ranks=groups[group], owners=owners)
        for number, key, start, stop, group, owners in rows
    )
    return ShareOrder(rank=rank, runs=runs, unit_bytes=unit_bytes)


def plan_shares(
    wants: Mapping[Key, Sequence[tuple[int, Box]]],
    shape_of: Callable[[Key], tuple[tuple[int, ...], int]],
    *,
    world_size: int,
    policy: SharePolicy,
    max_members: int = MAX_MEMBERS,
) -> list[ShareOrder] | None:
    """Return each rank's order, None if sharing would not pay.

    `wants` has for each chunk the ranks and the regions (from the chunk's first element) they
    want; `shape_of` returns a chunk's sizes and the bytes of an element. A chunk is shared as a
    whole or not at all. None, too, where the units and their ranks were more than `max_members`.
    """
    common = {key: users for key, users in wants.items() if len({rank for rank, _ in users}) > 1}
    if not can_plan(sum(map(len, common.values())), max_members=max_members):
        return None
    drafts: list[_Draft] = []
    saved_bytes = member_count = 0
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    known: dict[_Like, list[tuple[int, int, tuple[int, ...]]]] = {}
    for key, users in common.items():
        # Tensors that are cut alike, as most of a model's are, are looked at once.
        like = (*shape_of(key), tuple(users))
        if like not in known:
            known[like] = _runs(*like, policy)
        for start, stop, found in known[like]:
            # One object for equal ranks: compared and pickled as one.
            ranks = groups.setdefault(found, found)
            drafts.append((key, start, stop, ranks))
            saved_bytes += (len(ranks) - 1) * (stop - start)
            member_count += len(ranks) * -(-(stop - start) // policy.unit_bytes)
        if member_count > max_members:
            break
    if not can_plan(member_count, max_members=max_members):
        return None
    if saved_bytes < policy.min_saved_bytes:
        return None
    mine: list[list[Run]] = [[] for _ in range(world_size)]
    for run in _assigned(drafts, world_size, policy.unit_bytes):
        for rank in run.ranks:
            mine[rank].append(run)
    return [
        ShareOrder(rank=rank, runs=tuple(runs), unit_bytes=policy.unit_bytes)
        for rank, runs in enumerate(mine)
    ]


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


# A chunk's sizes, the bytes of an element, who wants which region.
_Like = tuple[tuple[int, ...], int, tuple[tuple[int, Box], ...]]

# A chunk, where a run of units begins and ends in its payload, who wants it.
_Draft = tuple[Key, int, int, tuple[int, ...]]


def _runs(
    sizes: tuple[int, ...],
    item_bytes: int,
    users: Sequence[tuple[int, Box]],
    policy: SharePolicy,
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
            if count > 1 and not is_same and gap_bytes / (count - 1) > policy.max_gap_bytes:
                return []
        low, high = reach.get(rank, (extent.start, extent.stop))
        reach[rank] = min(low, extent.start), max(high, extent.stop)
    if len(reach) < 2:  # noqa: PLR2004  # nobody else
        return []
    low, high = min(start for start, _ in reach.values()), max(stop for _, stop in reach.values())
    if sum(stop - start for start, stop in reach.values()) < _WORTH * (high - low):
        return []
    # Who wants a unit changes only where somebody's reach begins or ends.
    unit = policy.unit_bytes
    edges = {low - low % unit}
    for start, stop in reach.values():
        edges |= {start - start % unit, stop + -stop % unit}
    runs = []
    for start, stop in pairwise(sorted(edges)):
        ranks = tuple(sorted(r for r, (a, b) in reach.items() if a < stop and start < b))
        if ranks:
            runs.append((start, min(stop, total), ranks))
    return runs


def _assigned(drafts: Sequence[_Draft], world_size: int, unit_bytes: int) -> Iterator[Run]:
    """Give units owners, balanced by bytes; small ones that follow one another stay together."""
    load_bytes = [0] * world_size
    owner, held_bytes, number = 0, unit_bytes, 0
    before: tuple[int, ...] = ()
    for key, start, stop, ranks in drafts:
        owners = array("i")
        for at in range(start, stop, unit_bytes):
            length = min(unit_bytes, stop - at)
            if ranks is not before or held_bytes + length > unit_bytes:
                owner = min(ranks, key=load_bytes.__getitem__)
                held_bytes, before = 0, ranks
            held_bytes += length
            load_bytes[owner] += length
            owners.append(owner)
        yield Run(number=number, key=key, start=start, stop=stop, ranks=ranks, owners=owners)
        number += len(owners)
