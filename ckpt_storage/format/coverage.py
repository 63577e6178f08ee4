"""Do chunks hold every element of a tensor once, and which is the first that they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boxes import Box
from .documents import Counts

_MOST_COMPARED = 128
"""Of up to as many chunks each is held against each; that takes no millisecond."""

_CORNERS_PER_CHUNK = 64
_FEW_CORNERS = 1 << 16
_MOST_CORNERS = 1 << 24
"""Corners of chunks that are looked at together: real tensors are cut in a few dimensions only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """How chunks do not make up their tensor.

    `outside` is the position of the first chunk that does not lie in the shape. Otherwise `at` is
    the first element, in C order, that not exactly one chunk holds, and `holders` has the positions
    of those that do; `at` is None where chunks are cut in more ways than any real tensor is.
    """

    outside: int | None = None
    at: tuple[int, ...] | None = None
    holders: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.outside is not None:
            return f"chunk {self.outside} leaves it"
        if self.at is None:
            return "they are cut in more ways than can be checked"
        held = f"{len(self.holders)} different ones hold" if self.holders else "none holds"
        return f"{held} the element {list(self.at)}"


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Return where `boxes` hold an element of a tensor of `shape` never or twice; None if nowhere.

    Boxes without elements must only lie in the shape. Exact for boxes of any form, in O(m log m)
    for m corners: as many as boxes times 2 to the number of dimensions, or fewer.

    How many boxes hold an element is a sum of their indicator functions. Differences along each
    dimension in turn leave, of such a function, the signed corners of its boxes; they can be summed
    up again, so two functions are equal if and only if their corners are (the inclusion and
    exclusion of summed-area tables, Crow 1984). Here the tensor itself is subtracted as one more
    box; of what is left, the first corner is where the sum first is not zero.
    """
    for number, box in enumerate(boxes):
        if not _lies_in(shape, box):
            return Flaw(outside=number)
    whole = Box((0,) * len(shape), shape)
    solid = [box for box in boxes if not box.is_empty]
    if whole.is_empty or solid == [whole]:
        return None
    is_moderate = 1 < len(solid) <= _MOST_COMPARED
    if is_moderate and sum(box.volume for box in solid) == whole.volume and not _overlap(solid):
        return None
    cells = [*solid, whole]
    starts = np.array([box.offsets for box in cells], dtype=np.int64).reshape(len(cells), -1)
    stops = np.array([box.stops for box in cells], dtype=np.int64).reshape(len(cells), -1)
    # Where all are whole, nothing can be told of them; a tensor has few other dimensions.
    dims = [dim for dim in range(len(shape)) if (stops - starts)[:, dim].min() < shape[dim]]
    try:
        corner = _first_corner(starts[:, dims], stops[:, dims])
    except _TooManyCornersError:
        return Flaw()
    if corner is None:
        return None
    at = [0] * len(shape)
    for dim, index in zip(dims, corner, strict=True):
        at[dim] = index
    one = Box(tuple(at), (1,) * len(shape))
    holders = tuple(n for n, box in enumerate(boxes) if not box.is_empty and box.intersect(one))
    return Flaw(at=one.offsets, holders=holders)


def _lies_in(shape: tuple[int, ...], box: Box) -> bool:
    return (
        len(box.offsets) == len(box.sizes) == len(shape)
        and min((*box.offsets, *box.sizes), default=0) >= 0
        and all(stop <= size for stop, size in zip(box.stops, shape, strict=True))
    )


class _TooManyCornersError(Exception):
    """There are more corners than memory should hold."""


def _first_corner(starts: Counts, stops: Counts) -> Sequence[int] | None:
    """Return the first corner of boxes less the last one; None if there is none."""
    count, ndim = starts.shape
    rest = _ranks_of_rests(starts, stops)
    most = min(max(count * _CORNERS_PER_CHUNK, _FEW_CORNERS), _MOST_CORNERS)
    # Signed corners in the dimensions seen so far, each of a box, all in order of their corners.
    weights = np.ones(count, dtype=np.int64)
    weights[-1] = -1
    box = np.arange(count)
    rank = np.zeros(count, dtype=np.int64)
    # Of each dimension the corners' coordinates, and which corners before it they came from.
    edges: list[Counts] = []
    origins: list[Counts] = []
    for dim in range(ndim + 1):
        if dim:
            if 2 * len(box) > most:
                raise _TooManyCornersError
            edge = np.concatenate((starts[box, dim - 1], stops[box, dim - 1]))
            weights = np.concatenate((weights, -weights))
            box = np.concatenate((box, box))
            rank = _pair_ranks(np.concatenate((rank, rank)), edge)
        # Corners at one place, of boxes that are alike in all other dimensions, are one.
        _, first, which = np.unique(
            _pair_ranks(rank, rest[dim][box]), return_index=True, return_inverse=True
        )
        sums = np.zeros(len(first), dtype=np.int64)
        np.add.at(sums, which, weights)
        kept = first[sums != 0]
        if not len(kept):
            return None
        if dim:
            edges.append(edge[kept])
            origins.append(kept % (len(box) // 2))
        box, rank, weights = box[kept], rank[kept], sums[sums != 0]
    corner, at = list[int](), 0
    for edge, origin in zip(reversed(edges), reversed(origins), strict=True):
        corner.append(int(edge[at]))
        at = int(origin[at])
    return corner[::-1]


def _ranks_of_rests(starts: Counts, stops: Counts) -> list[Counts]:
    """Return for each number of dimensions a number that is equal for boxes alike in the others."""
    ranks = [np.zeros(len(starts), dtype=np.int64)]
    for dim in reversed(range(starts.shape[1])):
        edges = _pair_ranks(starts[:, dim], stops[:, dim])
        ranks.append(_pair_ranks(edges, ranks[-1]))
    return ranks[::-1]


def _pair_ranks(first: Counts, second: Counts) -> Counts:
    """Return the ranks of pairs, in the order of the first number and then of the second."""
    values, minor = np.unique(second, return_inverse=True)
    major = np.unique(first, return_inverse=True)[1]
    ranks: Counts = np.unique(major * len(values) + minor, return_inverse=True)[1]
    return ranks


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two of a moderate number of boxes share elements: each held against each."""
    # Unsigned, so that no sum of two of them wraps around.
    starts = np.array([box.offsets for box in boxes], dtype=np.uint64)
    stops = starts + np.array([box.sizes for box in boxes], dtype=np.uint64)
    met = ~np.eye(len(boxes), dtype=np.bool_)
    for dim in range(starts.shape[1]):
        start, stop = starts[:, dim], stops[:, dim]
        met &= np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop)
    return bool(met.any())
