"""How tensors are cut into chunks and who wrote which: records of tensors, and their JSON.

Tensors that are cut alike share one grid or list of chunks, in memory as in the document.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ckpt_storage.errors import FormatError

from .columns import Columns, Counts, pack_column, pack_names
from .documents import Getter
from .regions import Box
from .shardtable import boxes_from_json, boxes_to_json
from .tensorfile import DTYPES
from .tiling import Grid

Chunks = Sequence[tuple[Box, int]]
"""Chunks that form no grid, each with the rank that wrote it."""

_MOST_COMPARED = 128
"""Of up to as many chunks each is held against each; that takes no millisecond."""

_CORNERS_PER_CHUNK = 64
_FEW_CORNERS = 1 << 16
_MOST_CORNERS = 1 << 24
"""Corners of chunks that are looked at together: real tensors are cut in a few dimensions only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A whole tensor: dtype, shape, and which rank owns which box.

    Exactly one of `grid` (owners in C order) and `chunks` is set.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid | None = None
    chunks: Chunks | None = None

    def boxes(self) -> list[tuple[Box, int]]:
        """Return every chunk and the rank that wrote it."""
        if self.grid is not None:
            return list(zip(self.grid.boxes(self.shape), self.grid.owners, strict=True))
        return list(self.chunks or ())

    @property
    def chunk_count(self) -> int:
        """How many chunks there are."""
        return len(self.grid.owners) if self.grid is not None else len(self.chunks or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """The first element of a tensor, in C order, that not exactly one chunk holds.

    `at` is None where there are more corners to look at than any real tensor has.
    """

    at: tuple[int, ...] | None
    held_count: int


@dataclass(frozen=True, slots=True, eq=False)
class GridBoxes(Sequence[Box]):
    """The cells of a grid in C order, each made when it is asked for."""

    grid: Grid
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.grid.owners)

    @overload
    def __getitem__(self, index: int) -> Box: ...

    @overload
    def __getitem__(self, index: slice) -> list[Box]: ...

    def __getitem__(self, index: int | slice) -> Box | list[Box]:
        if isinstance(index, slice):
            return [self.grid.box(at, self.shape) for at in range(*index.indices(len(self)))]
        return self.grid.box(index + len(self) if index < 0 else index, self.shape)

    def __iter__(self) -> Iterator[Box]:
        return iter(self.grid.boxes(self.shape))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GridBoxes) and self.shape == other.shape:
            return self.grid == other.grid or list(self) == list(other)
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(Box.__eq__, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list


def compact(numbers: Counts) -> Sequence[int]:
    """Return integers from 0 on as a `range` if they are one, else as an array."""
    count = len(numbers)
    if count > 1:
        step = int(numbers[1]) - int(numbers[0])
        if step and bool((np.diff(numbers) == step).all()):
            return range(int(numbers[0]), int(numbers[0]) + count * step, step)
    elif count:
        return range(int(numbers[0]), int(numbers[0]) + 1)
    return array("q", numbers.tobytes())


def encode_tensors(tensors: Iterable[TensorRecord]) -> dict[str, Any]:
    """Return the keys `tensors`, `dtypes`, `shapes` and `layouts` of a manifest."""
    dtypes: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    layouts: dict[object, int] = {}
    known: dict[int, int] = {}
    bodies: list[dict[str, Any]] = []
    fqns: list[str] = []
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    for tensor in tensors:
        fqns.append(tensor.fqn)
        columns[0].append(dtypes.setdefault(tensor.dtype, len(dtypes)))
        columns[1].append(shapes.setdefault(tensor.shape, len(shapes)))
        cut = tensor.chunks if tensor.grid is None else tensor.grid
        at = known.get(id(cut))
        if at is None:
            at = layouts.setdefault(_key(cut), len(bodies))
            if at == len(bodies):
                bodies.append(_layout_to_json(cut))
            known[id(cut)] = at
        columns[2].append(at)
    return {
        "tensors": {
            "fqns": pack_names(fqns),
            **{
                key: pack_column(column)
                for key, column in zip(("dtype", "shape", "layout"), columns, strict=True)
            },
        },
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "layouts": bodies,
    }


def _key(cut: Grid | Chunks | None) -> object:
    """Return what tells a layout from others, hashable."""
    if isinstance(cut, Grid):
        return tuple(map(_words, (*cut.cuts, cut.owners)))
    return tuple(cut or ())


def _words(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype=np.int64).tobytes()


def _layout_to_json(cut: Grid | Chunks | None) -> dict[str, Any]:
    if isinstance(cut, Grid):
        return {"cuts": [_cut_to_json(cuts) for cuts in cut.cuts], "ranks": pack_column(cut.owners)}
    boxes = [(box.offsets, box.sizes) for box, _ in cut or ()]
    return {**boxes_to_json(boxes), "ranks": pack_column([rank for _, rank in cut or ()])}


def _cut_to_json(cuts: Sequence[int]) -> object:
    starts = compact(np.asarray(cuts, dtype=np.int64))
    if isinstance(starts, range) and len(starts) > 2:  # noqa: PLR2004  # shorter as it is
        return {"step": starts.step, "count": len(starts)}
    return pack_column(cuts)


def decode_tensors(
    body: Mapping[str, Any], columns: Columns, world_size: int
) -> list[TensorRecord]:
    """Return the tensors of a manifest. Raises `FormatError`."""
    get = Getter(body, columns.where)
    dtypes, shapes = get.strings("dtypes"), get.lists_of_counts("shapes")
    layouts = [
        _layout_from_json(entry.body, columns, world_size) for entry in get.objects("layouts")
    ]
    table = get.mapping("tensors")
    fqns = columns.names(table, "fqns")
    count = len(fqns)
    kinds = columns.column(table, "dtype", count=count, below=len(dtypes)).tolist()
    forms = columns.column(table, "shape", count=count, below=len(shapes)).tolist()
    cuts = columns.column(table, "layout", count=count, below=len(layouts)).tolist()
    for fqn, kind in zip(fqns, kinds, strict=True):
        _check_dtype(fqn, dtypes[kind], columns.where)
    sizes = [tuple(shape) for shape in shapes]
    for form, cut in set(zip(forms, cuts, strict=True)):
        if not fits(sizes[form], layouts[cut]) or _has_flaw(sizes[form], layouts[cut]):
            pairs = list(zip(forms, cuts, strict=True))
            fqn = fqns[pairs.index((form, cut))]
            get.fail(f"describes chunks of {fqn!r:.80} that do not hold each of its elements once")
    return [
        TensorRecord(
            fqn=fqn,
            dtype=dtypes[kind],
            shape=sizes[form],
            grid=layouts[cut] if isinstance(layouts[cut], Grid) else None,
            chunks=None if isinstance(layouts[cut], Grid) else layouts[cut],
        )
        for fqn, kind, form, cut in zip(fqns, kinds, forms, cuts, strict=True)
    ]


def _check_dtype(fqn: str, dtype: str, where: str) -> None:
    if dtype not in DTYPES:
        raise FormatError(
            f"{where} holds {fqn} with dtype {dtype!r}, which this release does not know.",
            path=where,
            next_step="Install a newer ckpt_storage.",
        )


def _layout_from_json(body: Mapping[str, Any], columns: Columns, world_size: int) -> Grid | Chunks:
    ranks = columns.column(body, "ranks", below=world_size)
    if "cuts" not in body:
        boxes = boxes_from_json(body, columns)
        if len(boxes) != len(ranks):
            Getter(body, columns.where).fail("has a layout with more or fewer ranks than chunks")
        return [(Box(*box), rank) for box, rank in zip(boxes, ranks.tolist(), strict=True)]
    get = Getter(body, columns.where)
    cuts = tuple(_cut_from_json(entry, columns) for entry in get.items("cuts"))
    if math.prod(map(len, cuts)) != len(ranks):
        get.fail("has a grid with more or fewer ranks than cells")
    return Grid(cuts, compact(ranks))


def _cut_from_json(value: object, columns: Columns) -> Sequence[int]:
    get = Getter(value, columns.where)
    if isinstance(value, dict) and "step" in value:
        step, count = get.count("step"), get.count("count")
        if step < 1 or count < 1 or step * count >= 1 << 63:
            get.fail("has a cut that cannot be")
        return range(0, step * count, step)
    starts = columns.column({"cut": value}, "cut")
    if not len(starts) or starts[0] != 0 or bool((np.diff(starts) <= 0).any()):
        get.fail("has a cut that does not ascend from 0")
    return compact(starts)


def fits(shape: tuple[int, ...], layout: Grid | Chunks) -> bool:
    """Return whether chunks lie in a shape and hold as many elements as it has.

    Of a grid, and of boxes that do not overlap, that is exact; see `find_flaw` for others.
    """
    if isinstance(layout, Grid):
        return len(layout.cuts) == len(shape) and all(
            cuts[-1] < max(size, 1) for cuts, size in zip(layout.cuts, shape, strict=True)
        )
    return sum(box.volume for box, _ in layout) == math.prod(shape) and all(
        len(box.offsets) == len(shape)
        and all(stop <= size for stop, size in zip(box.stops, shape, strict=True))
        for box, _ in layout
    )


def _has_flaw(shape: tuple[int, ...], layout: Grid | Chunks) -> bool:
    """Return whether chunks that `fits` says yes to overlap, and so leave a gap elsewhere."""
    if isinstance(layout, Grid):
        return False
    return find_flaw(shape, [box for box, _ in layout]) is not None


def find_flaw(shape: tuple[int, ...], boxes: Sequence[Box]) -> Flaw | None:
    """Return where `boxes`, which lie in `shape`, hold an element never or twice; None if nowhere.

    Boxes without elements count for nothing. Exact for boxes of any form, in O(m log m) for m
    corners: as many as boxes times 2 to the number of dimensions, or fewer.

    How many boxes hold an element is a sum of their indicator functions. Differences along each
    dimension in turn leave, of such a function, the signed corners of its boxes; they can be summed
    up again, so two functions are equal if and only if their corners are (the inclusion and
    exclusion of summed-area tables, Crow 1984). Here the tensor itself is subtracted as one more
    box; of what is left, the first corner is where the sum first is not zero, and its sign and size
    are the sum.
    """
    solid = [box for box in boxes if not box.is_empty]
    if 0 in shape or solid == [Box((0,) * len(shape), shape)]:
        return None
    is_moderate = 1 < len(solid) <= _MOST_COMPARED
    if is_moderate and sum(box.volume for box in solid) == math.prod(shape) and not _overlap(solid):
        return None
    cells = [*solid, Box((0,) * len(shape), shape)]
    starts = np.array([box.offsets for box in cells], dtype=np.int64).reshape(len(cells), -1)
    stops = np.array([box.stops for box in cells], dtype=np.int64).reshape(len(cells), -1)
    # Where all are whole, nothing can be told of them; a tensor has few other dimensions.
    dims = [dim for dim in range(len(shape)) if (stops - starts)[:, dim].min() < shape[dim]]
    found = _first_corner(starts[:, dims], stops[:, dims])
    if found is None:
        return None
    corner, excess = found
    if corner is None:
        return Flaw(at=None, held_count=0)
    at = [0] * len(shape)
    for dim, index in zip(dims, corner, strict=True):
        at[dim] = index
    return Flaw(at=tuple(at), held_count=excess + 1)


def _first_corner(starts: Counts, stops: Counts) -> tuple[Sequence[int] | None, int] | None:
    """Return the first corner, and its weight, of boxes less the last one; None if there is none.

    The corner is None where there are too many.
    """
    count, ndim = starts.shape
    rest = _ranks_of_rests(starts, stops)
    most = min(max(count * _CORNERS_PER_CHUNK, _FEW_CORNERS), _MOST_CORNERS)
    # Signed corners in the dimensions seen so far, each of a box, all in order of their corners.
    weights = np.ones(count, dtype=np.int64)
    weights[-1] = -1
    box = np.arange(count)
    rank = np.zeros(count, dtype=np.int64)
    # Of each dimension the corners' coordinates, and which corners before it they came from.
    edges: list[Counts] = []
    origins: list[Counts] = []
    for dim in range(ndim + 1):
        if dim:
            if 2 * len(box) > most:
                return None, 0
            edge = np.concatenate((starts[box, dim - 1], stops[box, dim - 1]))
            weights = np.concatenate((weights, -weights))
            box = np.concatenate((box, box))
            rank = _pair_ranks(np.concatenate((rank, rank)), edge)
        # Corners at one place, of boxes that are alike in all other dimensions, are one.
        _, first, which = np.unique(
            _pair_ranks(rank, rest[dim][box]), return_index=True, return_inverse=True
        )
        sums = np.zeros(len(first), dtype=np.int64)
        np.add.at(sums, which, weights)
        kept = first[sums != 0]
        if not len(kept):
            return None
        if dim:
            edges.append(edge[kept])
            origins.append(kept % (len(box) // 2))
        box, rank, weights = box[kept], rank[kept], sums[sums != 0]
    corner, at = list[int](), 0
    for edge, origin in zip(reversed(edges), reversed(origins), strict=True):
        corner.append(int(edge[at]))
        at = int(origin[at])
    return corner[::-1], int(weights[0])


def _ranks_of_rests(starts: Counts, stops: Counts) -> list[Counts]:
    """Return for each number of dimensions a number that is equal for boxes alike in the others."""
    ranks = [np.zeros(len(starts), dtype=np.int64)]
    for dim in reversed(range(starts.shape[1])):
        edges = _pair_ranks(starts[:, dim], stops[:, dim])
        ranks.append(_pair_ranks(edges, ranks[-1]))
    return ranks[::-1]


def _pair_ranks(first: Counts, second: Counts) -> Counts:
    """Return the ranks of pairs, in the order of the first number and then of the second."""
    values, minor = np.unique(second, return_inverse=True)
    major = np.unique(first, return_inverse=True)[1]
    ranks: Counts = np.unique(major * len(values) + minor, return_inverse=True)[1]
    return ranks


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two of a moderate number of boxes share elements: each held against each."""
    # Unsigned, so that no sum of two of them wraps around.
    starts = np.array([box.offsets for box in boxes], dtype=np.uint64)
    stops = starts + np.array([box.sizes for box in boxes], dtype=np.uint64)
    met = ~np.eye(len(boxes), dtype=np.bool_)
    for dim in range(starts.shape[1]):
        start, stop = starts[:, dim], stops[:, dim]
        met &= np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop)
    return bool(met.any())
