"""The numbers in one tensor in brief: mean, spread, extremes, NaN, and a histogram; streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import InvalidInputError

from .facts import DASH, shape_text, shown
from .html import card, histogram_svg, page

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_PIECE = 1 << 20
"""Elements that are converted at a time: 8 MiB as float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many finite elements lie between each two neighbouring `edges`.

    Intervals are half open, but the last one holds its upper edge too.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def _facts(self) -> dict[str, object]:
        numbers = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        facts: dict[str, object] = {
            "type": self.dtype,
            "shape": shape_text(self.shape),
        }
        facts.update({name: _number(value) for name, value in numbers.items()})
        counts = {"NaN": self.nan_count, "Inf": self.inf_count, "zero": self.zero_count}
        facts.update({name: f"{value:,}" for name, value in counts.items()})
        return facts

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"{shown(self.fqn)}: {facts}"

    def _repr_html_(self) -> str:
        picture = histogram_svg(self.histogram.edges, self.histogram.counts)
        return page(card(self.fqn, self._facts(), picture))


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.6g}"


def summarise(
    pieces: Callable[[], Iterable[NDArray[Any]]],
    *,
    fqn: str,
    dtype: str,
    shape: tuple[int, ...],
    bin_count: int,
) -> TensorStats:
    """Return what is in a tensor, whose elements `pieces()` yields as flat arrays.

    It is called twice, because a histogram wants the extremes first. Means and squares are merged
    as Chan, Golub and LeVeque do ("Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979). Raises `InvalidInputError` for complex numbers, which have no order.
    """
    import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

    total = _Totals()
    for piece in _small(pieces()):
        if np.iscomplexobj(piece):
            raise InvalidInputError(
                f"{fqn} is complex: its elements have no order.",
                next_step="Read it, and look at its real and imaginary parts.",
            )
        total.add(piece)
    edges, counts = _histogram(pieces, total, bin_count)
    has_finite = total.finite_count > 0
    return TensorStats(
        fqn=fqn,
        dtype=dtype,
        shape=shape,
        count=math.prod(shape),
        finite_count=total.finite_count,
        nan_count=total.nan_count,
        positive_inf_count=total.positive_inf_count,
        negative_inf_count=total.negative_inf_count,
        zero_count=total.zero_count,
        mean=total.mean if has_finite else None,
        std=total.std() if has_finite else None,
        min=total.least,
        max=total.most,
        histogram=Histogram(edges=edges, counts=counts),
    )


def _small(pieces: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for piece in pieces:
        for at in range(0, len(piece), _PIECE):
            yield piece[at : at + _PIECE]


def _wide(piece: NDArray[Any]) -> NDArray[np.float64]:
    """Return elements as float64; numpy warns of the NaN of types that it does not know."""
    import numpy as np  # noqa: PLC0415  # summarise imported it

    with np.errstate(invalid="ignore"):
        return piece.astype(np.float64)


class _Totals:
    """What the first pass gathers."""

    def __init__(self) -> None:
        self.finite_count = 0
        self.nan_count = 0
        self.positive_inf_count = 0
        self.negative_inf_count = 0
        self.zero_count = 0
        self.mean = 0.0
        self.squares = 0.0
        self.least: float | int | None = None
        self.most: float | int | None = None

    def add(self, piece: NDArray[Any]) -> None:
        """Take in one flat array."""
        import numpy as np  # noqa: PLC0415  # summarise imported it

        if piece.dtype.kind in "iu":
            # As float64 large integers would lose their last digits.
            finite = piece.astype(np.float64)
            low: float = int(piece.min())
            high: float = int(piece.max())
        else:
            values = _wide(piece)
            finite = values[np.isfinite(values)]
            self.nan_count += int(np.isnan(values).sum())
            self.positive_inf_count += int(np.isposinf(values).sum())
            self.negative_inf_count += int(np.isneginf(values).sum())
            if not finite.size:
                return
            low, high = float(finite.min()), float(finite.max())
        self.zero_count += int(finite.size - np.count_nonzero(finite))
        self.least = low if self.least is None else min(self.least, low)
        self.most = high if self.most is None else max(self.most, high)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(finite.mean())
            if not math.isfinite(mean):
                mean = float((finite / finite.size).sum())
            squares = float(np.square(finite - mean).sum())
        count = self.finite_count + finite.size
        share = finite.size / count
        step = mean - self.mean
        self.squares += squares + step * step * self.finite_count * share
        # Not through `step`, which overflows where the numbers themselves do not.
        self.mean += mean * share - self.mean * share
        self.finite_count = count

    def std(self) -> float:
        """Return the standard deviation; infinite where its square leaves float64's range."""
        square = self.squares / self.finite_count
        return math.inf if math.isnan(square) else math.sqrt(square)


def _histogram(
    pieces: Callable[[], Iterable[NDArray[Any]]], total: _Totals, bin_count: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    import numpy as np  # noqa: PLC0415  # summarise imported it

    if total.least is None or total.most is None or bin_count < 1:
        return (), ()
    low, high = float(total.least), float(total.most)
    if low == high:
        # As numpy does: a bin needs some width.
        low, high = low - 0.5, high + 0.5
    counts = np.zeros(bin_count, np.int64)
    # Halves, so that the distance of the extremes of float64 does not overflow.
    edges = 2 * np.linspace(low / 2, high / 2, bin_count + 1)
    edges[0], edges[-1] = low, high
    # Half of the smallest float there is rounds to nothing.
    edges = np.maximum.accumulate(np.clip(edges, low, high))
    for piece in _small(pieces()):
        values = _wide(piece)
        counts += np.histogram(values[np.isfinite(values)], edges)[0]
    return tuple(map(float, edges)), tuple(map(int, counts))
