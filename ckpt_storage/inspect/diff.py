"""Two checkpoints side by side: names, shapes, types and, streamed in bounded memory, values."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.format.boxes import Selection
from ckpt_storage.options import Progress

from .reading import (
    Handle,
    Names,
    elements_of,
    numpy_name,
    read_objects,
    read_stored,
    read_tensors,
    slabs,
)
from .views import Entry, shown

_PIECE = 1 << 20
"""Elements that are compared at a time: 8 MiB a side as float64."""
_MOST_SHOWN = 40


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the comparison of two tensors has found so far; fields as in `ValueDiff`.

    Elements x and y are alike if |x - y| <= absolute + relative x max(|x|, |y|).
    """

    absolute: float = 0.0
    relative: float = 0.0
    count: int = 0
    different_count: int = 0
    max_absolute: float | None = 0.0
    max_relative: float | None = 0.0
    at: int | None = None

    def as_fields(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the findings as fields of a `ValueDiff` of tensors of `shape`."""
        found = dataclasses.asdict(self)
        del found["absolute"], found["relative"]
        if self.at is not None:
            found["at"] = tuple(map(int, np.unravel_index(self.at, shape)))
        return found

    def add(
        self, left: NDArray[Any], left_dtype: str, right: NDArray[Any], right_dtype: str
    ) -> None:
        """Take in two flat arrays of words, equally long."""
        for at in range(0, len(left), _PIECE):
            x, y = left[at : at + _PIECE], right[at : at + _PIECE]
            is_same_type = left_dtype == right_dtype
            if is_same_type and x.tobytes() == y.tobytes():
                pass
            elif numpy_name(left_dtype) and numpy_name(right_dtype):
                self._add_numbers(elements_of(x, left_dtype), elements_of(y, right_dtype))
            else:
                self.max_absolute = self.max_relative = None
                self.different_count += int((x != y).sum()) if is_same_type else len(x)
            self.count += len(x)

    def _add_numbers(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        # Of the NaN of types that it does not know numpy warns.
        with np.errstate(all="ignore"):
            distance, size, x_nan, y_nan = _distances(x, y)
            distance[x_nan | y_nan] = 0.0
            # Where infinity meets a number, an infinite tolerance would allow it.
            is_far = (distance > self.absolute + self.relative * size) | np.isinf(distance)
            self.different_count += int((((distance > 0) & is_far) | (x_nan ^ y_nan)).sum())
            largest = int(distance.argmax())
            if float(distance[largest]) > (self.max_absolute or 0.0):
                self.max_absolute, self.at = float(distance[largest]), self.count + largest
            ratio = np.where(np.isinf(distance), np.inf, distance / np.where(size > 0, size, 1))
            self.max_relative = max(self.max_relative or 0.0, float(ratio.max()))


def _distances(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return |x - y| and max(|x|, |y|) as float64, and where x and y are NaN."""
    kind = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
    a, b = x.astype(kind), y.astype(kind)
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # Wrapped round in their unsigned type, differences of 64 bits stay exact.
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        apart = np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)
        distance = apart.astype(np.float64)
    else:
        distance = np.abs(a - b)
        # Infinities less one another are NaN: alike, or apart in one part of complex numbers.
        distance[np.isnan(distance)] = np.inf
        distance[a == b] = 0.0
    return distance, np.maximum(np.abs(a), np.abs(b)), np.isnan(a), np.isnan(b)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """One name whose values differ in two checkpoints; `left` and `right` describe them.

    kind: "kind": a tensor in one, an object in the other. "shape". "dtype": of another type; the
        values were compared all the same. "values".
    different_count: elements that differ by more than the tolerance; None if not compared, as
        are all that follow. NaN equals NaN, an infinity itself.
    max_absolute, max_relative: the largest |x - y|, and |x - y| / max(|x|, |y|), of all elements
        that are numbers in both. None for types without arithmetic.
    at: the index at which |x - y| is largest. An element that is NaN in one only differs.
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
    """How two checkpoints differ. False as a condition if they do not.

    `same_count` names are in both with equal values, or, where values were not looked at
    (`values_compared` False), with equal shape and dtype.
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
        lines = [
            f"- {shown(self.left_url)}",
            f"+ {shown(self.right_url)}",
            f"{self.same_count:,} same, {len(self.changed):,} changed",
        ]
        lines += [f"- {shown(fqn)}" for fqn in self.only_left[:_MOST_SHOWN]]
        lines += [f"+ {shown(fqn)}" for fqn in self.only_right[:_MOST_SHOWN]]
        for item in self.changed[:_MOST_SHOWN]:
            change = item.left if item.left == item.right else f"{item.left} -> {item.right}"
            told = f"! {shown(item.fqn)}: {change}"
            if item.different_count is not None:
                told += f", {item.different_count:,} of {item.count:,} differ"
            if item.max_absolute is not None:
                told += f", max |x - y| {item.max_absolute:.6g} at {item.at}"
                told += f", relative {item.max_relative:.6g}"
            lines.append(told)
        most = max(len(self.only_left), len(self.only_right), len(self.changed))
        return "\n".join([*lines, *(["…"] if most > _MOST_SHOWN else [])])

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
    """Return how two checkpoints differ in the chosen names. As `Checkpoint.diff`."""
    sides = (left, right)
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = list(names)
    lefts = dict.fromkeys(left.chosen(names, prefix, right))
    rights = dict.fromkeys(right.chosen(names, prefix, left))
    both = {fqn: (left.entry(fqn), right.entry(fqn)) for fqn in lefts if fqn in rights}
    found = {fqn: _unread(*pair) for fqn, pair in both.items()}
    if values:
        unread = [fqn for fqn, one in found.items() if one is None or one.kind == "dtype"]
        read = [both[fqn] for fqn in unread if both[fqn][0].dtype]
        total_bytes = sum(entry.size_bytes for pair in read for entry in pair)
        findings = [Findings(absolute=atol, relative=rtol) for _ in read]
        with left.reporting(progress, total_bytes=total_bytes) as on_bytes:
            _compare_elements(sides, read, findings, on_bytes)
        for (one, other), result in zip(read, findings, strict=True):
            known = found[one.fqn]
            if known is None and result.different_count:
                known = ValueDiff(fqn=one.fqn, kind="values", left=str(one), right=str(other))
            if known is not None:
                found[one.fqn] = dataclasses.replace(known, **result.as_fields(one.shape))
        found |= {fqn: _of_objects(left, right, fqn) for fqn in unread if not both[fqn][0].dtype}
    changed = tuple(item for item in found.values() if item is not None)
    return CheckpointDiff(
        left_url=left.url,
        right_url=right.url,
        only_left=tuple(fqn for fqn in lefts if fqn not in rights),
        only_right=tuple(fqn for fqn in rights if fqn not in lefts),
        changed=changed,
        same_count=len(both) - len(changed),
        values_compared=values,
    )


