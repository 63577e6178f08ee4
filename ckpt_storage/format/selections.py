"""Which elements of a chunk are meant, where they lie in its payload, and what is read for them.

A selection has one ascending `range` of positions for each dimension, counted from the chunk's
first element; a box is the case of step 1. Positions in a payload are in bytes; a payload holds
the elements of one chunk in C order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from ckpt_storage.errors import InvalidInputError

from .boxes import Box, interval_boxes

Selection = tuple[range, ...]

_CALLER = "This is a bug in the caller or a checkpoint that contradicts itself."


def box_selection(box: Box) -> Selection:
    """Return the selection of all elements of a box."""
    return tuple(map(range, box.offsets, box.stops))


def clip(ranges: Sequence[range], box: Box) -> tuple[Selection, tuple[slice, ...]] | None:
    """Return which of the selected positions lie in `box`, and where they are in the selection.

    The positions count from the first element of the box. None if there are none.
    """
    inside: list[range] = []
    where: list[slice] = []
    for positions, offset, size in zip(ranges, box.offsets, box.sizes, strict=True):
        low, high = _between(positions, offset, offset + size)
        if low >= high:
            return None
        start = positions.start + low * positions.step - offset
        count = high - low
        inside.append(range(start, start + (count - 1) * positions.step + 1, positions.step))
        where.append(slice(low, high))
    return tuple(inside), tuple(where)


def _between(positions: range, start: int, stop: int) -> tuple[int, int]:
    """Return the interval of indices of `positions`, which ascend, that fall in [start, stop)."""
    low = -((positions.start - start) // positions.step)
    high = -((positions.start - stop) // positions.step)
    return max(low, 0), min(high, len(positions))


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of `length` bytes of a payload, ascending; `steps` lead from the first to each."""

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
        """The shortest interval that holds them all."""
        stop = self.first + sum(step[-1] for step in self.steps) + self.length if len(self) else 0
        return range(self.first if stop else 0, stop)


def touched_spans(
    chunk_sizes: Sequence[int], ranges: Sequence[range], item_bytes: int, grain_bytes: int = 1
) -> Spans:
    """Return byte intervals of a payload that hold all selected elements.

    Between two selected elements of one interval lie fewer than `grain_bytes` bytes: with the
    size of a block for grain, each block that an interval reaches holds a selected element. Raises
    `InvalidInputError` for a selection that leaves the chunk.
    """
    if len(ranges) != len(chunk_sizes) or any(
        positions.step < 1 or positions.start < 0 or (positions and positions[-1] >= size)
        for positions, size in zip(ranges, chunk_sizes, strict=False)
    ):
        raise InvalidInputError(
            f"The selection {list(ranges)} leaves a chunk of sizes {list(chunk_sizes)}.",
            next_step=_CALLER,
        )
    if not all(ranges):
        return Spans(0, 0, (range(0),))
    strides = _strides(chunk_sizes)
    length = item_bytes
    dim = len(ranges)
    while dim:
        positions = ranges[dim - 1]
        pitch = positions.step * strides[dim - 1] * item_bytes
        if len(positions) > 1 and pitch - length >= grain_bytes:
            break
        length += (len(positions) - 1) * pitch
        dim -= 1
    first = sum(map(mul, (r.start for r in ranges), strides)) * item_bytes
    steps = [
        range(0, len(r) * r.step * stride * item_bytes, r.step * stride * item_bytes)
        for r, stride in zip(ranges[:dim], strides[:dim], strict=True)
    ]
    return Spans(first, length, tuple(steps))


@functools.lru_cache(maxsize=256)
def run_of(chunk_sizes: tuple[int, ...], where: Selection, item_bytes: int) -> range | None:
    """Return the bytes of a selection if it has some and they are adjacent, else None.

    Remembered: many chunks that are cut alike follow one another. Raises as `touched_spans`.
    """
    spans = touched_spans(chunk_sizes, where, item_bytes)
    return spans.hull if len(spans) == 1 else None


class WindowCopy(NamedTuple):
    """One strided copy out of a window of a payload; everything in elements.

    The source is the array of shape `sizes` that begins `source_offset_elements` behind the
    window's start and has `source_strides`; it does not reach out of the window. The destination
    is the box of the same `sizes` at `dest_offsets` in the array of the selection's shape.
    """

    source_offset_elements: int
    source_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]


def selected_copies(
    chunk_sizes: Sequence[int], ranges: Sequence[range], start_element: int, stop_element: int
) -> list[WindowCopy]:
    """Return what to copy from elements [start, stop) of a payload into the array of a selection.

    At most max(1, 2 ndim - 1) copies. Raises `InvalidInputError` for a window that leaves the
    chunk.
    """
    strides = _strides(chunk_sizes)
    copies = []
    for box in interval_boxes(chunk_sizes, start_element, stop_element):
        part = [
            _between(positions, offset, offset + size)
            for positions, offset, size in zip(ranges, box.offsets, box.sizes, strict=True)
        ]
        if any(low >= high for low, high in part):
            continue
        firsts = [r.start + low * r.step for r, (low, _) in zip(ranges, part, strict=True)]
        copies.append(
            WindowCopy(
                source_offset_elements=sum(map(mul, firsts, strides)) - start_element,
                source_strides=tuple(
                    r.step * stride for r, stride in zip(ranges, strides, strict=True)
                ),
                sizes=tuple(high - low for low, high in part),
                dest_offsets=tuple(low for low, _ in part),
            )
        )
    return copies


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the C-order strides of an array, in elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One read: bytes [start, stop), which hold the intervals at positions `members`."""

    start: int
    stop: int
    members: range


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
            extents.append(Extent(start=begin, stop=end, members=range(first, index)))
        first, begin, end = index, start, stop
    if intervals:
        extents.append(Extent(start=begin, stop=end, members=range(first, len(intervals))))
    return extents


def round_out(start: int, stop: int, block: int, total: int) -> tuple[int, int]:
    """Return the shortest interval of whole blocks that holds [start, stop).

    The last block ends at `total`. An empty interval stays empty.
    """
    first = start - start % block
    return (first, min(stop + -stop % block, total)) if start < stop else (first, first)
