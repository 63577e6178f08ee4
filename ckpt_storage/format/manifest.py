"""The manifest of a checkpoint, with a strict codec of its JSON body.

Tensors with equal chunks share one grid or list, in memory as in the document. The section
"Manifest" of `docs/format.md` specifies it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .boxes import Box, Grid, compact, find_flaw
from .columns import LazyList, pack_column, pack_crcs, pack_names
from .documents import MAX_RANKS, FileRef, no_constant, strict_json
from .fields import MAX_DIMS, Fields, format_of, is_int_list
from .names import is_save_id, rank_manifest_path, shard_path, stock_copy_path
from .rank_manifest import boxes_from_json, boxes_to_json, dtypes_of, ties_of

Path = tuple[str | int, ...]

INT_KEY = re.compile(r"0|-?[1-9][0-9]{0,18}")
"""The text of an int key of a dict, as flattening spells it."""


class PlannerData(dict[str, Path]):
    """The path of each FQN in the nested state dict: keys of dicts, all of them text, and indices.

    `int_keys` are the paths of dicts in which every key that `INT_KEY` matches was an int.
    """

    def __init__(
        self,
        paths: Mapping[str, Path] | Iterable[tuple[str, Path]] = (),
        *,
        int_keys: Iterable[Path] = (),
    ) -> None:
        super().__init__(paths)
        self.int_keys = frozenset(int_keys)


def find_int_keys(value: object, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of dicts with int keys in a nested state, for `PlannerData.int_keys`.

    A dict that has a text such as "0" among its keys, too, is left out.
    """
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, Mapping):
        is_mixed = any(isinstance(key, str) and INT_KEY.fullmatch(key) for key in value)
        if not is_mixed and any(type(key) is int for key in value):
            yield path
        children = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        children = enumerate(value)
    for key, item in children:
        if isinstance(item, Mapping | list):
            yield from find_int_keys(item, (*path, key))


