"""Manifest and rank manifests as values, with strict codecs to and from sealed JSON.

`docs/format.md`, sections "Rank manifest" and "Manifest", specifies both.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from ckpt_storage.errors import CheckpointError, FormatError

from .documents import (
    MOST_MANIFEST_BYTES,
    MOST_RANKS,
    Columns,
    FileRef,
    Getter,
    check_format,
    decode_crcs,
    encode_crcs,
    encode_format,
    pack_column,
    pack_names,
    ref_from_json,
)
from .dtypes import DTYPES
from .names import checked_path, rank_manifest_path, save_folder, shard_path, stock_copy_path
from .shardtable import (
    BoxTable,
    ItemTable,
    ShardFile,
    Vocabulary,
    boxes_from_json,
    decode_file,
    encode_file,
)
from .tensorlayout import TensorRecord, decode_tensors, encode_tensors

__all__ = [
    "INLINE_LIMIT_BYTES",
    "InlineRanks",
    "ItemTable",
    "Manifest",
    "RankManifest",
    "ShardFile",
    "TensorRecord",
]

INLINE_LIMIT_BYTES = 4 << 20
"""Rank manifests are inlined while each has at most this, divided by the world size."""

_MAJOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """What one rank wrote; `fqns` and `dtypes` are the vocabularies of its tables.

    `ties` maps alias to target: what this rank wrote of both was the same memory. `unsafe` maps
    names of blobs that only pickle can hold to what the pickle names.
    """

    save_id: str
    rank: int
    world_size: int
    fqns: Sequence[str]
    dtypes: Sequence[str]
    files: Sequence[ShardFile]
    ties: Mapping[str, str] = field(default_factory=dict)
    unsafe: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body (`docs/format.md`, "Rank manifest")."""
        boxes = BoxTable()
        files = [encode_file(file, boxes) for file in self.files]
        body: dict[str, Any] = {
            "format": encode_format("rank", _MAJOR),
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "pid": self.pid,
            "fqns": pack_names(self.fqns),
            "dtypes": list(self.dtypes),
            "boxes": boxes.to_json(),
            "files": files,
        }
        if self.ties:
            body["ties"] = dict(self.ties)
        if self.unsafe:
            body["unsafe"] = dict(self.unsafe)
        return body

    @classmethod
    def from_body(
        cls, body: Mapping[str, Any], *, where: str, columns: Columns | None = None
    ) -> RankManifest:
        """Return the manifest that `body` describes; `where` names its file in errors.

        `columns` are those of the document that `body` is a part of, if it is.

        Raises `FormatError` for anything that contradicts itself, `UnsafeContentError` for a path
        that leaves the checkpoint.
        """
        check_format(body, "rank", _MAJOR, path=where)
        get, columns = Getter(body, where), columns or Columns(where)
        fqns = columns.names(body, "fqns")
        dtypes = get.strings("dtypes")
        unknown = [name for name in dtypes if name not in DTYPES]
        if unknown:
            raise FormatError(
                f"{where} holds tensors of dtype {unknown[0]!r}, which this release does not know.",
                path=where,
                next_step="Install a newer ckpt_storage.",
            )
        if len(set(dtypes)) != len(dtypes):
            get.fail("names a dtype twice")
        boxes = boxes_from_json(body.get("boxes"), columns)
        vocabulary = Vocabulary(fqns, dtypes, boxes)
        manifest = cls(
            save_id=get.string("save_id"),
            rank=get.count("rank"),
            world_size=get.count("world_size"),
            host=str(body.get("host", "")),
            pid=get.count("pid") if "pid" in body else 0,
            fqns=fqns,
            dtypes=dtypes,
            files=[decode_file(entry, vocabulary, columns) for entry in get.items("files")],
            ties=_ties_from_json(get, fqns),
            unsafe=_unsafe_from_json(get, fqns),
        )
        for file in manifest.files:
            if not file.path.startswith(save_folder(manifest.save_id) + "/"):
                get.fail(f"lists {file.path}, which belongs to another save")
        return manifest


