"""Do chunks hold every element of a tensor once: a quick yes, or what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge, le, sub

import numpy as np

from .boxes import Box, find_grid
from .columns import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How boxes cover a shape; each finding is None where there is nothing to find.

    `gap` is a box of elements that no box holds; `overlap` the indices, ascending, of two boxes
    that share elements of the shape; `outside` the index of the first box that leaves the shape,
    has another number of dimensions or a negative size. Of several gaps or overlaps the first one
    met is given, which need not be the first in C order.
    """

    gap: Box | None = None
    overlap: tuple[int, int] | None = None
    outside: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every element is held by exactly one box."""
        return self.gap is None and self.overlap is None and self.outside is None


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> Coverage:
    """Return whether `boxes` hold every element of a tensor of `shape` once, and what is wrong.

    Empty boxes are ignored, wherever they are. A cartesian grid is recognised in
    O(n log n). Otherwise space is halved at the median of the boxes' faces, in the dimension
    where that cuts the fewest boxes, until one box fills a part or none reaches it: the
    partition of Overmars and Yap ("New upper bounds in Klee's measure problem", 1991). Its depth
    is at most the sum over the dimensions of log2 of the number of faces.
    """
    solid = [(index, box) for index, box in enumerate(boxes) if not box.is_empty]
    whole = Box((0,) * len(shape), tuple(shape))
    if find_grid(shape, [box for _, box in solid]) is not None:
        return Coverage()
    outside = None
    inside: list[_Solid] = []
    for index, box in solid:
        fits = len(box.offsets) == len(box.sizes) == len(shape)
        part = box.intersect(whole) if fits else None
        if part is not None:
            inside.append((index, part.offsets, part.stops))
        if part != box and outside is None:
            outside = index
    if whole.is_empty:
        return Coverage(outside=outside)
    search = _Search()
    search.visit(whole.offsets, whole.stops, inside)
    return Coverage(gap=search.gap, overlap=search.overlap, outside=outside)


_Solid = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A box that holds elements: its position in the caller's list, its offsets, its stops."""


class _Search:
    """One gap and one overlap among boxes, found by halving space."""

    __slots__ = ("gap", "overlap")

    def __init__(self) -> None:
        self.gap: Box | None = None
        self.overlap: tuple[int, int] | None = None

    def visit(
        self, starts: tuple[int, ...], stops: tuple[int, ...], boxes: Sequence[_Solid]
    ) -> None:
        """Search the part of space from `starts` to `stops`, which exactly `boxes` reach."""
        if self.gap is not None and self.overlap is not None:
            return
        if not boxes:
            if self.gap is None:
                self.gap = Box(starts, tuple(map(sub, stops, starts)))
            return
        filling = next((box for box in boxes if _fills(box, starts, stops)), None)
        if filling is not None:
            others = [box[0] for box in boxes if box is not filling]
            if others and self.overlap is None:
                self.overlap = (min(filling[0], others[0]), max(filling[0], others[0]))
            return
        dim, cut = _best_cut(starts, stops, boxes)
        self.visit(
            starts,
            (*stops[:dim], cut, *stops[dim + 1 :]),
            [box for box in boxes if box[1][dim] < cut],
        )
        self.visit(
            (*starts[:dim], cut, *starts[dim + 1 :]),
            stops,
            [box for box in boxes if box[2][dim] > cut],
        )


def _fills(box: _Solid, starts: tuple[int, ...], stops: tuple[int, ...]) -> bool:
    return all(map(le, box[1], starts)) and all(map(ge, box[2], stops))


def _best_cut(
    starts: tuple[int, ...], stops: tuple[int, ...], boxes: Sequence[_Solid]
) -> tuple[int, int]:
    """Return the dimension and the place at which to halve a part that no box fills.

    A box that does not fill a part has a face strictly inside it.
    """
    cuts = []
    for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        faces = [box[1][dim] for box in boxes if box[1][dim] > start]
        faces += [box[2][dim] for box in boxes if box[2][dim] < stop]
        if faces:
            faces.sort()
            median = faces[len(faces) // 2]
            crossing_count = sum(box[1][dim] < median < box[2][dim] for box in boxes)
            cuts.append((crossing_count, -len(faces), dim, median))
    _, _, dim, cut = min(cuts)
    return dim, cut


_MOST_COMPARED = 128
"""Of up to as many chunks each is held against each; that takes no millisecond."""


_CORNERS_PER_CHUNK = 64


_FEW_CORNERS = 1 << 16


_MOST_CORNERS = 1 << 24
"""Corners of chunks that are looked at together: real tensors are cut in a few dimensions only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """The first element of a tensor, in C order, that not exactly one chunk holds.

    `at` is None where there are more corners to look at than any real tensor has.
    """

    at: tuple[int, ...] | None
    held_count: int


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Return where `boxes`, which lie in `shape`, hold an element never or twice; None if nowhere.

    Boxes without elements count for nothing. Exact for boxes of any form, in O(m log m) for m
    corners: as many as boxes times 2 to the number of dimensions, or fewer.

    How many boxes hold an element is a sum of their indicator functions. Differences along each
    dimension in turn leave, of such a function, the signed corners of its boxes; they can be summed
    up again, so two functions are equal if and only if their corners are (the inclusion and
    exclusion of summed-area tables, Crow 1984). Here the tensor itself is subtracted as one more
    box; of what is left, the first corner is where the sum first is not zero, and its sign and size
    are the sum.
    """
    solid = [box for box in boxes if not box.is_empty]
    if 0 in shape or solid == [Box((0,) * len(shape), shape)]:
        return None
    is_moderate = 1 < len(solid) <= _MOST_COMPARED
    if is_moderate and sum(box.volume for box in solid) == math.prod(shape) and not _overlap(solid):
        return None
    cells = [*solid, Box((0,) * len(shape), shape)]
    starts = np.array([box.offsets for box in cells], dtype=np.int64).reshape(len(cells), -1)
    stops = np.array([box.stops for box in cells], dtype=np.int64).reshape(len(cells), -1)
    # Where all are whole, nothing can be told of them; a tensor has few other dimensions.
    dims = [dim for dim in range(len(shape)) if (stops - starts)[:, dim].min() < shape[dim]]
    found = _first_corner(starts[:, dims], stops[:, dims])
    if found is None:
        return None
    corner, excess = found
    if corner is None:
        return Flaw(at=None, held_count=0)
    at = [0] * len(shape)
    for dim, index in zip(dims, corner, strict=True):
        at[dim] = index
    return Flaw(at=tuple(at), held_count=excess + 1)


def _first_corner(starts: Counts, stops: Counts) -> tuple[Sequence[int] | None, int] | None:
    """Return the first corner, and its weight, of boxes less the last one; None if there is none.

    The corner is None where there are too many.
    """
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
                return None, 0
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
    return corner[::-1], int(weights[0])


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
