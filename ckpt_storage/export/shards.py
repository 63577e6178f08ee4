"""Layouts of DCP's shard files, for stock torch and for us, and what describes them afterwards.

The chunks stay those of the source. Imports torch for `.metadata` and DCP's plans alone.
"""

from __future__ import annotations

import os
import pickle
import socket
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ckpt_storage.format.rank_manifest import COLUMNS, RankManifest, ShardFile, Vocabulary
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.source.model import TensorInfo

from .layout import Elements, Fixed, Layout, OutFile, Segment, boxes_of, elements_of, split_by_size
from .write import Span, joined

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Paths = Mapping[str, tuple[str | int, ...]]
"""Where values sit in the nested state dict; one that is not named sits at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shard files, and the columns of the items of each, whose checksums are not known yet."""

    layout: Layout
    tables: Sequence[Mapping[str, Sequence[int]]]
    known: Vocabulary


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
    known = Vocabulary()
    files, tables = [], []
    chunks = ((info.fqn, elements_of(info, box)) for info in tensors for box in boxes_of(info))
    values: list[tuple[str, Segment]] = [*chunks, *sorted(blobs.items())]
    for number, group in enumerate(split_by_size(values, max_file_bytes, _filling_bytes)):
        segments: list[Segment] = []
        edges: list[int] = []
        rows: list[tuple[int, ...]] = []
        at = 0
        for fqn, part in group:
            head, tail, dtype, box = b"", b"", None, None
            if isinstance(part, Elements):
                dtype, box = part.dtype, part.box
                head, tail = tensor_envelope(dtype, box.sizes)
            start = at + -at % PAYLOAD_ALIGN_BYTES
            begin = start + len(head)
            end = begin + part.size_bytes
            segments += [Fixed(b"\0" * (start - at) + head), part, Fixed(tail)]
            at = end + len(tail)
            lies = (start, at - start, begin, end - begin)
            rows.append((*known.numbers(fqn, dtype, box), *lies))
            if block_bytes is not None:
                edges += [*range(begin, end, block_bytes), end]
        if block_bytes is not None:
            edges.append(at)
        name = path_of(number)
        files.append(OutFile(number=number + 1, name=name, segments=segments, edges=edges))
        tables.append(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))
    return Shards(layout=Layout(files=tuple(files)), tables=tables, known=known)


def _filling_bytes(value: tuple[str, Segment]) -> int:
    # Objects never fill a file.
    return value[1].size_bytes if isinstance(value[1], Elements) else 0


def rank_manifest(
    shards: Shards,
    spans: Sequence[Sequence[Span]],
    *,
    save_id: str,
    block_bytes: int,
    ties: Mapping[str, str],
) -> RankManifest:
    """Return what describes files of ours, of which these spans were written, as of one rank."""
    files = []
    for file, columns, crcs in zip(shards.layout.files, shards.tables, spans, strict=True):
        parts: dict[int, list[Span]] = {}
        for span in crcs:
            parts.setdefault(bisect_right(file.edges, span[0]), []).append(span)
        # Of a frame, then of the blocks of a payload, and so on; frames may be empty.
        found = (joined(parts.get(at, [(0, 0, 0)]))[2] for at in range(len(file.edges)))
        block_crcs, frame_crcs = array("I"), array("I")
        for length in columns["payload_bytes"]:
            frame_crcs.append(next(found))
            block_crcs.extend(islice(found, -(-length // block_bytes)))
        frame_crcs.append(next(found))
        files.append(
            ShardFile(
                path=file.name,
                size_bytes=file.size_bytes,
                crc32c=joined(crcs)[2],
                block_bytes=block_bytes,
                **columns,
                block_crcs=block_crcs,
                frame_crcs=frame_crcs,
            )
        )
    return RankManifest(
        save_id=save_id,
        rank=0,
        world_size=1,
        fqns=list(shards.known.fqns),
        dtypes=list(shards.known.dtypes),
        boxes=list(shards.known.boxes),
        files=files,
        ties=dict(ties),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


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

    from ckpt_storage.commit.assembly import STOCK_VERSION  # noqa: PLC0415  # as above

    fqns = list(shards.known.fqns)
    # -1, which is a blob's, is the last.
    offsets = [*(torch.Size(box.offsets) for box in shards.known.boxes), None]
    keys = ("fqn", "box", "item_start", "item_bytes")
    metadata.storage_data = {
        MetadataIndex(fqns[fqn], offsets[box]): _StorageInfo(file.name, start, length)
        for file, table in zip(shards.layout.files, shards.tables, strict=True)
        for fqn, box, start, length in zip(*(table[key] for key in keys), strict=True)
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=url)
    metadata.version = STOCK_VERSION
    return pickle.dumps(metadata)
