"""Pickles of numbers in numpy's form pass; everything that could do more does not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpt_storage.format.inert_pickle import is_inert_with_numpy

_reconstruct: Any = np.array([]).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]


class Call:
    """Pickles as a call, with a state if one is given."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], *state: Any) -> None:
        self.parts = (function, args, *state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def pickled(value: object) -> bytes:
    """Return the pickle that torch.save would write."""
    return pickle.dumps(value, protocol=2)


@pytest.mark.parametrize(
    "value",
    [
        np.random.RandomState(1).get_state(),
        np.random.RandomState(1).get_state(legacy=False),
        np.random.default_rng(2).bit_generator.state,
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), dtype=np.complex64)),
        np.zeros((0, 3), dtype=np.float16),
        np.bool_(1).reshape(()),
        np.float64(0.5),
        [{"a": (np.int64(1), None, "text", b"raw", 1 << 80, -1.5)}],
        7,
    ],
)
def test_numbers_of_numpy_among_plain_values_pass(value: object) -> None:
    """Random states, arrays and scalars of numbers are inert, in containers too."""
    assert is_inert_with_numpy(pickled(value))


def dtype_call(name: str = "f8", state: object = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    """Return what pickles like a dtype."""
    return Call(np.dtype, (name, False, True), state)


def array_call(dtype: object, raw: object = b"\0" * 8, kind: object = np.ndarray) -> Call:
    """Return what pickles like an array of one element."""
    return Call(_reconstruct, (kind, (0,), b"b"), (1, (1,), dtype, False, raw))


def test_the_forgeries_below_differ_from_the_real_thing_in_one_place() -> None:
    """Unaltered, the calls of this file pass and unpickle to an array of one number."""
    forged = pickled(array_call(dtype_call()))
    assert is_inert_with_numpy(forged)
    assert np.array_equal(pickle.loads(forged), np.zeros(1))


FORGERIES: dict[str, object] = {
    "another function": Call(print, ("x",)),
    "object array": np.array([None]),
    "array of text": np.array(["a"]),
    "fields": np.zeros(1, dtype=[("a", "f4")]),
    "dates": np.zeros(1, dtype="M8[s]"),
    "generator": np.random.default_rng(1),
    "dtype of objects": array_call(dtype_call("O")),
    "dtype with flags": array_call(dtype_call(state=(3, "<", None, None, None, -1, -1, 63))),
    "dtype with fields": array_call(
        dtype_call("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))
    ),
    "dtype without state": array_call(Call(np.dtype, ("f8", False, True))),
    "shared dtype": array_call(Call(np.dtype, ("f8", False, False), (3, "<"))),
    "elements as list": array_call(dtype_call(), [print]),
    "array of another kind": array_call(dtype_call(), kind=np.matrix),
    "array without state": Call(_reconstruct, (np.ndarray, (0,), b"b")),
    "large to begin with": Call(_reconstruct, (np.ndarray, (1 << 40,), b"b")),
    "array called": Call(np.ndarray, ((1,),)),
    "scalar of an object": Call(_scalar, (dtype_call("O"), [1])),
    "bytes called": Call(bytes, (1 << 40,)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_everything_else_is_refused(name: str) -> None:
    """Other calls, dtypes that are no numbers, and states that numpy does not write do not pass."""
    assert not is_inert_with_numpy(pickled(FORGERIES[name]))


def test_what_is_no_pickle_is_refused() -> None:
    """Bytes that end early, or mean nothing, do not pass."""
    whole = pickled(np.arange(3))
    assert not any(is_inert_with_numpy(whole[:end]) for end in range(len(whole)))
    assert not is_inert_with_numpy(b"cos\nsystem\n")
