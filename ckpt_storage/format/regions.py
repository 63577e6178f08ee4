"""Boxes in index space, the byte runs they occupy, and what to copy out of windows of a payload.

Offsets and sizes are in elements, positions in a payload in bytes; a payload holds the elements of
one chunk in C order. A 0-dimensional box holds one element. All intervals are half open.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, ge, le, mul, sub
from typing import NamedTuple

from ckpt_storage.errors import InvalidInputError

_CALLER = "This is a bug in the caller or a checkpoint that contradicts itself."


class Box(NamedTuple):
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
    # Remembered as `rows_of`.
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


class WindowCopy(NamedTuple):
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
    rows = rows_of(tuple(chunk_sizes), region)
    row = rows.row_elements
    if row and not (start_element % row or stop_element % row):
        first, last = start_element // row, stop_element // row
        if 0 <= first < last <= chunk_sizes[0]:
            # Whole rows, as in most windows: nothing to cut.
            low, high = max(first, rows.first_row), min(last, rows.last_row)
            if low >= high:
                return []
            copy = WindowCopy(
                source_offset_elements=(low - first) * row + rows.inner_start,
                source_strides=rows.strides,
                sizes=(high - low, *rows.inner_sizes),
                dest_offsets=(low - rows.first_row, *rows.inner_zeros),
            )
            return [copy]
    copies = []
    for box in interval_boxes(chunk_sizes, start_element, stop_element):
        part = box.intersect(region)
        if part is not None:
            copy = WindowCopy(
                source_offset_elements=_dot(part.offsets, rows.strides) - start_element,
                source_strides=rows.strides,
                sizes=part.sizes,
                dest_offsets=part.relative_to(region).offsets,
            )
            copies.append(copy)
    return copies


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


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the C-order strides of an array, in elements."""
    inner = itertools.accumulate(reversed(sizes[1:]), mul, initial=1)
    return tuple(inner)[::-1] if sizes else ()


class Rows(NamedTuple):
    """What all windows of a chunk have in common for one region of it; everything in elements.

    A row is what one index of the first dimension holds; those of the region are
    [first_row, last_row), none if it is empty. In each its part begins at `inner_start`.
    """

    strides: tuple[int, ...]
    row_elements: int
    first_row: int
    last_row: int
    inner_start: int
    inner_sizes: tuple[int, ...]
    inner_zeros: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def rows_of(chunk_sizes: tuple[int, ...], region: Box) -> Rows:
    """Work out what windows have in common, after making sure that the region lies in the chunk.

    Remembered, because many windows of one chunk follow one another.
    """
    _check_inside(chunk_sizes, region)
    strides = _strides(chunk_sizes)
    if not strides or region.is_empty:
        return Rows(strides, strides[0] if strides else 0, 0, 0, 0, (), ())
    inner = region.sizes[1:]
    return Rows(
        strides=strides,
        row_elements=strides[0],
        first_row=region.offsets[0],
        last_row=region.offsets[0] + region.sizes[0],
        inner_start=_dot(region.offsets[1:], strides[1:]),
        inner_sizes=inner,
        inner_zeros=(0,) * len(inner),
    )


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
