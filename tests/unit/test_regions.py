"""Boxes, byte runs and windows, held against counting elements in numpy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_storage.format.boxes import (
    Box,
    box_selection,
    coalesce,
    interval_boxes,
    run_of,
    touched_spans,
)

QUICK = settings(max_examples=200, deadline=None)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Draw a box, possibly empty, within `shape`; along half of the dimensions it is whole."""
    spans = [
        (0, size)
        if draw(st.booleans())
        else sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        for size in shape
    ]
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


def slices(box: Box) -> tuple[slice, ...]:
    """Return the numpy index of a box."""
    return tuple(
        slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)
    )


def mask(shape: Sequence[int], box: Box) -> NDArray[np.bool_]:
    """Return an array that is True in the elements of `shape` that `box` holds."""
    held = np.zeros(shape, dtype=bool)
    held[
        tuple(
            slice(max(start, 0), max(start + size, 0))
            for start, size in zip(box.offsets, box.sizes, strict=True)
        )
    ] = True
    return held


@QUICK
@given(data=st.data(), shape=SHAPES)
def test_boxes_behave_as_sets_of_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Volume, emptiness, intersection and shift agree with masks."""
    left, right = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    in_left, in_right = mask(shape, left), mask(shape, right)
    assert left.volume == in_left.sum()
    assert left.is_empty == (not in_left.any())
    both = left.intersect(right)
    assert (both is not None) == bool((in_left & in_right).any())
    if both is not None:
        assert (mask(shape, both) == (in_left & in_right)).all()
        values = np.arange(math.prod(shape)).reshape(shape)
        shifted = values[slices(left)][slices(both.relative_to(left))]
        assert (shifted == values[slices(both)]).all()


@QUICK
@given(data=st.data(), sizes=SHAPES, item_bytes=st.sampled_from([1, 2, 8]))
def test_the_number_and_extent_of_runs_are_those_of_marked_bytes(
    data: st.DataObject, sizes: tuple[int, ...], item_bytes: int
) -> None:
    """How many runs a region is, and where they begin and end, agrees with marking each byte."""
    region = data.draw(boxes_in(sizes))
    held = np.repeat(mask(sizes, region).ravel(), item_bytes)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], held.astype(int), [0]))))
    runs = [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
    where = box_selection(region)
    spans = touched_spans(sizes, where, item_bytes)
    assert list(spans) == runs
    assert len(spans) == len(runs)
    assert spans.hull == (range(runs[0][0], runs[-1][1]) if runs else range(0))
    assert run_of(sizes, where, item_bytes) == (range(*runs[0]) if len(runs) == 1 else None)


@QUICK
@given(data=st.data(), shape=SHAPES)
def test_an_interval_is_cut_into_few_boxes_in_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Laid end to end, the boxes' elements are those of the interval."""
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = interval_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert not any(box.is_empty for box in boxes)
    values = np.arange(total).reshape(shape)
    elements = [int(value) for box in boxes for value in values[slices(box)].ravel()]
    assert elements == list(range(start, stop))


INTERVALS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=12).map(
    lambda pairs: sorted((start, start + length) for start, length in pairs)
)


@QUICK
@given(intervals=INTERVALS, gap=st.integers(0, 20), max_bytes=st.integers(1, 60))
def test_extents_hold_all_intervals_and_respect_the_limits(
    intervals: list[tuple[int, int]], gap: int, max_bytes: int
) -> None:
    """Every interval is in one extent, none is too long or bridges too much, none could join."""
    extents = list(coalesce(intervals, gap, max_bytes))
    assert [at for *_, which in extents for at in which] == list(range(len(intervals)))
    for begin, end, which in extents:
        members = [intervals[at] for at in which]
        assert begin == members[0][0]
        assert end == max(stop for _, stop in members)
        longest = max(stop - start for start, stop in members)
        assert end - begin <= max(max_bytes, longest)
        wanted = np.zeros(200, dtype=int)
        for start, stop in members:
            wanted[start:stop] = 1
        read = "".join(map(str, wanted[begin:end]))
        assert all(len(bridged) <= gap for bridged in read.split("1"))
    for (begin, end, _), (_, _, which) in itertools.pairwise(extents):
        first, last = intervals[which[0]]
        longer = max(end, last) - begin
        assert first - end > gap or longer > max(max_bytes, end - begin)
