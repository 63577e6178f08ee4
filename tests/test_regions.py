"""Boxes, tilings, byte runs and windows, held against counting elements in numpy arrays."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.regions import (
    Box,
    ByteRun,
    Grid,
    WindowCopy,
    byte_runs,
    coalesce,
    covers_exactly,
    find_grid,
    interval_boxes,
    round_out,
    run_bytes,
    run_count,
    run_extent,
    window_copies,
)

QUICK = settings(max_examples=200, deadline=None)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SOLID_SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


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
def test_boxes_behave_as_sets_of_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Volume, emptiness, intersection, containment and shift agree with masks."""
    left, right = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    in_left, in_right = mask(shape, left), mask(shape, right)
    assert left.volume == in_left.sum()
    assert left.is_empty == (not in_left.any())
    assert left.contains(right) == bool((in_left | ~in_right).all())
    both = left.intersect(right)
    assert (both is not None) == bool((in_left & in_right).any())
    if both is not None:
        assert (mask(shape, both) == (in_left & in_right)).all()
        values = np.arange(math.prod(shape)).reshape(shape)
        shifted = values[slices(left)][slices(both.relative_to(left))]
        assert (shifted == values[slices(both)]).all()


def test_a_box_without_dimensions_holds_one_element() -> None:
    """The box of a scalar has volume 1, contains itself and meets itself."""
    scalar = Box((), ())
    assert scalar.volume == 1
    assert not scalar.is_empty
    assert scalar.contains(scalar)
    assert scalar.intersect(scalar) == scalar
    assert covers_exactly((), [scalar]).is_exact
    assert covers_exactly((), []).gap == scalar
    assert covers_exactly((), [scalar, scalar]).overlap == (0, 1)
    assert find_grid((), [scalar]) == Grid((), (0,))


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


def test_of_several_gaps_of_a_vector_the_first_is_given() -> None:
    """Space is searched from its beginning, so that the finding does not depend on chance."""
    boxes = [Box((7,), (1,)), Box((3,), (2,))]
    assert covers_exactly((9,), boxes).gap == Box((0,), (3,))


def test_a_tensor_without_elements_is_covered_by_empty_boxes_or_none() -> None:
    """Nothing is missing where nothing is; a box with elements cannot belong there."""
    assert covers_exactly((0, 4), []).is_exact
    assert covers_exactly((0, 4), [Box((0, 0), (0, 4)), Box((0, 4), (0, 0))]).is_exact
    assert covers_exactly((0, 4), [Box((0, 0), (1, 4))]).outside == 0
    assert covers_exactly((3,), [Box((0,), (3,)), Box((3,), (0,)), Box((9,), (0,))]).is_exact


def test_ten_thousand_boxes_of_a_grid_are_judged() -> None:
    """A large grid is exact in any order; one box replaced by another is a gap and an overlap."""
    boxes = cells_of((800, 400), [range(0, 800, 8), range(0, 400, 4)])
    random.Random(7).shuffle(boxes)
    assert len(boxes) == 10_000
    assert covers_exactly((800, 400), boxes).is_exact
    wrong = [*boxes[:-1], boxes[17]]
    found = covers_exactly((800, 400), wrong)
    assert found.overlap == (17, 9_999)
    assert found.gap == boxes[-1]


