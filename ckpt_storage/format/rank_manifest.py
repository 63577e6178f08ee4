"""What one rank wrote: its manifest as a value, with a strict codec.

Tables stay columnar, in memory as on disk: a rank with 20,000 small tensors has one `ItemTable`,
not 20,000 objects. `docs/format.md`, section "Rank manifest", specifies the document.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt_storage.errors import FormatError
from ckpt_storage.options import MIN_BLOCK_BYTES

from .crc import combine_blocks
from .documents import Counts, Fields, FileRef, format_of, pack_column, pack_crcs, pack_names
from .dtypes import DTYPES
from .names import is_save_id, shard_path

BoxKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""

_MOST = (1 << 63) - 1
_MOST_DIMS = 64
_POSITIONS = ("item_start", "item_bytes", "payload_start", "payload_bytes")


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

    def payload_crcs(self, wanted: Iterable[int]) -> list[int]:
        """Return the checksums of the payloads of these items, combined from their blocks."""
        items, starts = self.items, self.block_starts()
        return [
            combine_blocks(
                items.block_crcs[starts[at] : starts[at + 1]],
                self.block_bytes,
                items.payload_bytes[at],
            )
            for at in wanted
        ]

    def ref(self) -> FileRef:
        """Return path, length and checksum."""
        return FileRef(path=self.path, size_bytes=self.size_bytes, crc32c=self.crc32c)


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
        """Return the JSON body."""
        boxes, columns = box_columns([file.items for file in self.files])
        body: dict[str, Any] = {
            "format": format_of("rank"),
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "pid": self.pid,
            "fqns": pack_names(self.fqns),
            "dtypes": list(self.dtypes),
            "boxes": boxes_to_json(boxes),
            "files": list(map(_file_to_json, self.files, columns)),
        }
        for index, file in enumerate(self.files):
            if file.path != shard_path(self.save_id, self.rank, index):
                raise ValueError(f"{file.path} is not where file {index} of {self.rank} lies")
        if self.ties:
            body["ties"] = dict(self.ties)
        if self.unsafe:
            body["unsafe"] = dict(self.unsafe)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> RankManifest:
        """Return the manifest that `body` describes; `where` names its file in errors.

        Raises `FormatError` for anything that contradicts itself.
        """
        get = Fields.of(body, "rank", where)
        save_id, rank, fqns = save_id_of(get), get.count("rank"), get.names("fqns")
        dtypes, boxes = dtypes_of(get), boxes_from_json(get.object("boxes"))
        volumes = [math.prod(sizes) for _, sizes in boxes]
        known = _Known(
            fqn_count=len(fqns),
            item_bytes=np.array([DTYPES[name].item_bytes for name in dtypes], dtype=np.int64),
            boxes=[*boxes, (None, None)],
            volumes=np.array([v if v <= _MOST else -1 for v in volumes], dtype=np.int64),
        )
        return cls(
            save_id=save_id,
            rank=rank,
            world_size=get.count("world_size"),
            host=str(body.get("host", "")),
            pid=get.count("pid") if "pid" in get else 0,
            fqns=fqns,
            dtypes=dtypes,
            files=[
                _file_of(entry, known, shard_path(save_id, rank, index))
                for index, entry in enumerate(get.objects("files"))
            ],
            ties=ties_of(get, fqns),
            unsafe=_unsafe_of(get, fqns),
        )


def _file_to_json(file: ShardFile, boxes: Sequence[int]) -> dict[str, Any]:
    items = file.items
    return {
        "bytes": file.size_bytes,
        "crc32c": f"{file.crc32c:08x}",
        "block_bytes": file.block_bytes,
        "items": {
            "fqn": pack_column(items.fqn),
            "dtype": pack_column(items.dtype),
            "box": pack_column(boxes),
            **{key: pack_column(getattr(items, key)) for key in _POSITIONS},
        },
        "block_crcs": pack_crcs(items.block_crcs),
        "frame_crcs": pack_crcs(items.frame_crcs),
    }


def box_columns(tables: Iterable[ItemTable]) -> tuple[list[BoxKey], list[list[int]]]:
    """Return distinct boxes in order of first use, and per table their positions; -1: a blob."""
    at: dict[BoxKey, int] = {}
    columns = [
        [
            -1 if one is None or two is None else at.setdefault((tuple(one), tuple(two)), len(at))
            for one, two in zip(items.offsets, items.sizes, strict=True)
        ]
        for items in tables
    ]
    return list(at), columns


def boxes_to_json(boxes: Sequence[BoxKey]) -> dict[str, Any]:
    """Return boxes as columns."""
    return {
        "ndim": pack_column([len(offsets) for offsets, _ in boxes]),
        "offsets": pack_column([n for offsets, _ in boxes for n in offsets]),
        "sizes": pack_column([n for _, sizes in boxes for n in sizes]),
    }


def boxes_from_json(get: Fields) -> list[BoxKey]:
    """Return the boxes that columns spell. Raises `FormatError`."""
    ndim = get.column("ndim", below=_MOST_DIMS + 1)
    total = int(ndim.sum())
    offsets = get.column("offsets", count=total).tolist()
    sizes = get.column("sizes", count=total).tolist()
    ends = np.cumsum(ndim).tolist()
    return [
        (tuple(offsets[start:end]), tuple(sizes[start:end]))
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def save_id_of(get: Fields) -> str:
    """Return the save id of a document; paths are made of it."""
    save_id = get.string("save_id")
    if not is_save_id(save_id):
        get.fail(f"has {save_id!r:.80} where a save id should be")
    return save_id


def dtypes_of(get: Fields) -> list[str]:
    """Return the dtypes of a document. Raises `FormatError` for one not known or listed twice."""
    dtypes = get.strings("dtypes")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise FormatError(
            f"{get.where} holds tensors of dtype {unknown[0]!r:.80}, which this release does not "
            "know.",
            path=get.where,
            next_step="Install a newer ckpt_storage.",
        )
    if len(set(dtypes)) != len(dtypes):
        get.fail("names a dtype twice")
    return dtypes


def ties_of(get: Fields, fqns: Iterable[str]) -> dict[str, str]:
    """Return alias -> target; {} where the document has none."""
    ties = get.mapping("ties") if "ties" in get else {}
    known = frozenset(fqns) if ties else frozenset()
    for alias, target in ties.items():
        named = isinstance(target, str) and alias in known and target in known
        if not named or target in ties:
            get.fail(f"has a tie of {alias!r:.80} to {target!r:.80} that cannot be")
    return ties


def _unsafe_of(get: Fields, fqns: Iterable[str]) -> dict[str, str]:
    unsafe = get.mapping("unsafe") if "unsafe" in get else {}
    known = frozenset(fqns) if unsafe else frozenset()
    for fqn, named in unsafe.items():
        if fqn not in known or not isinstance(named, str):
            get.fail(f"calls {fqn!r:.80} unsafe in a way that cannot be")
    return unsafe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the columns of a rank's files refer to; the last of `boxes` is for blobs."""

    fqn_count: int
    item_bytes: Counts
    boxes: Sequence[BoxKey | tuple[None, None]]
    volumes: Counts


