"""Values as shard files of DCP: for a checkpoint of ours, and for stock torch's own layout.

The chunks stay those of the source.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage.commit.shardfile import ShardFileWriter, ShardTable
from ckpt_storage.commit.stock import STOCK_VERSION
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .stream import Item
from .values import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTarget:
    """Where shard files go: `path_of` gives the path of file number n (from 0)."""

    store: Store
    path_of: Callable[[int], str]
    save_id: str
    options: TransferOptions
    deadline: Deadline
    on_bytes: Callable[[int], None]
    max_file_bytes: int

    def write(self, values: Values) -> RankManifest:
        """Write all values; return what is where, as of one rank. Durable on return.

        On any error the file that was being written is discarded; those before it stay.
        """
        return self._written(values, enumerate(planned_files(values, self.max_file_bytes)))

    def write_file(self, values: Values, number: int, items: list[Item]) -> RankManifest:
        """Write file `number` alone, with these values; as `write`."""
        return self._written(values, [(number, items)])

    def _written(self, values: Values, groups: Iterable[tuple[int, list[Item]]]) -> RankManifest:
        fqns: dict[str, int] = {}
        dtypes: dict[str, int] = {}
        files: list[ShardFile] = []
        for number, group in groups:
            one = _OneFile(self, values, fqns, dtypes, number, bytes_of(values, group))
            files.append(one.write(group))
        return RankManifest(
            save_id=self.save_id,
            rank=0,
            world_size=1,
            fqns=list(fqns),
            dtypes=list(dtypes),
            files=files,
            ties=dict(values.ties),
            host=socket.gethostname(),
            pid=os.getpid(),
        )


def planned_files(values: Values, max_file_bytes: int) -> list[list[Item]]:
    """Return which items go into which file: in order, a new file when one is full."""
    groups: list[list[Item]] = [[]]
    size = 0
    items: list[Item] = [(fqn, box) for fqn in values.tensors for box in values.boxes_of(fqn)]
    for item in [*items, *((fqn, None) for fqn in sorted(values.blobs))]:
        item_bytes = bytes_of(values, [item])
        if groups[-1] and size + item_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item_bytes
    return [group for group in groups if group]


def bytes_of(values: Values, items: list[Item]) -> int:
    """Return how many bytes the elements of these items have."""
    return sum(
        box.volume * DTYPES[values.tensors[fqn].dtype].item_bytes
        for fqn, box in items
        if box is not None
    )


class _OneFile:
    """One shard file being written."""

    def __init__(
        self,
        target: ShardTarget,
        values: Values,
        fqns: dict[str, int],
        dtypes: dict[str, int],
        number: int,
        planned_bytes: int,
    ) -> None:
        self._values = values
        self._fqns = fqns
        self._dtypes = dtypes
        self._deadline = target.deadline
        self._table = ShardTable()
        self._file = ShardFileWriter(
            target.store,
            target.path_of(number),
            options=target.options,
            planned_bytes=planned_bytes,
            deadline=target.deadline,
            on_bytes=target.on_bytes,
        )

    def write(self, items: list[Item]) -> ShardFile:
        try:
            self._values.expect(items)
            for fqn, box in items:
                self._item(fqn, box)
                self._deadline.check(f"Writing {self._file.path}")
            size_bytes, crc = self._file.finish()
        except BaseException as error:
            try:
                self._file.abort()
            except StorageError as failure:
                error.add_note(f"Discarding the upload failed too: {failure}")
            raise
        return self._table.shard_file(self._file, size_bytes, crc)

    def _item(self, fqn: str, box: Box | None) -> None:
        file, table = self._file, self._table
        file.frame(b"\0" * (-file.position % PAYLOAD_ALIGN_BYTES))
        table.fqn.append(self._fqns.setdefault(fqn, len(self._fqns)))
        start = file.position
        table.item_start.append(start)
        if box is None:
            table.payload_start.append(start)
            table.payload_bytes.append(file.payload([self._values.pickled(fqn)]))
            table.dtype.append(-1)
            table.offsets.append(None)
            table.sizes.append(None)
        else:
            dtype = self._values.tensors[fqn].dtype
            envelope = tensor_envelope(dtype, box.sizes)
            file.frame(envelope.head)
            table.payload_start.append(file.position)
            length = file.payload(self._values.box(fqn, box))
            if length != envelope.payload_bytes:  # pragma: no cover  # the stream gives the box
                raise CheckpointError(f"{fqn} gave {length} bytes, not {envelope.payload_bytes}.")
            file.frame(envelope.tail)
            table.payload_bytes.append(length)
            table.dtype.append(self._dtypes.setdefault(dtype, len(self._dtypes)))
            table.offsets.append(box.offsets)
            table.sizes.append(box.sizes)
        table.item_bytes.append(file.position - start)


def metadata_of(values: Values) -> Metadata:
    """Return what DCP's global plan would have said of the values; without places."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        fqn: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, info.dtype)),
            size=torch.Size(info.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                for box in values.boxes_of(fqn)
            ],
        )
        for fqn, info in values.tensors.items()
    }
    state |= {fqn: BytesStorageMetadata() for fqn in sorted(values.blobs)}
    return Metadata(
        state_dict_metadata=state,
        planner_data={fqn: values.path_of(fqn) for fqn in state},
    )


def stock_pickle(values: Values, files: Sequence[RankManifest], url: str) -> bytes:
    """Return the `.metadata` of stock torch for what was written, one manifest a file."""
    metadata = metadata_of(values)
    metadata.storage_data = {
        MetadataIndex(
            written.fqns[fqn], None if offsets is None else torch.Size(offsets)
        ): _StorageInfo(file.path, start, length)
        for written in files
        for file in written.files
        for fqn, offsets, start, length in zip(
            file.items.fqn,
            file.items.offsets,
            file.items.item_start,
            file.items.item_bytes,
            strict=True,
        )
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=url)
    metadata.version = STOCK_VERSION
    return pickle.dumps(metadata)
