"""Grids and flaws of chunks, held against counting elements in numpy arrays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_assemble import Chunk, tilings
from test_regions import QUICK, SHAPES, boxes_in, mask

from ckpt_storage.format.boxes import Box, Grid, find_flaw, find_grid, grid_of_rows


def grid_and_owners(shape: tuple[int, ...], boxes: list[Box]) -> tuple[Grid, Sequence[int]]:
    """Return the grid that boxes make, and the position of the box that is each cell."""
    rows = np.array([(*box.offsets, *box.sizes) for box in boxes], dtype=np.int64)
    found = grid_of_rows(shape, rows.reshape(len(boxes), -1), np.arange(len(boxes)))
    assert found is not None
    assert list(found[0]) == list(find_grid(shape, boxes) or ())
    return found


def test_boxes_that_cannot_be_of_the_tensor_are_no_grid() -> None:
    """Another number of dimensions, a negative size, a place outside."""
    whole = Box((0, 0), (2, 2))
    for box in (Box((0,), (4,)), Box((0, 0), (2, -1)), Box((2, 0), (1, 2))):
        assert find_grid((2, 2), [whole, box]) is None


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
        if is_grid:
            _, owners = grid_and_owners(shape, [boxes[0], *boxes])
            assert sorted(owners) == [0, *range(2, len(boxes) + 1)]


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


@pytest.mark.parametrize(
    "box", [Box((0,), (4,)), Box((0, 0, 0), (2, 2, 1)), Box((0, 0), (2, -1)), Box((2, 0), (1, 2))]
)
def test_a_box_that_cannot_be_of_the_tensor_is_named(box: Box) -> None:
    """Another number of dimensions, a negative size and a place outside are told by position."""
    found = find_flaw((2, 2), [Box((0, 0), (0, 2)), Box((0, 0), (2, 2)), box, box])
    assert found is not None
    assert found.outside == 2


def test_a_tensor_without_elements_is_held_by_empty_boxes_or_none() -> None:
    """Nothing is missing where nothing is; a box with elements cannot belong there."""
    assert find_flaw((0, 4), []) is None
    assert find_flaw((0, 4), [Box((0, 0), (0, 4)), Box((0, 4), (0, 0))]) is None
    found = find_flaw((0, 4), [Box((0, 0), (1, 4))])
    assert found is not None
    assert found.outside == 0


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