def _file_of(get: Fields, known: _Known, path: str) -> ShardFile:
    """Return the file at `path` that a JSON object tells of."""
    size_bytes, block_bytes = get.count("bytes"), get.count("block_bytes")
    if block_bytes < MIN_BLOCK_BYTES or block_bytes % 64:
        get.fail(f"says that blocks of {path} have {block_bytes} bytes")
    items = get.object("items")
    fqn = items.column("fqn", below=known.fqn_count)
    count = len(fqn)
    dtype = items.column("dtype", count=count, least=-1, below=len(known.item_bytes))
    box = items.column("box", count=count, least=-1, below=len(known.volumes))
    positions = [items.column(key, count=count) for key in _POSITIONS]
    # Unsigned, so that no sum of two of them wraps around.
    start, item_bytes, payload, payload_bytes = (at.astype(np.uint64) for at in positions)
    stop, payload_stop = start + item_bytes, payload + payload_bytes
    before = np.concatenate((np.zeros(1, dtype=np.uint64), stop[:-1]))[:count]
    good = (before <= start) & (start <= payload) & (payload_stop <= stop)
    good &= (stop <= np.uint64(size_bytes)) & ((dtype < 0) == (box < 0))
    held = (dtype >= 0) & (box >= 0)
    if held.any():
        length, one = positions[3][held], known.item_bytes[dtype[held]]
        # Divided, because a product of 64 bits might wrap around.
        good[held] &= (length % one == 0) & (length // one == known.volumes[box[held]])
    if not good.all():
        get.fail(f"describes item {int(np.argmin(good))} of {path} in a way that cannot be")
    boxes = [known.boxes[at] for at in box.tolist()]
    return ShardFile(
        path=path,
        size_bytes=size_bytes,
        crc32c=get.crc("crc32c"),
        block_bytes=block_bytes,
        items=ItemTable(
            fqn=fqn.tolist(),
            dtype=dtype.tolist(),
            offsets=[offsets for offsets, _ in boxes],
            sizes=[sizes for _, sizes in boxes],
            **{key: at.tolist() for key, at in zip(_POSITIONS, positions, strict=True)},
            block_crcs=get.crcs("block_crcs", int((-(-positions[3] // block_bytes)).sum())),
            frame_crcs=get.crcs("frame_crcs", count + 1),
        ),
    )
