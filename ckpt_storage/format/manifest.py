"""What a checkpoint is: its manifest as a value, with a strict codec to and from sealed JSON.

Tensors that are cut alike share one grid or list of chunks, in memory as in the document.
`docs/format.md`, section "Manifest", specifies it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .boxes import Box, Grid, compact
from .columns import Columns, Counts, LazyList, pack_column, pack_names
from .coverage import find_flaw
from .documents import (
    MOST_RANKS,
    FileRef,
    Getter,
    check_format,
    decode_crcs,
    encode_crcs,
    encode_format,
    ref_from_json,
)
from .names import rank_manifest_path, shard_path, stock_copy_path
from .rank_manifest import (
    boxes_from_json,
    boxes_to_json,
    check_dtypes,
    save_id_of,
    ties_from_json,
)

_MAJOR = 1

Chunks = Sequence[tuple[Box, int]]
"""Chunks that form no grid, each with the rank that wrote it."""

PlannerData = dict[str, tuple[str | int, ...]]


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
class Manifest:
    """What the checkpoint is.

    `files` are in order of rank and of each rank's index; `ranks` and `hosts` have an entry a
    rank. `planner_data` maps an FQN to its path in the nested state dict, or is None. `ties` maps
    alias to target, which was the same memory; what is stored of them is equal. `stock_entries`
    is how many items stock readers find, 0 if `stock` is a note that says they find none; None if
    there are none to find.
    """

    save_id: str
    world_size: int
    tensors: Mapping[str, TensorRecord]
    blobs: Mapping[str, int]
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    files: Sequence[tuple[FileRef, int]]
    ranks: Sequence[FileRef]
    hosts: Sequence[str]
    stock: FileRef | None
    stock_entries: int | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    writer: Mapping[str, str] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body."""
        names = list(dict.fromkeys(self.hosts))
        at = {name: number for number, name in enumerate(names)}
        body: dict[str, Any] = {
            "format": encode_format("manifest", _MAJOR),
            "save_id": self.save_id,
            "world_size": self.world_size,
            "created_at": self.created_at,
            "writer": dict(self.writer),
            **encode_tensors(self.tensors.values()),
            "blobs": {
                "fqns": pack_names(list(self.blobs)),
                "rank": pack_column(list(self.blobs.values())),
            },
            "planner_data": None
            if self.planner_data is None
            else pack_names([_spelt(*entry) for entry in self.planner_data.items()]),
            "files": {
                "rank": pack_column([rank for _, rank in self.files]),
                **_refs_to_json([ref for ref, _ in self.files]),
            },
            "ranks": _refs_to_json(self.ranks),
            "hosts": {
                "names": pack_names(names),
                "rank": pack_column([at[host] for host in self.hosts]),
            },
            "stock": self.stock.as_json() if self.stock else None,
        }
        if self.stock_entries is not None:
            body["stock_entries"] = self.stock_entries
        if self.ties:
            body["ties"] = dict(self.ties)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> Manifest:
        """Return the manifest that `body` describes; `where` names its file in errors.

        Raises `FormatError` for anything that contradicts itself, `UnsafeContentError` for a path
        that leaves the checkpoint.
        """
        check_format(body, "manifest", _MAJOR, path=where)
        get, columns = Getter(body, where), Columns(where)
        save_id, world_size = save_id_of(get), get.count("world_size")
        if world_size > MOST_RANKS:
            get.fail(f"declares more than {MOST_RANKS} ranks")
        tensors = decode_tensors(body, columns, world_size)
        blobs = get.mapping("blobs")
        blob_fqns = columns.names(blobs, "fqns")
        blob_ranks = columns.column(blobs, "rank", count=len(blob_fqns), below=world_size)
        by_fqn = {tensor.fqn: tensor for tensor in tensors}
        if len({*by_fqn, *blob_fqns}) != len(tensors) + len(blob_fqns):
            get.fail("has two values of one name")
        hosts = get.mapping("hosts")
        names = columns.names(hosts, "names")
        host_of = columns.column(hosts, "rank", count=world_size, below=len(names)).tolist()
        stock = ref_from_json(body["stock"], where) if body.get("stock") else None
        if stock is not None and stock.path != stock_copy_path(save_id):
            # Who copies would write there.
            get.fail(f"names {stock.path!r:.200}, which is no document of this save")
        writer = get.mapping("writer") if "writer" in body else {}
        return cls(
            save_id=save_id,
            world_size=world_size,
            created_at=str(body.get("created_at", "")),
            writer={key: str(value) for key, value in writer.items()},
            tensors=by_fqn,
            blobs=dict(zip(blob_fqns, blob_ranks.tolist(), strict=True)),
            planner_data=_planner_data_of(body, columns, get),
            files=_files_from_json(get.mapping("files"), columns, save_id, world_size),
            ranks=_refs_from_json(
                get.mapping("ranks"),
                columns,
                world_size,
                partial(rank_manifest_path, save_id),
            ),
            hosts=[names[at] for at in host_of],
            stock=stock,
            stock_entries=get.count("stock_entries") if "stock_entries" in body else None,
            ties=_checked_ties(get, by_fqn),
        )


