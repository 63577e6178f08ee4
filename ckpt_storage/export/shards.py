"""Layouts of DCP's shard files, for stock torch and for us, and what describes them afterwards.

The chunks stay those of the source. Imports torch for `.metadata` and DCP's plans alone.
"""

from __future__ import annotations

import os
import pickle
import socket
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import combine_many
from ckpt_storage.format.rank_manifest import ItemTable, RankManifest, ShardFile
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.source.model import TensorInfo

from .layout import Fixed, Layout, Segment, out_file
from .weights import boxes_of, elements_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Paths = Mapping[str, tuple[str | int, ...]]
"""Where values sit in the nested state dict; one that is not named sits at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardItem:
    """One item of a shard file: a chunk, or, without `box` and `dtype`, a value that is no tensor.

    The item is [start, stop) of the file, the payload [payload_start, payload_stop).
    """

    fqn: str
    box: Box | None
    dtype: str | None
    start: int
    stop: int
    payload_start: int
    payload_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shard files, and the items of each in their order."""

    layout: Layout
    items: tuple[tuple[ShardItem, ...], ...]


def lay_out_shards(
    tensors: Iterable[TensorInfo],
    blobs: Mapping[str, Segment],
    *,
    max_file_bytes: int,
    path_of: Callable[[int], str],
    block_bytes: int | None = None,
) -> Shards:
    """Return files that hold all chunks of `tensors`, and then `blobs` as they are pickled.

    A new file is begun when one is full. `path_of` gives the path of file number n (from 0). With
    `block_bytes` the files are cut into the frames and blocks of our format.
    """
    files = []
    items: list[tuple[ShardItem, ...]] = []
    for number, group in enumerate(_groups(tensors, blobs, max_file_bytes)):
        segments: list[Segment] = []
        listed: list[ShardItem] = []
        edges: list[int] = []
        at = 0
        for fqn, info, box, payload in group:
            head, tail = b"", b""
            if info is not None and box is not None:
                envelope = tensor_envelope(info.dtype, box.sizes)
                head, tail = envelope.head, envelope.tail
            start = at + -at % PAYLOAD_ALIGN_BYTES
            payload_start = start + len(head)
            payload_stop = payload_start + payload.size_bytes
            segments += [Fixed(b"\0" * (start - at) + head), payload, Fixed(tail)]
            at = payload_stop + len(tail)
            listed.append(
                ShardItem(
                    fqn=fqn,
                    box=box,
                    dtype=None if info is None else info.dtype,
                    start=start,
                    stop=at,
                    payload_start=payload_start,
                    payload_stop=payload_stop,
                )
            )
            if block_bytes is not None:
                edges += [*range(payload_start, payload_stop, block_bytes), payload_stop]
        if block_bytes is not None:
            edges.append(at)
        files.append(out_file(number + 1, path_of(number), segments, edges=edges))
        items.append(tuple(listed))
    return Shards(layout=Layout(files=tuple(files)), items=tuple(items))


_Item = tuple[str, TensorInfo | None, Box | None, Segment]


def _groups(
    tensors: Iterable[TensorInfo], blobs: Mapping[str, Segment], max_file_bytes: int
) -> list[list[_Item]]:
    groups: list[list[_Item]] = [[]]
    size = 0
    found: list[_Item] = [
        (info.fqn, info, box, elements_of(info, box)) for info in tensors for box in boxes_of(info)
    ]
    for item in [*found, *((fqn, None, None, blobs[fqn]) for fqn in sorted(blobs))]:
        item_bytes = 0 if item[1] is None else item[3].size_bytes
        if groups[-1] and size + item_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item_bytes
    return [group for group in groups if group]


Spans = Sequence[tuple[int, int, int]]
"""(start, length, CRC-32C) of consecutive bytes of a file, ascending."""


def rank_manifest(
    shards: Shards,
    spans: Sequence[Spans],
    *,
    save_id: str,
    block_bytes: int,
    ties: Mapping[str, str],
) -> RankManifest:
    """Return what describes files of ours that have these checksums, as of one rank."""
    fqns: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    files = []
    for file, items, crcs in zip(shards.layout.files, shards.items, spans, strict=True):
        within = _Crcs(crcs)
        block_crcs, frame_crcs = array("I"), array("I")
        at = 0
        for item in items:
            frame_crcs.append(within.of(at, item.payload_start))
            for start in range(item.payload_start, item.payload_stop, block_bytes):
                block_crcs.append(within.of(start, min(start + block_bytes, item.payload_stop)))
            at = item.payload_stop
        frame_crcs.append(within.of(at, file.size_bytes))
        files.append(
            ShardFile(
                path=file.name,
                size_bytes=file.size_bytes,
                crc32c=within.of(0, file.size_bytes),
                block_bytes=block_bytes,
                items=ItemTable(
                    fqn=[fqns.setdefault(item.fqn, len(fqns)) for item in items],
                    dtype=[
                        -1 if item.dtype is None else dtypes.setdefault(item.dtype, len(dtypes))
                        for item in items
                    ],
                    offsets=[None if item.box is None else item.box.offsets for item in items],
                    sizes=[None if item.box is None else item.box.sizes for item in items],
                    item_start=[item.start for item in items],
                    item_bytes=[item.stop - item.start for item in items],
                    payload_start=[item.payload_start for item in items],
                    payload_bytes=[item.payload_stop - item.payload_start for item in items],
                    block_crcs=block_crcs,
                    frame_crcs=frame_crcs,
                ),
            )
        )
    return RankManifest(
        save_id=save_id,
        rank=0,
        world_size=1,
        fqns=list(fqns),
        dtypes=list(dtypes),
        files=files,
        ties=dict(ties),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


class _Crcs:
    """The checksums of one file."""

    def __init__(self, spans: Spans) -> None:
        self._spans = [span for span in spans if span[1]]
        self._starts = [start for start, _, _ in self._spans]

    def of(self, start: int, stop: int) -> int:
        """Return that of bytes [start, stop), both of which are ends of spans."""
        inner = self._spans[bisect_left(self._starts, start) : bisect_left(self._starts, stop)]
        if len(inner) == 1:
            return inner[0][2]
        return combine_many([crc for _, _, crc in inner], [n for _, n, _ in inner])


def metadata_of(tensors: Iterable[TensorInfo], blobs: Collection[str], paths: Paths) -> Metadata:
    """Return what DCP's global plan would have said of the values; without places."""
    import torch  # noqa: PLC0415  # only for DCP's formats
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # as above
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        info.fqn: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, info.dtype)),
            size=torch.Size(info.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                for box in boxes_of(info)
            ],
        )
        for info in tensors
    }
    state |= {fqn: BytesStorageMetadata() for fqn in sorted(blobs)}
    return Metadata(
        state_dict_metadata=state, planner_data={fqn: paths.get(fqn, (fqn,)) for fqn in state}
    )


def stock_pickle(metadata: Metadata, shards: Shards, url: str) -> bytes:
    """Return the `.metadata` of stock torch for these files."""
    import torch  # noqa: PLC0415  # only for DCP's formats
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415  # as above
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  # as above
        MetadataIndex,
        StorageMeta,
    )

    from ckpt_storage.commit.stock import STOCK_VERSION  # noqa: PLC0415  # as above

    metadata.storage_data = {
        MetadataIndex(
            item.fqn, None if item.box is None else torch.Size(item.box.offsets)
        ): _StorageInfo(file.name, item.start, item.stop - item.start)
        for file, items in zip(shards.layout.files, shards.items, strict=True)
        for item in items
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=url)
    metadata.version = STOCK_VERSION
    return pickle.dumps(metadata)
