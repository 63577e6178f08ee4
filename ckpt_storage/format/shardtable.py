"""One shard file as a value: where it is, its items, their checksums; and its JSON.

Tables stay columnar, in memory as on disk: a rank with 20,000 small tensors has one `ItemTable`,
not 20,000 objects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.options import MIN_BLOCK_BYTES

from .documents import (
    Columns,
    Counts,
    FileRef,
    Getter,
    decode_crcs,
    encode_crcs,
    pack_column,
    ref_from_json,
)
from .dtypes import DTYPES

BoxKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""

_MOST = (1 << 63) - 1


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


class BoxTable:
    """Distinct boxes in order of first use, and the column that refers to them."""

    def __init__(self) -> None:
        self._at: dict[BoxKey | None, int] = {}

    @property
    def boxes(self) -> list[BoxKey]:
        """The boxes in order."""
        return [box for box in self._at if box is not None]

    def refer(self, items: ItemTable) -> list[int]:
        """Return, per item, the position of its box; -1 for a blob."""
        at = self._at
        column = []
        for offsets, sizes in zip(items.offsets, items.sizes, strict=True):
            if offsets is None or sizes is None:
                column.append(-1)
            else:
                column.append(at.setdefault((tuple(offsets), tuple(sizes)), len(at)))
        return column

    def to_json(self) -> dict[str, Any]:
        """Return the columns `ndim`, `offsets` and `sizes`."""
        return boxes_to_json(self.boxes)


def boxes_to_json(boxes: Sequence[BoxKey]) -> dict[str, Any]:
    """Return boxes as columns."""
    return {
        "ndim": pack_column([len(offsets) for offsets, _ in boxes]),
        "offsets": pack_column([n for offsets, _ in boxes for n in offsets]),
        "sizes": pack_column([n for _, sizes in boxes for n in sizes]),
    }


def boxes_from_json(value: object, columns: Columns) -> list[BoxKey]:
    """Return the boxes that columns spell. Raises `FormatError`."""
    ndim = columns.column(value, "ndim", below=65)
    total = int(ndim.sum())
    offsets = columns.column(value, "offsets", count=total).tolist()
    sizes = columns.column(value, "sizes", count=total).tolist()
    ends = np.cumsum(ndim).tolist()
    starts = [0, *ends]
    return [
        (tuple(offsets[start:end]), tuple(sizes[start:end]))
        for start, end in zip(starts, ends, strict=False)
    ]


def encode_file(file: ShardFile, boxes: BoxTable) -> dict[str, Any]:
    """Return the JSON object of a file; its boxes enter the table."""
    items = file.items
    return {
        **file.ref().as_json(),
        "block_bytes": file.block_bytes,
        "items": {
            "fqn": pack_column(items.fqn),
            "dtype": pack_column(items.dtype),
            "box": pack_column(boxes.refer(items)),
            "item_start": pack_column(items.item_start),
            "item_bytes": pack_column(items.item_bytes),
            "payload_start": pack_column(items.payload_start),
            "payload_bytes": pack_column(items.payload_bytes),
        },
        "chunk_crcs": encode_crcs(items.chunk_crcs),
        "block_crcs": encode_crcs(items.block_crcs),
        "frame_crcs": encode_crcs(items.frame_crcs),
    }


class Vocabulary:
    """What the columns of a rank's files refer to; the dtypes are known ones."""

    def __init__(
        self, fqns: Sequence[str], dtypes: Sequence[str], boxes: Sequence[BoxKey] = ()
    ) -> None:
        self.fqns = fqns
        self.dtypes = dtypes
        self.boxes = boxes

    @cached_property
    def _item_bytes(self) -> Counts:
        return np.array([DTYPES[name].item_bytes for name in self.dtypes], dtype=np.int64)

    @cached_property
    def _volumes(self) -> Counts:
        volumes = (math.prod(sizes) for _, sizes in self.boxes)
        return np.array([v if v <= _MOST else -1 for v in volumes], dtype=np.int64)

    def fits(self, box: Counts, dtype: Counts, payload_bytes: Counts) -> NDArray[np.bool_]:
        """Return, per item, whether a payload has as many bytes as its box and dtype say."""
        item_bytes = self._item_bytes[dtype]
        # Divided, because a product of 64 bits might wrap around.
        whole = payload_bytes % item_bytes == 0
        fits: NDArray[np.bool_] = whole & (payload_bytes // item_bytes == self._volumes[box])
        return fits


def decode_file(value: object, vocabulary: Vocabulary, columns: Columns) -> ShardFile:
    """Return the file that a JSON object spells.

    Raises `FormatError` for items that overlap, leave the file, or do not hold what they say.
    """
    where = columns.where
    ref = ref_from_json(value, where)
    get = Getter(value, where)
    block_bytes = _block_bytes(get, ref)
    body = get.mapping("items")
    fqn = columns.column(body, "fqn", below=len(vocabulary.fqns))
    count = len(fqn)
    dtype = columns.column(body, "dtype", count=count, least=-1, below=len(vocabulary.dtypes))
    box = columns.column(body, "box", count=count, least=-1, below=len(vocabulary.boxes))
    item_start = columns.column(body, "item_start", count=count)
    item_bytes = columns.column(body, "item_bytes", count=count)
    payload_start = columns.column(body, "payload_start", count=count)
    payload_bytes = columns.column(body, "payload_bytes", count=count)
    # Unsigned, so that no sum of two of them wraps around.
    start, payload = item_start.astype(np.uint64), payload_start.astype(np.uint64)
    stop = start + item_bytes.astype(np.uint64)
    payload_stop = payload + payload_bytes.astype(np.uint64)
    before = np.concatenate((np.zeros(1, dtype=np.uint64), stop[:-1]))[:count]
    good = (
        (before <= start)
        & (start <= payload)
        & (payload_stop <= stop)
        & (stop <= np.uint64(ref.size_bytes))
        & ((dtype < 0) == (box < 0))
    )
    held = (dtype >= 0) & (box >= 0)
    if held.any():
        good[held] &= vocabulary.fits(box[held], dtype[held], payload_bytes[held])
    if not good.all():
        item = int(np.argmin(good))
        get.fail(f"describes item {item} of {ref.path} in a way that cannot be")
    block_count = int((-(-payload_bytes // block_bytes)).sum())
    at = box.tolist()
    boxes = [*vocabulary.boxes, (None, None)]
    return ShardFile(
        path=ref.path,
        size_bytes=ref.size_bytes,
        crc32c=ref.crc32c,
        block_bytes=block_bytes,
        items=ItemTable(
            fqn=fqn.tolist(),
            dtype=dtype.tolist(),
            offsets=[boxes[i][0] for i in at],
            sizes=[boxes[i][1] for i in at],
            item_start=item_start.tolist(),
            item_bytes=item_bytes.tolist(),
            payload_start=payload_start.tolist(),
            payload_bytes=payload_bytes.tolist(),
            chunk_crcs=decode_crcs(get.string("chunk_crcs"), count, path=where),
            block_crcs=decode_crcs(get.string("block_crcs"), block_count, path=where),
            frame_crcs=decode_crcs(get.string("frame_crcs"), count + 1, path=where),
        ),
    )


def _block_bytes(get: Getter, ref: FileRef) -> int:
    block_bytes = get.count("block_bytes")
    if block_bytes < MIN_BLOCK_BYTES or block_bytes % 64:
        get.fail(f"says that blocks of {ref.path} have {block_bytes} bytes")
    return block_bytes
