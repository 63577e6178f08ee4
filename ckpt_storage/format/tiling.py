"""Whether boxes tile a tensor: grids of chunks, and where chunks leave gaps or overlap."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge, le, sub

from .regions import Box


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


@dataclass(frozen=True, slots=True)
class Grid:
    """Chunks that tile a tensor as a cartesian grid.

    `cuts` has for each dimension the start offsets, ascending from 0; cell i, in C order, belongs
    to `owners[i]`. The shape stands beside a grid, not in it, as in the manifest. What is regular
    may be a `range`, which takes no memory however many cells there are.
    """

    cuts: tuple[Sequence[int], ...]
    owners: Sequence[int]

    def box(self, cell: int, shape: Sequence[int]) -> Box:
        """Return one cell of a tensor of `shape`, without making the others."""
        if not 0 <= cell < len(self.owners):
            raise IndexError(f"cell {cell} of {len(self.owners)}")
        offsets: list[int] = []
        sizes: list[int] = []
        for cuts, size in zip(reversed(self.cuts), reversed(shape), strict=True):
            cell, at = divmod(cell, len(cuts))
            stop = cuts[at + 1] if at + 1 < len(cuts) else size
            offsets.append(cuts[at])
            sizes.append(stop - cuts[at])
        return Box(tuple(reversed(offsets)), tuple(reversed(sizes)))

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """Return all cells of a tensor of `shape`, in C order."""
        sizes = map(_cell_sizes, self.cuts, shape)
        return list(map(Box, itertools.product(*self.cuts), itertools.product(*sizes)))

    def cell_at(self, offsets: Sequence[int]) -> int | None:
        """Return the cell that begins at `offsets`, None if none does."""
        if len(offsets) != len(self.cuts):
            return None
        cell = 0
        for cuts, offset in zip(self.cuts, offsets, strict=True):
            at = bisect_left(cuts, offset)
            if at == len(cuts) or cuts[at] != offset:
                return None
            cell = cell * len(cuts) + at
        return cell

    def intersecting(self, box: Box) -> list[int]:
        """Return the cells, ascending, that share elements with `box`, which lies in the shape.

        Costs two bisections per dimension and one step per cell found.
        """
        if box.is_empty:
            return []
        cells = [0]
        for cuts, first, stop in zip(self.cuts, box.offsets, box.stops, strict=True):
            here = range(bisect_right(cuts, first) - 1, bisect_left(cuts, stop))
            cells = [cell * len(cuts) + at for cell in cells for at in here]
        return cells


def find_grid(shape: Sequence[int], boxes: Sequence[Box]) -> Grid | None:
    """Return the grid whose cells are exactly `boxes`, in any order; None if they are none.

    Owners are positions in `boxes`. The boxes of a grid cover `shape` exactly. An empty box
    belongs to a grid only where a dimension of the shape is 0; a caller that has others drops
    them first. Costs one sort of the distinct offsets per dimension and a few look-ups per box.
    """
    ndim = len(shape)
    if any(len(box.offsets) != ndim or len(box.sizes) != ndim for box in boxes):
        return None
    places = [0] * len(boxes)
    cell_count = 1
    cuts: list[tuple[int, ...]] = []
    for dim, size in enumerate(shape):
        starts = [box.offsets[dim] for box in boxes]
        cut = tuple(sorted(set(starts)))
        cell_count *= len(cut)
        if not cut or cut[0] != 0 or cut[-1] >= max(size, 1) or cell_count > len(boxes):
            return None
        expected = dict(zip(cut, _cell_sizes(cut, size), strict=True))
        if [expected[start] for start in starts] != [box.sizes[dim] for box in boxes]:
            return None
        at = {start: index for index, start in enumerate(cut)}
        places = [place * len(cut) + at[start] for place, start in zip(places, starts, strict=True)]
        cuts.append(cut)
    owners = [-1] * cell_count
    for index, place in enumerate(places):
        owners[place] = index
    # As many boxes as cells and no cell without a box: then none has two.
    if len(boxes) != cell_count or -1 in owners:
        return None
    return Grid(tuple(cuts), tuple(owners))


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


def _cell_sizes(cuts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(map(sub, (*cuts[1:], size), cuts))
