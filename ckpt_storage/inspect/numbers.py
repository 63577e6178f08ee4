"""Statistics of a tensor, and differences of two checkpoints, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.options import Progress

from .reading import Handle, Names, Words, elements_of, numpy_name, read_objects, read_stored, walk
from .views import DASH, Entry, shape_text, shown

_MAX_LINES = 100


def differences(
    pieces: Iterable[Sequence[Words]], sides: Sequence[Entry], rtol: float, atol: float
) -> dict[str, Any]:
    """Return the fields of a `ValueDiff` of two tensors; `pieces` are pairs of flat words.

    Elements x and y are equal if |x - y| <= atol + rtol x max(|x|, |y|).
    """
    dtypes = [side.dtype or "" for side in sides]
    has_numbers, is_same_type = all(map(numpy_name, dtypes)), dtypes[0] == dtypes[1]
    count = different_count = 0
    max_absolute, max_relative, at = 0.0, 0.0, None
    for x, y in pieces:
        if is_same_type and x.tobytes() == y.tobytes():
            pass
        elif not has_numbers:
            different_count += int((x != y).sum()) if is_same_type else len(x)
        elif len(x):
            # numpy warns of the NaN of types of `ml_dtypes`.
            with np.errstate(all="ignore"):
                distance, size, x_nan, y_nan = _distances(*map(elements_of, (x, y), dtypes))
                distance[x_nan | y_nan] = 0.0
                # An infinite tolerance would accept an infinity and a number.
                is_far = (distance > atol + rtol * size) | np.isinf(distance)
                ratio = np.where(np.isinf(distance), np.inf, distance / np.where(size > 0, size, 1))
            different_count += int((((distance > 0) & is_far) | (x_nan ^ y_nan)).sum())
            max_relative = max(max_relative, float(ratio.max()))
            largest = int(distance.argmax())
            if float(distance[largest]) > max_absolute:
                max_absolute, at = float(distance[largest]), count + largest
        count += len(x)
    is_known = has_numbers or not different_count
    return {
        "count": count,
        "different_count": different_count,
        "max_absolute": max_absolute if is_known else None,
        "max_relative": max_relative if is_known else None,
        "at": None if at is None else tuple(map(int, np.unravel_index(at, sides[0].shape))),
    }


def _distances(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return |x - y| and max(|x|, |y|) as float64, and where x and y are NaN."""
    kind = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
    a, b = x.astype(kind), y.astype(kind)
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # In the unsigned type, differences of 64-bit integers wrap around and stay exact.
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        apart = np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)
        distance = apart.astype(np.float64)
    else:
        distance = np.abs(a - b)
        # The difference of two infinities is NaN; equal infinities get the distance 0 below.
        distance[np.isnan(distance)] = np.inf
        distance[a == b] = 0.0
    return distance, np.maximum(np.abs(a), np.abs(b)), np.isnan(a), np.isnan(b)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A name whose values differ in two checkpoints; `left` and `right` describe the values.

    kind: "kind": a tensor and an object. "shape". "dtype": the values were compared all the same.
        "values".
    different_count: elements that differ by more than the tolerance. NaN equals NaN, and an
        infinity itself; NaN differs from a number. None, as the next fields: not compared.
    max_absolute, max_relative: the largest |x - y|, and |x - y| / max(|x|, |y|), of all elements
        that are numbers in both. None for types without arithmetic.
    at: the index at which |x - y| is largest.
    """

    fqn: str
    kind: Literal["kind", "shape", "dtype", "values"]
    left: str
    right: str
    count: int | None = None
    different_count: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    at: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointDiff:
    """The differences of two checkpoints; false if there are none.

    `same_count` names are in both with equal values; if `values_compared` is False, with equal
    shape and dtype.
    """

    left_url: str
    right_url: str
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    changed: tuple[ValueDiff, ...]
    same_count: int
    values_compared: bool

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_left or self.only_right or self.changed)

    def __bool__(self) -> bool:
        return not self.is_equal

    def __str__(self) -> str:
        lines = [f"- {self.left_url}", f"+ {self.right_url}"]
        lines += [f"{self.same_count:,} same, {len(self.changed):,} changed"]
        lines += [f"- {fqn}" for fqn in self.only_left] + [f"+ {fqn}" for fqn in self.only_right]
        for item in self.changed:
            change = item.left if item.left == item.right else f"{item.left} -> {item.right}"
            line = f"! {item.fqn}: {change}"
            if item.different_count is not None:
                line += f", {item.different_count:,} of {item.count:,} differ"
            if item.max_absolute is not None:
                line += f", max |x - y| {item.max_absolute:.6g} at {item.at}"
                line += f", relative {item.max_relative:.6g}"
            lines.append(line)
        more = ["…"] if len(lines) > _MAX_LINES else []
        return "\n".join([*map(shown, lines[:_MAX_LINES]), *more])

    __repr__ = __str__


def compare(
    left: Handle,
    right: Handle,
    *,
    names: Names = None,
    prefix: str | None = None,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress = None,
) -> CheckpointDiff:
    """Return the differences of two checkpoints in the selected names; as `Checkpoint.diff`."""
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = list(names)
    lefts = dict.fromkeys(left.chosen(names, prefix, right))
    rights = dict.fromkeys(right.chosen(names, prefix, left))
    both = {fqn: (left.entry(fqn), right.entry(fqn)) for fqn in lefts if fqn in rights}
    changes = {fqn: change for fqn, pair in both.items() if (change := _compare_entries(*pair))}
    if values:
        comparable = [fqn for fqn in both if fqn not in changes or changes[fqn].kind == "dtype"]
        tensors = [fqn for fqn in comparable if fqn in left.tensors]
        total_bytes = sum(entry.size_bytes for fqn in tensors for entry in both[fqn])
        with left.reporting(progress, total_bytes=total_bytes) as on_bytes:
            pieces = walk((left, right), tensors, on_bytes=on_bytes)
            for fqn, group in groupby(pieces, key=itemgetter(0)):
                fields = differences((words for _, words in group), both[fqn], rtol, atol)
                if fqn in changes or fields["different_count"]:
                    x, y = map(str, both[fqn])
                    change = changes.get(fqn) or ValueDiff(fqn=fqn, kind="values", left=x, right=y)
                    changes[fqn] = dataclasses.replace(change, **fields)
        for fqn in comparable:
            if fqn not in left.tensors and (changed := _compare_objects(left, right, fqn)):
                changes[fqn] = changed
    return CheckpointDiff(
        left_url=left.url,
        right_url=right.url,
        only_left=tuple(fqn for fqn in lefts if fqn not in rights),
        only_right=tuple(fqn for fqn in rights if fqn not in lefts),
        changed=tuple(changes[fqn] for fqn in both if fqn in changes),
        same_count=len(both) - len(changes),
        values_compared=values,
    )


def _compare_entries(left: Entry, right: Entry) -> ValueDiff | None:
    """Return the difference of kind, shape or dtype, None if there is none."""
    kind: Literal["kind", "shape", "dtype"]
    texts = str(left), str(right)
    if bool(left.dtype) != bool(right.dtype):
        kind, texts = "kind", ("tensor", "object") if left.dtype else ("object", "tensor")
    elif left.shape != right.shape:
        kind = "shape"
    elif left.dtype != right.dtype:
        kind = "dtype"
    else:
        return None
    return ValueDiff(fqn=left.fqn, kind=kind, left=texts[0], right=texts[1])


def _compare_objects(left: Handle, right: Handle, fqn: str) -> ValueDiff | None:
    (x, _), (y, _) = (read_stored(side, [fqn])[0] for side in (left, right))
    if x == y:
        return None
    try:
        values = [read_objects(side, [fqn])[fqn] for side in (left, right)]
    except UnsafeContentError:
        texts = [f"{len(x)} bytes", f"{len(y)} bytes"]
    else:
        if _same_objects(*values):
            return None
        texts = [shown(reprlib.repr(value)) for value in values]
    return ValueDiff(fqn=fqn, kind="values", left=texts[0], right=texts[1])


def _same_objects(left: object, right: object) -> bool:
    """Return whether two objects are equal; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(
            _same_objects(left[key], right[key]) for key in left
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same_objects, left, right))
    if hasattr(left, "dtype") and hasattr(left, "shape"):
        return _same_arrays(left, right)
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124


