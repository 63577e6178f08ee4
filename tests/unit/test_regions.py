"""Boxes, byte runs, windows, grids and flaws, held against counting elements in numpy arrays."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_assemble import Chunk, tilings

from ckpt_storage.format.boxes import (
    Box,
    Grid,
    box_selection,
    coalesce,
    find_flaw,
    find_grid,
    grid_of_rows,
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
            # Gaps are between intervals, also where one is empty.
            wanted[start : max(stop, start + 1)] = 1
        read = "".join(map(str, wanted[begin:end]))
        assert all(len(bridged) <= gap for bridged in read.split("1"))
    for (begin, end, _), (_, _, which) in itertools.pairwise(extents):
        first, last = intervals[which[0]]
        longer = max(end, last) - begin
        assert first - end > gap or longer > max(max_bytes, end - begin)


def grid_and_owners(shape: tuple[int, ...], boxes: list[Box]) -> tuple[Grid, Sequence[int]]:
    """Return the grid that boxes make, and the position of the box that is each cell."""
    rows = np.array([(*box.offsets, *box.sizes) for box in boxes], dtype=np.int64)
    found = grid_of_rows(shape, rows.reshape(len(boxes), -1), np.arange(len(boxes)))
    assert found is not None
    assert list(found[0]) == list(find_grid(shape, boxes) or ())
    return found


@QUICK
@given(data=st.data(), tiling=tilings("grid"))
def test_a_grid_is_found_in_any_order(
    data: st.DataObject, tiling: tuple[tuple[int, ...], list[Chunk]]
) -> None:
    """Cells come back in C order, each with its owner in the list given."""
    shape, cells = tiling[0], [Box(*chunk) for chunk in tiling[1]]
    shuffled = data.draw(st.permutations(cells))
    found, owners = grid_and_owners(shape, shuffled)
    assert [shuffled[owner] for owner in owners] == cells
    assert list(found) == cells
    assert [found[cell] for cell in range(len(cells))] == cells
    region = data.draw(boxes_in(shape))
    wanted = mask(shape, region)
    touched = [at for at, cell in enumerate(cells) if (wanted & mask(shape, cell)).any()]
    assert found.intersecting(region) == touched
    if len(cells) > 1:
        assert find_grid(shape, cells[1:]) is None
        _, owners = grid_and_owners(shape, [cells[0], *cells])
        assert sorted(owners) == [0, *range(2, len(cells) + 1)]


def cut_up(shape: tuple[int, ...], cut_count: int, seed: int) -> tuple[tuple[int, ...], list[Box]]:
    """Return the boxes that a shape falls into if a piece is cut in two again and again."""
    draw = random.Random(seed)  # for tests
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(cut_count):
        at = draw.randrange(len(boxes))
        offsets, sizes = boxes[at]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw.choice(dims)
            cut = draw.randrange(1, sizes[dim])
            there = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
            boxes[at] = Box(offsets, (*sizes[:dim], cut, *sizes[dim + 1 :]))
            boxes.append(Box(there, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])))
    return shape, boxes


MANY_CUTS = st.builds(
    cut_up,
    st.lists(st.integers(2, 6), min_size=2, max_size=4).map(tuple),
    st.integers(9, 300),
    st.integers(0),
)


@QUICK
@given(
    tiling=tilings() | MANY_CUTS,
    change=st.sampled_from(["none", "drop", "double", "replace", "add"]),
    data=st.data(),
)
def test_a_flaw_is_found_if_and_only_if_counting_finds_one(
    tiling: tuple[tuple[int, ...], list[Chunk]], change: str, data: st.DataObject
) -> None:
    """Whatever form the chunks have, however many there are, and whatever became of one."""
    shape, boxes = tiling[0], [Box(*chunk) for chunk in tiling[1]]
    data.draw(st.randoms(use_true_random=True)).shuffle(boxes)
    if change == "drop":
        boxes.pop()
    elif change == "double":
        boxes.append(boxes[0])
    elif change == "replace":
        boxes[0] = boxes[-1]
    elif change == "add":
        boxes.append(data.draw(boxes_in(shape)))
    empty = Box((0,) * len(shape), (0,) * len(shape))
    found = find_flaw(shape, [*boxes, empty] if shape else boxes)
    held = np.sum([mask(shape, box) for box in boxes], axis=0) + np.zeros(shape, dtype=np.int64)
    assert (found is None) == bool((held == 1).all())
    if found is not None:
        assert found.at is not None
        assert held[found.at] == len(found.holders) != 1
    if find_grid(shape, boxes) is not None:
        # Of equal ones one counts.
        assert (np.sum([mask(shape, box) for box in {*boxes}], axis=0) == 1).all()


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((2, 2), Box((0,), (4,))),
        ((2, 2), Box((0, 0, 0), (2, 2, 1))),
        ((2, 2), Box((0, 0), (2, -1))),
        ((2, 2), Box((2, 0), (1, 2))),
        ((0, 2), Box((0, 0), (1, 2))),
    ],
)
def test_a_box_that_cannot_be_of_the_tensor_is_named(shape: tuple[int, ...], box: Box) -> None:
    """Other dimensions, a negative size and a place outside are told by position."""
    sound = [Box((0, 0), (0, 2)), Box((0, 0), shape)]
    assert find_flaw(shape, sound) is find_flaw((0, *shape), []) is None
    assert find_grid(shape, [sound[1], box]) is None
    found = find_flaw(shape, [*sound, box, box])
    assert found is not None
    assert found.outside == 2


def test_chunks_that_all_lie_side_by_side_are_refused_at_once() -> None:
    """Too many that begin at one place and overlap nowhere are not held each against each."""
    cut = [Box((n, at), (1, 1)) for n in range(2) for at in range(20_000)]
    assert find_flaw((2, 20_000), cut) is None
    nested = [Box((0, 0), (n + 1, 1)) for n in range(20_000)]
    found = find_flaw((20_000, 2), nested)
    assert found is not None


def test_more_steps_than_may_be_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be checked in time is not taken for sound."""
    monkeypatch.setattr("ckpt_storage.format.boxes._MOST_STEPS", 10)
    assert find_flaw((4,), [Box((at,), (1,)) for at in range(4)]) is None
    found = find_flaw((20,), [Box((at,), (1,)) for at in range(20)])
    assert str(found) == "they are cut in more ways than can be checked"
