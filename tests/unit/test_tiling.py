"""Grids, held against counting elements in numpy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_assemble import Chunk, tilings
from test_regions import QUICK, SHAPES, boxes_in, mask

from ckpt_storage.format.boxes import Box, find_grid


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


def test_boxes_that_cannot_be_of_the_tensor_are_no_grid() -> None:
    """Another number of dimensions, a negative size, a place outside."""
    whole = Box((0, 0), (2, 2))
    for box in (Box((0,), (4,)), Box((0, 0), (2, -1)), Box((2, 0), (1, 2))):
        assert find_grid((2, 2), [whole, box]) is None


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
    assert list(map(tuple, found.cuts)) == list(cuts)
    assert [shuffled[owner] for owner in found.owners] == cells
    assert found.boxes(shape) == cells
    assert [found.box(cell, shape) for cell in range(len(cells))] == cells
    region = data.draw(boxes_in(shape))
    wanted = mask(shape, region)
    touched = [at for at, cell in enumerate(cells) if (wanted & mask(shape, cell)).any()]
    assert found.intersecting(region) == touched


@QUICK
@given(tiling=tilings())
def test_what_is_no_grid_is_not_called_one(tiling: tuple[tuple[int, ...], list[Chunk]]) -> None:
    """A tiling is a grid if and only if it has as many boxes as combinations of offsets."""
    shape, boxes = tiling[0], [Box(*chunk) for chunk in tiling[1]]
    starts = [sorted({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    is_grid = math.prod(map(len, starts)) == len(boxes)
    assert (find_grid(shape, boxes) is not None) == is_grid
    if len(boxes) > 1:
        assert find_grid(shape, boxes[1:]) is None
        again = find_grid(shape, [boxes[0], *boxes])
        assert again is None or sorted(again.owners) == [0, *range(2, len(boxes) + 1)]


@QUICK
@given(data=st.data(), shape=SHAPES)
def test_a_grid_is_found_only_in_exact_coverings(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Whatever the boxes, if they are called a grid, each element has one holder."""
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    if find_grid(shape, boxes) is not None:
        solid = {box for box in boxes if not box.is_empty}
        count = np.sum([mask(shape, box) for box in solid], axis=0)
        assert (count == 1).all()
