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

from .arrays import Region, read_regions, read_slabs
from .elementdiff import Findings, Tolerance
from .holdings import Holdings, Names
from .markup import card, escaped, page, shown, table
from .session import Outline, Session

if TYPE_CHECKING:
    from .arrays import Words

__all__ = ["CheckpointDiff", "ValueDiff", "compare"]

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
        urls = f'<code class="q">{escaped(self.left_url)}<br>{escaped(self.right_url)}</code>'
        return page(card(title, self._facts(), urls, *parts))


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
    return ["" if cell is None else cell for cell in cells]


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
