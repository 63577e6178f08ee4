"""One rank's part of a save: items written as one shard file, with their table. Knows no torch."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckpt_storage.commit.shardfile import ShardFileWriter, ShardTable
from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.format.names import shard_path
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.options import Progress, TransferOptions, UnsafeValues
from ckpt_storage.progress import reporting
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")

_MOST_NAMED = 8

_ZEROS = tuple(bytes(length) for length in range(PAYLOAD_ALIGN_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item and where its bytes come from; knows no DCP and no tensor.

    `dtype` is None for a blob, which has no box. `views` gives the payload, `payload_bytes` long,
    as windows of at most about so many bytes; they stay as they are while anybody holds them.
    `unsafe` names the type that makes `load` refuse a blob.
    """

    fqn: str
    dtype: str | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    payload_bytes: int
    views: Callable[[int], Iterable[memoryview | bytes]]
    unsafe: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What a rank needs to know to write its shard file."""

    save_id: str
    rank: int
    world_size: int
    item_count: int
    planned_bytes: int
    options: TransferOptions
    unsafe_values: UnsafeValues
    deadline: Deadline
    progress: Progress
    with_bar: bool


@dataclass(slots=True)
class _Contents:
    """What is in the file so far; strings and equal boxes are one object each."""

    fqns: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    boxes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    unsafe: dict[str, str] = field(default_factory=dict)
    table: ShardTable = field(default_factory=ShardTable)

    def write(self, file: ShardFileWriter, item: Item) -> None:
        """Append one item."""
        file.frame(_ZEROS[-file.position % PAYLOAD_ALIGN_BYTES])
        table, start, dtype = self.table, file.position, item.dtype
        table.fqn.append(self.fqns.setdefault(item.fqn, len(self.fqns)))
        table.item_start.append(start)
        if dtype is None:
            table.dtype.append(-1)
            table.offsets.append(None)
            table.sizes.append(None)
            self._payload(file, item)
        else:
            box = self.boxes.setdefault
            sizes = box(item.sizes, item.sizes)
            table.dtype.append(self.dtypes.setdefault(dtype, len(self.dtypes)))
            table.offsets.append(box(item.offsets, item.offsets))
            table.sizes.append(sizes)
            envelope = tensor_envelope(dtype, sizes)
            file.frame(envelope.head)
            self._payload(file, item)
            file.frame(envelope.tail)
        table.item_bytes.append(file.position - start)

    def _payload(self, file: ShardFileWriter, item: Item) -> None:
        start, length = file.position, item.payload_bytes
        views = item.views(file.part_bytes)
        if length <= file.small_bytes:
            file.small_payload(b"".join(views))
        else:
            file.payload(map(memoryview, views))
        if file.position - start != length:
            raise CheckpointError(f"{item.fqn} gave {file.position - start} bytes, not {length}.")
        self.table.payload_start.append(start)
        self.table.payload_bytes.append(length)


def write_shard(store: Store, items: Iterable[Item], job: ShardJob) -> RankManifest:
    """Write `items` to a shard file; return what is durable then.

    Without items no file is written. After any error no upload stays open. Raises `StorageError`,
    `PhaseTimeoutError`, `InvalidInputError`.
    """
    contents = _Contents()
    files = [_write_file(store, items, job, contents)] if job.item_count else []
    _warn_of(contents.unsafe, store, job)
    return RankManifest(
        save_id=job.save_id,
        rank=job.rank,
        world_size=job.world_size,
        fqns=list(contents.fqns),
        dtypes=list(contents.dtypes),
        files=files,
        unsafe=contents.unsafe,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _write_file(
    store: Store, items: Iterable[Item], job: ShardJob, contents: _Contents
) -> ShardFile:
    path = shard_path(job.save_id, job.rank, 0)
    job.deadline.expect(job.planned_bytes)
    with reporting(
        job.progress,
        phase="write",
        rank=job.rank,
        total_bytes=job.planned_bytes,
        save_id=job.save_id,
        with_bar=job.with_bar,
    ) as on_bytes:
        file = ShardFileWriter(
            store,
            path,
            options=job.options,
            planned_bytes=job.planned_bytes,
            deadline=job.deadline,
            on_bytes=on_bytes,
        )
        try:
            for item in items:
                _check_safe(item, job, contents.unsafe)
                contents.write(file, item)
                job.deadline.check(f"Writing {path}")
            return contents.table.shard_file(file, *file.finish())
        except BaseException as error:
            try:
                file.abort()
            except StorageError as failure:
                error.add_note(f"Discarding the upload failed too: {failure}")
            raise


def _check_safe(item: Item, job: ShardJob, unsafe: dict[str, str]) -> None:
    if item.unsafe is None:
        return
    unsafe[item.fqn] = item.unsafe
    if job.unsafe_values == "refuse":
        raise InvalidInputError(
            f"{item.fqn} is a value ({item.unsafe}) that only pickle can hold; load refuses it.",
            phase="write",
            next_step="Save plain values in its place, or save with unsafe_values='warn'.",
        )


def _warn_of(unsafe: dict[str, str], store: Store, job: ShardJob) -> None:
    if unsafe:
        named = [f"{fqn} ({name})" for fqn, name in unsafe.items()]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        log.warning(
            "save %s to %s: load will refuse values that only pickle can hold: %s%s. Save plain "
            "values in their place, or load with unsafe_pickle=True.",
            job.save_id,
            store.url,
            ", ".join(named[:_MOST_NAMED]),
            more,
        )
