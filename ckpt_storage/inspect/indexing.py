"""numpy's basic indexing as arithmetic: which elements an index means."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType

FinalIndex = tuple[int | slice | EllipsisType | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What an index means: ascending positions per dimension, and what is left to do with them.

    `ranges` has one entry per dimension of the tensor. `final` is the index that turns the array
    of those positions, all dimensions kept, into what numpy gives for the original index: it drops
    dimensions, adds new ones, turns round what was asked for backwards, and copies nothing.
    """

    ranges: tuple[range, ...]
    final: FinalIndex

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions per dimension."""
        return tuple(map(len, self.ranges))


def select(index: object, shape: Sequence[int]) -> Selection:
    """Return what `index` means for a tensor of `shape`, as numpy's basic indexing has it.

    Takes integers, slices, `...`, None and tuples of them. Raises `IndexError` for whatever numpy
    refuses, and for arrays of indices and masks, which numpy takes.
    """
    entries = index if isinstance(index, tuple) else (index,)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(
            f"too many indices for array: array is {len(shape)}-dimensional, but {used} were "
            "indexed"
        )
    ranges: list[range] = []
    final: list[int | slice | EllipsisType | None] = []
    for entry in entries:
        if entry is None:
            final.append(None)
        elif entry is Ellipsis:
            missing = len(shape) - used
            ranges.extend(range(size) for size in shape[len(ranges) : len(ranges) + missing])
            final.append(Ellipsis)
        elif isinstance(entry, slice):
            positions = range(*entry.indices(shape[len(ranges)]))
            is_backwards = positions.step < 0
            ranges.append(_ascending(positions))
            final.append(slice(None, None, -1) if is_backwards else slice(None))
        else:
            ranges.append(_one(entry, shape[len(ranges)], len(ranges)))
            final.append(0)
    ranges.extend(range(size) for size in shape[len(ranges) :])
    return Selection(ranges=tuple(ranges), final=tuple(final))


def _ascending(positions: range) -> range:
    if not positions:
        return range(0)
    return positions if positions.step > 0 else positions[::-1]


def _one(entry: object, size: int, axis: int) -> range:
    # A boolean has __index__ but is a mask to numpy.
    is_mask = isinstance(entry, bool) or "bool" in str(getattr(entry, "dtype", ""))
    try:
        at = None if is_mask else operator.index(entry)  # type: ignore[arg-type]  # it looks
    except TypeError:
        at = None
    # An array of one number has __index__ too, but numpy keeps its dimensions.
    if at is None or getattr(entry, "ndim", None):
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`) and None are valid indices of a "
            "LazyTensor; read a region first and index the array with what you have"
        )
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of bounds for axis {axis} with size {size}")
    at %= size
    return range(at, at + 1)


def slabs(shape: Sequence[int], most_count: int) -> Iterator[tuple[range, ...]]:
    """Yield regions of at most `most_count` elements that follow one another in C order.

    Each is of adjacent rows of one dimension, so that it is one run of every chunk it meets
    that is not cut in a dimension before that one. An empty shape has none.
    """
    if 0 in shape:
        return
    dim, row_count = 0, math.prod(shape)
    while dim < len(shape) and row_count // shape[dim] > most_count:
        row_count //= shape[dim]
        dim += 1
    outer = itertools.product(*([range(i, i + 1) for i in range(size)] for size in shape[:dim]))
    if dim == len(shape):
        yield from outer
        return
    size = shape[dim]
    step = max(1, most_count * size // row_count)
    inner = tuple(range(n) for n in shape[dim + 1 :])
    for before in outer:
        for start in range(0, size, step):
            yield (*before, range(start, min(start + step, size)), *inner)