def test_a_thousand_flat_shards_of_a_tensor_are_judged() -> None:
    """Shards cut without regard to rows are a tiling that is no grid."""
    shape, count = (97, 31, 13), 1_000
    ends = [math.prod(shape) * at // count for at in range(count + 1)]
    boxes = [
        box
        for start, stop in itertools.pairwise(ends)
        for box in interval_boxes(shape, start, stop)
    ]
    assert find_grid(shape, boxes) is None
    assert covers_exactly(shape, boxes).is_exact
    assert covers_exactly(shape, boxes[1:]).gap == boxes[0]


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


def test_empty_boxes_belong_to_a_grid_only_in_an_empty_tensor() -> None:
    """A tensor of no rows is a grid of one cell; an empty box beside others is none of a grid."""
    grid = find_grid((0, 4), [Box((0, 0), (0, 4))])
    assert grid == Grid(((0,), (0,)), (0,))
    assert grid.boxes((0, 4)) == [Box((0, 0), (0, 4))]
    assert grid.intersecting(Box((0, 0), (0, 4))) == []
    assert find_grid((3,), [Box((0,), (3,)), Box((3,), (0,))]) is None
    assert find_grid((3,), []) is None
    assert find_grid((0,), []) is None


@pytest.mark.parametrize("cell", [-1, 2])
def test_a_cell_that_a_grid_lacks_is_an_error(cell: int) -> None:
    """Cells are counted from 0; neither end wraps around."""
    with pytest.raises(IndexError):
        Grid(((0, 3),), (0, 1)).box(cell, (5,))


@QUICK
@given(data=st.data(), sizes=SHAPES, item_bytes=st.sampled_from([1, 2, 8]))
def test_byte_runs_are_the_maximal_runs_of_the_region(
    data: st.DataObject, sizes: tuple[int, ...], item_bytes: int
) -> None:
    """Runs, their number, bytes and extent agree with marking each byte of the payload."""
    region = data.draw(boxes_in(sizes))
    held = np.repeat(mask(sizes, region).ravel(), item_bytes)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], held.astype(int), [0]))))
    runs = [ByteRun(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
    assert list(byte_runs(sizes, region, item_bytes)) == runs
    assert run_count(sizes, region) == len(runs)
    assert run_bytes(region, item_bytes) == held.sum()
    extent = ByteRun(runs[0].start, runs[-1].stop) if runs else ByteRun(0, 0)
    assert run_extent(sizes, region, item_bytes) == extent


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


def copied(source: NDArray[Any], copy: WindowCopy) -> NDArray[Any]:
    """Return the source of a copy as an array; `source` is the window and nothing else."""
    reach = copy.source_offset_elements + sum(
        (size - 1) * stride for size, stride in zip(copy.sizes, copy.source_strides, strict=True)
    )
    assert 0 <= copy.source_offset_elements <= reach < source.size
    return as_strided(
        source[copy.source_offset_elements :],
        copy.sizes,
        [stride * source.itemsize for stride in copy.source_strides],
    )


@QUICK
@given(data=st.data(), sizes=SHAPES)
def test_windows_fill_a_region_once(data: st.DataObject, sizes: tuple[int, ...]) -> None:
    """Copies out of windows that partition a payload put every element into its place, once."""
    region = data.draw(boxes_in(sizes))
    total = math.prod(sizes)
    inner = data.draw(st.sets(st.integers(0, total), max_size=4))
    values = np.arange(total)
    target = np.full(region.sizes, -1)
    for start, stop in itertools.pairwise(sorted({0, total, *inner})):
        copies = window_copies(sizes, region, start, stop)
        assert len(copies) <= max(1, 2 * len(sizes) - 1)
        for copy in copies:
            place = slices(Box(copy.dest_offsets, copy.sizes))
            assert target[place].shape == copy.sizes
            assert np.all(target[place] == -1)
            target[place] = copied(values[start:stop], copy)
    assert (target == values.reshape(sizes)[slices(region)]).all()


@pytest.mark.parametrize(
    "region",
    [
        Box((0, 0), (3, 4)),
        Box((1, 0), (2, 4)),
        Box((-1, 0), (2, 4)),
        Box((0, 0), (2, -1)),
        Box((0,), (2,)),
        Box((0, 0), (2,)),
        Box((), ()),
    ],
)
def test_a_region_that_leaves_its_chunk_is_refused(region: Box) -> None:
    """No byte positions are given for elements that are not in the payload."""
    with pytest.raises(InvalidInputError, match="leaves a chunk"):
        list(byte_runs((2, 4), region, 2))
    with pytest.raises(InvalidInputError, match="leaves a chunk"):
        run_count((2, 4), region)
    with pytest.raises(InvalidInputError, match="leaves a chunk"):
        run_extent((2, 4), region, 2)
    with pytest.raises(InvalidInputError, match="leaves a chunk"):
        window_copies((2, 4), region, 0, 8)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 9), (9, 9)])
def test_an_interval_that_leaves_the_shape_is_refused(start: int, stop: int) -> None:
    """A window must lie in the payload, from its start to its end."""
    with pytest.raises(InvalidInputError, match="not within the shape"):
        interval_boxes((2, 4), start, stop)
    with pytest.raises(InvalidInputError, match="not within the shape"):
        window_copies((2, 4), Box((0, 0), (2, 4)), start, stop)


INTERVALS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=12).map(
    lambda pairs: sorted((start, start + length) for start, length in pairs)
)


@QUICK
@given(intervals=INTERVALS, gap=st.integers(0, 20), max_bytes=st.integers(1, 60))
def test_extents_hold_all_intervals_and_respect_the_limits(
    intervals: list[tuple[int, int]], gap: int, max_bytes: int
) -> None:
    """Every interval is in one extent, none is too long or bridges too much, none could join."""
    extents = coalesce(intervals, gap, max_bytes)
    assert [member for extent in extents for member in extent.members] == list(
        range(len(intervals))
    )
    for extent in extents:
        members = [intervals[member] for member in extent.members]
        assert extent.start == members[0][0]
        assert extent.stop == max(stop for _, stop in members)
        longest = max(stop - start for start, stop in members)
        assert extent.stop - extent.start <= max(max_bytes, longest)
        wanted = np.zeros(200, dtype=int)
        for start, stop in members:
            wanted[start:stop] = 1
        read = "".join(map(str, wanted[extent.start : extent.stop]))
        assert all(len(bridged) <= gap for bridged in read.split("1"))
    for left, right in itertools.pairwise(extents):
        begins, ends = intervals[right.members[0]]
        longer = max(left.stop, ends) - left.start
        assert begins - left.stop > gap or longer > max(max_bytes, left.stop - left.start)


@pytest.mark.parametrize("intervals", [[(5, 4)], [(3, 4), (2, 6)], [(0, 9), (5, 6), (4, 9)]])
def test_intervals_out_of_order_are_refused(intervals: list[tuple[int, int]]) -> None:
    """An interval that is reversed, or begins before its predecessor, is an error."""
    with pytest.raises(InvalidInputError, match="out of order"):
        coalesce(intervals, 10, 100)


@QUICK
@given(data=st.data(), block=st.integers(1, 12), total=st.integers(0, 60))
def test_rounding_out_adds_no_block_that_is_not_touched(
    data: st.DataObject, block: int, total: int
) -> None:
    """The interval becomes the bytes of all blocks it shares a byte with."""
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    touched = {at // block for at in range(start, stop)}
    expected = [at for at in range(total) if at // block in touched]
    first, last = round_out(start, stop, block, total)
    assert list(range(first, last)) == expected
    assert first % block == 0
    assert first <= start
