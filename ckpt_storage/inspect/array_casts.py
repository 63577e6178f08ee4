"""Casts of numpy arrays to another dtype, by the rules of `casts=` of loads."""

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
        is_exact = casts == "exact" or target.kind in "iub?"
        refused = np.argwhere(_refused(array, result, is_exact=is_exact))
    if len(refused):
        first = tuple(refused[0])
        raise InvalidInputError(
            f"{fqn} is stored as {array.dtype} and read as {target}: {array[first]!s} becomes "
            f"{result[first]!s}.",
            phase="load",
            next_step="Read it in its own dtype or a wider dtype, or open the checkpoint with "
            "casts='any'.",
        )
    return result


def _refused(array: NDArray[Any], result: NDArray[Any], *, is_exact: bool) -> NDArray[np.bool_]:
    """Return which elements of a cast are refused. NaN equals NaN.

    An exact cast refuses every change of a number. Others refuse a finite number that becomes
    infinite or NaN, an infinity that becomes another value, and the loss of an imaginary part.
    """
    is_complex = "c" in (array.dtype.kind, result.dtype.kind)
    wide = np.clongdouble if is_complex else np.longdouble
    before, after = array.astype(wide), result.astype(wide)
    refused: NDArray[np.bool_] = (before != after) & ~(np.isnan(before) & np.isnan(after))
    if not is_exact:
        is_unfit = np.isfinite(before) & ~np.isfinite(after)
        is_unfit |= np.isinf(before) & ~np.isinf(after)
        if array.dtype.kind == "c" and result.dtype.kind != "c":
            is_unfit |= array.imag != 0
        refused &= is_unfit
    return refused