class InlineRanks(Sequence[RankManifest]):
    """The rank manifests that a manifest holds, each decoded when it is asked for.

    `columns` are those of the manifest: what all of them inflate counts together.
    """

    def __init__(self, bodies: Sequence[Mapping[str, Any]], columns: Columns) -> None:
        self.bodies = bodies
        self._columns = columns
        self._decoded: dict[int, RankManifest] = {}
        # By process: one that is inherited by fork may be held by a thread that is gone.
        self._locks: dict[int, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self.bodies)

    @overload
    def __getitem__(self, index: int) -> RankManifest: ...

    @overload
    def __getitem__(self, index: slice) -> list[RankManifest]: ...

    def __getitem__(self, index: int | slice) -> RankManifest | list[RankManifest]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        found = self._decoded.get(at)
        if found is None:
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                found = self._decoded.get(at) or self._decode(at)
        return found

    def _decode(self, at: int) -> RankManifest:
        columns = self._columns
        left_bytes = columns.left_bytes
        try:
            found = RankManifest.from_body(self.bodies[at], where=columns.where, columns=columns)
        except CheckpointError:
            # Nothing of it is held, so it counts for nothing, however often it is asked for.
            columns.left_bytes = left_bytes
            raise
        self._decoded[at] = found
        return found

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the checkpoint is (`docs/format.md`, "Manifest").

    `planner_data` maps an FQN to its path in the nested state dict, or is None. `ties` maps alias
    to target, which was the same memory; what is stored of them is equal. `stock_entries` is how
    many items stock readers find, 0 if `stock` is a note that says they find none; None if there
    are none to find.
    """

    save_id: str
    world_size: int
    tensors: Mapping[str, TensorRecord]
    blobs: Mapping[str, int]
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    files: Sequence[tuple[FileRef, int]]
    ranks: Sequence[FileRef]
    stock: FileRef | None
    stock_entries: int | None = None
    inline_ranks: InlineRanks | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    writer: Mapping[str, str] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body."""
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
            "planner_data": _planner_data_to_json(self.planner_data),
            "files": self._files_to_json(),
            "ranks": _refs_to_json(self.ranks),
            "stock": self.stock.as_json() if self.stock else None,
        }
        if self.stock_entries is not None:
            body["stock_entries"] = self.stock_entries
        if self.ties:
            body["ties"] = dict(self.ties)
        if self.inline_ranks is not None:
            body["inline_ranks"] = list(self.inline_ranks.bodies)
        return body

    def _files_to_json(self) -> dict[str, Any]:
        refs = [ref for ref, _ in self.files]
        ranks = [rank for _, rank in self.files]
        body = {"rank": pack_column(ranks), **_refs_to_json(refs)}
        paths = [ref.path for ref in refs]
        if paths != _shard_paths(self.save_id, ranks):
            body["paths"] = pack_names(paths)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> Manifest:
        """Return the manifest that `body` describes. Raises as `RankManifest.from_body`."""
        check_format(body, "manifest", _MAJOR, path=where)
        get, columns = Getter(body, where), Columns(where, MOST_MANIFEST_BYTES)
        save_id, world_size = get.string("save_id"), get.count("world_size")
        if world_size > MOST_RANKS:
            get.fail(f"declares more than {MOST_RANKS} ranks")
        parts = _parts(body, columns, save_id, world_size)
        inline = None
        if body.get("inline_ranks") is not None:
            inline = [entry.body for entry in get.objects("inline_ranks")]
        if len(parts.ranks) != world_size or (inline is not None and len(inline) != world_size):
            get.fail(f"has another number of ranks than its world size {world_size}")
        tensors = {tensor.fqn: tensor for tensor in parts.tensors}
        stock = ref_from_json(body["stock"], where) if body.get("stock") else None
        _check_places(get, save_id, parts, stock)
        names = {*tensors, *parts.blobs}
        if len(names) != len(parts.tensors) + parts.blob_count:
            get.fail("has two values of one name")
        ties = _ties_from_json(get, tensors.keys())
        for alias, target in ties.items():
            a, b = tensors[alias], tensors[target]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                get.fail(f"ties {alias!r:.80} to a tensor of another dtype or shape")
        writer = get.mapping("writer") if "writer" in body else {}
        return cls(
            save_id=save_id,
            world_size=world_size,
            created_at=str(body.get("created_at", "")),
            writer={key: str(value) for key, value in writer.items()},
            tensors=tensors,
            blobs=parts.blobs,
            planner_data=parts.planner_data,
            files=parts.files,
            ranks=parts.ranks,
            stock=stock,
            stock_entries=get.count("stock_entries") if "stock_entries" in body else None,
            inline_ranks=None if inline is None else InlineRanks(inline, columns),
            ties=ties,
        )


