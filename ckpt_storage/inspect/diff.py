"""Two checkpoints side by side: names, shapes, types and, streamed in bounded memory, values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.options import Progress
from ckpt_storage.progress import reporting

from .facts import Entry, shown
from .handle import Handle, Names
from .html import card, page, table
from .reading import elements_of, numpy_name, read_objects, read_slabs, read_stored, read_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reading import Words

_PIECE = 1 << 20
"""Elements that are compared at a time: 8 MiB a side as float64."""
_MOST_SHOWN = 40
_WIDTH = 60

Kind = Literal["kind", "shape", "dtype", "values"]


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
            elif numpy_name(left_dtype) and numpy_name(right_dtype):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """One name whose values differ in two checkpoints; `left` and `right` describe them.

    kind: "kind": a tensor in one, an object in the other. "shape". "dtype": of another type; the
        values were compared all the same. "values".
    different_count: elements that differ by more than the tolerance; None if not compared, as
        are all that follow. NaN equals NaN, an infinity itself.
    max_absolute, max_relative: the largest |x - y|, and |x - y| / max(|x|, |y|), of all elements
        that are numbers in both. None for types without arithmetic.
    at: the index at which |x - y| is largest.
    left_nan_count, right_nan_count: elements that are NaN in one only; they differ.
    """

    fqn: str
    kind: Kind
    left: str
    right: str
    count: int | None = None
    different_count: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None
    at: tuple[int, ...] | None = None
    left_nan_count: int | None = None
    right_nan_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def _facts(self) -> dict[str, object]:
        return {
            "same": f"{self.same_count:,}",
            "changed": f"{len(self.changed):,}",
            "only left": f"{len(self.only_left):,}",
            "only right": f"{len(self.only_right):,}",
        }

    def __str__(self) -> str:
        facts = ", ".join(f"{value} {name}" for name, value in self._facts().items())
        lines = [f"- {shown(self.left_url)}", f"+ {shown(self.right_url)}", facts]
        lines += [f"- {shown(fqn)}" for fqn in self.only_left[:_MOST_SHOWN]]
        lines += [f"+ {shown(fqn)}" for fqn in self.only_right[:_MOST_SHOWN]]
        for item in self.changed[:_MOST_SHOWN]:
            change = item.left if item.left == item.right else f"{item.left} -> {item.right}"
            told = [f"! {shown(item.fqn)}: {change}"]
            if item.different_count is not None:
                told.append(f"{item.different_count:,} of {item.count:,} differ")
            if item.max_absolute is not None:
                told.append(f"max |x - y| {item.max_absolute:.6g} at {item.at}")
            if item.max_relative is not None:
                told.append(f"relative {item.max_relative:.6g}")
            lines.append(", ".join(told))
        most = max(len(self.only_left), len(self.only_right), len(self.changed))
        return "\n".join([*lines, *(["…"] if most > _MOST_SHOWN else [])])

    def _repr_html_(self) -> str:
        parts = []
        if self.changed:
            head = ("name", "left", "right", "different", "of", "max difference", "relative", "at")
            parts.append(table(head, map(_row, self.changed[:_MOST_SHOWN])))
        for title, names in (("only left", self.only_left), ("only right", self.only_right)):
            if names:
                parts.append(table((title,), ((fqn,) for fqn in names[:_MOST_SHOWN])))
        title = "Equal" if self.is_equal else "Different"
        urls = (self.left_url, self.right_url)
        return page(card(title, self._facts(), *parts, note=urls))


def _row(item: ValueDiff) -> Sequence[object]:
    cells: Sequence[object] = (
        item.fqn,
        item.left,
        item.right,
        item.different_count,
        item.count,
        item.max_absolute,
        item.max_relative,
        None if item.at is None else ", ".join(map(str, item.at)),
    )
    return cells


def compare(
    left: Handle,
    right: Handle,
    *,
    names: Names,
    prefix: str | None,
    values: bool,
    tolerance: Tolerance,
    progress: Progress,
) -> CheckpointDiff:
    """Return how two checkpoints differ in the chosen names, which may be in either one only.

    Holds a few pieces of two tensors at a time. Raises what reading raises, and `KeyError` for a
    name that is in neither.
    """
    sides = (left, right)
    if names is not None and not callable(names):
        wanted = [names] if isinstance(names, str) else list(names)
        for fqn in wanted:
            if fqn not in left and fqn not in right:
                raise left.unknown(fqn)
        chosen = [side.chosen([fqn for fqn in wanted if fqn in side], prefix) for side in sides]
    else:
        chosen = [side.chosen(names, prefix) for side in sides]
    lefts, rights = map(dict.fromkeys, chosen)
    both = [fqn for fqn in lefts if fqn in rights]
    pairs = {fqn: _Pair(_entry(left, fqn), _entry(right, fqn)) for fqn in both}
    total = sum(pair.left.size_bytes + pair.right.size_bytes for pair in pairs.values())
    with reporting(
        progress,
        phase="load",
        rank=0,
        total_bytes=total if values else 0,
        save_id=left.source.save_id,
        with_bar=True,
    ) as on_bytes:
        found: dict[str, ValueDiff | None] = {}
        read: list[_Pair] = []
        for fqn, pair in pairs.items():
            if pair.is_readable and values:
                read.append(pair)
            elif pair.left.dtype or pair.right.dtype:
                found[fqn] = pair.unread()
            elif values:
                found[fqn] = _of_objects(left, right, fqn)
        found |= _of_tensors(left, right, read, tolerance, on_bytes)
    changed = tuple(item for fqn in both if (item := found.get(fqn)) is not None)
    return CheckpointDiff(
        left_url=left.url,
        right_url=right.url,
        only_left=tuple(fqn for fqn in lefts if fqn not in rights),
        only_right=tuple(fqn for fqn in rights if fqn not in lefts),
        changed=changed,
        same_count=len(both) - len(changed),
        values_compared=values,
    )


def _entry(side: Handle, fqn: str) -> Entry:
    info = side.tensors.get(fqn)
    return Entry(fqn=fqn) if info is None else Entry(fqn=fqn, dtype=info.dtype, shape=info.shape)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The values of one name."""

    left: Entry
    right: Entry

    @property
    def is_readable(self) -> bool:
        """Whether both are tensors of one shape."""
        both = self.left.dtype and self.right.dtype
        return bool(both) and self.left.shape == self.right.shape

    def unread(self) -> ValueDiff | None:
        """Return how they differ as far as that is known without their elements."""
        if not (self.left.dtype and self.right.dtype):
            left, right = ("tensor" if side.dtype else "object" for side in (self.left, self.right))
            return ValueDiff(fqn=self.left.fqn, kind="kind", left=left, right=right)
        if self.left.shape != self.right.shape:
            return self._diff("shape")
        return None if self.left.dtype == self.right.dtype else self._diff("dtype")

    def read(self, findings: Findings) -> ValueDiff | None:
        """Return how they differ, their elements looked at."""
        is_other_type = self.left.dtype != self.right.dtype
        if not is_other_type and not findings.different_count:
            return None
        return dataclasses.replace(
            self._diff("dtype" if is_other_type else "values"),
            count=math.prod(self.left.shape),
            **findings.as_fields(self.left.shape),
        )

    def _diff(self, kind: Kind) -> ValueDiff:
        return ValueDiff(fqn=self.left.fqn, kind=kind, left=str(self.left), right=str(self.right))


