"""Who reads what several ranks need, so that remote storage sends it once: pure planning.

It is cut into numbered units of a few MiB; one of the ranks reads each, and passes it on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_storage.format.boxes import Box, box_selection, touched_spans
from ckpt_storage.options import KIB, MIB

log = logging.getLogger("ckpt_storage")

_MOST_MEMBERS = 1_000_000
"""Above this many pairs of a unit and a rank that wants it nobody shares.

The coordinator plans them alone while all others wait: about a second for so many."""

_WORTH = 1.5
"""Sharing must spare a third of what ranks would read of a chunk."""

_MOST_UNIT_BYTES = 8 * MIB
_LEAST_UNIT_BYTES = MIB

_LEAST_SAVED_BYTES = 64 * MIB
"""Sharing pays if it spares so many."""

_MOST_GAP_BYTES = 512 * KIB
"""A rank alone reads over gaps of a region up to this."""

Key = tuple[str, tuple[int, ...]]
"""FQN and offsets of a chunk."""

Piece = tuple[Key, int, int]
"""Bytes [start, stop) of the payload of a chunk."""


def unit_for(part_bytes: int) -> int | None:
    """Return the longest unit for reads in parts of at most `part_bytes`; None: do not share."""
    unit_bytes = _MOST_UNIT_BYTES
    while unit_bytes > part_bytes:
        unit_bytes //= 2
    return None if unit_bytes < _LEAST_UNIT_BYTES else unit_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """What `owner` reads at once and passes on to the other `ranks`: some pieces of chunks."""

    number: int
    owner: int
    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """The length of all pieces together."""
        return sum(stop - start for _, start, stop in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrder:
    """The units that concern one rank, in the order of their numbers."""

    rank: int
    units: tuple[Unit, ...]
    unit_bytes: int

    @property
    def keys(self) -> frozenset[Key]:
        """The chunks that the units are of."""
        return frozenset(key for unit in self.units for key, _, _ in unit.pieces)


def plan_shares(
    wants: Mapping[Key, Sequence[tuple[int, Box]]],
    shape_of: Callable[[Key], tuple[tuple[int, ...], int]],
    *,
    world_size: int,
    unit_bytes: int,
) -> list[ShareOrder] | None:
    """Return each rank's order, None if sharing would not pay or take too long to plan.

    `wants`: who wants which region of a chunk; `shape_of`: its sizes and the bytes of an element.
    Pieces begin at multiples of `unit_bytes`, the longest unit: so a block lies in one unit only.
    """
    common = {key: users for key, users in wants.items() if len({rank for rank, _ in users}) > 1}
    if not can_plan(sum(map(len, common.values()))):
        return None
    drafts: list[_Draft] = []
    saved_bytes = member_count = 0
    known: dict[_Like, list[tuple[int, int, tuple[int, ...]]]] = {}
    for key, users in common.items():
        # Tensors that are cut alike, as most of a model's are, are looked at once.
        like = (*shape_of(key), tuple(users))
        if like not in known:
            known[like] = list(_cells(*like, unit_bytes))
        for start, stop, ranks in known[like]:
            drafts.append(((key, start, stop), ranks))
            saved_bytes += (len(ranks) - 1) * (stop - start)
            member_count += len(ranks)
        if not can_plan(member_count):
            return None
    if saved_bytes < _LEAST_SAVED_BYTES:
        return None
    mine: list[list[Unit]] = [[] for _ in range(world_size)]
    load_bytes = [0] * world_size
    for number, (ranks, pieces) in enumerate(_joined(drafts, unit_bytes)):
        owner = min(ranks, key=load_bytes.__getitem__)
        unit = Unit(number, owner, ranks, pieces)
        load_bytes[owner] += unit.size_bytes
        for rank in ranks:
            mine[rank].append(unit)
    return [
        ShareOrder(rank=rank, units=tuple(units), unit_bytes=unit_bytes)
        for rank, units in enumerate(mine)
    ]


def can_plan(member_count: int) -> bool:
    """Return whether so many pairs of a unit and a rank may be planned; say so where not."""
    if member_count <= _MOST_MEMBERS:
        return True
    log.info(
        "Each rank reads for itself: to share what ranks have in common, one rank would have to "
        "plan more than %d reads.",
        _MOST_MEMBERS,
    )
    return False


# A chunk's sizes, the bytes of an element, who wants which region.
_Like = tuple[tuple[int, ...], int, tuple[tuple[int, Box], ...]]

_Draft = tuple[Piece, tuple[int, ...]]


def _cells(
    sizes: tuple[int, ...],
    item_bytes: int,
    users: Sequence[tuple[int, Box]],
    unit: int,
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield start, stop and ranks of parts of a chunk; none if it is not to be shared."""
    total = math.prod(sizes) * item_bytes
    reach: dict[int, tuple[int, int]] = {}
    is_same = all(region == users[0][1] for _, region in users)
    for rank, region in users:
        if region.is_empty:
            continue
        runs = touched_spans(sizes, box_selection(region), item_bytes)
        extent, count = runs.hull, len(runs)
        gap_bytes = len(extent) - region.volume * item_bytes
        if count > 1 and not is_same and gap_bytes / (count - 1) > _MOST_GAP_BYTES:
            return
        low, high = reach.get(rank, (extent.start, extent.stop))
        reach[rank] = min(low, extent.start), max(high, extent.stop)
    if len(reach) < 2:  # noqa: PLR2004  # nobody else
        return
    low, high = min(start for start, _ in reach.values()), max(stop for _, stop in reach.values())
    if sum(stop - start for start, stop in reach.values()) < _WORTH * (high - low):
        return
    # Who wants a cell changes only where somebody's reach begins or ends.
    edges = {low - low % unit}
    for start, stop in reach.values():
        edges |= {start - start % unit, stop + -stop % unit}
    for start, stop in pairwise(sorted(edges)):
        ranks = tuple(sorted(r for r, (a, b) in reach.items() if a < stop and start < b))
        if ranks:
            for at in range(start, min(stop, total), unit):
                yield at, min(at + unit, total), ranks


def _joined(
    drafts: Sequence[_Draft], unit_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[Piece, ...]]]:
    """Yield ranks and pieces of units: small pieces that follow one another stay together."""
    held: list[Piece] = []
    held_bytes = 0
    before: tuple[int, ...] = ()
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for piece, ranks in drafts:
        length = piece[2] - piece[1]
        if held and (ranks != before or held_bytes + length > unit_bytes):
            yield before, tuple(held)
            held, held_bytes = [], 0
        # One object for equal ranks: pickled as one.
        before = groups.setdefault(ranks, ranks)
        held.append(piece)
        held_bytes += length
    if held:
        yield before, tuple(held)
