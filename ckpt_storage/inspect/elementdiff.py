"""How the elements of two tensors of one shape differ, taken in piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_storage.format.tensorfile import DTYPES

from .arrays import elements_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Findings", "Tolerance"]

_PIECE = 1 << 20
"""Elements that are compared at a time: 8 MiB a side as float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Elements x and y are alike if |x - y| <= absolute + relative x max(|x|, |y|)."""

    absolute: float = 0.0
    relative: float = 0.0


class Findings:
    """What the comparison of two tensors has found so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._seen_count = 0
        self._has_numbers = True
        self._at: int | None = None
        self.different_count = 0
        self._max_absolute = 0.0
        self._max_relative = 0.0
        self._nan_counts = [0, 0]

    def as_fields(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the findings as fields of a `ValueDiff` of tensors of `shape`."""
        import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

        at = None
        if self._at is not None:
            at = tuple(int(i) for i in np.unravel_index(self._at, shape)) if shape else ()
        return {
            "different_count": self.different_count,
            "max_absolute": self._max_absolute if self._has_numbers else None,
            "max_relative": self._max_relative if self._has_numbers else None,
            "at": at,
            "left_nan_count": self._nan_counts[0],
            "right_nan_count": self._nan_counts[1],
        }

    def add(
        self, left: NDArray[Any], left_dtype: str, right: NDArray[Any], right_dtype: str
    ) -> None:
        """Take in two flat arrays of words, equally long."""
        for at in range(0, len(left), _PIECE):
            x, y = left[at : at + _PIECE], right[at : at + _PIECE]
            if left_dtype == right_dtype and x.tobytes() == y.tobytes():
                pass
            elif _has_numbers(left_dtype) and _has_numbers(right_dtype):
                self._add_numbers(elements_of(x, left_dtype), elements_of(y, right_dtype))
            else:
                self._has_numbers = False
                same_type = left_dtype == right_dtype
                self.different_count += int((x != y).sum()) if same_type else len(x)
            self._seen_count += len(x)

    def _add_numbers(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

        if x.dtype == y.dtype and x.dtype.kind in "iu":
            self._add_integers(x, y)
            return
        kind = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
        with np.errstate(invalid="ignore"):
            # Of the NaN of types that it does not know numpy warns.
            a, b = x.astype(kind), y.astype(kind)
        a_nan, b_nan = np.isnan(a), np.isnan(b)
        self._nan_counts[0] += int((a_nan & ~b_nan).sum())
        self._nan_counts[1] += int((b_nan & ~a_nan).sum())
        with np.errstate(all="ignore"):
            distance = np.abs(a - b)
            # An infinity is no distance from itself, though inf - inf is NaN.
            distance[(a == b) | (a_nan & b_nan)] = 0.0
            # Neither is it one where only the other part of a complex number differs.
            distance[np.isnan(distance) & ~(a_nan | b_nan)] = np.inf
            size = np.maximum(np.abs(a), np.abs(b))
            self._weigh(distance, size, a_nan | b_nan)
        self.different_count += int((a_nan ^ b_nan).sum())

    def _add_integers(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

        # Wrapped round in their unsigned type, differences of 64 bits stay exact.
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        wide = (np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)).astype(
            np.float64
        )
        size = np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
        with np.errstate(all="ignore"):
            self._weigh(wide, size, np.zeros(len(x), bool))

    def _weigh(self, distance: NDArray[Any], size: NDArray[Any], no_number: NDArray[Any]) -> None:
        """Take in distances, with the larger magnitude of each pair; not where there is none."""
        import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

        distance[no_number] = 0.0
        allowed = self._tolerance.absolute + self._tolerance.relative * size
        # Where infinity meets a number, an infinite tolerance would allow it.
        beyond = (distance > 0) & ((distance > allowed) | np.isinf(distance))
        self.different_count += int(beyond.sum())
        if not distance.size:
            return
        largest = int(distance.argmax())
        if float(distance[largest]) > self._max_absolute:
            self._max_absolute = float(distance[largest])
            self._at = self._seen_count + largest
        relative = np.where(np.isinf(distance), np.inf, distance / np.where(size > 0, size, 1))
        self._max_relative = max(self._max_relative, float(relative.max()))


def _has_numbers(dtype: str) -> bool:
    """Return whether elements of torch's type `dtype` are numbers that numpy can count with."""
    return DTYPES[dtype].numpy is not None or dtype.startswith(("bfloat16", "float8"))
