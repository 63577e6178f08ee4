"""Manifest and rank manifests as values, with strict codecs to and from sealed JSON.

Knows `docs/format.md`, sections "Rank manifest" and "Manifest"; does no I/O and
knows no storage. Called by `commit`, `source`, `catalog`, `writer`.

Tables stay columnar, in memory as on disk: a rank with 20,000 small tensors has one `ItemTable`,
not 20,000 objects.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import integrity, layout
from .documents import FileRef, Getter, are_counts, ref_from_json
from .errors import FormatError
from .options import MIN_BLOCK_BYTES
from .regions import Box, Grid
from .tensorfile import DTYPES

INLINE_LIMIT_BYTES = 4 << 20
"""Rank manifests are inlined in the manifest while together they stay below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTable:
    """The items of one shard file, in file order; all columns have equal length.

    `offsets[i]` and `sizes[i]` are in elements, None for a blob, whose `dtype[i]` is -1.
    Positions are bytes from the start of the file. `block_crcs` holds the blocks of all
    payloads one after another; `frame_crcs` has one entry more than there are items.
    """

    fqn: Sequence[int]
    dtype: Sequence[int]
    offsets: Sequence[Sequence[int] | None]
    sizes: Sequence[Sequence[int] | None]
    item_start: Sequence[int]
    item_bytes: Sequence[int]
    payload_start: Sequence[int]
    payload_bytes: Sequence[int]
    chunk_crcs: Sequence[int]
    block_crcs: Sequence[int]
    frame_crcs: Sequence[int]

    def __len__(self) -> int:
        return len(self.fqn)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard file: where it is, how long, its checksum, and its items."""

    path: str
    size_bytes: int
    crc32c: int
    block_bytes: int
    items: ItemTable

    def block_starts(self) -> list[int]:
        """Return, per item, the position of its first block in `items.block_crcs`, and the end."""
        size = self.block_bytes
        counts = (-(-length // size) for length in self.items.payload_bytes)
        return list(itertools.accumulate(counts, initial=0))

    def frames(self) -> list[tuple[int, int]]:
        """Return the byte interval `[start, end)` of every frame, in order."""
        items = self.items
        starts = [0, *map(int.__add__, items.payload_start, items.payload_bytes)]
        return list(zip(starts, [*items.payload_start, self.size_bytes], strict=True))

    def ref(self) -> FileRef:
        """Return path, length and checksum."""
        return FileRef(path=self.path, size_bytes=self.size_bytes, crc32c=self.crc32c)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """What one rank wrote; `fqns` and `dtypes` are the vocabularies of its tables.

    `ties` maps alias to target: what this rank wrote of both was the same memory.
    """

    save_id: str
    rank: int
    world_size: int
    fqns: Sequence[str]
    dtypes: Sequence[str]
    files: Sequence[ShardFile]
    ties: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body (`docs/format.md`, "Rank manifest")."""
        body: dict[str, Any] = {
            "format": "ckpt_storage.rank/1",
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "pid": self.pid,
            "fqns": list(self.fqns),
            "dtypes": list(self.dtypes),
            "files": [_file_to_json(file) for file in self.files],
        }
        if self.ties:
            body["ties"] = dict(self.ties)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> RankManifest:
        """Return the manifest that `body` describes; `where` names its file in errors.

        Raises `FormatError` for anything that contradicts itself, `UnsafeContentError` for a path
        that leaves the checkpoint.
        """
        integrity.check_format(body, "rank", 1, path=where)
        get = Getter(body, where)
        fqns = get.strings("fqns")
        dtypes = get.strings("dtypes")
        unknown = [name for name in dtypes if name not in DTYPES]
        if unknown:
            raise FormatError(
                f"{where} holds tensors of dtype {unknown[0]!r}, which this release does not know.",
                path=where,
                next_step="Install a newer ckpt_storage.",
            )
        manifest = cls(
            save_id=get.string("save_id"),
            rank=get.count("rank"),
            world_size=get.count("world_size"),
            host=str(body.get("host", "")),
            pid=get.count("pid") if "pid" in body else 0,
            fqns=fqns,
            dtypes=dtypes,
            files=[
                _file_from_json(entry, fqns, dtypes, where=where) for entry in get.items("files")
            ],
            ties=_ties_from_json(get, fqns),
        )
        for file in manifest.files:
            if not file.path.startswith(layout.save_folder(manifest.save_id) + "/"):
                get.fail(f"lists {file.path}, which belongs to another save")
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A whole tensor: dtype, shape, and which rank owns which box.

    Exactly one of `grid` (owners in C order) and `chunks` is set.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid | None = None
    chunks: Sequence[tuple[Box, int]] | None = None

    def boxes(self) -> list[tuple[Box, int]]:
        """Return every chunk and the rank that wrote it."""
        if self.grid is not None:
            return list(zip(self.grid.boxes(self.shape), self.grid.owners, strict=True))
        return list(self.chunks or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the checkpoint is (`docs/format.md`, "Manifest").

    `planner_data` maps an FQN to its path in the nested state dict, or is None. `ties` maps alias
    to target, which was the same memory; what is stored of them is equal.
    """

    save_id: str
    world_size: int
    tensors: Mapping[str, TensorRecord]
    blobs: Mapping[str, int]
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    files: Sequence[tuple[FileRef, int]]
    ranks: Sequence[FileRef]
    stock: FileRef | None
    inline_ranks: Sequence[RankManifest] | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    created_at: str = ""
    writer: Mapping[str, str] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body."""
        planner_data = self.planner_data
        body: dict[str, Any] = {
            "format": "ckpt_storage.manifest/1",
            "save_id": self.save_id,
            "world_size": self.world_size,
            "created_at": self.created_at,
            "writer": dict(self.writer),
            "tensors": [_tensor_to_json(tensor) for tensor in self.tensors.values()],
            "blobs": [{"fqn": fqn, "rank": rank} for fqn, rank in self.blobs.items()],
            "planner_data": None
            if planner_data is None
            else [[fqn, list(path)] for fqn, path in planner_data.items()],
            "files": [{**ref.as_json(), "rank": rank} for ref, rank in self.files],
            "ranks": [ref.as_json() for ref in self.ranks],
            "stock": self.stock.as_json() if self.stock else None,
        }
        if self.ties:
            body["ties"] = dict(self.ties)
        if self.inline_ranks is not None:
            body["inline_ranks"] = [rank.to_body() for rank in self.inline_ranks]
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> Manifest:
        """Return the manifest that `body` describes. Raises as `RankManifest.from_body`."""
        integrity.check_format(body, "manifest", 1, path=where)
        get = Getter(body, where)
        world_size = get.count("world_size")
        tensors = [_tensor_from_json(entry, world_size, where) for entry in get.items("tensors")]
        blobs = [
            (entry.string("fqn"), entry.count("rank", below=world_size))
            for entry in get.objects("blobs")
        ]
        ranks = [ref_from_json(entry, where) for entry in get.items("ranks")]
        inline = None
        if body.get("inline_ranks") is not None:
            inline = get.objects("inline_ranks")
        if len(ranks) != world_size or (inline is not None and len(inline) != world_size):
            get.fail(f"has another number of ranks than its world size {world_size}")
        names = [tensor.fqn for tensor in tensors] + [fqn for fqn, _ in blobs]
        if len(set(names)) != len(names):
            get.fail("has two values of one name")
        writer = get.mapping("writer") if "writer" in body else {}
        tensor_of = {tensor.fqn: tensor for tensor in tensors}
        ties = _ties_from_json(get, tensor_of.keys())
        for alias, target in ties.items():
            a, b = tensor_of[alias], tensor_of[target]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                get.fail(f"ties {alias!r:.80} to a tensor of another dtype or shape")
        return cls(
            save_id=get.string("save_id"),
            world_size=world_size,
            created_at=str(body.get("created_at", "")),
            writer={key: str(value) for key, value in writer.items()},
            tensors=tensor_of,
            blobs=dict(blobs),
            planner_data=_planner_data_from_json(body.get("planner_data"), get),
            files=[
                (ref_from_json(entry.body, where), entry.count("rank", below=world_size))
                for entry in get.objects("files")
            ],
            ranks=ranks,
            stock=ref_from_json(body["stock"], where) if body.get("stock") else None,
            inline_ranks=None
            if inline is None
            else [RankManifest.from_body(entry.body, where=where) for entry in inline],
            ties=ties,
        )


def _planner_data_from_json(value: object, get: Getter) -> dict[str, tuple[str | int, ...]] | None:
    if value is None:
        return None
    try:
        data = {fqn: tuple(path) for fqn, path in value}  # type: ignore[attr-defined]  # caught
    except (TypeError, ValueError):
        data = {}
        get.fail("has planner_data that is not a list of pairs")
    for fqn, path in data.items():
        if not isinstance(fqn, str) or not all(type(key) in {str, int} for key in path):
            get.fail(f"has a planner_data entry for {fqn!r:.80} that is no path")
    return data


def _ties_from_json(get: Getter, fqns: Iterable[str]) -> dict[str, str]:
    """Return alias -> target; {} where the document has none, as all did before there were ties."""
    if "ties" not in get.body:
        return {}
    ties = get.mapping("ties")
    known = frozenset(fqns)
    for alias, target in ties.items():
        named = isinstance(target, str) and alias in known and target in known
        if not named or target in ties:
            get.fail(f"has a tie of {alias!r:.80} to {target!r:.80} that cannot be")
    return ties


def _file_to_json(file: ShardFile) -> dict[str, Any]:
    items = file.items
    return {
        **file.ref().as_json(),
        "block_bytes": file.block_bytes,
        "items": {
            "fqn": list(items.fqn),
            "dtype": list(items.dtype),
            "offsets": [None if box is None else list(box) for box in items.offsets],
            "sizes": [None if box is None else list(box) for box in items.sizes],
            "item_start": list(items.item_start),
            "item_bytes": list(items.item_bytes),
            "payload_start": list(items.payload_start),
            "payload_bytes": list(items.payload_bytes),
        },
        "chunk_crcs": integrity.encode_crcs(items.chunk_crcs),
        "block_crcs": integrity.encode_crcs(items.block_crcs),
        "frame_crcs": integrity.encode_crcs(items.frame_crcs),
    }


def _file_from_json(
    value: object, fqns: Sequence[str], dtypes: Sequence[str], *, where: str
) -> ShardFile:
    ref = ref_from_json(value, where)
    get = Getter(value, where)
    block_bytes = get.count("block_bytes")
    if block_bytes < MIN_BLOCK_BYTES or block_bytes % 64:
        get.fail(f"says that blocks of {ref.path} have {block_bytes} bytes")
    columns = Getter(get.body.get("items"), where)
    fqn = columns.counts("fqn")
    count = len(fqn)
    items = ItemTable(
        fqn=fqn,
        dtype=columns.counts("dtype", count, least=-1),
        offsets=_boxes(columns, "offsets", count),
        sizes=_boxes(columns, "sizes", count),
        item_start=columns.counts("item_start", count),
        item_bytes=columns.counts("item_bytes", count),
        payload_start=columns.counts("payload_start", count),
        payload_bytes=columns.counts("payload_bytes", count),
        chunk_crcs=integrity.decode_crcs(get.string("chunk_crcs"), count, path=where),
        block_crcs=(),
        frame_crcs=integrity.decode_crcs(get.string("frame_crcs"), count + 1, path=where),
    )
    _check_items(items, ref, fqns, dtypes, get)
    block_count = sum(-(-length // block_bytes) for length in items.payload_bytes)
    blocks: array[int] = integrity.decode_crcs(get.string("block_crcs"), block_count, path=where)
    return ShardFile(
        path=ref.path,
        size_bytes=ref.size_bytes,
        crc32c=ref.crc32c,
        block_bytes=block_bytes,
        items=ItemTable(
            fqn=items.fqn,
            dtype=items.dtype,
            offsets=items.offsets,
            sizes=items.sizes,
            item_start=items.item_start,
            item_bytes=items.item_bytes,
            payload_start=items.payload_start,
            payload_bytes=items.payload_bytes,
            chunk_crcs=items.chunk_crcs,
            block_crcs=blocks,
            frame_crcs=items.frame_crcs,
        ),
    )


def _boxes(columns: Getter, key: str, count: int) -> list[tuple[int, ...] | None]:
    values = columns.items(key)
    if len(values) != count or not all(value is None or are_counts(value) for value in values):
        columns.fail(f"has a column {key!r} that does not hold {count} boxes")
    return [None if value is None else tuple(value) for value in values]


def _check_items(
    items: ItemTable, ref: FileRef, fqns: Sequence[str], dtypes: Sequence[str], get: Getter
) -> None:
    """Refuse a table whose items overlap, leave the file, or do not hold what they say."""
    item_bytes_of = [DTYPES[name].item_bytes for name in dtypes]
    end = 0
    for i in range(len(items)):
        start, stop = items.item_start[i], items.item_start[i] + items.item_bytes[i]
        payload = items.payload_start[i]
        sizes, offsets = items.sizes[i], items.offsets[i]
        good = (
            end <= start <= payload
            and payload + items.payload_bytes[i] <= stop <= ref.size_bytes
            and items.fqn[i] < len(fqns)
            and items.dtype[i] < len(dtypes)
        )
        if good and items.dtype[i] >= 0:
            good = sizes is not None and offsets is not None and len(sizes) == len(offsets)
            volume = item_bytes_of[items.dtype[i]]
            for size in sizes or ():
                volume *= size
            good = good and volume == items.payload_bytes[i]
        if not good:
            get.fail(f"describes item {i} of {ref.path} in a way that cannot be")
        end = stop


def _tensor_to_json(tensor: TensorRecord) -> dict[str, Any]:
    head = {"fqn": tensor.fqn, "dtype": tensor.dtype, "shape": list(tensor.shape)}
    if tensor.grid is not None:
        grid = {
            "cuts": [list(cuts) for cuts in tensor.grid.cuts],
            "ranks": list(tensor.grid.owners),
        }
        return {**head, "grid": grid}
    chunks = [[list(box.offsets), list(box.sizes), rank] for box, rank in tensor.chunks or ()]
    return {**head, "chunks": chunks}


def _tensor_from_json(value: object, world_size: int, where: str) -> TensorRecord:
    get = Getter(value, where)
    fqn, dtype = get.string("fqn"), get.string("dtype")
    shape: tuple[int, ...] = tuple(get.counts("shape"))
    if dtype not in DTYPES:
        raise FormatError(
            f"{where} holds {fqn} with dtype {dtype!r}, which this release does not know.",
            path=where,
            next_step="Install a newer ckpt_storage.",
        )
    if "grid" in get.body:
        grid_get = Getter(get.body["grid"], where)
        cuts = tuple(tuple(cut) for cut in grid_get.lists_of_counts("cuts"))
        owners: tuple[int, ...] = tuple(grid_get.counts("ranks"))
        cells = 1
        for cut in cuts:
            cells *= len(cut)
        ascending = all(
            cut and cut[0] == 0 and all(a < b for a, b in itertools.pairwise(cut)) for cut in cuts
        )
        inside = all(cut[-1] < max(size, 1) for cut, size in zip(cuts, shape, strict=False) if cut)
        if len(cuts) != len(shape) or cells != len(owners) or not ascending or not inside:
            get.fail(f"describes a grid for {fqn} that cannot be")
        if any(owner >= world_size for owner in owners):
            get.fail(f"names an owner of {fqn} outside the world of {world_size} ranks")
        return TensorRecord(fqn=fqn, dtype=dtype, shape=shape, grid=Grid(cuts, owners))
    chunks = []
    for entry in get.items("chunks"):
        box, rank = _chunk_from_json(entry, shape)
        if box is None or not 0 <= rank < world_size:
            get.fail(f"describes a chunk of {fqn} that cannot be")
        chunks.append((box, rank))
    # Whether boxes overlap is dear to tell; `catalog.verify` does.
    if sum(box.volume for box, _ in chunks) != math.prod(shape):
        get.fail(f"describes chunks of {fqn} that do not hold each of its elements once")
    return TensorRecord(fqn=fqn, dtype=dtype, shape=shape, chunks=chunks)


def _chunk_from_json(entry: object, shape: Sequence[int]) -> tuple[Box | None, int]:
    """Return the box within `shape` that `entry` spells, None if it spells none, and its rank."""
    match entry:
        case [list(offsets), list(sizes), int(rank)] if are_counts([*offsets, *sizes, rank]):
            fits = len(offsets) == len(sizes) == len(shape) and all(
                start + size <= length
                for start, size, length in zip(offsets, sizes, shape, strict=True)
            )
            return Box(tuple(offsets), tuple(sizes)) if fits else None, rank
        case _:
            return None, -1
