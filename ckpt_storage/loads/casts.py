"""Casts of a load: which values a cast changed, and whether the load may go on with them."""

from __future__ import annotations

import functools
import logging
import math
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Casts

from .tensors import dtype_name

log = logging.getLogger("ckpt_storage")

_HIGH = 1 << 32
_PIECE = 1 << 16
"""Elements compared per step: their temporaries fit into a second-level cache."""


class CastChecker:
    """Copies elements with a cast and compares the result with them; thread-safe.

    "checked" raises for a value that does not fit and counts those that were rounded; "exact"
    raises for both. "any" copies as torch does and needs no checker.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._lock = threading.Lock()
        self._rounded_count = 0
        self._example: str | None = None

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, fqn: str, *, non_blocking: bool = False
    ) -> None:
        """Copy `source` into `target` and compare. Raises `InvalidInputError`."""
        if not source.dim() or target.device.type != "cpu":
            self._copy(source, target, fqn, non_blocking=non_blocking)
            return
        row_count = max(1, _PIECE * len(source) // max(1, source.numel()))
        for piece, place in zip(
            *(torch.split(t, row_count) for t in (source, target)), strict=True
        ):
            self._copy(piece, place, fqn, non_blocking=non_blocking)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, fqn: str, *, non_blocking: bool
    ) -> None:
        if source.is_complex() and not target.is_complex():
            # The imaginary parts are compared below; torch would warn of each copy.
            target.copy_(source.real, non_blocking=non_blocking)
        else:
            target.copy_(source, non_blocking=non_blocking)
        changes = find_changes(source, target)
        if changes.unfit is not None:
            raise _cast_error(
                f"{_example(source, target, changes.unfit, fqn)}, which is another value.",
                "Load into a target of the stored dtype or a wider one, or pass casts='any'.",
            )
        if changes.rounded is None:
            return
        if self._casts == "exact":
            raise _cast_error(
                f"{_example(source, target, changes.rounded, fqn)}, which is rounded.",
                "Load into a target of the stored dtype or a wider one, or pass casts='checked'.",
            )
        with self._lock:
            self._rounded_count += int(torch.count_nonzero(changes.rounded))
            if self._example is None:
                self._example = _example(source, target, changes.rounded, fqn)

    def report(self, url: str) -> None:
        """Log one line if values were rounded."""
        if self._example is not None:
            log.warning(
                "%s: elements rounded to the dtypes of their targets: %d. For example, %s. "
                "casts='any' loads without this check, casts='exact' raises.",
                *(url, self._rounded_count, self._example),
            )


def _cast_error(message: str, next_step: str) -> InvalidInputError:
    effect = "Targets of this load hold undefined values."
    return InvalidInputError(f"{message} {effect}", phase="load", next_step=next_step)


def _example(source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, fqn: str) -> str:
    """Describe the first element that a cast changed."""
    first = tuple(torch.nonzero(mask)[0].tolist())
    return (
        f"{fqn} is stored as {dtype_name(source.dtype)} and loaded as {dtype_name(target.dtype)}: "
        f"{_number(source[first])!r} becomes {_number(target[first])!r}"
    )


def _number(element: torch.Tensor) -> object:
    return element.double().item() if element.dtype.is_floating_point else element.item()


def can_cast(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch copies elements of one dtype into the other."""
    names = map(dtype_name, (stored, target))
    return stored == target or not any(name.startswith(("bits", "float4")) for name in names)


