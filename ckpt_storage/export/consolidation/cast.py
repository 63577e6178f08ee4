"""Floating-point elements from one dtype to another, as torch converts them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError

from .options import CASTABLE

__all__ = ["cast_into", "check_cast"]

Bits = NDArray[Any]
"""Elements of a dtype as unsigned integers of its size, or as the dtype where numpy has it."""

_SLAB_ELEMENTS = 1 << 16
"""Elements converted at a time: what lies between the steps stays in the processor's cache."""

_INFINITE_F32 = np.uint32(0x7F800000)
_MAGNITUDE_F32 = np.uint32(0x7FFFFFFF)
_NAN_BF16 = np.uint16(0x7FC0)
_NUMPY = {"float64": "f8", "float32": "f4", "float16": "f2"}


def check_cast(source_dtype: str, dtype: str) -> None:
    """Raise `InvalidInputError` unless elements of one dtype can become ones of the other."""
    if {source_dtype, dtype} <= CASTABLE:
        return
    raise InvalidInputError(
        f"Elements of {source_dtype} cannot be written as {dtype}.",
        next_step=f"Only {', '.join(sorted(CASTABLE))} are cast.",
    )


def cast_into(source: Bits, source_dtype: str, target: Bits, dtype: str) -> None:
    """Convert `source` into `target`, arrays of one shape and any strides.

    Both hold unsigned integers with the bits of the elements. Rounds to nearest, ties to even;
    what is beyond the range becomes infinite; float64 goes by way of float32, as in torch.
    """
    for index in _slabs(source.shape):
        _cast_slab(source[index], source_dtype, target[index], dtype)


def _slabs(shape: tuple[int, ...]) -> itertools.product[tuple[slice, ...]]:
    """Return the indices of boxes of at most `_SLAB_ELEMENTS` that together are the array."""
    room = _SLAB_ELEMENTS
    steps = []
    for size in reversed(shape):
        step = max(1, min(size, room))
        room //= step
        steps.append([slice(at, at + step) for at in range(0, size, step)])
    return itertools.product(*reversed(steps))


def _cast_slab(source: Bits, source_dtype: str, target: Bits, dtype: str) -> None:
    if source_dtype == "bfloat16":
        wide = source.astype(np.uint32)
        wide <<= np.uint32(16)
        values: Bits = wide.view(np.float32)
    else:
        values = np.ascontiguousarray(source).view(_NUMPY[source_dtype])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype != "float64":
            values = values.astype(np.float32, copy=False)
        if dtype == "bfloat16":
            target[...] = _rounded_to_bfloat16(values.view(np.uint32))
        else:
            target[...] = values.astype(_NUMPY[dtype]).view(target.dtype)


def _rounded_to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 bits, rounded by the lower ones."""
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    rounded = odd.astype(np.uint16)
    # Rounding would carry a NaN's payload into the sign or out of the NaNs.
    is_nan = (bits & _MAGNITUDE_F32) > _INFINITE_F32
    if is_nan.any():
        rounded[is_nan] = _NAN_BF16
    return rounded