PlannerData = dict[str, tuple[str | int, ...]]

_PATH_KEYS = frozenset({str, int})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a manifest packs in columns."""

    tensors: Sequence[TensorRecord]
    blobs: dict[str, int]
    blob_count: int
    planner_data: PlannerData | None
    files: Sequence[tuple[FileRef, int]]
    ranks: Sequence[FileRef]


def _parts(body: Mapping[str, Any], columns: Columns, save_id: str, world_size: int) -> _Parts:
    get = Getter(body, columns.where)
    blobs = get.mapping("blobs")
    blob_fqns = columns.names(blobs, "fqns")
    blob_ranks = columns.column(blobs, "rank", count=len(blob_fqns), below=world_size)
    files = get.mapping("files")
    ranks = columns.column(files, "rank", below=world_size).tolist()
    paths = (
        [
            checked_path(path, where=columns.where)
            for path in columns.names(files, "paths", count=len(ranks))
        ]
        if "paths" in files
        else _shard_paths(save_id, ranks)
    )
    documents = get.mapping("ranks")
    count = len(columns.column(documents, "bytes"))
    document_paths = map(partial(rank_manifest_path, save_id), range(count))
    return _Parts(
        tensors=decode_tensors(body, columns, world_size),
        blobs=dict(zip(blob_fqns, blob_ranks.tolist(), strict=True)),
        blob_count=len(blob_fqns),
        planner_data=_planner_data_of(body, columns, get),
        files=list(zip(_refs_from_json(files, paths, columns), ranks, strict=True)),
        ranks=_refs_from_json(documents, list(document_paths), columns),
    )


def _check_places(get: Getter, save_id: str, parts: _Parts, stock: FileRef | None) -> None:
    """Refuse what lies elsewhere than the layout says: who copies would write there."""
    if stock is not None and stock.path != stock_copy_path(save_id):
        get.fail(f"names {stock.path!r:.200}, which is no document of this save")
    folder = save_folder(save_id) + "/"
    for ref, _ in parts.files:
        if not ref.path.startswith(folder):
            get.fail(f"lists {ref.path!r:.200}, which belongs to another save")
    for rank, ref in enumerate(parts.ranks):
        if ref.path != rank_manifest_path(save_id, rank):
            get.fail(f"lists {ref.path!r:.200}, which is not the manifest of rank {rank}")


def _refs_to_json(refs: Sequence[FileRef]) -> dict[str, Any]:
    return {
        "bytes": pack_column([ref.size_bytes for ref in refs]),
        "crc32c": encode_crcs([ref.crc32c for ref in refs]),
    }


def _refs_from_json(body: object, paths: Sequence[str], columns: Columns) -> list[FileRef]:
    sizes = columns.column(body, "bytes", count=len(paths)).tolist()
    text = Getter(body, columns.where).string("crc32c")
    crcs = decode_crcs(text, len(paths), path=columns.where)
    return [
        FileRef(path=path, size_bytes=size_bytes, crc32c=crc)
        for path, size_bytes, crc in zip(paths, sizes, crcs, strict=True)
    ]


def _shard_paths(save_id: str, ranks: Sequence[int]) -> list[str]:
    """Return where writers put the files of these ranks, which are in order of each rank's."""
    counts: dict[int, int] = {}
    paths = []
    for rank in ranks:
        index = counts.get(rank, 0)
        counts[rank] = index + 1
        paths.append(shard_path(save_id, rank, index))
    return paths