def _checked_ties(get: Getter, tensors: Mapping[str, TensorRecord]) -> dict[str, str]:
    ties = ties_from_json(get, tensors.keys())
    for alias, target in ties.items():
        a, b = tensors[alias], tensors[target]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            get.fail(f"ties {alias!r:.80} to a tensor of another dtype or shape")
    return ties


def _refs_to_json(refs: Sequence[FileRef]) -> dict[str, Any]:
    return {
        "bytes": pack_column([ref.size_bytes for ref in refs]),
        "crc32c": encode_crcs([ref.crc32c for ref in refs]),
    }


def _refs_from_json(
    body: object, columns: Columns, count: int, path_of: Callable[[int], str]
) -> Sequence[FileRef]:
    sizes = columns.column(body, "bytes", count=count)
    text = Getter(body, columns.where).string("crc32c")
    crcs = decode_crcs(text, count, path=columns.where)
    return LazyList(count, partial(_ref, path_of, sizes, crcs))


def _ref(path_of: Callable[[int], str], sizes: Counts, crcs: Sequence[int], at: int) -> FileRef:
    return FileRef(path=path_of(at), size_bytes=int(sizes[at]), crc32c=crcs[at])


def _files_from_json(
    body: object, columns: Columns, save_id: str, world_size: int
) -> Sequence[tuple[FileRef, int]]:
    ranks = columns.column(body, "rank", below=world_size)
    if len(ranks) and int(np.diff(ranks, prepend=0).min()) < 0:
        Getter(body, columns.where).fail("lists files that are not in order of rank")
    index = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
    refs = _refs_from_json(body, columns, len(ranks), partial(_shard_path, save_id, ranks, index))
    return LazyList(len(ranks), partial(_file, refs, ranks))


def _shard_path(save_id: str, ranks: Counts, index: Counts, at: int) -> str:
    return shard_path(save_id, int(ranks[at]), int(index[at]))


def _file(refs: Sequence[FileRef], ranks: Counts, at: int) -> tuple[FileRef, int]:
    return refs[at], int(ranks[at])


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
        words = (np.asarray(numbers, dtype=np.int64) for numbers in (*cut.cuts, cut.owners))
        return tuple(each.tobytes() for each in words)
    return tuple(cut or ())


def _layout_to_json(cut: Grid | Chunks | None) -> dict[str, Any]:
    if isinstance(cut, Grid):
        return {"cuts": [pack_column(cuts) for cuts in cut.cuts], "ranks": pack_column(cut.owners)}
    boxes = [(box.offsets, box.sizes) for box, _ in cut or ()]
    return {**boxes_to_json(boxes), "ranks": pack_column([rank for _, rank in cut or ()])}


