"""Basic indices mean what numpy means by them, and name no byte too few or block too many."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ckpt_storage.format.selections import touched_spans
from ckpt_storage.inspect.lazy_tensor import select

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """Return a shape and a basic index that numpy takes for it."""
    shape = draw(SHAPES)
    index = draw(npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    return shape, index


@st.composite
def ranges_of(draw: st.DrawFn, *, most_dims: int = 3) -> tuple[tuple[int, ...], tuple[range, ...]]:
    """Return a shape without a zero and non-empty ascending positions in each dimension."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=most_dims, min_side=1, max_side=7))
    ranges = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, size))
        ranges.append(range(start, draw(st.integers(start + 1, size)), step))
    return shape, tuple(ranges)


def positions(shape: tuple[int, ...]) -> Any:
    """Return the array of that shape whose elements are their places in C order."""
    return np.arange(math.prod(shape)).reshape(shape)


def same(left: Any, right: Any) -> bool:
    """Return whether numpy made the same of two ways: type, shape and elements."""
    return (
        type(left) is type(right)
        and np.shape(left) == np.shape(right)
        and bool(np.array_equal(left, right))
    )


@given(indexed())
def test_an_index_means_what_numpy_means(case: tuple[tuple[int, ...], Any]) -> None:
    """Taking the ranges and then the final index gives what the index gives at once."""
    shape, index = case
    array = positions(shape)
    selection = select(index, shape)
    taken = array[tuple(slice(r.start, r.stop, r.step) for r in selection.ranges)]
    assert taken.shape == selection.shape
    assert all(r.step > 0 and (not r or 0 <= r[0] <= r[-1]) for r in selection.ranges)
    assert same(taken[selection.final], array[index])


@given(
    SHAPES,
    st.lists(
        st.one_of(
            st.integers(-9, 9),
            st.just(...),
            st.none(),
            st.slices(6),
            st.integers(-9, 9).map(np.int64),
        ),
        max_size=5,
    ).map(tuple),
)
def test_what_numpy_refuses_is_refused(shape: tuple[int, ...], index: Any) -> None:
    """An index raises IndexError, with numpy's words, exactly where it does in numpy."""
    refusal = ""
    try:
        count = np.size(positions(shape)[index])
    except IndexError as error:
        refusal = str(error)
    if refusal:
        with pytest.raises(IndexError) as caught:
            select(index, shape)
        assert str(caught.value) == refusal
    else:
        assert math.prod(select(index, shape).shape) == count


@pytest.mark.parametrize(
    "index",
    [
        True,
        np.bool_(0),
        [0, 1],
        np.array([0]),
        np.array([True, False]),
        "a",
        1.0,
        (0, [1]),
        object(),
    ],
    ids=lambda value: repr(value).split(" at ")[0],
)
def test_lists_masks_and_nonsense_are_refused(index: object) -> None:
    """What is no basic index raises IndexError and says what to do."""
    with pytest.raises(IndexError, match="read a region first"):
        select(index, (2, 2))


def test_a_step_of_zero_is_refused() -> None:
    """As for every slice in Python."""
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        select(slice(None, None, 0), (3,))


@given(ranges_of(), st.sampled_from([1, 2, 4, 16]), st.integers(1, 200))
def test_spans_hold_all_that_is_wanted_and_no_free_grain(
    case: tuple[tuple[int, ...], tuple[range, ...]], item_bytes: int, grain_bytes: int
) -> None:
    """Every wanted byte lies in a span; no grain of a span is without one; spans ascend."""
    shape, ranges = case
    wanted = np.zeros(math.prod(shape) * item_bytes, bool)
    for place in positions(shape)[np.ix_(*ranges)].ravel() if shape else [0]:
        wanted[place * item_bytes : (place + 1) * item_bytes] = True
    spans = list(touched_spans(shape, ranges, item_bytes, grain_bytes))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    covered = np.zeros_like(wanted)
    for start, stop in spans:
        assert wanted[start]
        assert wanted[stop - 1]
        covered[start:stop] = True
        free = "".join("x" if byte else "." for byte in wanted[start:stop])
        assert max(map(len, free.split("x"))) < grain_bytes
    assert not (wanted & ~covered).any()