@functools.cache
def is_lossless(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether `target` has every value of `stored`, so that no cast needs a check."""
    if stored.is_complex and not target.is_complex:
        return False
    stored, target = stored.to_real(), target.to_real()
    if stored == target:
        return True
    narrow, wide = _limits(stored), _limits(target)
    return (
        wide.lowest <= narrow.lowest
        and narrow.highest <= wide.highest
        and narrow.digit_count <= wide.digit_count
        and wide.step <= narrow.step
    )


_EPS = {torch.float8_e5m2fnuz: 0.25}
"""Where `torch.finfo` names another distance between 1 and the next value."""


class _Limits(NamedTuple):
    """Lowest and highest value of a dtype, its binary digits, and the step between values at 0."""

    lowest: float
    highest: float
    digit_count: int
    step: float


@functools.cache
def _limits(dtype: torch.dtype) -> _Limits:
    if dtype == torch.bool:
        return _Limits(0, 1, 1, 1)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        eps = _EPS.get(dtype, info.eps)
        digit_count = 2 - math.frexp(eps)[1]
        return _Limits(info.min, info.max, digit_count, info.smallest_normal * eps)
    whole = torch.iinfo(dtype)
    return _Limits(whole.min, whole.max, whole.max.bit_length(), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Masks of the elements that a cast changed; None: there are none.

    `unfit` were wrapped, truncated, clamped, or made infinite or NaN; `rounded` are the nearest
    values of the target's dtype.
    """

    unfit: torch.Tensor | None = None
    rounded: torch.Tensor | None = None


def find_changes(source: torch.Tensor, result: torch.Tensor) -> Changes:
    """Compare elements with those they were cast from; NaN equals NaN."""
    result = result.to(source.device).resolve_conj().resolve_neg()
    if not source.numel():
        return Changes()
    imaginary: torch.Tensor | None = None
    if result.is_complex():
        result, imaginary = torch.view_as_real(result).unbind(-1)
    if not source.is_complex():
        return _find_real_changes(source, result)
    source_real, source_imaginary = torch.view_as_real(source).unbind(-1)
    of_real = _find_real_changes(source_real, result)
    if imaginary is None:
        of_imaginary = Changes(unfit=_if_any(source_imaginary != 0))
    else:
        of_imaginary = _find_real_changes(source_imaginary, imaginary)
    return Changes(
        unfit=_either(of_real.unfit, of_imaginary.unfit),
        rounded=_either(of_real.rounded, of_imaginary.rounded),
    )


def _find_real_changes(source: torch.Tensor, result: torch.Tensor) -> Changes:
    is_narrow = _fits_float32(source.dtype) and _fits_float32(result.dtype)
    wide = torch.float32 if is_narrow else torch.float64
    before, after = source.to(wide), result.to(wide)
    if source.dtype in _LONG or result.dtype in _LONG:
        # No float has all values of 64 bits; two have.
        pairs = zip(_halves(source), _halves(result), strict=True)
        high, low = (left != right for left, right in pairs)
        differing = high | low
    else:
        differing = before != after
    if not result.dtype.is_floating_point:
        return Changes(unfit=_if_any(differing))
    # Half a unit in the last place above the highest value still rounds to it.
    limits = _limits(result.dtype)
    limit = limits.highest + 2.0 ** (math.frexp(limits.highest)[1] - limits.digit_count - 1)
    lowest, highest = map(float, before.aminmax())
    if -limit < lowest and highest < limit and result.dtype != torch.float8_e8m0fnu:
        # Nothing is infinite or NaN, and nothing becomes so.
        return Changes(rounded=_if_any(differing))
    differing &= ~(before.isnan() & after.isnan())
    unfit = (
        (before.isfinite() != after.isfinite())
        | (before.isinf() != after.isinf())
        | (before.isfinite() & (before.abs() > limit))
        | (before.sign() * after.sign() < 0)
    )
    return Changes(unfit=_if_any(differing & unfit), rounded=_if_any(differing & ~unfit))


def _if_any(mask: torch.Tensor) -> torch.Tensor | None:
    return mask if bool(mask.any()) else None


def _either(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    return right if left is None else left if right is None else left | right


_LONG = (torch.int64, torch.uint64)


@functools.cache
def _fits_float32(dtype: torch.dtype) -> bool:
    return is_lossless(dtype, torch.float32)


def _halves(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x // 2**32 and x % 2**32 as float64; equal for equal numbers alone."""
    if tensor.dtype in _LONG:
        bits = tensor.view(torch.int64)
        high = bits >> 32
        if tensor.dtype == torch.uint64:
            high = high & (_HIGH - 1)
        return high.double(), (bits & (_HIGH - 1)).double()
    number = tensor.double()
    high = torch.floor(number / _HIGH)
    return high, number - high * _HIGH
