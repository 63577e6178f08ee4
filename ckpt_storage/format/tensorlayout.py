"""How tensors are cut into chunks and who wrote which: records of tensors, and their JSON.

Tensors that are cut alike share one grid or list of chunks, in memory as in the document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_storage.errors import FormatError

from .boxes import Box, Grid, compact, find_flaw
from .documents import Columns, Getter, pack_column, pack_names
from .dtypes import DTYPES
from .shardtable import boxes_from_json, boxes_to_json

Chunks = Sequence[tuple[Box, int]]
"""Chunks that form no grid, each with the rank that wrote it."""


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
