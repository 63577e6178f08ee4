"""The shard files of one rank, written side by side, or reused from an earlier save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.names import shard_path
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers
from ckpt_storage.transfer.writing import ObjectWriter

from .base import Base, copy_file
from .items import planned_bytes
from .reuse import FilePlan, moving_in
from .shardfile import Item, ReusedShard, Shard, write_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsWriter:
    """Writes the shard files of a rank; `items` yields those of a plan."""

    store: Store
    save_id: str
    rank: int
    transfer: TransferOptions
    base: Base | None
    items: Callable[[SavePlan], Iterable[Item]]
    on_bytes: Callable[[int], None]
    deadline: Deadline

    def write(self, files: Sequence[FilePlan]) -> list[Shard]:
        """Return the files, one at least, once all are durable."""
        if len(files) == 1:
            return [self._write(SharedItems(), 1, 0, files[0])]
        shared, shards = SharedItems(), dict[int, Shard]()

        def write(index: int, file: FilePlan) -> None:
            shards[index] = self._write(shared, len(files), index, file)

        name = f"ckpt-storage write rank {self.rank}"
        with Workers(len(files), name=name, deadline=self.deadline) as workers:
            try:
                for each in enumerate(files):
                    workers.submit(partial(write, *each))
                workers.drain()
            except BaseException:
                shared.stop()
                raise
        return [shards[index] for index in range(len(files))]

    def _write(self, shared: SharedItems, file_count: int, index: int, file: FilePlan) -> Shard:
        transfer, path = self.transfer, shard_path(self.save_id, self.rank, index)
        transfer = replace(transfer, thread_count=max(1, transfer.thread_count // file_count))

        def count(byte_count: int) -> None:
            shared.check()
            self.on_bytes(byte_count)

        try:
            shard = self._reuse(path, file, transfer)
            if shard is not None:
                count(shard.size_bytes)
                return shard
            writer = ObjectWriter(
                self.store,
                path,
                options=transfer,
                planned_bytes=planned_bytes(file.plan),
                deadline=self.deadline,
                on_bytes=count,
            )
            written = write_shard(
                path,
                writer,
                shared.of(self.items(file.plan)),
                block_bytes=transfer.block_bytes,
                deadline=self.deadline,
                is_hashed=file.is_hashed,
            )
        except BaseException:
            shared.stop()
            raise
        age = None if file.age is None else 0
        return replace(written, age=age, moving=moving_in(file))

    def _reuse(self, path: str, file: FilePlan, transfer: TransferOptions) -> ReusedShard | None:
        """Return the file of the base that equals `file`, linked or copied to `path`; else None."""
        base, stored = self.base, file.stored
        if base is None or stored is None:
            return None
        is_copied = copy_file(
            base,
            stored,
            self.store,
            path,
            thread_count=transfer.thread_count,
            deadline=self.deadline,
        )
        if not is_copied:
            return None
        return ReusedShard(manifest=base.manifest, stored=stored, path=path)


class SharedItems:
    """Items that several threads resolve: one at a time, and none once a thread has failed.

    A planner need not be safe in threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Make every thread raise at its next item or part."""
        self._is_stopped = True

    def check(self) -> None:
        """Raise `CheckpointError` once `stop` was called."""
        if self._is_stopped:
            raise CheckpointError("Another shard file of this rank failed.", phase="write")

    def of(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, each resolved while no other thread resolves one."""
        iterator = iter(items)
        while True:
            with self._lock:
                self.check()
                item = next(iterator, None)
            if item is None:
                return
            yield item