def int_keys_of(paths: object) -> frozenset[Path]:
    """Return the `int_keys` of a `PlannerData`, none of any other planner's data."""
    return paths.int_keys if isinstance(paths, PlannerData) else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """Dtype, shape and chunks of tensors; `boxes` is a `Grid` if the chunks form one.

    `owners` are the ranks that wrote the chunks, () if unknown. A `Grid` makes each box on access;
    `chunk_at` and `overlapping` make only the boxes that they need.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    owners: Sequence[int] = ()

    def chunk_at(self, offsets: tuple[int, ...]) -> Box | None:
        """Return the chunk that begins at `offsets`, None if no chunk does."""
        if isinstance(self.boxes, Grid):
            cell = self.boxes.cell_at(offsets)
            return None if cell is None else self.boxes[cell]
        return next((box for box in self.boxes if box.offsets == offsets), None)

    def overlapping(self, box: Box) -> list[int]:
        """Return the positions, ascending, of the chunks that share elements with `box`."""
        if isinstance(self.boxes, Grid):
            return self.boxes.intersecting(box)
        return [at for at, chunk in enumerate(self.boxes) if chunk.intersect(box) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    `files` are in order of rank and index; `ranks` and `hosts` have one entry for each rank.
    `groups` has the group of each file, "" for none, or is empty if no file has a group. `ties`
    maps aliases to targets, with which they shared memory; the stored values are equal.
    `stock_entries` is the number of items that stock readers find: 0 if `stock` is a note, None
    without `stock` or items.
    """

    save_id: str
    world_size: int
    tensors: Mapping[str, TensorRecord]
    blobs: Mapping[str, int]
    planner_data: Mapping[str, Path] | None
    files: Sequence[tuple[FileRef, int]]
    ranks: Sequence[FileRef]
    hosts: Sequence[str]
    stock: FileRef | None
    stock_entries: int | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[str] = ()
    created_at: str = ""
    writer: Mapping[str, str] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body."""
        names = list(dict.fromkeys(self.hosts))
        at = {name: number for number, name in enumerate(names)}
        body: dict[str, Any] = {
            "format": format_of("manifest"),
            "save_id": self.save_id,
            "world_size": self.world_size,
            "created_at": self.created_at,
            "writer": dict(self.writer),
            **_tensors_to_json(self.tensors),
            "blobs": {
                "fqns": pack_names(list(self.blobs)),
                "rank": pack_column(list(self.blobs.values())),
            },
            "planner_data": None
            if self.planner_data is None
            else pack_names([_spell(entry) for entry in self.planner_data.items()]),
            "files": {
                "rank": pack_column([rank for _, rank in self.files]),
                **_refs_to_json([ref for ref, _ in self.files]),
                **_groups_to_json(self.groups),
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
        if int_keys := int_keys_of(self.planner_data):
            body["int_keys"] = pack_names(sorted(map(_spell, int_keys)))
        if self.ties:
            body["ties"] = dict(self.ties)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> Manifest:
        """Return the manifest in a JSON body; `where` names its file in errors.

        Raises `FormatError` for a body that contradicts itself or the format, and
        `UnsafeContentError` for a path that leaves the checkpoint.
        """
        get = Fields.of(body, "manifest", where)
        save_id = get.value("save_id", str, ok=is_save_id)
        world_size = get.count("world_size")
        if world_size > MAX_RANKS:
            get.fail(f"declares more than {MAX_RANKS} ranks")
        tensors = _tensors_of(get, world_size)
        blobs = get.object("blobs")
        blob_fqns = blobs.names("fqns")
        blob_ranks = blobs.column("rank", count=len(blob_fqns), below=world_size)
        if len({*tensors, *blob_fqns}) != len(tensors) + len(blob_fqns):
            get.fail("has two values with one name")
        hosts = get.object("hosts")
        names = hosts.names("names")
        return cls(
            save_id=save_id,
            world_size=world_size,
            created_at=get.note("created_at", str, ""),
            writer={key: str(value) for key, value in get.note("writer", dict, {}).items()},
            tensors=tensors,
            blobs=dict(zip(blob_fqns, blob_ranks.tolist(), strict=True)),
            planner_data=_planner_data_of(get.required("planner_data")),
            files=(files := _files_of(get.object("files"), save_id, world_size)),
            groups=_groups_of(get.object("files"), len(files)),
            ranks=_refs_of(get.object("ranks"), world_size, partial(rank_manifest_path, save_id)),
            hosts=[
                names[at]
                for at in hosts.column("rank", count=world_size, below=len(names)).tolist()
            ],
            stock=get.required("stock").document("stock", stock_copy_path(save_id)),
            stock_entries=get.count("stock_entries") if "stock_entries" in get else None,
            ties=_ties_of(get, tensors),
        )


def _ties_of(get: Fields, tensors: Mapping[str, TensorRecord]) -> dict[str, str]:
    ties = ties_of(get, tensors)
    for alias, target in ties.items():
        a, b = tensors[alias], tensors[target]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            get.fail(f"ties {alias!r:.80} to a tensor of another dtype or shape")
    return ties


def _refs_to_json(refs: Sequence[FileRef]) -> dict[str, Any]:
    return {
        "bytes": pack_column([ref.size_bytes for ref in refs]),
        "crc32c": pack_crcs([ref.crc32c for ref in refs]),
    }


def _refs_of(get: Fields, count: int, path_of: Callable[[int], str]) -> Sequence[FileRef]:
    sizes, crcs = get.column("bytes", count=count), get.crcs("crc32c", count)

    def ref(at: int) -> FileRef:
        return FileRef(path=path_of(at), size_bytes=int(sizes[at]), crc32c=crcs[at])

    return LazyList(count, ref)


def _files_of(get: Fields, save_id: str, world_size: int) -> Sequence[tuple[FileRef, int]]:
    ranks = get.column("rank", below=world_size)
    if bool((ranks[1:] < ranks[:-1]).any()):
        get.fail("has files that are not in order of rank")
    index = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)

    def path(at: int) -> str:
        return shard_path(save_id, int(ranks[at]), int(index[at]))

    refs = _refs_of(get, len(ranks), path)
    return LazyList(len(ranks), lambda at: (refs[at], int(ranks[at])))


def _groups_to_json(groups: Sequence[str]) -> dict[str, Any]:
    names = list(dict.fromkeys(filter(None, groups)))
    at = {"": -1} | {name: number for number, name in enumerate(names)}
    if not names:
        return {}
    return {"group": pack_column([at[name] for name in groups]), "groups": names}


def _groups_of(get: Fields, file_count: int) -> Sequence[str]:
    if "group" not in get:
        return ()
    names = get.strings("groups")
    column = get.column("group", count=file_count, least=-1, below=len(names)).tolist()
    return [names[at] if at >= 0 else "" for at in column]


def _tensors_to_json(tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Return the members `tensors`, `dtypes`, `shapes` and `layouts` of a manifest."""
    dtypes: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    layouts: dict[object, int] = {}
    bodies: list[dict[str, Any]] = []
    rows: dict[int, tuple[int, int, int]] = {}
    for tensor in tensors.values():
        if id(tensor) not in rows:
            at = layouts.setdefault(_layout_key(tensor), len(bodies))
            if at == len(bodies):
                ranks = {"ranks": pack_column(tensor.owners)}
                if isinstance(tensor.boxes, Grid):
                    bodies.append({"cuts": list(map(pack_column, tensor.boxes.cuts)), **ranks})
                else:
                    bodies.append(boxes_to_json(tensor.boxes) | ranks)
            rows[id(tensor)] = (
                dtypes.setdefault(tensor.dtype, len(dtypes)),
                shapes.setdefault(tensor.shape, len(shapes)),
                at,
            )
    columns = {
        key: pack_column([rows[id(tensor)][at] for tensor in tensors.values()])
        for at, key in enumerate(("dtype", "shape", "layout"))
    }
    return {
        "tensors": {"fqns": pack_names(list(tensors)), **columns},
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "layouts": bodies,
    }


