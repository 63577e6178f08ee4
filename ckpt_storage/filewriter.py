"""One shard file out: cut into parts, checksummed block by block, sent within bounds.

Knows stores and checksums; knows no tensor and no process group. Called by `shards`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from . import integrity
from .deadline import Deadline
from .errors import CheckpointError, InvalidInputError
from .manifest import ItemTable, ShardFile
from .options import TransferOptions
from .store.base import Capabilities, Store, Upload
from .workers import Workers, bounded

_MAX_UPLOAD_PARTS = 9_000
"""Below S3's 10,000, so that a plan whose sizes were estimated still fits."""


def part_bytes_for(capabilities: Capabilities, options: TransferOptions, planned_bytes: int) -> int:
    """Return the part size for a file of about `planned_bytes`, legal for the store.

    Raises `InvalidInputError` if the memory limit does not allow it.
    """
    size = max(options.part_bytes, capabilities.min_part_bytes)
    limit = options.memory_limit_bytes
    if capabilities.max_part_count is not None:
        size = max(size, -(-planned_bytes // min(_MAX_UPLOAD_PARTS, capabilities.max_part_count)))
    multiple = capabilities.part_multiple_bytes
    size = -(-size // multiple) * multiple
    # A store may join the views of a part, so a part counts twice.
    if capabilities.is_remote and 2 * size > limit:
        raise InvalidInputError(
            f"A file of {planned_bytes} bytes needs parts of {size} bytes on this storage, two of "
            f"them in memory; memory_limit_bytes is {limit}.",
            next_step=f"Raise memory_limit_bytes to {2 * size} or more.",
        )
    return size


class ShardFileWriter:
    """Writes one shard file from front to back, in parts, and records its checksums.

    The calling thread cuts parts and computes CRCs while `thread_count` others send earlier
    parts. Buffers are sent from where they lie and must not change before `finish` returns. At
    most `memory_limit_bytes` of them are in flight.
    """

    def __init__(  # one call site, all named
        self,
        store: Store,
        path: str,
        *,
        options: TransferOptions,
        planned_bytes: int,
        deadline: Deadline,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        capabilities = store.capabilities
        self.path = path
        self.position = 0
        self._store = bounded(store, deadline)
        self._options = options
        self._deadline = deadline
        self._on_bytes = on_bytes
        self.part_bytes = part_bytes_for(capabilities, options, planned_bytes)
        self._workers = self._start_workers(capabilities)
        self._upload: Upload | None = None
        self._part: list[memoryview] = []
        self._part_size = 0
        self._part_count = 0
        self._sent_bytes = 0
        self._frame_crc = 0
        self._frame_bytes = 0
        self._crcs: list[int] = []
        self._lengths: list[int] = []
        self.frame_crcs: array[int] = array("I")
        self.chunk_crcs: array[int] = array("I")
        self.block_crcs: array[int] = array("I")

    def _start_workers(self, capabilities: Capabilities) -> Workers | None:
        """Return the threads that send; None where the calling thread does it as well itself.

        One local file takes one write at a time, and bytes that were just hashed are still in
        the cache: a second thread would only contend for them.
        """
        options = self._options
        if options.thread_count == 1 and not capabilities.is_remote:
            return None
        count = options.thread_count if capabilities.parallel_parts else 1
        # A store may join the views of a part, so a part counts twice against the limit.
        in_flight = max(1, options.memory_limit_bytes // (2 * self.part_bytes))
        return Workers(
            min(count, in_flight),
            name=f"write {self.path}",
            deadline=self._deadline,
            limit=max(1, min(count + 1, in_flight)),
        )

    def frame(self, data: bytes) -> None:
        """Append bytes that belong to no payload."""
        if data:
            self._frame_crc = integrity.crc32c_of(data, self._frame_crc)
            self._frame_bytes += len(data)
            self._append(memoryview(data))

    def payload(self, views: Iterable[memoryview]) -> int:
        """Append one payload given as consecutive byte views; return its length in bytes."""
        self._end_frame()
        start = self.position
        hasher = integrity.BlockHasher(self._options.block_bytes)
        for view in views:
            # Hash and queue in bounded steps, so that sending starts before a huge view is hashed.
            for at in range(0, len(view), self.part_bytes):
                piece = view[at : at + self.part_bytes]
                hasher.update(piece)
                self._append(piece)
        blocks = hasher.finish()
        length = self.position - start
        crc = integrity.combine_blocks(blocks, self._options.block_bytes, length)
        self.block_crcs.extend(blocks)
        self.chunk_crcs.append(crc)
        self._crcs.append(crc)
        self._lengths.append(length)
        return length

    def _end_frame(self) -> None:
        self.frame_crcs.append(self._frame_crc)
        self._crcs.append(self._frame_crc)
        self._lengths.append(self._frame_bytes)
        self._frame_crc = 0
        self._frame_bytes = 0

    def _append(self, view: memoryview) -> None:
        while len(view):
            if self._part_size == self.part_bytes:
                self._send(last=False)
            room = self.part_bytes - self._part_size
            piece, view = view[:room], view[room:]
            self._part.append(piece)
            self._part_size += len(piece)
            self.position += len(piece)

    def _send(self, *, last: bool) -> None:
        if self._upload is None:
            self._upload = self._store.start_upload(self.path, part_bytes=self.part_bytes)
        upload, number, offset = self._upload, self._part_count, self._sent_bytes
        views, size = self._part, self._part_size
        self._part, self._part_size = [], 0
        self._part_count += 1
        self._sent_bytes += size

        def send() -> None:
            upload.write_part(number, offset, views, last=last)
            views.clear()
            self._deadline.advanced(size)
            self._on_bytes(size)

        if self._workers is None:
            self._deadline.check(f"Writing {self.path}")
            send()
        else:
            self._workers.submit(send)

    def finish(self) -> tuple[int, int]:
        """Make the file visible and durable; return its length in bytes and its CRC-32C.

        Raises what the store raised; then nothing is visible and nothing is left behind.
        """
        self._end_frame()
        self._send(last=True)
        if self._workers is not None:
            self._workers.drain()
        upload = self._upload
        if upload is None:  # pragma: no cover  # _send made it
            raise CheckpointError(f"{self.path} has no upload.")
        upload.complete(self.position)
        self._deadline.ended_file()
        self._stop()
        return self.position, integrity.combine_many(self._crcs, self._lengths)

    def abort(self) -> None:
        """Discard everything; idempotent; never raises in place of the error being handled."""
        self._stop()
        if self._upload is not None:
            self._upload.abort()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)


class ShardTable:
    """Collects the items of a shard file as columns while the file is written."""

    def __init__(self) -> None:
        self.fqn: list[int] = []
        self.dtype: list[int] = []
        self.offsets: list[tuple[int, ...] | None] = []
        self.sizes: list[tuple[int, ...] | None] = []
        self.item_start: list[int] = []
        self.item_bytes: list[int] = []
        self.payload_start: list[int] = []
        self.payload_bytes: list[int] = []

    def shard_file(self, file: ShardFileWriter, size_bytes: int, crc32c: int) -> ShardFile:
        """Return the record of the finished `file`."""
        return ShardFile(
            path=file.path,
            size_bytes=size_bytes,
            crc32c=crc32c,
            block_bytes=file._options.block_bytes,  # noqa: SLF001  # same module
            items=ItemTable(
                fqn=self.fqn,
                dtype=self.dtype,
                offsets=self.offsets,
                sizes=self.sizes,
                item_start=self.item_start,
                item_bytes=self.item_bytes,
                payload_start=self.payload_start,
                payload_bytes=self.payload_bytes,
                chunk_crcs=file.chunk_crcs,
                block_crcs=file.block_crcs,
                frame_crcs=file.frame_crcs,
            ),
        )