def _same_arrays(left: Any, right: Any) -> bool:  # noqa: ANN401  # arrays or tensors
    facts = [(str(side.dtype), str(side.shape)) for side in (left, right)]
    if facts[0] != facts[1]:
        return False
    if getattr(left, "is_floating_point", bool)():
        # Narrow types of torch have no comparison.
        left, right = left.double(), right.double()
    return bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The numbers of finite elements between neighbouring `edges`.

    Intervals are half open, but the last interval includes its upper edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorStats:
    """Statistics of a tensor. Mean, std, min and max are those of finite elements, or None.

    `std` is that of the population (numpy's `ddof=0`). Sums are in float64, so that narrow types do
    not overflow. `min` and `max` are exact.
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


_COUNTED: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.bool_]]] = {
    "finite_count": np.isfinite,
    "nan_count": np.isnan,
    "positive_inf_count": np.isposinf,
    "negative_inf_count": np.isneginf,
    "zero_count": np.logical_not,
}


def summarise(
    pieces: Callable[[], Iterable[NDArray[Any]]],
    *,
    bin_count: int,
    **facts: Any,  # noqa: ANN401  # fields of the result
) -> TensorStats:
    """Return the statistics of a tensor; `pieces()`, called twice, yields its elements."""
    counts: Counter[str] = Counter()
    means: list[tuple[int, float]] = []
    extremes: list[float] = []
    for piece in pieces():
        values = _wide(piece)
        counts.update({name: int(test(values).sum()) for name, test in _COUNTED.items()})
        finite = values[np.isfinite(values)]
        if finite.size:
            # As float64, large integers would lose digits.
            exact = piece if piece.dtype.kind in "iu" else finite
            extremes += [exact.min().item(), exact.max().item()]
            with np.errstate(over="ignore"):
                mean = float(finite.mean())
            if not math.isfinite(mean):
                mean = float((finite / finite.size).sum())
            means.append((finite.size, mean))
    facts |= {name: counts[name] for name in _COUNTED}
    count = counts["finite_count"]
    if not count:
        facts |= dict.fromkeys(("mean", "std", "min", "max"))
        return TensorStats(**facts, histogram=Histogram(edges=(), counts=()))
    mean = sum(value * (size / count) for size, value in means)
    edges = _edges(min(extremes), max(extremes), max(1, bin_count))
    bins, squares = np.zeros(len(edges) - 1, np.int64), 0.0
    for values in map(_wide, pieces()):
        finite = values[np.isfinite(values)]
        bins += np.histogram(finite, edges)[0]
        with np.errstate(over="ignore"):
            squares += float(np.square(finite - mean).sum())
    return TensorStats(
        **facts,
        mean=mean,
        std=math.sqrt(squares / count),
        min=min(extremes),
        max=max(extremes),
        histogram=Histogram(edges=tuple(edges.tolist()), counts=tuple(bins.tolist())),
    )


def _wide(piece: NDArray[Any]) -> NDArray[np.float64]:
    # numpy warns of the NaN of types of `ml_dtypes`.
    with np.errstate(invalid="ignore"):
        return piece.astype(np.float64)


def _edges(low: float, high: float, bin_count: int) -> NDArray[np.float64]:
    low, high = float(low), float(high)
    if low == high:
        # As in numpy: a bin needs a width.
        low, high = low - 0.5, high + 0.5
    # With halves, the distance of the extremes of float64 does not overflow.
    edges = 2 * np.linspace(low / 2, high / 2, bin_count + 1)
    edges[0], edges[-1] = low, high
    # Half of the smallest float rounds to 0, which may leave the range.
    return np.maximum.accumulate(np.clip(edges, low, high))
