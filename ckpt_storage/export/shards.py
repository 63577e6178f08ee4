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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import combine_many
from ckpt_storage.format.rank_manifest import ItemTable, RankManifest, ShardFile
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.source.model import TensorInfo

from .layout import Fixed, Layout, Segment, boxes_of, elements_of, out_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Paths = Mapping[str, tuple[str | int, ...]]
"""Where values sit in the nested state dict; one that is not named sits at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shard files, and the items of each in their order, whose checksums are not known yet.

    `fqns` and `dtypes` are what the tables refer to.
    """

    layout: Layout
    tables: Sequence[ItemTable]
    fqns: Sequence[str]
    dtypes: Sequence[str]


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
    fqns: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    files, tables = [], []
    for number, group in enumerate(_groups(tensors, blobs, max_file_bytes)):
        segments: list[Segment] = []
        edges: list[int] = []
        columns: dict[str, list[Any]] = {name: [] for name in ItemTable.__slots__}
        at = 0
        for fqn, info, box, payload in group:
            head, tail, dtype = b"", b"", -1
            if info is not None and box is not None:
                envelope = tensor_envelope(info.dtype, box.sizes)
                head, tail = envelope.head, envelope.tail
                dtype = dtypes.setdefault(info.dtype, len(dtypes))
            start = at + -at % PAYLOAD_ALIGN_BYTES
            begin = start + len(head)
            end = begin + payload.size_bytes
            segments += [Fixed(b"\0" * (start - at) + head), payload, Fixed(tail)]
            at = end + len(tail)
            columns["fqn"].append(fqns.setdefault(fqn, len(fqns)))
            columns["dtype"].append(dtype)
            columns["offsets"].append(box and box.offsets)
            columns["sizes"].append(box and box.sizes)
            columns["item_start"].append(start)
            columns["item_bytes"].append(at - start)
            columns["payload_start"].append(begin)
            columns["payload_bytes"].append(payload.size_bytes)
            if block_bytes is not None:
                edges += [*range(begin, end, block_bytes), end]
        if block_bytes is not None:
            edges.append(at)
        files.append(out_file(number + 1, path_of(number), segments, edges=edges))
        tables.append(ItemTable(**columns))
    layout = Layout(files=tuple(files))
    return Shards(layout=layout, tables=tables, fqns=list(fqns), dtypes=list(dtypes))


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
    files = []
    for file, items, crcs in zip(shards.layout.files, shards.tables, spans, strict=True):
        within = _Crcs(crcs)
        block_crcs, frame_crcs = array("I"), array("I")
        at = 0
        for start, length in zip(items.payload_start, items.payload_bytes, strict=True):
            frame_crcs.append(within.of(at, start))
            at = start + length
            for block in range(start, at, block_bytes):
                block_crcs.append(within.of(block, min(block + block_bytes, at)))
        frame_crcs.append(within.of(at, file.size_bytes))
        files.append(
            ShardFile(
                path=file.name,
                size_bytes=file.size_bytes,
                crc32c=within.of(0, file.size_bytes),
                block_bytes=block_bytes,
                items=replace(items, block_crcs=block_crcs, frame_crcs=frame_crcs),
            )
        )
    return RankManifest(
        save_id=save_id,
        rank=0,
        world_size=1,
        fqns=shards.fqns,
        dtypes=shards.dtypes,
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
            shards.fqns[fqn], None if offsets is None else torch.Size(offsets)
        ): _StorageInfo(file.name, start, length)
        for file, items in zip(shards.layout.files, shards.tables, strict=True)
        for fqn, offsets, start, length in zip(
            items.fqn, items.offsets, items.item_start, items.item_bytes, strict=True
        )
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=url)
    metadata.version = STOCK_VERSION
    return pickle.dumps(metadata)
