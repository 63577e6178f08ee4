"""Boxes in index space: what they share, the intervals they are, the grids they form.

Offsets and sizes are in elements. A 0-dimensional box holds one element. All intervals are half
open.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

import numpy as np

from ckpt_storage.errors import InvalidInputError

from .documents import Counts, LazyList

_MOST_ELEMENTS = (1 << 62) - 1
_MOST_STEPS = 1 << 23
_Sides = tuple[tuple[int, int], ...]


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

    They follow one another in that order, each of them contiguous in it: at most
    max(1, 2 ndim - 1). Raises `InvalidInputError` if the interval is not within the shape.
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
        """Return the cells, ascending, that share elements with `box`, which lies in the shape."""
        if box.is_empty:
            return []
        cells = [0]
        for cuts, first, stop in zip(self.cuts, box.offsets, box.stops, strict=True):
            here = range(bisect_right(cuts, first) - 1, bisect_left(cuts, stop))
            cells = [cell * len(cuts) + at for cell in cells for at in here]
        return cells


def _cell_sizes(cuts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(map(sub, (*cuts[1:], size), cuts))


def find_grid(shape: Sequence[int], boxes: Sequence[Box]) -> Grid | None:
    """Return the grid that `boxes` make, as `grid_of_rows` does; owners are positions in them."""
    ndim = len(shape)
    if any(len(box.offsets) != ndim or len(box.sizes) != ndim for box in boxes):
        return None
    rows = np.array([(*box.offsets, *box.sizes) for box in boxes], dtype=np.int64)
    return grid_of_rows(shape, rows.reshape(len(boxes), 2 * ndim), np.arange(len(boxes)))


def grid_of_rows(shape: Sequence[int], rows: Counts, owners: Counts) -> Grid | None:
    """Return the grid whose cells are exactly some boxes, in any order; None if they make none.

    A row has the offsets, then the sizes of a box. A grid covers the shape exactly. Boxes without
    elements are left out; of equal ones the first counts.
    """
    if 0 in shape or math.prod(shape) > _MOST_ELEMENTS:
        return None
    offsets, sizes = np.hsplit(rows, 2)
    solid = (sizes != 0).all(axis=1)
    offsets, sizes, owners = offsets[solid], sizes[solid], owners[solid]
    places = np.zeros(len(owners), dtype=np.int64)
    cell_count = 1
    cuts: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        starts, at = np.unique(offsets[:, dim], return_inverse=True)
        cell_count *= len(starts)
        if not cell_count or cell_count > len(offsets) or starts[0] != 0 or starts[-1] >= size:
            return None
        if not np.array_equal(np.diff(starts, append=size)[at], sizes[:, dim]):
            return None
        places = places * len(starts) + at
        cuts.append(compact(starts))
    # Sorted, and of equal ones the first: so ascending positions and as many as cells means all.
    found, kept = np.unique(places, return_index=True)
    return Grid(tuple(cuts), compact(owners[kept])) if len(found) == cell_count else None


class GridBoxes(LazyList[Box]):
    """The cells of a grid in C order, each made when it is asked for."""

    def __init__(self, grid: Grid, shape: tuple[int, ...]) -> None:
        self.grid = grid
        self.shape = shape
        super().__init__(len(grid.owners), lambda cell: grid.box(cell, shape))

    def __iter__(self) -> Iterator[Box]:
        return iter(self.grid.boxes(self.shape))

    def __reduce__(self) -> tuple[type[GridBoxes], tuple[Grid, tuple[int, ...]]]:
        return GridBoxes, (self.grid, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """How chunks do not make up their tensor.

    `outside` is the position of the first chunk that does not lie in the shape. Otherwise `at` is
    an element that not exactly one chunk holds, and `holders` has the positions of those that do;
    `at` is None where too many chunks lie side by side to hold each against each.
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

    Boxes without elements must only lie in the shape.
    """
    for number, box in enumerate(boxes):
        if not _lies_in(shape, box):
            return Flaw(outside=number)
    if 0 in shape:
        return None
    # First along the dimension where few boxes lie side by side at few starts.
    starts = [len({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    reach = [sum(box.sizes[dim] for box in boxes) / size for dim, size in enumerate(shape)]
    order = sorted(range(len(shape)), key=lambda dim: starts[dim] * reach[dim])
    sides = [list(zip(box.offsets, box.stops, strict=True)) for box in boxes if not box.is_empty]
    turned = [tuple(side[dim] for dim in order) for side in sides]
    try:
        found = _odd_element([shape[dim] for dim in order], turned, [_MOST_STEPS])
    except _TooManyStepsError:
        return Flaw()
    if found is None:
        return None
    at = tuple(found[order.index(dim)] for dim in range(len(shape)))
    one = Box(at, (1,) * len(shape))
    return Flaw(
        at=at,
        holders=tuple(n for n, box in enumerate(boxes) if not box.is_empty and box.intersect(one)),
    )


def _lies_in(shape: tuple[int, ...], box: Box) -> bool:
    return (
        len(box.offsets) == len(box.sizes) == len(shape)
        and min((*box.offsets, *box.sizes), default=0) >= 0
        and all(stop <= size for stop, size in zip(box.stops, shape, strict=True))
    )


class _TooManyStepsError(Exception):
    """More boxes lie side by side than may be compared."""


def _odd_element(
    shape: Sequence[int], sides: Iterable[_Sides], steps_left: list[int]
) -> tuple[int, ...] | None:
    """Return the first element that not exactly one box holds; a box is its starts and stops.

    Between two edges of boxes all slices across the first dimension are alike.
    """
    coming = sorted(sides, reverse=True)
    if not shape:
        return None if len(coming) == 1 else ()
    here: list[_Sides] = []
    at = 0
    while at < shape[0]:
        here = [side for side in here if side[0][1] > at]
        while coming and coming[-1][0][0] == at:
            here.append(coming.pop())
        steps_left[0] -= len(here)
        if steps_left[0] < 0:
            raise _TooManyStepsError
        inner = _odd_element(shape[1:], (side[1:] for side in here), steps_left)
        if inner is not None:
            return (at, *inner)
        at = min(side[0][1] for side in here)
        if coming:
            at = min(at, coming[-1][0][0])
    return None


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