def _compare_elements(
    sides: tuple[Handle, Handle],
    pairs: Sequence[tuple[Entry, Entry]],
    findings: Sequence[Findings],
    on_bytes: Callable[[int], None],
) -> None:
    """Compare tensors of one shape each, piece by piece; small ones are read many at a time."""
    batch: list[tuple[int, Selection]] = []

    def read_and_compare() -> None:
        parts = [(pairs[at][0].fqn, where) for at, where in batch]
        arrays = (read_tensors(side, parts, gaps="cheap") for side in sides)
        for (at, _), x, y in zip(batch, *arrays, strict=True):
            one, other = (entry.dtype or "" for entry in pairs[at])
            findings[at].add(x.reshape(-1), one, y.reshape(-1), other)
            on_bytes(x.nbytes + y.nbytes)
        batch.clear()

    most_bytes, size_bytes = min(side.piece_bytes for side in sides), 0
    for at, pair in enumerate(pairs):
        item_bytes = max(entry.item_bytes for entry in pair)
        for part in slabs(pair[0].shape, max(1, most_bytes // item_bytes)):
            part_bytes = math.prod(map(len, part)) * item_bytes
            if size_bytes + part_bytes > most_bytes:
                read_and_compare()
                size_bytes = 0
            batch.append((at, part))
            size_bytes += part_bytes
    read_and_compare()


def _unread(left: Entry, right: Entry) -> ValueDiff | None:
    """Return how two values differ as far as that is known without reading them."""
    kind: Literal["kind", "shape", "dtype"]
    told = str(left), str(right)
    if bool(left.dtype) != bool(right.dtype):
        kind, told = "kind", ("tensor", "object") if left.dtype else ("object", "tensor")
    elif left.shape != right.shape:
        kind = "shape"
    elif left.dtype != right.dtype:
        kind = "dtype"
    else:
        return None
    return ValueDiff(fqn=left.fqn, kind=kind, left=told[0], right=told[1])


def _of_objects(left: Handle, right: Handle, fqn: str) -> ValueDiff | None:
    (x, _), (y, _) = (read_stored(side, [fqn])[0] for side in (left, right))
    if x == y:
        return None
    try:
        values = [read_objects(side, [fqn])[fqn] for side in (left, right)]
    except UnsafeContentError:
        told = [f"{len(x)} bytes", f"{len(y)} bytes"]
    else:
        if _same_objects(*values):
            return None
        told = [shown(reprlib.repr(value)) for value in values]
    return ValueDiff(fqn=fqn, kind="values", left=told[0], right=told[1])


def _same_objects(left: object, right: object) -> bool:
    """Return whether two objects are equal, and what is no number equal to itself."""
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
    # A number that is none equals itself here: what was saved did not change.
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124


def _same_arrays(left: Any, right: Any) -> bool:  # noqa: ANN401  # arrays or tensors
    facts = [(str(side.dtype), str(side.shape)) for side in (left, right)]
    if facts[0] != facts[1]:
        return False
    if getattr(left, "is_floating_point", bool)():
        # Narrow types of torch know no comparison.
        left, right = left.double(), right.double()
    return bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124
