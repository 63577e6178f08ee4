"""What is no basic index is refused with the words of numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ckpt_storage.inspect.lazy_tensor import select

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def positions(shape: tuple[int, ...]) -> Any:
    """Return the array of that shape whose elements are their places in C order."""
    return np.arange(math.prod(shape)).reshape(shape)


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
        assert math.prod(map(len, select(index, shape).ranges)) == count


@pytest.mark.parametrize("index", [True, [0, 1], np.array([True, False]), "a", 1.0, (0, [1])])
def test_lists_masks_and_nonsense_are_refused(index: object) -> None:
    """What is no basic index raises IndexError and says what to do."""
    with pytest.raises(IndexError, match="read a region first"):
        select(index, (2, 2))
