"""Which elements of a chunk are meant, and where they lie in its payload.

A selection has one ascending `range` of positions for each dimension, counted from the chunk's
first element; a box is the case of step 1. Positions in a payload are in bytes; a payload holds
the elements of one chunk in C order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import mul

from ckpt_storage.errors import InvalidInputError

from .boxes import Box, WindowCopy, interval_boxes

Selection = tuple[range, ...]


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


def touched_spans(
    chunk_sizes: Sequence[int], ranges: Sequence[range], item_bytes: int, grain_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield byte intervals of a payload that hold all selected elements, ascending.

    Between two selected elements of one interval lie fewer than `grain_bytes` bytes: with the
    size of a block for grain, each block that an interval reaches holds a selected element. There
    are at most a few intervals per `grain_bytes` of the payload. Nothing may be empty. Raises
    `InvalidInputError` for a selection that leaves the chunk.
    """
    _check_inside(chunk_sizes, ranges)
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
    for step in itertools.product(*steps):
        start = first + sum(step)
        yield start, start + length


def selected_copies(
    chunk_sizes: Sequence[int], ranges: Sequence[range], start_element: int, stop_element: int
) -> list[WindowCopy]:
    """Return what to copy from elements [start, stop) of a payload into the array of a selection.

    There are at most max(1, 2 ndim - 1) copies, whatever the sizes; over windows that partition
    the payload each element is copied once. Raises `InvalidInputError` for a window that leaves
    the chunk.
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


def _check_inside(chunk_sizes: Sequence[int], ranges: Sequence[range]) -> None:
    if len(ranges) != len(chunk_sizes) or any(
        positions.step < 1 or positions.start < 0 or (positions and positions[-1] >= size)
        for positions, size in zip(ranges, chunk_sizes, strict=False)
    ):
        raise InvalidInputError(
            f"The selection {list(ranges)} leaves a chunk of sizes {list(chunk_sizes)}.",
            next_step="This is a bug in the caller or a checkpoint that contradicts itself.",
        )