def _planner_data_to_json(data: Mapping[str, tuple[str | int, ...]] | None) -> object:
    if data is None:
        return None
    packed = pack_names([_spelt(*entry) for entry in data.items()])
    # Lists only of few: many objects would be for the collector to look at.
    return [[fqn, list(path)] for fqn, path in data.items()] if isinstance(packed, list) else packed


def _spelt(fqn: str, path: tuple[str | int, ...]) -> str:
    """Return the JSON text of an entry; an encoder that is called for each takes thrice as long."""
    keys = (_quoted(key) if isinstance(key, str) else str(key) for key in path)
    return f"[{_quoted(fqn)}, [{', '.join(keys)}]]"


_quoted: Callable[[str], str] = json.encoder.encode_basestring


def _planner_data_of(body: Mapping[str, Any], columns: Columns, get: Getter) -> PlannerData | None:
    value = body.get("planner_data")
    if isinstance(value, Mapping):
        entries = columns.names(body, "planner_data")
        try:
            value = list(map(_decoded, entries))
            if any("\\u" in entry for entry in entries):
                # Half of a surrogate pair, which only an escape can spell, is no text.
                json.dumps(value, ensure_ascii=False).encode()
        except (RecursionError, ValueError):
            get.fail("has planner_data that is not a list of pairs")
    return _planner_data(value, get)


def _no_constant(name: str) -> object:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decoded(text: str) -> object:
    """Return what a JSON text spells; skips the decoder's look for blanks where there are none."""
    # `raw_decode` takes no blank before the text, as `decode` does.
    value, end = _DECODER.raw_decode(text) if text[:1] == "[" else (None, -1)
    return value if end == len(text) else _DECODER.decode(text)


def _planner_data(value: object, get: Getter) -> PlannerData | None:
    if value is None:
        return None
    data: PlannerData = {}
    for entry in value if isinstance(value, list) else (value,):
        if type(entry) is not list or [*map(type, entry)] != [str, list]:
            get.fail("has planner_data that is not a list of pairs")
        fqn, path = entry
        if fqn in data:
            get.fail(f"has two planner_data entries for {fqn!r:.80}")
        if not _PATH_KEYS.issuperset(map(type, path)):
            get.fail(f"has a planner_data entry for {fqn!r:.80} that is no path")
        data[fqn] = tuple(path)
    return data


def _unsafe_from_json(get: Getter, fqns: Iterable[str]) -> dict[str, str]:
    if "unsafe" not in get.body:
        return {}
    unsafe = get.mapping("unsafe")
    known = frozenset(fqns)
    for fqn, named in unsafe.items():
        if fqn not in known or not isinstance(named, str):
            get.fail(f"calls {fqn!r:.80} unsafe in a way that cannot be")
    return dict(unsafe)


def _ties_from_json(get: Getter, fqns: Iterable[str]) -> dict[str, str]:
    """Return alias -> target; {} where the document has none."""
    if "ties" not in get.body:
        return {}
    ties = get.mapping("ties")
    known = frozenset(fqns)
    for alias, target in ties.items():
        named = isinstance(target, str) and alias in known and target in known
        if not named or target in ties:
            get.fail(f"has a tie of {alias!r:.80} to {target!r:.80} that cannot be")
    return ties
