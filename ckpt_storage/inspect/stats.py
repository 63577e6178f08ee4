"""The numbers in one tensor in brief: mean, spread, extremes, NaN, and a histogram; streamed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import InvalidInputError

from .views import DASH, shape_text, shown

_PIECE = 1 << 20
"""Elements that are converted at a time: 8 MiB as float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many finite elements lie between each two neighbouring `edges`.

    Intervals are half open, but the last one holds its upper edge too.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorStats:
    """What is in a tensor. Mean, std, min and max are of its finite elements, None without any.

    `std` is that of the population (numpy's `ddof=0`); sums are taken in float64, so that those
    of narrow types do not overflow. `min` and `max` are exact.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    finite_count: int
    nan_count: int
    positive_inf_count: int
    negative_inf_count: int
    zero_count: int
    mean: float | None
    std: float | None
    min: float | int | None
    max: float | int | None
    histogram: Histogram

    @property
    def inf_count(self) -> int:
        """Infinite elements of either sign."""
        return self.positive_inf_count + self.negative_inf_count

    def __str__(self) -> str:
        facts: dict[str, object] = {"type": self.dtype, "shape": shape_text(self.shape)}
        for name in ("mean", "std", "min", "max"):
            value = getattr(self, name)
            facts[name] = DASH if value is None else f"{value:.6g}"
        counts = {"NaN": self.nan_count, "Inf": self.inf_count, "zero": self.zero_count}
        facts.update((name, f"{value:,}") for name, value in counts.items())
        return f"{shown(self.fqn)}: {', '.join(f'{k} {v}' for k, v in facts.items())}"

    __repr__ = __str__


def summarise(
    pieces: Callable[[], Iterable[NDArray[Any]]],
    *,
    fqn: str,
    dtype: str,
    shape: tuple[int, ...],
    bin_count: int,
) -> TensorStats:
    """Return what is in a tensor, whose elements `pieces()` yields as flat arrays; asked twice."""
    counts: Counter[str] = Counter()
    means: list[tuple[int, float]] = []
    extremes: list[float] = []
    for piece, values in _wide(pieces()):
        if np.iscomplexobj(piece):
            raise InvalidInputError(
                f"{fqn} is complex: its elements have no order.",
                next_step="Read it, and look at its real and imaginary parts.",
            )
        finite = values[np.isfinite(values)]
        counts["nan"] += int(np.isnan(values).sum())
        counts["+inf"] += int(np.isposinf(values).sum())
        counts["-inf"] += int(np.isneginf(values).sum())
        counts["zero"] += int(finite.size - np.count_nonzero(finite))
        if finite.size:
            # As float64 large integers would lose their last digits.
            exact = piece if piece.dtype.kind in "iu" else finite
            extremes += [exact.min().item(), exact.max().item()]
            with np.errstate(over="ignore"):
                mean = float(finite.mean())
            if not math.isfinite(mean):
                mean = float((finite / finite.size).sum())
            means.append((finite.size, mean))
    count = sum(size for size, _ in means)
    mean = sum(value * (size / count) for size, value in means)
    edges = _edges(min(extremes), max(extremes), bin_count) if count and bin_count > 0 else None
    bins = np.zeros(max(bin_count, 0) if count else 0, np.int64)
    squares = 0.0
    for _, values in _wide(pieces()) if count else ():
        finite = values[np.isfinite(values)]
        with np.errstate(over="ignore"):
            squares += float(np.square(finite - mean).sum())
        if edges is not None:
            bins += np.histogram(finite, edges)[0]
    return TensorStats(
        fqn=fqn,
        dtype=dtype,
        shape=shape,
        count=math.prod(shape),
        finite_count=count,
        nan_count=counts["nan"],
        positive_inf_count=counts["+inf"],
        negative_inf_count=counts["-inf"],
        zero_count=counts["zero"],
        mean=mean if count else None,
        std=math.sqrt(squares / count) if count else None,
        min=min(extremes, default=None),
        max=max(extremes, default=None),
        histogram=Histogram(
            edges=() if edges is None else tuple(map(float, edges)), counts=tuple(map(int, bins))
        ),
    )


def _wide(
    pieces: Iterable[NDArray[Any]],
) -> Iterator[tuple[NDArray[Any], NDArray[np.float64]]]:
    """Yield pieces of bounded size with their elements as float64."""
    for whole in pieces:
        for at in range(0, len(whole), _PIECE):
            piece = whole[at : at + _PIECE]
            # numpy warns of the NaN of types that it does not know, and of complex numbers.
            with np.errstate(invalid="ignore"):
                yield piece, np.real(piece).astype(np.float64)


def _edges(low: float, high: float, bin_count: int) -> NDArray[np.float64]:
    low, high = float(low), float(high)
    if low == high:
        # As numpy does: a bin needs some width.
        low, high = low - 0.5, high + 0.5
    # Halves, so that the distance of the extremes of float64 does not overflow.
    edges = 2 * np.linspace(low / 2, high / 2, bin_count + 1)
    edges[0], edges[-1] = low, high
    # Half of the smallest float there is rounds to nothing.
    return np.maximum.accumulate(np.clip(edges, low, high))
