"""Tilings and grids, held against counting elements in numpy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_regions import QUICK, SHAPES, SOLID_SHAPES, boxes_in, mask

from ckpt_storage.format.boxes import Box, find_grid
from ckpt_storage.format.coverage import covers_exactly


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes that tile it, made by cutting boxes in two, in any order."""
    shape = draw(SOLID_SHAPES)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not wide:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(wide))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        offsets, sizes = list(box.offsets), list(box.sizes)
        sizes[dim] = at
        boxes.append(Box(tuple(offsets), tuple(sizes)))
        offsets[dim] += at
        sizes[dim] = box.sizes[dim] - at
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Draw a shape without zeros and the start offsets of a grid on it."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    cuts = [
        (0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))) if size > 1 else (0,)
        for size in shape
    ]
    return shape, cuts


def cells_of(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Return the cells of a grid in C order."""
    per_dim = [
        [(start, stop - start) for start, stop in itertools.pairwise([*cut, size])]
        for cut, size in zip(cuts, shape, strict=True)
    ]
    return [
        Box(tuple(start for start, _ in cell), tuple(size for _, size in cell))
        for cell in itertools.product(*per_dim)
    ]


def assert_coverage(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Assert that `covers_exactly` finds what counting the holders of each element finds."""
    found = covers_exactly(shape, boxes)
    held = [mask(shape, box) for box in boxes]
    count = np.sum(held, axis=0, dtype=int) if boxes else np.zeros(shape, dtype=int)
    outside = [
        index
        for index, (box, inside) in enumerate(zip(boxes, held, strict=True))
        if math.prod(box.sizes) != inside.sum()
    ]
    assert found.outside == (outside[0] if outside else None)
    assert (found.gap is not None) == bool((count == 0).any())
    if found.gap is not None:
        missing = mask(shape, found.gap)
        assert missing.sum() == math.prod(found.gap.sizes) > 0
        assert not count[missing].any()
    assert (found.overlap is not None) == bool((count > 1).any())
    if found.overlap is not None:
        first, second = found.overlap
        assert first < second
        assert (held[first] & held[second]).any()
    assert found.is_exact == (not outside and bool((count == 1).all()))


@QUICK
@given(data=st.data(), shape=SHAPES)
def test_any_boxes_are_judged_as_counting_does(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Gaps, overlaps and boxes that stick out are found in arbitrary heaps of boxes."""
    box = st.builds(
        Box,
        st.tuples(*(st.integers(-1, size + 1) for size in shape)),
        st.tuples(*(st.integers(0, size + 1) for size in shape)),
    )
    assert_coverage(shape, data.draw(st.lists(box | boxes_in(shape), max_size=6)))


@QUICK
@given(data=st.data(), tiling=tilings())
def test_a_tiling_is_exact_until_it_is_touched(
    data: st.DataObject, tiling: tuple[tuple[int, ...], list[Box]]
) -> None:
    """Irregular tilings are exact; with a box dropped, doubled or resized they are not."""
    shape, boxes = tiling
    assert covers_exactly(shape, boxes).is_exact
    at = data.draw(st.integers(0, len(boxes) - 1))
    dropped = [*boxes[:at], *boxes[at + 1 :]]
    assert_coverage(shape, dropped)
    assert not covers_exactly(shape, dropped).is_exact
    assert_coverage(shape, [*boxes, boxes[at]])
    assert_coverage(shape, [*boxes[:at], data.draw(boxes_in(shape)), *boxes[at + 1 :]])
    assert_coverage(shape, [*dropped, data.draw(boxes_in(shape))])


def test_a_tiling_that_no_straight_cut_divides_is_exact() -> None:
    """Four boxes around a fifth, as a pinwheel, are a tiling; a smaller fifth is a gap."""
    wings = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert covers_exactly((3, 3), [*wings, Box((1, 1), (1, 1))]).is_exact
    assert covers_exactly((3, 3), wings).gap == Box((1, 1), (1, 1))


@pytest.mark.parametrize(
    "box", [Box((0,), (4,)), Box((0, 0, 0), (2, 2, 1)), Box((0, 0), (2, -1)), Box((2, 0), (1, 2))]
)
def test_a_box_that_cannot_be_of_the_tensor_is_named(box: Box) -> None:
    """Another number of dimensions, a negative size and a place outside are reported by index."""
    whole = Box((0, 0), (2, 2))
    found = covers_exactly((2, 2), [Box((0, 0), (0, 2)), whole, box, box])
    assert (found.outside, found.gap, found.overlap) == (2, None, None)
    assert find_grid((2, 2), [whole, box]) is None


def test_a_tensor_without_elements_is_covered_by_empty_boxes_or_none() -> None:
    """Nothing is missing where nothing is; a box with elements cannot belong there."""
    assert covers_exactly((0, 4), []).is_exact
    assert covers_exactly((0, 4), [Box((0, 0), (0, 4)), Box((0, 4), (0, 0))]).is_exact
    assert covers_exactly((0, 4), [Box((0, 0), (1, 4))]).outside == 0
    assert covers_exactly((3,), [Box((0,), (3,)), Box((3,), (0,)), Box((9,), (0,))]).is_exact


@QUICK
@given(data=st.data(), grid=grids())
def test_a_grid_is_found_in_any_order(
    data: st.DataObject, grid: tuple[tuple[int, ...], list[tuple[int, ...]]]
) -> None:
    """Cells come back in C order, each with its owner's place in the list given."""
    shape, cuts = grid
    cells = cells_of(shape, cuts)
    shuffled = data.draw(st.permutations(cells))
    found = find_grid(shape, shuffled)
    assert found is not None
    assert found.cuts == tuple(cuts)
    assert [shuffled[owner] for owner in found.owners] == cells
    assert found.boxes(shape) == cells
    assert [found.box(cell, shape) for cell in range(len(cells))] == cells
    region = data.draw(boxes_in(shape))
    wanted = mask(shape, region)
    touched = [at for at, cell in enumerate(cells) if (wanted & mask(shape, cell)).any()]
    assert found.intersecting(region) == touched


@QUICK
@given(tiling=tilings())
def test_what_is_no_grid_is_not_called_one(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    """A tiling is a grid if and only if it has as many boxes as combinations of offsets."""
    shape, boxes = tiling
    starts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    is_grid = math.prod(map(len, starts)) == len(boxes)
    assert (find_grid(shape, boxes) is not None) == is_grid
    if len(boxes) > 1:
        assert find_grid(shape, boxes[1:]) is None
        assert find_grid(shape, [boxes[0], *boxes]) is None
        assert find_grid(shape, [boxes[0], boxes[0], *boxes[2:]]) is None


@QUICK
@given(data=st.data(), shape=SHAPES)
def test_a_grid_is_found_only_in_exact_coverings(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Whatever the boxes, if they are called a grid, each element has one holder."""
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    if find_grid(shape, boxes) is not None:
        count = np.sum([mask(shape, box) for box in boxes], axis=0)
        assert (count == 1).all()
