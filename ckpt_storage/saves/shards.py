"""One rank's part of a save: the items of its plan, written as a shard file, with their table."""

from __future__ import annotations

import io
import logging
import os
import socket
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt_storage.commit.shardfile import ShardFileWriter, ShardTable
from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.names import shard_path
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.inspect.torchload import name_in, refusal_of
from ckpt_storage.loads.hostbytes import HostCopies, check_plain, dtype_name, host_bytes
from ckpt_storage.loads.resolving import data_resolver, gives_own_tensors, plain_names
from ckpt_storage.options import Progress, TransferOptions, UnsafeValues
from ckpt_storage.progress import reporting
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .tiedmemory import WrittenMemory

log = logging.getLogger("ckpt_storage")

_MOST_NAMED = 8

_ZEROS = tuple(bytes(length) for length in range(PAYLOAD_ALIGN_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What a rank needs to know to write its shards."""

    save_id: str
    rank: int
    world_size: int
    options: TransferOptions
    unsafe_values: UnsafeValues
    deadline: Deadline
    progress: Progress
    with_bar: bool


@dataclass(slots=True)
class _Vocabulary:
    """Strings that columns refer to by position, in order of first use.

    And boxes: equal ones are one object, as many thousand that live long keep Python's garbage
    collector busy, which in a process with torch takes 0.2 s each time.
    """

    fqns: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    boxes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def box(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first of all tuples that are equal to `values`."""
        found = self.boxes.get(values)
        if found is None:
            found = tuple(values)
            self.boxes[found] = found
        return found


def _planned_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    count: int = item.tensor_data.chunk.sizes.numel()
    return count * item.tensor_data.properties.dtype.itemsize


def _chunk(item: WriteItem, data: object) -> tuple[torch.Tensor, torch.Size, torch.Size]:
    """Return the tensor the planner gave, and offsets and sizes of the chunk that it must be."""
    fqn = item.index.fqn
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        raise InvalidInputError(
            f"The planner gave {type(data).__name__} for the tensor {fqn}.",
            next_step="SavePlanner.resolve_data must return a tensor for tensor items.",
        )
    chunk = item.tensor_data.chunk
    # A planner may put lists there.
    offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
    if data.shape != sizes:
        raise InvalidInputError(
            f"{fqn} has shape {list(data.shape)}; the plan says {list(sizes)}.",
            phase="write",
            next_step="The state changed after it was planned; with plan caching, pass the same "
            "shapes or a new planner key.",
        )
    return data, offsets, sizes


def write_shards(store: Store, plan: SavePlan, planner: SavePlanner, job: ShardJob) -> RankManifest:
    """Write the items of `plan` to a shard file; return what is durable then.

    A plan without items writes no file. After any error no upload stays open. Raises
    `StorageError`, `PhaseTimeoutError`, `InvalidInputError`.
    """
    vocabulary = _Vocabulary()
    memory = WrittenMemory()
    unsafe: dict[str, str] = {}
    files = []
    if plan.items:
        files = [_write_file(store, plan, planner, job, vocabulary, memory, unsafe)]
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
    return RankManifest(
        save_id=job.save_id,
        rank=job.rank,
        world_size=job.world_size,
        fqns=list(vocabulary.fqns),
        dtypes=list(vocabulary.dtypes),
        files=files,
        ties=memory.ties(),
        unsafe=unsafe,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _write_file(
    store: Store,
    plan: SavePlan,
    planner: SavePlanner,
    job: ShardJob,
    vocabulary: _Vocabulary,
    memory: WrittenMemory,
    unsafe: dict[str, str],
) -> ShardFile:
    path = shard_path(job.save_id, job.rank, 0)
    planned_bytes = sum(_planned_bytes(item) for item in plan.items)
    job.deadline.expect(planned_bytes)
    with reporting(
        job.progress,
        phase="write",
        rank=job.rank,
        total_bytes=planned_bytes,
        save_id=job.save_id,
        with_bar=job.with_bar,
    ) as on_bytes:
        file = ShardFileWriter(
            store,
            path,
            options=job.options,
            planned_bytes=planned_bytes,
            deadline=job.deadline,
            on_bytes=on_bytes,
        )
        shard = _Shard(
            *(file, ShardTable(), vocabulary, memory, data_resolver(planner)),
            lasts=gives_own_tensors(planner),
            plain=plain_names(planner),
            unsafe=unsafe,
            refuses_unsafe=job.unsafe_values == "refuse",
        )
        try:
            for item in plan.items:
                shard.write(item)
                job.deadline.check(f"Writing {path}")
            return shard.table.shard_file(file, *file.finish())
        except BaseException as error:
            try:
                file.abort()
            except StorageError as failure:
                error.add_note(f"Discarding the upload failed too: {failure}")
            raise


@dataclass(slots=True)
class _Shard:
    """A shard file being written, and the table of what is in it."""

    file: ShardFileWriter
    table: ShardTable
    vocabulary: _Vocabulary
    memory: WrittenMemory
    resolve: Callable[[WriteItem], object]
    lasts: bool
    plain: AbstractSet[str]
    unsafe: dict[str, str]
    refuses_unsafe: bool
    copies: HostCopies = field(default_factory=HostCopies)

    def write(self, item: WriteItem) -> None:
        """Append one item."""
        fqn = item.index.fqn
        data = self._resolved(item)
        self.file.frame(_ZEROS[-self.file.position % PAYLOAD_ALIGN_BYTES])
        fqns = self.vocabulary.fqns
        self.table.fqn.append(fqns.setdefault(fqn, len(fqns)))
        self.table.item_start.append(self.file.position)
        if item.type is WriteItemType.BYTE_IO:
            self._write_blob(fqn, data)
        else:
            self._write_tensor(fqn, *_chunk(item, data))

    def _resolved(self, item: WriteItem) -> object:
        try:
            return self.resolve(item)
        except CheckpointError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"{item.index.fqn} cannot be saved: {type(error).__name__}: "
                f"{str(error).rstrip('.')}.",
                phase="write",
                next_step="Save plain data in its place, or give the object a state_dict.",
            ) from error

    def _write_blob(self, fqn: str, data: object) -> None:
        if not isinstance(data, io.BytesIO):
            raise InvalidInputError(
                f"The planner gave {type(data).__name__} for the blob {fqn}.",
                next_step="SavePlanner.resolve_data must return io.BytesIO for BYTE_IO items.",
            )
        if fqn not in self.plain and (refusal := refusal_of(data)) is not None:
            named = self.unsafe[fqn] = name_in(refusal)
            if self.refuses_unsafe:
                raise InvalidInputError(
                    f"{fqn} is a value ({named}) that only pickle can hold; load refuses it.",
                    phase="write",
                    next_step="Save plain values in its place, or save with unsafe_values='warn'.",
                ) from refusal
        table, start = self.table, self.file.position
        view = data.getbuffer()
        length = view.nbytes
        if length <= self.file.small_bytes:
            self.file.small_payload(bytes(view))
        else:
            self.file.payload([view])
        table.dtype.append(-1)
        table.offsets.append(None)
        table.sizes.append(None)
        table.item_bytes.append(length)
        table.payload_start.append(start)
        table.payload_bytes.append(length)

    def _write_tensor(
        self, fqn: str, tensor: torch.Tensor, at: torch.Size, planned: torch.Size
    ) -> None:
        offsets, sizes = self.vocabulary.box(at), self.vocabulary.box(planned)
        check_plain(tensor, fqn)
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise InvalidInputError(
                f"{fqn} has dtype {dtype}, which cannot be stored.",
                phase="write",
                next_step="Convert it before saving, or leave it out.",
            )
        self.memory.add(fqn, offsets, tensor, lasts=self.lasts)
        envelope = tensor_envelope(dtype, sizes)
        file, table, start = self.file, self.table, self.file.position
        file.frame(envelope.head)
        table.payload_start.append(file.position)
        length = envelope.payload_bytes
        if length <= file.small_bytes:
            file.small_payload(host_bytes(tensor))
        else:
            views = self.copies.views(tensor, file.part_bytes)
            file.payload(views)
        if file.position - table.payload_start[-1] != length:  # pragma: no cover  # see `_chunk`
            raise CheckpointError(f"{fqn} did not give {length} bytes.")
        file.frame(envelope.tail)
        dtypes = self.vocabulary.dtypes
        table.dtype.append(dtypes.setdefault(dtype, len(dtypes)))
        table.offsets.append(offsets)
        table.sizes.append(sizes)
        table.item_bytes.append(file.position - start)
        table.payload_bytes.append(length)
