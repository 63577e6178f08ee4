"""Boxes in index space, whether they tile a tensor, and the byte runs they occupy.

Knows integers only: no dtype, no file, no tensor. Called by `manifest`, `filewriter`, `commit`
and the readers. Offsets and sizes are in elements, positions in a payload in bytes; a payload
holds the elements of one chunk in C order. A 0-dimensional box holds one element. All intervals
are half open.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, ge, le, mul, sub

from .errors import InvalidInputError

_CALLER = "This is a bug in the caller or a checkpoint that contradicts itself."


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box of elements; both tuples have one entry per dimension.

    Nothing is checked here: `covers_exactly` and the codecs judge what comes from outside.
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

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box; an empty one is in any."""
        return other.is_empty or (
            all(map(le, self.offsets, other.offsets)) and all(map(ge, self.stops, other.stops))
        )


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


@dataclass(frozen=True, slots=True)
class ByteRun:
    """The bytes [start, stop) of a payload."""

    start: int
    stop: int


def byte_runs(chunk_sizes: Sequence[int], region: Box, item_bytes: int) -> Iterator[ByteRun]:
    """Yield the byte runs of `region` in the payload of a chunk, ascending, none adjacent.

    `region` counts from the chunk's first element. There can be as many runs as the region has
    rows; `run_count` tells. Raises `InvalidInputError` if the region leaves the chunk.
    """
    _check_inside(chunk_sizes, region)
    if region.is_empty:
        return
    strides = _strides(chunk_sizes)
    first = _dot(region.offsets, strides) * item_bytes
    outer = _run_dimension(chunk_sizes, region)
    length = region.volume // math.prod(region.sizes[:outer]) * item_bytes
    steps = [
        range(0, size * stride * item_bytes, stride * item_bytes)
        for size, stride in zip(region.sizes[:outer], strides[:outer], strict=True)
    ]
    for step in itertools.product(*steps):
        start = first + sum(step)
        yield ByteRun(start, start + length)


def run_count(chunk_sizes: Sequence[int], region: Box) -> int:
    """Return how many runs `byte_runs` yields, without making them."""
    return _run_count(tuple(chunk_sizes), region)


@functools.lru_cache(maxsize=256)
def _run_count(chunk_sizes: tuple[int, ...], region: Box) -> int:
    # Remembered as `_strides_around`.
    _check_inside(chunk_sizes, region)
    if region.is_empty:
        return 0
    return math.prod(region.sizes[: _run_dimension(chunk_sizes, region)])


def run_bytes(region: Box, item_bytes: int) -> int:
    """Return how many bytes the runs of `region` hold together."""
    return region.volume * item_bytes


def run_extent(chunk_sizes: Sequence[int], region: Box, item_bytes: int) -> ByteRun:
    """Return the shortest interval that holds all runs of `region`; [0, 0) if it has none.

    Raises `InvalidInputError` if `region` leaves the chunk.
    """
    _check_inside(chunk_sizes, region)
    if region.is_empty:
        return ByteRun(0, 0)
    strides = _strides(chunk_sizes)
    first = _dot(region.offsets, strides)
    last = first + _dot([size - 1 for size in region.sizes], strides)
    return ByteRun(first * item_bytes, (last + 1) * item_bytes)


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
            next_step=_CALLER,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCopy:
    """One strided copy out of a window of a payload; everything in elements.

    The source is the array of shape `sizes` that begins `source_offset_elements` behind the
    window's start and has `source_strides`; it does not reach out of the window. The destination
    is the box of the same `sizes` at `dest_offsets` in the array of the region's shape.
    """

    source_offset_elements: int
    source_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]


def window_copies(
    chunk_sizes: Sequence[int], region: Box, start_element: int, stop_element: int
) -> list[WindowCopy]:
    """Return what to copy from elements [start, stop) of a chunk's payload into a region.

    `region` counts from the chunk's first element. There are at most max(1, 2 ndim - 1) copies,
    whatever the sizes; over windows that partition the payload each element of the region is
    copied once. Raises `InvalidInputError` if the region or the window leaves the chunk.
    """
    strides = _strides_around(tuple(chunk_sizes), region)
    copies = []
    for box in _window_boxes(chunk_sizes, strides, start_element, stop_element):
        part = box.intersect(region)
        if part is not None:
            copy = WindowCopy(
                source_offset_elements=_dot(part.offsets, strides) - start_element,
                source_strides=strides,
                sizes=part.sizes,
                dest_offsets=part.relative_to(region).offsets,
            )
            copies.append(copy)
    return copies


