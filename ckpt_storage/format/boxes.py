"""Boxes in index space: what they share, the intervals they are, the grids they form.

Offsets and sizes are in elements. A 0-dimensional box holds one element. All intervals are half
open.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple, overload

import numpy as np

from ckpt_storage.errors import InvalidInputError

from .documents import Counts


class Box(NamedTuple):
    """An axis-aligned box of elements; both tuples have one entry per dimension.

    Nothing is checked here: `find_flaw` and the codecs judge what comes from outside.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return 0 in self.sizes

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index behind the box, per dimension."""
        return tuple(map(add, self.offsets, self.sizes))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both, None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.stops, other.stops), starts))
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, other: Box) -> Box:
        """Return the same elements counted from the first element of `other`."""
        return Box(tuple(map(sub, self.offsets, other.offsets)), self.sizes)


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that hold elements [start, stop) of the C-order linearisation of `shape`.

    They follow one another in that order, each of them contiguous in it. At most one of them is
    of whole rows of the first dimension that is cut, and for each inner dimension there is at
    most one before and one behind: max(1, 2 ndim - 1) in all. Raises `InvalidInputError` if the
    interval is not within the shape.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidInputError(
            f"Elements [{start}, {stop}) are not within the shape {list(shape)}.",
            next_step="This is a bug in the caller or a checkpoint that contradicts itself.",
        )
    return list(_interval_boxes((), tuple(shape), start, stop))


def _interval_boxes(
    prefix: tuple[int, ...], inner: tuple[int, ...], start: int, stop: int
) -> Iterator[Box]:
    """Yield boxes for elements [start, stop) of the slab of shape `inner` at index `prefix`."""
    if start == stop:
        return
    ones = (1,) * len(prefix)
    if not inner:
        yield Box(prefix, ones)
        return
    row, inner = math.prod(inner[1:]), inner[1:]
    first, before = divmod(start, row)
    last, behind = divmod(stop, row)
    if first == last:
        yield from _interval_boxes((*prefix, first), inner, before, behind)
        return
    if before:
        yield from _interval_boxes((*prefix, first), inner, before, row)
        first += 1
    if first < last:
        yield Box((*prefix, first, *(0 for _ in inner)), (*ones, last - first, *inner))
    yield from _interval_boxes((*prefix, last), inner, 0, behind)


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
    cuts: list[tuple[int, ...]] = []
    cell_count = 1
    for dim, size in enumerate(shape):
        cut = tuple(sorted({box.offsets[dim] for box in boxes}))
        cell_count *= len(cut)
        if not cut or cut[0] != 0 or cut[-1] >= max(size, 1) or cell_count > len(boxes):
            return None
        expected = dict(zip(cut, _cell_sizes(cut, size), strict=True))
        if any(expected[box.offsets[dim]] != box.sizes[dim] for box in boxes):
            return None
        cuts.append(cut)
    # As many boxes as cells, and no two in one cell: then no cell is without one.
    at = {box.offsets: index for index, box in enumerate(boxes)}
    if not len(boxes) == len(at) == cell_count:
        return None
    return Grid(tuple(cuts), tuple(at[offsets] for offsets in itertools.product(*cuts)))


def _cell_sizes(cuts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(map(sub, (*cuts[1:], size), cuts))


@dataclass(frozen=True, slots=True, eq=False)
class GridBoxes(Sequence[Box]):
    """The cells of a grid in C order, each made when it is asked for."""

    grid: Grid
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.grid.owners)

    @overload
    def __getitem__(self, index: int) -> Box: ...

    @overload
    def __getitem__(self, index: slice) -> list[Box]: ...

    def __getitem__(self, index: int | slice) -> Box | list[Box]:
        if isinstance(index, slice):
            return [self.grid.box(at, self.shape) for at in range(*index.indices(len(self)))]
        return self.grid.box(index + len(self) if index < 0 else index, self.shape)

    def __iter__(self) -> Iterator[Box]:
        return iter(self.grid.boxes(self.shape))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GridBoxes) and self.shape == other.shape:
            return self.grid == other.grid or list(self) == list(other)
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(Box.__eq__, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list


def compact(numbers: Counts) -> Sequence[int]:
    """Return integers from 0 on as a `range` if they are one, else as an array."""
    count = len(numbers)
    if count > 1:
        step = int(numbers[1]) - int(numbers[0])
        if step and bool((np.diff(numbers) == step).all()):
            return range(int(numbers[0]), int(numbers[0]) + count * step, step)
    elif count:
        return range(int(numbers[0]), int(numbers[0]) + 1)
    return array("q", numbers.tobytes())