def _layout_key(tensor: TensorRecord) -> object:
    """Return a hashable key that is equal for equal layouts."""
    if isinstance(tensor.boxes, Grid):
        columns = (*tensor.boxes.cuts, tensor.owners)
        return tuple(np.asarray(column, dtype=np.int64).tobytes() for column in columns)
    return tuple(zip(tensor.boxes, tensor.owners, strict=True))


def _tensors_of(get: Fields, world_size: int) -> dict[str, TensorRecord]:
    shapes = get.value("shapes", list, ok=lambda shapes: all(map(is_int_list, shapes)))
    dtypes, sizes = dtypes_of(get), list(map(tuple, shapes))
    layouts = [_layout_of(entry, world_size) for entry in get.objects("layouts")]
    table = get.object("tensors")
    fqns = table.names("fqns")
    kinds, forms, cuts = (
        table.column(key, count=len(fqns), below=len(those)).tolist()
        for key, those in (("dtype", dtypes), ("shape", sizes), ("layout", layouts))
    )
    keys = list(zip(kinds, forms, cuts, strict=True))
    records: dict[tuple[int, int, int], TensorRecord] = {}
    for key in set(keys):
        dtype, shape, (cut, owners) = dtypes[key[0]], sizes[key[1]], layouts[key[2]]
        boxes: Sequence[Box]
        if isinstance(cut, tuple):
            # `_layout_of` has checked that the cuts ascend from 0.
            is_whole = len(cut) == len(shape) and all(
                starts[-1] < max(size, 1) for starts, size in zip(cut, shape, strict=True)
            )
            boxes = Grid(cut, shape)
        else:
            is_whole = len(shape) <= MAX_DIMS and find_flaw(shape, cut) is None
            boxes = cut
        if not is_whole:
            fqn = fqns[keys.index(key)]
            get.fail(f"has chunks of {fqn!r:.80} that do not hold each of its elements once")
        records[key] = TensorRecord(dtype=dtype, shape=shape, boxes=boxes, owners=owners)
    tensors = dict(zip(fqns, map(records.__getitem__, keys), strict=True))
    if len(tensors) != len(fqns):
        get.fail("has two values with one name")
    return tensors


def _layout_of(
    get: Fields, world_size: int
) -> tuple[tuple[Sequence[int], ...] | list[Box], Sequence[int]]:
    """Return the cuts of a grid, or a list of chunks; and the rank of each chunk."""
    ranks = get.column("ranks", below=world_size)
    if "cuts" not in get:
        boxes = boxes_from_json(get)
        if len(boxes) != len(ranks):
            get.fail("has a layout with more or fewer ranks than chunks")
        return boxes, ranks.tolist()
    cuts: list[Sequence[int]] = []
    for entry in get.value("cuts", list):
        starts = Fields({"cut": entry}, get.where, get.budget).column("cut")
        if not len(starts) or starts[0] != 0 or bool((starts[1:] <= starts[:-1]).any()):
            get.fail("has a cut that does not ascend from 0")
        cuts.append(compact(starts))
    if math.prod(map(len, cuts)) != len(ranks):
        get.fail("has a grid with more or fewer ranks than cells")
    return tuple(cuts), compact(ranks)


# Shared, because making an encoder or decoder for each entry takes three times as long.
_spell = json.JSONEncoder(ensure_ascii=False).encode
_decode = json.JSONDecoder(parse_constant=no_constant).decode

_BATCH = 256
"""Entries that are decoded together: few enough that no garbage collection starts meanwhile."""


def _planner_data_of(get: Fields) -> PlannerData | None:
    if "planner_data" not in get:
        return None
    entries = get.names("planner_data")
    data: dict[str, Path] = {}
    for start in range(0, len(entries), _BATCH):
        batch = entries[start : start + _BATCH]
        try:
            # One call for each entry takes ten times as long. The separator is no entry, so that
            # each entry must be a complete JSON value.
            decoded = _decode(f"[{',null,'.join(batch)}]")
            if any("\\u" in entry for entry in batch):
                # Raises for half of a surrogate pair.
                _spell(decoded).encode()
        except (RecursionError, ValueError):
            decoded = []
        pairs, between = decoded[::2], decoded[1::2]
        is_whole = len(pairs) == len(batch) and between == [None] * (len(batch) - 1)
        if not is_whole or not all(map(_is_planned, pairs)):
            get.fail("has an entry in planner_data that is no name and path")
        data.update((fqn, tuple(path)) for fqn, path in pairs)
    if len(data) != len(entries):
        get.fail("has two entries in planner_data with one name")
    return PlannerData(data, int_keys=_int_keys_of(get))


def _int_keys_of(get: Fields) -> list[Path]:
    paths: list[Path] = []
    for entry in get.names("int_keys") if "int_keys" in get else ():
        try:
            path = strict_json(entry.encode(), list)
        except (RecursionError, ValueError):
            path = [None]
        if not _is_path(path):
            get.fail("has an entry in int_keys that is no path")
        paths.append(tuple(path))
    return paths


def _is_planned(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:  # noqa: PLR2004  # name and path
        return False
    return isinstance(entry[0], str) and _is_path(entry[1])


def _is_path(path: object) -> bool:
    return isinstance(path, list) and set(map(type, path)) <= {str, int}