def _of_tensors(
    left: Handle,
    right: Handle,
    pairs: Sequence[_Pair],
    tolerance: Tolerance,
    on_bytes: Callable[[int], None],
) -> dict[str, ValueDiff | None]:
    """Compare tensors of one shape each; small ones are read many at a time."""
    found: dict[str, ValueDiff | None] = {}
    piece_bytes = min(left.piece_bytes, right.piece_bytes)
    for batch in _batches(pairs, piece_bytes):
        findings = [Findings(tolerance) for _ in batch]
        for at, x, y in _elements(left, right, batch, piece_bytes):
            pair = batch[at]
            findings[at].add(x, pair.left.dtype or "", y, pair.right.dtype or "")
            on_bytes(x.nbytes + y.nbytes)
        for pair, result in zip(batch, findings, strict=True):
            found[pair.left.fqn] = pair.read(result)
    return found


def _batches(pairs: Sequence[_Pair], most_bytes: int) -> Iterator[list[_Pair]]:
    """Yield runs of pairs of at most `most_bytes` together, or of one that is larger."""
    batch: list[_Pair] = []
    size_bytes = 0
    for pair in pairs:
        larger_bytes = max(pair.left.size_bytes, pair.right.size_bytes)
        if batch and size_bytes + larger_bytes > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(pair)
        size_bytes += larger_bytes
    if batch:
        yield batch


def _elements(
    left: Handle, right: Handle, batch: Sequence[_Pair], piece_bytes: int
) -> Iterator[tuple[int, Words, Words]]:
    """Yield, of each pair, its place in the batch and elements of both as flat arrays of words."""
    first = batch[0]
    if len(batch) > 1:
        wanted = [(pair.left.fqn, tuple(map(range, pair.left.shape))) for pair in batch]
        both = (read_tensors(side, wanted, gaps="cheap") for side in (left, right))
        for at, (x, y) in enumerate(zip(*both, strict=True)):
            yield at, x.reshape(-1), y.reshape(-1)
        return
    most_count = max(1, piece_bytes // max(first.left.item_bytes, first.right.item_bytes))
    slabs = (read_slabs(side, first.left.fqn, most_count) for side in (left, right))
    for x, y in zip(*slabs, strict=True):
        yield 0, x, y


def _of_objects(left: Handle, right: Handle, fqn: str) -> ValueDiff | None:
    (x, _), (y, _) = (read_stored(side, [fqn])[0] for side in (left, right))
    if x == y:
        return None
    try:
        values = [read_objects(side, [fqn])[fqn] for side in (left, right)]
    except UnsafeContentError:
        told = [f"{len(x)} bytes", f"{len(y)} bytes"]
    else:
        if same_objects(*values):
            return None
        told = list(map(_brief, values))
    return ValueDiff(fqn=fqn, kind="values", left=told[0], right=told[1])


def same_objects(left: object, right: object) -> bool:
    """Return whether two objects are equal, and what is no number equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(
            same_objects(left[key], right[key]) for key in left
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_objects, left, right))
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


def _brief(value: object) -> str:
    text = repr(value)
    return shown(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…")