def decode_tensors(
    body: Mapping[str, Any], columns: Columns, world_size: int
) -> list[TensorRecord]:
    """Return the tensors of a manifest. Raises `FormatError`."""
    get = Getter(body, columns.where)
    dtypes, shapes = get.strings("dtypes"), get.lists_of_counts("shapes")
    check_dtypes(get, dtypes)
    layouts = [
        _layout_from_json(entry.body, columns, world_size) for entry in get.objects("layouts")
    ]
    table = get.mapping("tensors")
    fqns = columns.names(table, "fqns")
    count = len(fqns)
    kinds = columns.column(table, "dtype", count=count, below=len(dtypes)).tolist()
    forms = columns.column(table, "shape", count=count, below=len(shapes)).tolist()
    cuts = columns.column(table, "layout", count=count, below=len(layouts)).tolist()
    sizes = [tuple(shape) for shape in shapes]
    pairs = list(zip(forms, cuts, strict=True))
    for form, cut in set(pairs):
        if not _makes_up(sizes[form], layouts[cut]):
            fqn = fqns[pairs.index((form, cut))]
            get.fail(f"describes chunks of {fqn!r:.80} that do not hold each of its elements once")
    return [
        TensorRecord(
            fqn=fqn,
            dtype=dtypes[kind],
            shape=sizes[form],
            grid=cut if isinstance(cut, Grid) else None,
            chunks=None if isinstance(cut, Grid) else cut,
        )
        for fqn, kind, form, cut in zip(
            fqns, kinds, forms, map(layouts.__getitem__, cuts), strict=True
        )
    ]


def _layout_from_json(body: Mapping[str, Any], columns: Columns, world_size: int) -> Grid | Chunks:
    get = Getter(body, columns.where)
    ranks = columns.column(body, "ranks", below=world_size)
    if "cuts" not in body:
        boxes = boxes_from_json(body, columns)
        if len(boxes) != len(ranks):
            get.fail("has a layout with more or fewer ranks than chunks")
        return [(Box(*box), rank) for box, rank in zip(boxes, ranks.tolist(), strict=True)]
    cuts: list[Sequence[int]] = []
    for entry in get.items("cuts"):
        starts = columns.column({"cut": entry}, "cut")
        if not len(starts) or starts[0] != 0 or bool((np.diff(starts) <= 0).any()):
            get.fail("has a cut that does not ascend from 0")
        cuts.append(compact(starts))
    if math.prod(map(len, cuts)) != len(ranks):
        get.fail("has a grid with more or fewer ranks than cells")
    return Grid(tuple(cuts), compact(ranks))


def _makes_up(shape: tuple[int, ...], layout: Grid | Chunks) -> bool:
    """Return whether chunks hold each element of a shape once; of a grid only its cuts count."""
    if isinstance(layout, Grid):
        return len(layout.cuts) == len(shape) and all(
            cuts[-1] < max(size, 1) for cuts, size in zip(layout.cuts, shape, strict=True)
        )
    return find_flaw(shape, [box for box, _ in layout]) is None


def _spelt(fqn: str, path: tuple[str | int, ...]) -> str:
    """Return the JSON text of an entry; an encoder that is called for each takes thrice as long."""
    keys = (_quoted(key) if isinstance(key, str) else str(key) for key in path)
    return f"[{_quoted(fqn)}, [{', '.join(keys)}]]"


_quoted: Callable[[str], str] = json.encoder.encode_basestring


def _planner_data_of(body: Mapping[str, Any], columns: Columns, get: Getter) -> PlannerData | None:
    if body.get("planner_data") is None:
        return None
    data: PlannerData = {}
    for entry in columns.names(body, "planner_data"):
        match _decoded(entry):
            case [str(fqn), list(path)] if set(map(type, path)) <= {str, int}:
                pass
            case _:
                get.fail(f"has planner_data {entry!r:.80}, which is no name and path")
        if fqn in data:
            get.fail(f"has two planner_data entries for {fqn!r:.80}")
        data[fqn] = tuple(path)
    return data


def _no_constant(name: str) -> object:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decoded(text: str) -> object:
    """Return what a JSON text spells; None if it is none or spells half of a surrogate pair."""
    try:
        # `raw_decode` takes no blank before the text, as `decode` does, and is faster.
        value, end = _DECODER.raw_decode(text) if text[:1] == "[" else (None, -1)
        if end != len(text):
            value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (RecursionError, ValueError):
        return None
    return value
