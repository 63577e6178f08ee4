"""The manifest of one rank, with a strict codec of its JSON body, and checksums of its files.

Tables are columnar, in memory as in the document: a rank with 20,000 small tensors has a few
columns, not 20,000 objects. The section "Rank manifest" of `docs/format.md` specifies it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt_storage.errors import FormatError, IntegrityError
from ckpt_storage.options import MIN_BLOCK_BYTES

from .boxes import Box
from .columns import Counts, pack_bytes, pack_column, pack_crcs, pack_names
from .crc import combine_blocks, combine_many
from .documents import DAMAGED, FileRef
from .dtypes import DTYPES
from .fields import MAX_COUNT, MAX_DIMS, Fields, format_of
from .names import is_save_id, shard_path

_POSITIONS = ("item_start", "item_bytes", "payload_start", "payload_bytes")

COLUMNS = ("fqn", "dtype", "box", *_POSITIONS)
"""The columns of a `ShardFile` with a number for each item, in the order of the rows of writers.

`ShardFile` has a field for each of them; `_file_of` checks them.
"""

HASH_BYTES = 16
"""The length of an XXH3-128."""

NO_HASH = bytes(HASH_BYTES)


class Vocabulary:
    """The names, dtypes and boxes that items of a rank refer to, numbered in order of first use."""

    def __init__(self) -> None:
        self.fqns: dict[str, int] = {}
        self.dtypes: dict[str, int] = {}
        self.boxes: dict[Box, int] = {}

    def numbers(self, fqn: str, dtype: str | None, box: Box | None) -> tuple[int, int, int]:
        """Return the numbers of name, dtype and box of an item; -1 for those that a blob lacks."""
        return (
            self.fqns.setdefault(fqn, len(self.fqns)),
            -1 if dtype is None else self.dtypes.setdefault(dtype, len(self.dtypes)),
            -1 if box is None else self.boxes.setdefault(box, len(self.boxes)),
        )

    def merge(self, other: Vocabulary) -> tuple[list[int], list[int], list[int]]:
        """Add all of another; return the numbers here of its names, of its dtypes, of its boxes."""
        return (
            [self.fqns.setdefault(fqn, len(self.fqns)) for fqn in other.fqns],
            [self.dtypes.setdefault(dtype, len(self.dtypes)) for dtype in other.dtypes],
            [self.boxes.setdefault(box, len(self.boxes)) for box in other.boxes],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard file: its path, its checksum, and its items in file order, as columns.

    `fqn`, `dtype` and `box` are positions in the lists of the manifest; the last two are -1 for a
    blob. Starts are bytes from the start of the file. `block_crcs` has the checksums of the blocks
    of all payloads, one after another; `frame_crcs` has one entry more than there are items.

    For saves that use this save as their base: `hashes` has the XXH3-128 of each payload, `NO_HASH`
    for a payload that was not hashed, or is empty. `age` is the number of saves before this one
    that had the same file, None for a file whose values are not expected to stay the same. `moving`
    are the items that changed after they were expected to stay the same.
    """

    path: str
    size_bytes: int
    crc32c: int
    block_bytes: int
    fqn: Sequence[int]
    dtype: Sequence[int]
    box: Sequence[int]
    item_start: Sequence[int]
    item_bytes: Sequence[int]
    payload_start: Sequence[int]
    payload_bytes: Sequence[int]
    block_crcs: Sequence[int]
    frame_crcs: Sequence[int]
    hashes: bytes = b""
    age: int | None = None
    moving: Sequence[int] = ()

    def hash_of(self, item: int) -> bytes:
        """Return the hash of the payload of an item, `NO_HASH` if there is none."""
        return self.hashes[item * HASH_BYTES : (item + 1) * HASH_BYTES] or NO_HASH

    def block_starts(self) -> list[int]:
        """Return the position of each item's first block in `block_crcs`, and the end."""
        counts = (-(-length // self.block_bytes) for length in self.payload_bytes)
        return list(itertools.accumulate(counts, initial=0))

    def payload_crcs(self, wanted: Iterable[int]) -> list[int]:
        """Return the checksums of the payloads of these items, combined from their blocks."""
        starts, size = self.block_starts(), self.block_bytes
        return [
            combine_blocks(
                self.block_crcs[starts[at] : starts[at + 1]], size, self.payload_bytes[at]
            )
            for at in wanted
        ]

    def combined_crc(self) -> int:
        """Return the checksum of the whole file, combined from those of its frames and blocks."""
        crcs, lengths, end = list[int](), list[int](), 0
        payloads = self.payload_crcs(range(len(self.fqn)))
        rows = zip(self.frame_crcs, self.payload_start, payloads, self.payload_bytes, strict=False)
        for frame, start, payload, size_bytes in rows:
            crcs += (frame, payload)
            lengths += (start - end, size_bytes)
            end = start + size_bytes
        return combine_many([*crcs, self.frame_crcs[-1]], [*lengths, self.size_bytes - end])

    def ref(self) -> FileRef:
        """Return path, length and checksum."""
        return FileRef(path=self.path, size_bytes=self.size_bytes, crc32c=self.crc32c)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """The values that one rank wrote; its files refer to `fqns`, `dtypes` and `boxes`.

    `ties` maps aliases to targets, with which they shared memory on this rank. `unsafe` maps names
    of blobs that only pickle can hold to the class or function that the pickle names.
    `unlinked_count` is the number of saves in a row, this save included, that could have reused
    files and reused none on this rank.
    """

    save_id: str
    rank: int
    world_size: int
    fqns: Sequence[str]
    dtypes: Sequence[str]
    boxes: Sequence[Box]
    files: Sequence[ShardFile]
    ties: Mapping[str, str] = field(default_factory=dict)
    unsafe: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    unlinked_count: int = 0

    def box_of(self, file: ShardFile, item: int) -> Box | None:
        """Return the chunk that is an item of a file, None for a blob."""
        at = file.box[item]
        return None if at < 0 else self.boxes[at]

    def renumbered(self, file: ShardFile, known: Vocabulary, path: str) -> ShardFile:
        """Return a file of this manifest for a manifest that has it at `path`.

        Adds names, dtypes and boxes of the items to `known`.
        """
        rows = [
            known.numbers(
                self.fqns[fqn], None if dtype < 0 else self.dtypes[dtype], self.box_of(file, item)
            )
            for item, (fqn, dtype) in enumerate(zip(file.fqn, file.dtype, strict=True))
        ]
        fqn, dtype, box = map(list, zip(*rows, strict=True))
        return replace(file, path=path, fqn=fqn, dtype=dtype, box=box)

    def to_body(self) -> dict[str, Any]:
        """Return the JSON body."""
        body: dict[str, Any] = {
            "format": format_of("rank"),
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "pid": self.pid,
            "fqns": pack_names(self.fqns),
            "dtypes": list(self.dtypes),
            "boxes": boxes_to_json(self.boxes),
            "files": [
                {
                    "bytes": file.size_bytes,
                    "crc32c": f"{file.crc32c:08x}",
                    "block_bytes": file.block_bytes,
                    "items": {key: pack_column(getattr(file, key)) for key in COLUMNS},
                    "block_crcs": pack_crcs(file.block_crcs),
                    "frame_crcs": pack_crcs(file.frame_crcs),
                    **({"hashes": pack_bytes(file.hashes)} if file.hashes else {}),
                    **({} if file.age is None else {"age": file.age}),
                    **({"moving": pack_column(file.moving)} if file.moving else {}),
                }
                for file in self.files
            ],
        }
        if self.unlinked_count:
            body["unlinked_count"] = self.unlinked_count
        return body | {
            key: dict(names) for key in ("ties", "unsafe") if (names := getattr(self, key))
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> RankManifest:
        """Return the manifest in a JSON body; `where` names its file in errors.

        Raises `FormatError` for a body that contradicts itself or the format.
        """
        get = Fields.of(body, "rank", where)
        save_id = get.value("save_id", str, ok=is_save_id)
        rank, fqns = get.count("rank"), get.names("fqns")
        dtypes, boxes = dtypes_of(get), boxes_from_json(get.object("boxes"))
        item_bytes = np.array([DTYPES[name].item_bytes for name in dtypes], dtype=np.int64)
        volumes = [box.volume if box.volume <= MAX_COUNT else -1 for box in boxes]
        payload_bytes = np.array(volumes, dtype=np.int64)
        return cls(
            save_id=save_id,
            rank=rank,
            world_size=get.count("world_size"),
            host=get.note("host", str, ""),
            pid=get.note("pid", int, 0),
            fqns=fqns,
            dtypes=dtypes,
            boxes=boxes,
            files=[
                _file_of(entry, shard_path(save_id, rank, at), len(fqns), item_bytes, payload_bytes)
                for at, entry in enumerate(get.objects("files"))
            ],
            ties=ties_of(get, fqns),
            unsafe=_unsafe_of(get, fqns),
            unlinked_count=get.count("unlinked_count", 0),
        )


def checksums_of(
    document: RankManifest, file: ShardFile
) -> tuple[Sequence[int], Sequence[int], Sequence[str | None]]:
    """Return the edges of the frames and blocks of a file, their checksums and their FQNs.

    There is one edge more. The FQN is None in a file without values.
    """
    edges, crcs, fqns = array("q"), array("I"), list[str | None]()
    frames, blocks, end = iter(file.frame_crcs), iter(file.block_crcs), 0
    items = zip(file.fqn, file.payload_start, file.payload_bytes, strict=True)
    for name, start, length in itertools.chain(items, [(-1, file.size_bytes, 0)]):
        frame = next(frames)
        if end < start:
            edges.append(end)
            crcs.append(frame)
        starts = range(start, start + length, file.block_bytes)
        edges.extend(starts)
        crcs.extend(itertools.islice(blocks, len(starts)))
        # The frame after the last item gets the FQN of that item.
        last = fqns[-1] if fqns else None
        fqns += [last if name < 0 else document.fqns[name]] * (len(edges) - len(fqns))
        end = start + length
    edges.append(file.size_bytes)
    return edges, crcs, fqns


def wrong_block(path: str, offset: int, *, fqn: str | None, rank: int | None) -> IntegrityError:
    """Return the error for a block of a file with a wrong checksum."""
    by = f" (written by rank {rank})" if rank is not None else ""
    what = f"a block of {fqn}" if fqn else "its content"
    what = (
        f"{path}{by} is damaged: {what} at byte {offset} does not have the checksum it was "
        "written with."
    )
    return IntegrityError(what, fqn=fqn, offset=offset, path=path, rank=rank, next_step=DAMAGED)


def boxes_to_json(boxes: Sequence[Box]) -> dict[str, Any]:
    """Return the JSON object of boxes: three columns."""
    return {
        "ndim": pack_column([len(box.offsets) for box in boxes]),
        "offsets": pack_column([n for box in boxes for n in box.offsets]),
        "sizes": pack_column([n for box in boxes for n in box.sizes]),
    }


def boxes_from_json(get: Fields) -> list[Box]:
    """Return the boxes in three columns. Raises `FormatError`."""
    ndim = get.column("ndim", below=MAX_DIMS + 1)
    ends = np.cumsum(ndim).tolist()
    offsets, sizes = (
        get.column(key, count=int(ndim.sum())).tolist() for key in ("offsets", "sizes")
    )
    return [
        Box(tuple(offsets[start:end]), tuple(sizes[start:end]))
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def dtypes_of(get: Fields) -> list[str]:
    """Return the dtypes of a document. Raises `FormatError` for an unknown or repeated dtype."""
    dtypes = get.strings("dtypes")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        what = (
            f"{get.where} holds tensors of dtype {unknown[0]!r:.80}, which this release does not "
            "know."
        )
        raise FormatError(what, path=get.where, next_step="Install a newer ckpt_storage.")
    if len(set(dtypes)) != len(dtypes):
        get.fail("names a dtype twice")
    return dtypes


def ties_of(get: Fields, fqns: Iterable[str]) -> dict[str, str]:
    """Return alias -> target; {} where the document has none."""
    ties = get.value("ties", dict, {})
    known = frozenset(fqns) if ties else frozenset()
    for alias, target in ties.items():
        named = isinstance(target, str) and alias in known and target in known
        if not named or target in ties:
            get.fail(f"has an invalid tie of {alias!r:.80} to {target!r:.80}")
    return ties


def _unsafe_of(get: Fields, fqns: Iterable[str]) -> dict[str, str]:
    unsafe = get.value("unsafe", dict, {})
    known = frozenset(fqns) if unsafe else frozenset()
    for fqn, named in unsafe.items():
        if fqn not in known or not isinstance(named, str):
            get.fail(f"has an invalid entry for {fqn!r:.80} in unsafe")
    return unsafe


def _file_of(
    get: Fields, path: str, fqn_count: int, item_bytes: Counts, volumes: Counts
) -> ShardFile:
    """Return the file in a JSON object; `volumes` are those of the boxes, -1 if too large."""
    size_bytes, block_bytes = get.count("bytes"), get.count("block_bytes")
    if block_bytes < MIN_BLOCK_BYTES or block_bytes % 64:
        get.fail(f"has the invalid block length {block_bytes} for {path}")
    items = get.object("items")
    fqn = items.column("fqn", below=fqn_count)
    count = len(fqn)
    dtype = items.column("dtype", count=count, least=-1, below=len(item_bytes))
    box = items.column("box", count=count, least=-1, below=len(volumes))
    positions = [items.column(key, count=count) for key in _POSITIONS]
    # Unsigned, so that no sum of two of them wraps around.
    start, length, payload, payload_bytes = (at.astype(np.uint64) for at in positions)
    stop, payload_stop = start + length, payload + payload_bytes
    before = np.concatenate((np.zeros(1, dtype=np.uint64), stop[:-1]))[:count]
    good = (before <= start) & (start <= payload) & (payload_stop <= stop)
    good &= (stop <= np.uint64(size_bytes)) & ((dtype < 0) == (box < 0))
    is_chunk = (dtype >= 0) & (box >= 0)
    if is_chunk.any():
        chunk_bytes, element_bytes = positions[3][is_chunk], item_bytes[dtype[is_chunk]]
        # A product of 64-bit integers might wrap around.
        good[is_chunk] &= (chunk_bytes % element_bytes == 0) & (
            chunk_bytes // element_bytes == volumes[box[is_chunk]]
        )
    if not good.all():
        get.fail(f"has an invalid item {int(np.argmin(good))} of {path}")
    columns = (column.tolist() for column in (fqn, dtype, box, *positions))
    return ShardFile(
        path=path,
        size_bytes=size_bytes,
        crc32c=get.crc("crc32c"),
        block_bytes=block_bytes,
        **dict(zip(COLUMNS, columns, strict=True)),
        block_crcs=get.crcs("block_crcs", int((-(-positions[3] // block_bytes)).sum())),
        frame_crcs=get.crcs("frame_crcs", count + 1),
        hashes=get.packed("hashes", count * HASH_BYTES) if "hashes" in get else b"",
        age=get.count("age") if "age" in get else None,
        moving=get.column("moving", below=count).tolist() if "moving" in get else (),
    )