def _window_boxes(
    chunk_sizes: Sequence[int], strides: Sequence[int], start: int, stop: int
) -> Sequence[Box]:
    """Return what `interval_boxes` does; soon where the interval is of whole rows, as most are."""
    if chunk_sizes and (row := strides[0]) and not (start % row or stop % row):
        first, last = start // row, stop // row
        if 0 <= first < last <= chunk_sizes[0]:
            inner = chunk_sizes[1:]
            return (Box((first, *(0 for _ in inner)), (last - first, *inner)),)
    return interval_boxes(chunk_sizes, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One read: bytes [start, stop), which hold the intervals at positions `members`."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(intervals: Sequence[tuple[int, int]], gap: int, max_bytes: int) -> list[Extent]:
    """Return few extents that hold all `intervals`, which are half open and sorted by start.

    Neighbours at most `gap` bytes apart share an extent while it stays within `max_bytes`. An
    extent is longer only if its first member is, and then it is as long as that member. Raises
    `InvalidInputError` if an interval is reversed or out of order.
    """
    extents: list[Extent] = []
    first, begin, end, previous = 0, 0, 0, 0
    for index, (start, stop) in enumerate(intervals):
        if stop < start or (index and start < previous):
            raise InvalidInputError(
                f"Interval {index}, [{start}, {stop}), is reversed or out of order.",
                next_step=_CALLER,
            )
        previous = start
        reach = max(stop, end)
        if index and start - end <= gap and reach - begin <= max(max_bytes, end - begin):
            end = reach
            continue
        if index:
            extents.append(Extent(start=begin, stop=end, members=tuple(range(first, index))))
        first, begin, end = index, start, stop
    if intervals:
        extents.append(Extent(start=begin, stop=end, members=tuple(range(first, len(intervals)))))
    return extents


def round_out(start: int, stop: int, block: int, total: int) -> tuple[int, int]:
    """Return the shortest interval of whole blocks that holds [start, stop).

    The last block ends at `total`. An empty interval stays empty.
    """
    first = start - start % block
    return (first, min(stop + -stop % block, total)) if start < stop else (first, first)


def _cell_sizes(cuts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(map(sub, (*cuts[1:], size), cuts))


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the C-order strides of an array, in elements."""
    inner = itertools.accumulate(reversed(sizes[1:]), mul, initial=1)
    return tuple(inner)[::-1] if sizes else ()


@functools.lru_cache(maxsize=256)
def _strides_around(chunk_sizes: tuple[int, ...], region: Box) -> tuple[int, ...]:
    """Return the strides of a chunk, after making sure that a region lies in it.

    Remembered, because many windows of one chunk follow one another.
    """
    _check_inside(chunk_sizes, region)
    return _strides(chunk_sizes)


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(map(mul, left, right))


def _run_dimension(chunk_sizes: Sequence[int], region: Box) -> int:
    """Return the outermost dimension along which the region's elements are one run."""
    dim = max(len(chunk_sizes) - 1, 0)
    while dim and region.sizes[dim] == chunk_sizes[dim]:
        dim -= 1
    return dim


def _check_inside(chunk_sizes: Sequence[int], region: Box) -> None:
    chunk = Box((0,) * len(chunk_sizes), tuple(chunk_sizes))
    same_ndim = len(region.offsets) == len(region.sizes) == len(chunk_sizes)
    if not same_ndim or min(region.sizes, default=0) < 0 or not chunk.contains(region):
        raise InvalidInputError(
            f"The region at {list(region.offsets)} of sizes {list(region.sizes)} leaves a chunk "
            f"of sizes {list(chunk_sizes)}.",
            next_step=_CALLER,
        )
