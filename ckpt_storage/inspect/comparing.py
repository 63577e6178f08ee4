"""Two checkpoints side by side: names, shapes, types and, streamed in bounded memory, values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import Progress
from ckpt_storage.progress import reporting

from .arrays import Region, elements_of, read_regions, read_slabs
from .facts import shown
from .holdings import Holdings, Names
from .html import card, page, table
from .session import Outline, Session

if TYPE_CHECKING:
    from numpy.typing import NDArray

if TYPE_CHECKING:
    from .arrays import Words


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


_MOST_SHOWN = 40
_WIDTH = 60

Kind = Literal["kind", "shape", "dtype", "values"]


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


def compare(  # all named
    left: Holdings,
    right: Holdings,
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
    lefts, rights = _chosen(left, right, names, prefix)
    both = [fqn for fqn in lefts if fqn in rights]
    sizes = (
        side.session.outline(fqn).size_bytes
        for fqn in both
        for side in (left, right)
        if side.is_tensor(fqn)
    )
    with reporting(
        progress,
        phase="load",
        rank=0,
        total_bytes=sum(sizes) if values else 0,
        save_id=left.session.save_id,
        with_bar=True,
    ) as on_bytes:
        found = _found(left, right, both, values=values, tolerance=tolerance, on_bytes=on_bytes)
    changed = tuple(found[fqn] for fqn in both if fqn in found)
    return CheckpointDiff(
        left_url=left.session.url,
        right_url=right.session.url,
        only_left=tuple(fqn for fqn in lefts if fqn not in rights),
        only_right=tuple(fqn for fqn in rights if fqn not in lefts),
        changed=changed,
        same_count=len(both) - len(changed),
        values_compared=values,
    )


def _chosen(
    left: Holdings, right: Holdings, names: Names, prefix: str | None
) -> tuple[dict[str, None], dict[str, None]]:
    """Return the chosen names of both sides, as sets that keep their order."""
    sides = (left, right)
    if names is None or callable(names):
        return tuple(dict.fromkeys(side.chosen(names, prefix)) for side in sides)  # type: ignore[return-value]  # two
    wanted = [names] if isinstance(names, str) else list(names)
    for fqn in wanted:
        if fqn not in left and fqn not in right:
            raise left.unknown(fqn)
    return tuple(  # type: ignore[return-value]  # two
        dict.fromkeys(side.chosen([fqn for fqn in wanted if fqn in side], prefix)) for side in sides
    )


def _found(
    left: Holdings,
    right: Holdings,
    both: Sequence[str],
    *,
    values: bool,
    tolerance: Tolerance,
    on_bytes: Callable[[int], None],
) -> dict[str, ValueDiff]:
    """Return what differs, by name; tensors that are small are read many at a time."""
    found: dict[str, ValueDiff | None] = {}
    pairs: list[_Pair] = []
    for fqn in both:
        if left.is_tensor(fqn) and right.is_tensor(fqn):
            pair = _Pair(left.session.outline(fqn), right.session.outline(fqn))
            if pair.has_one_shape and values:
                pairs.append(pair)
            else:
                found[fqn] = pair.unread()
        elif left.is_tensor(fqn) or right.is_tensor(fqn):
            told = ("object", "tensor")
            found[fqn] = ValueDiff(
                fqn=fqn,
                kind="kind",
                left=told[left.is_tensor(fqn)],
                right=told[right.is_tensor(fqn)],
            )
        elif values:
            found[fqn] = _of_objects(left, right, fqn)
    piece_bytes = min(side.piece_bytes for side in (left, right))
    for batch in _batches(pairs, piece_bytes):
        findings = [Findings(tolerance) for _ in batch]
        for at, x, y in _elements(left.session, right.session, batch, piece_bytes):
            findings[at].add(x, batch[at].left.dtype, y, batch[at].right.dtype)
            on_bytes(x.nbytes + y.nbytes)
        found.update(
            (pair.left.fqn, pair.read(result)) for pair, result in zip(batch, findings, strict=True)
        )
    return {fqn: item for fqn, item in found.items() if item is not None}


@dataclass(frozen=True, slots=True)
class _Pair:
    """The tensors of one name."""

    left: Outline
    right: Outline

    @property
    def has_one_shape(self) -> bool:
        return self.left.shape == self.right.shape

    @property
    def size_bytes(self) -> int:
        """The size of the larger one."""
        return max(self.left.size_bytes, self.right.size_bytes)

    def unread(self) -> ValueDiff | None:
        """Return how they differ as far as that is known without their elements."""
        if not self.has_one_shape:
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
        return ValueDiff(
            fqn=self.left.fqn,
            kind=kind,
            left=_described(self.left),
            right=_described(self.right),
        )


def _batches(pairs: Sequence[_Pair], most_bytes: int) -> Iterator[list[_Pair]]:
    """Yield runs of pairs of at most `most_bytes` together, or of one that is larger."""
    batch: list[_Pair] = []
    size_bytes = 0
    for pair in pairs:
        if batch and size_bytes + pair.size_bytes > most_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(pair)
        size_bytes += pair.size_bytes
    if batch:
        yield batch


def _elements(
    left: Session, right: Session, batch: Sequence[_Pair], piece_bytes: int
) -> Iterator[tuple[int, Words, Words]]:
    """Yield, of each pair, its place in the batch and elements of both as flat arrays of words."""
    if len(batch) > 1:
        regions = [Region.whole(pair.left.fqn, pair.left.shape) for pair in batch]
        both = (read_regions(side, regions, gaps="cheap") for side in (left, right))
        for at, (x, y) in enumerate(zip(*both, strict=True)):
            yield at, x.reshape(-1), y.reshape(-1)
        return
    fqn = batch[0].left.fqn
    most_count = max(1, piece_bytes // max(batch[0].left.item_bytes, batch[0].right.item_bytes))
    slabs = (read_slabs(side, fqn, most_count) for side in (left, right))
    for x, y in zip(*slabs, strict=True):
        yield 0, x, y


def _described(outline: Outline) -> str:
    return f"{outline.dtype}[{', '.join(map(str, outline.shape))}]"


def _of_objects(left: Holdings, right: Holdings, fqn: str) -> ValueDiff | None:
    stored = (left.stored_bytes(fqn), right.stored_bytes(fqn))
    if stored[0] == stored[1]:
        return None
    try:
        values = (left.value(fqn), right.value(fqn))
    except UnsafeContentError:
        told = tuple(f"{len(data)} bytes" for data in stored)
        return ValueDiff(fqn=fqn, kind="values", left=told[0], right=told[1])
    if _same(*values):
        return None
    return ValueDiff(fqn=fqn, kind="values", left=_brief(values[0]), right=_brief(values[1]))


def _same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if hasattr(left, "tobytes") and hasattr(right, "tobytes"):
        return _facts_of(left) == _facts_of(right) and (
            left.tobytes() == right.tobytes() or _same_elements(left, right)
        )
    if hasattr(left, "numpy") and hasattr(right, "numpy"):
        return _facts_of(left) == _facts_of(right) and _same_elements(left, right)
    # A number that is none equals itself here: what was saved did not change.
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124


def _same_elements(left: Any, right: Any) -> bool:  # noqa: ANN401  # arrays or tensors
    """Return whether all elements are equal, those that are no number to each other."""
    if getattr(left, "is_floating_point", bool)():
        # Narrow types of torch know no comparison.
        left, right = left.double(), right.double()
    return bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124


def _facts_of(value: object) -> tuple[str, str]:
    return str(getattr(value, "dtype", "")), str(getattr(value, "shape", ""))


def _brief(value: object) -> str:
    text = repr(value)
    return shown(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…")
