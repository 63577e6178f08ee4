"""Casts of arrays to another dtype, by the rules of `casts=` for loads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Casts


def cast_array(array: NDArray[Any], dtype: DTypeLike, casts: Casts, fqn: str) -> NDArray[Any]:
    """Return `array` as `dtype`. Raises `InvalidInputError` for values that `casts` refuses."""
    target = np.dtype(dtype)
    with np.errstate(all="ignore"):
        if array.dtype.kind == "c" and target.kind != "c":
            result = array.real.astype(target)
        else:
            result = array.astype(target, copy=False)
        if casts == "any" or np.can_cast(array.dtype, target, "safe"):
            return result
        differing = _differs(array, result)
        unfit = differing if casts == "exact" or target.kind in "iub?" else _unfit(array, result)
        refused = np.argwhere(differing & unfit)
    if len(refused):
        first = tuple(refused[0])
        raise InvalidInputError(
            f"{fqn} is stored as {array.dtype} and read as {target}: {array[first]!s} becomes "
            f"{result[first]!s}.",
            phase="load",
            next_step="Read it in its own dtype or a wider one, or open the checkpoint with "
            "casts='any'.",
        )
    return result


def _differs(array: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which elements are not equal as numbers; NaN equals NaN."""
    wide = np.clongdouble if "c" in (array.dtype.kind, result.dtype.kind) else np.longdouble
    before, after = array.astype(wide), result.astype(wide)
    differing: NDArray[np.bool_] = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return differing


def _unfit(array: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which elements became infinite or NaN, or lost an imaginary part."""
    is_complex = "c" in (array.dtype.kind, result.dtype.kind)
    wide = np.clongdouble if is_complex else np.longdouble
    before, after = array.astype(wide), result.astype(wide)
    unfit: NDArray[np.bool_] = np.isfinite(before) & ~np.isfinite(after)
    unfit |= np.isinf(before) & ~np.isinf(after)
    if array.dtype.kind == "c" and result.dtype.kind != "c":
        unfit |= array.imag != 0
    return unfit
