"""Boxes of elements, the grids that they form, and selections of elements in a payload.

Offsets and sizes are in elements; a 0-dimensional box holds one element. Positions in a payload,
which has the elements of one chunk in C order, are in bytes. All intervals are half open.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import NamedTuple

import numpy as np

from ckpt_storage.errors import InvalidInputError

from .columns import Counts, LazyList

_MAX_ELEMENTS = (1 << 62) - 1
_MAX_STEPS = 1 << 23
_Sides = tuple[tuple[int, int], ...]


class Box(NamedTuple):
    """An axis-aligned box of elements; both tuples have one entry per dimension.

    The constructor checks nothing: `find_flaw` and the codecs check boxes of documents.
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
        """Return the box of the elements in both, None if they share none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.stops, other.stops), starts))
        return Box(starts, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, other: Box) -> Box:
        """Return the same elements counted from the first element of `other`."""
        return Box(tuple(map(sub, self.offsets, other.offsets)), self.sizes)


def interval_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return boxes that hold elements [start, stop) of the C-order linearisation of `shape`.

    The boxes are in C order, and each is contiguous in it; there are at most max(1, 2 ndim - 1).
    Raises `ValueError` if the interval is not within the shape.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements [{start}, {stop}) of the shape {list(shape)}")
    if not shape:
        return [Box((), ())] if start < stop else []
    inner, boxes = shape[1:], list[Box]()
    row = math.prod(inner)
    while start < stop:
        index, before = divmod(start, row)
        count = 0 if before else (stop - start) // row
        if count:
            boxes.append(Box((index, *(0 for _ in inner)), (count, *inner)))
        else:
            end = min(stop - index * row, row)
            pieces = interval_boxes(inner, before, end)
            boxes += (Box((index, *piece.offsets), (1, *piece.sizes)) for piece in pieces)
        start = (index + max(count, 1)) * row
    return boxes


class Grid(LazyList[Box]):
    """Chunks that tile a tensor of `shape` as a cartesian grid: its cells in C order.

    `cuts` has the start offsets of each dimension, ascending from 0; regular offsets may be a
    `range`. A cell is made on access.
    """

    def __init__(self, cuts: tuple[Sequence[int], ...], shape: tuple[int, ...]) -> None:
        self.cuts = cuts
        self.shape = shape
        super().__init__(math.prod(map(len, cuts)), functools.partial(_cell, cuts, shape))

    def __iter__(self) -> Iterator[Box]:
        pairs = zip(self.cuts, self.shape, strict=True)
        sizes = [map(sub, (*cuts[1:], size), cuts) for cuts, size in pairs]
        return map(Box, itertools.product(*self.cuts), itertools.product(*sizes))

    def __reduce__(self) -> tuple[type[Grid], tuple[tuple[Sequence[int], ...], tuple[int, ...]]]:
        return Grid, (self.cuts, self.shape)

    def cell_at(self, offsets: Sequence[int]) -> int | None:
        """Return the position of the cell that begins at `offsets`, None if no cell does."""
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
        """Return the positions, ascending, of the cells that share elements with `box`.

        The box must lie in the shape.
        """
        if box.is_empty:
            return []
        cells = [0]
        for cuts, first, stop in zip(self.cuts, box.offsets, box.stops, strict=True):
            here = range(bisect_right(cuts, first) - 1, bisect_left(cuts, stop))
            cells = [cell * len(cuts) + at for cell in cells for at in here]
        return cells


def _cell(all_cuts: tuple[Sequence[int], ...], shape: tuple[int, ...], cell: int) -> Box:
    offsets: list[int] = []
    sizes: list[int] = []
    for cuts, size in zip(reversed(all_cuts), reversed(shape), strict=True):
        cell, at = divmod(cell, len(cuts))
        stop = cuts[at + 1] if at + 1 < len(cuts) else size
        offsets.append(cuts[at])
        sizes.append(stop - cuts[at])
    return Box(tuple(reversed(offsets)), tuple(reversed(sizes)))


def find_grid(shape: tuple[int, ...], boxes: Sequence[Box]) -> Grid | None:
    """Return the grid whose cells are exactly `boxes`; as `grid_of_rows`."""
    ndim = len(shape)
    if any(len(box.offsets) != ndim or len(box.sizes) != ndim for box in boxes):
        return None
    rows = np.array([(*box.offsets, *box.sizes) for box in boxes], dtype=np.int64)
    grids = grid_of_rows(shape, rows.reshape(len(boxes), 2 * ndim), np.arange(len(boxes)))
    return grids and grids[0]


def grid_of_rows(
    shape: tuple[int, ...], rows: Counts, owners: Counts
) -> tuple[Grid, Sequence[int]] | None:
    """Return the grid whose cells are the boxes of `rows`, in any order, and the cells' owners.

    A row has the offsets, then the sizes of a box. A grid covers the shape exactly. Boxes without
    elements are ignored; of equal boxes the first counts. None if the boxes form no grid.
    """
    if 0 in shape or math.prod(shape) > _MAX_ELEMENTS:
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
    # `return_index` gives the first of equal places.
    cells, first = np.unique(places, return_index=True)
    return (Grid(tuple(cuts), shape), compact(owners[first])) if len(cells) == cell_count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Why chunks do not make up their tensor.

    `outside` is the position of the first chunk that leaves the shape. Otherwise `at` is an element
    that no chunk or several chunks hold, and `holders` has the positions of these chunks; `at` is
    None if too many chunks lie side by side to compare them.
    """

    outside: int | None = None
    at: tuple[int, ...] | None = None
    holders: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.outside is not None:
            return f"chunk {self.outside} leaves it"
        if self.at is None:
            return "they are cut in more ways than can be checked"
        holders = f"{len(self.holders)} chunks hold" if self.holders else "no chunk holds"
        return f"{holders} the element {list(self.at)}"


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Return why `boxes` do not hold each element of a tensor of `shape` once; None if they do.

    Boxes without elements only have to lie in the shape.
    """
    for number, box in enumerate(boxes):
        if not _lies_in(shape, box):
            return Flaw(outside=number)
    if 0 in shape:
        return None
    # Sweep first along the dimension with few starts and few boxes side by side.
    starts = [len({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    reach = [sum(box.sizes[dim] for box in boxes) / size for dim, size in enumerate(shape)]
    order = sorted(range(len(shape)), key=lambda dim: starts[dim] * reach[dim])
    sides = [list(zip(box.offsets, box.stops, strict=True)) for box in boxes if not box.is_empty]
    turned = [tuple(side[dim] for dim in order) for side in sides]
    try:
        element = _find_element([shape[dim] for dim in order], turned, [_MAX_STEPS])
    except _TooManyStepsError:
        return Flaw()
    if element is None:
        return None
    at = tuple(element[order.index(dim)] for dim in range(len(shape)))
    cell = Box(at, (1,) * len(shape))
    return Flaw(
        at=at,
        holders=tuple(n for n, box in enumerate(boxes) if not box.is_empty and box.intersect(cell)),
    )


def _lies_in(shape: tuple[int, ...], box: Box) -> bool:
    return (
        len(box.offsets) == len(box.sizes) == len(shape)
        and min((*box.offsets, *box.sizes), default=0) >= 0
        and all(stop <= size for stop, size in zip(box.stops, shape, strict=True))
    )


class _TooManyStepsError(Exception):
    """Too many boxes lie side by side to be compared."""


def _find_element(
    shape: Sequence[int], sides: Iterable[_Sides], steps_left: list[int]
) -> tuple[int, ...] | None:
    """Return the first element that no box or several boxes hold; a box is its starts and stops.

    A sweep along the first dimension: between two edges of boxes, all slices across it are equal.
    """
    pending = sorted(sides, reverse=True)
    if not shape:
        return None if len(pending) == 1 else ()
    current: list[_Sides] = []
    at = 0
    while at < shape[0]:
        current = [side for side in current if side[0][1] > at]
        while pending and pending[-1][0][0] == at:
            current.append(pending.pop())
        steps_left[0] -= len(current)
        if steps_left[0] < 0:
            raise _TooManyStepsError
        inner = _find_element(shape[1:], (side[1:] for side in current), steps_left)
        if inner is not None:
            return (at, *inner)
        at = min(side[0][1] for side in current)
        if pending:
            at = min(at, pending[-1][0][0])
    return None


def compact(numbers: Counts) -> Sequence[int]:
    """Return integers from 0 on as a `range` if they are regular, else as an array."""
    count = len(numbers)
    if count > 1:
        step = int(numbers[1]) - int(numbers[0])
        if step and bool((np.diff(numbers) == step).all()):
            return range(int(numbers[0]), int(numbers[0]) + count * step, step)
    elif count:
        return range(int(numbers[0]), int(numbers[0]) + 1)
    return array("q", numbers.tobytes())


Selection = tuple[range, ...]
"""Selected positions in each dimension of a chunk, counted from its first element."""


def box_selection(box: Box) -> Selection:
    """Return the selection of all elements of a box."""
    return tuple(map(range, box.offsets, box.stops))


def clip(ranges: Sequence[range], box: Box) -> tuple[Selection, tuple[slice, ...]] | None:
    """Return the selected positions that lie in `box`, and their slices in the selection.

    The positions count from the first element of the box. None if there are none.
    """
    inside: list[range] = []
    where: list[slice] = []
    for positions, offset, size in zip(ranges, box.offsets, box.sizes, strict=True):
        low = max(-((positions.start - offset) // positions.step), 0)
        high = min(-((positions.start - offset - size) // positions.step), len(positions))
        if low >= high:
            return None
        taken = positions[low:high]
        inside.append(range(taken.start - offset, taken.stop - offset, taken.step))
        where.append(slice(low, high))
    return tuple(inside), tuple(where)


@dataclass(frozen=True, slots=True)
class Spans:
    """Ascending intervals of `length` bytes of a payload; `steps` added to `first` start them."""

    first: int
    length: int
    steps: tuple[range, ...]

    def __len__(self) -> int:
        return math.prod(map(len, self.steps))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in itertools.product(*self.steps):
            start = self.first + sum(step)
            yield start, start + self.length

    @property
    def hull(self) -> range:
        """The shortest interval that contains all intervals."""
        stop = self.first + sum(step[-1] for step in self.steps) + self.length if len(self) else 0
        return range(self.first if stop else 0, stop)


def touched_spans(
    chunk_sizes: Sequence[int], ranges: Sequence[range], item_bytes: int, grain_bytes: int = 1
) -> Spans:
    """Return byte intervals of a payload that contain all selected elements.

    Fewer than `grain_bytes` bytes separate two neighbouring selected elements of one interval. If
    it is the size of a block, each block that an interval touches has a selected element. Raises
    `InvalidInputError` for a selection that leaves the chunk.
    """
    if len(ranges) != len(chunk_sizes) or any(
        positions.step < 1 or positions.start < 0 or (positions and positions[-1] >= size)
        for positions, size in zip(ranges, chunk_sizes, strict=False)
    ):
        raise InvalidInputError(
            f"The selection {list(ranges)} leaves a chunk of sizes {list(chunk_sizes)}.",
            next_step="This is a bug in the caller, or the checkpoint contradicts itself.",
        )
    if not all(ranges):
        return Spans(0, 0, (range(0),))
    strides = [stride * item_bytes for stride in _strides(chunk_sizes)]
    first = sum(map(mul, (r.start for r in ranges), strides))
    steps = [
        range(0, len(r) * r.step * stride, r.step * stride)
        for r, stride in zip(ranges, strides, strict=True)
    ]
    length = item_bytes
    while steps and (len(steps[-1]) == 1 or steps[-1].step - length < grain_bytes):
        length += steps.pop()[-1]
    return Spans(first, length, tuple(steps))


@functools.lru_cache(maxsize=256)
def run_of(chunk_sizes: tuple[int, ...], where: Selection, item_bytes: int) -> range | None:
    """Return the bytes of a selection if they are adjacent and not empty, else None.

    Cached, because many chunks of equal sizes follow one another. Raises as `touched_spans`.
    """
    spans = touched_spans(chunk_sizes, where, item_bytes)
    return spans.hull if len(spans) == 1 else None


class WindowCopy(NamedTuple):
    """One strided copy out of a window of a payload; everything in elements.

    The source is the array of shape `sizes` with `source_strides` that begins
    `source_offset_elements` after the start of the window; it ends inside the window. The
    destination is the box of these `sizes` at `dest_offsets` in an array of the selection's shape.
    """

    source_offset_elements: int
    source_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def selected_copies(
    chunk_sizes: tuple[int, ...], ranges: Selection, start_element: int, stop_element: int
) -> tuple[WindowCopy, ...]:
    """Return the copies from elements [start, stop) of a payload into the array of a selection.

    At most max(1, 2 ndim - 1) copies. Cached, as `run_of`. Raises `ValueError` for a window that
    leaves the chunk.
    """
    strides = _strides(chunk_sizes)
    copies = []
    for box in interval_boxes(chunk_sizes, start_element, stop_element):
        held = clip(ranges, box)
        if held is None:
            continue
        inside, where = held
        firsts = (r.start + offset for r, offset in zip(inside, box.offsets, strict=True))
        copies.append(
            WindowCopy(
                source_offset_elements=sum(map(mul, firsts, strides)) - start_element,
                source_strides=tuple(map(mul, (r.step for r in ranges), strides)),
                sizes=tuple(map(len, inside)),
                dest_offsets=tuple(positions.start for positions in where),
            )
        )
    return tuple(copies)


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def coalesce(
    intervals: Sequence[tuple[int, int]], gap: int, max_bytes: int
) -> Iterator[tuple[int, int, range]]:
    """Yield joined intervals, each with the positions of its members in the sorted `intervals`.

    Neighbours at most `gap` bytes apart are joined up to a length of `max_bytes`. A joined interval
    is longer only if its first member is, and then it ends with that member.
    """
    first = begin = end = 0
    for index, (start, stop) in enumerate(intervals):
        reach = max(stop, end)
        if index and start - end <= gap and reach - begin <= max(max_bytes, end - begin):
            end = reach
            continue
        if index:
            yield begin, end, range(first, index)
        first, begin, end = index, start, stop
    if intervals:
        yield begin, end, range(first, len(intervals))


def round_out(start: int, stop: int, block: int, total: int) -> tuple[int, int]:
    """Return the shortest interval of whole blocks that contains [start, stop).

    The last block ends at `total`. An empty interval stays empty.
    """
    first = start - start % block
    return (first, min(stop + -stop % block, total)) if start < stop else (first, first)
