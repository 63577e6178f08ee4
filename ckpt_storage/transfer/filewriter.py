"""One shard file out: cut into parts, checksummed block by block."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format import integrity
from ckpt_storage.format.manifest import ItemTable, ShardFile
from ckpt_storage.options import DEFAULT_PART_BYTES, LOCAL_WRITE_BYTES, MIB, TransferOptions
from ckpt_storage.store.base import Capabilities, Reserving, Store, Upload
from ckpt_storage.store.deadline import Deadline

from .pacing import BUDGET, Pacer
from .workers import Workers, bounded

_FIRST_REQUESTS = 8
"""How many go out before anything is known of the storage: 128 MiB in parts of 16 MiB, which is
what 4 GB/s carry in a round trip of 30 ms."""


def copies_of(capabilities: Capabilities) -> int:
    """Return how many times a part is in memory on its way: most remote clients join its views."""
    return 2 if capabilities.is_remote and not capabilities.streams_parts else 1


class PartSender:
    """Sends the parts of one new object; ended by `complete` or `abort`.

    Where a request costs a round trip, or several local writes were asked for, threads send the
    parts. Else the caller's own thread does, while their bytes, just hashed, are still in the
    processor's cache. The memory of the process's transfers together stays below
    `memory_limit_bytes`.
    """

    def __init__(  # one call site, all named
        self,
        store: Store,
        path: str,
        *,
        part_bytes: int,
        planned_bytes: int,
        options: TransferOptions,
        deadline: Deadline,
        on_bytes: Callable[[int], None],
    ) -> None:
        capabilities = store.capabilities
        self._path = path
        self._what = f"Writing {path}"
        self._part_bytes = part_bytes
        self._planned_bytes = planned_bytes
        self._limit_bytes = options.memory_limit_bytes
        self._cost_bytes = part_bytes * copies_of(capabilities)
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._upload: Upload | None = None
        self._part_count = 0
        self._sent_bytes = 0
        self._claimed_bytes = 0
        most = options.thread_count if capabilities.parallel_parts else 1
        most = max(1, min(most, options.memory_limit_bytes // self._cost_bytes))
        self._pacer = Pacer(most, start=_FIRST_REQUESTS if capabilities.is_remote else most)
        self._store = bounded(store, deadline, throttled=self._pacer.slowed_down)
        self._is_remote = capabilities.is_remote
        self._thread_count = most
        self._workers: Workers | None = None

    def claim(self) -> None:
        """Wait until there is memory for the next part; to be called before its bytes are made."""
        if not self._claimed_bytes:
            BUDGET.acquire(self._cost_bytes, limit_bytes=self._limit_bytes, deadline=self._deadline)
            self._claimed_bytes = self._cost_bytes

    def send(self, views: list[memoryview], size_bytes: int, *, last: bool) -> None:
        """Send the next part: consecutive views, taken out of the list once nobody reads them.

        Raises what sending it, or an earlier one, raised.
        """
        upload = self._begun()
        number, offset = self._part_count, self._sent_bytes
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        self._part_count += 1
        self._sent_bytes += size_bytes

        def send() -> None:
            begin_s = time.monotonic()
            upload.write_part(number, offset, views, last=last)
            self._sent(time.monotonic() - begin_s, size_bytes)

        def end() -> None:
            views.clear()
            BUDGET.release(claimed_bytes)

        try:
            workers = self._started_workers()
        except BaseException:
            # A process may have no more threads.
            end()
            raise
        if workers is not None:
            workers.submit(send, ended=end)
            return
        try:
            self._deadline.check(self._what)
            send()
        finally:
            end()

    def _sent(self, seconds: float, size_bytes: int) -> None:
        self._pacer.succeeded(seconds, size_bytes)
        self._deadline.advanced(size_bytes)
        self._on_bytes(size_bytes)

    def _started_workers(self) -> Workers | None:
        if self._workers is None and (self._is_remote or self._thread_count > 1):
            self._workers = Workers(
                self._thread_count,
                name=f"write {self._path}",
                deadline=self._deadline,
                limit=self._pacer.limit,
            )
        return self._workers

    def complete(self, total_bytes: int) -> None:
        """Wait until all parts are on the storage, make the object visible and durable.

        Raises what failed.
        """
        upload = self._begun()
        if self._workers is not None:
            self._workers.drain()
        upload.complete(total_bytes)
        self._deadline.ended_file()
        self._stop()

    def abort(self) -> None:
        """Discard everything; idempotent. Raises `StorageError` if that fails."""
        self._stop()
        if self._upload is not None:
            self._upload.abort()

    def _begun(self) -> Upload:
        if self._upload is None:
            self._upload = self._store.start_upload(self._path, part_bytes=self._part_bytes)
            if isinstance(self._upload, Reserving):
                self._upload.reserve(self._planned_bytes)
        return self._upload

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        BUDGET.release(claimed_bytes)


_MAX_UPLOAD_PARTS = 9_000
"""Below S3's 10,000, so that a plan whose sizes were estimated still fits."""

_GROWN_PART_COUNT = 16
"""How many parts a file has at least before they are made larger: enough to send at a time."""

_SMALL_BYTES = 64 << 10
"""Up to here joining costs less than a buffer of its own."""

_GATHER_BYTES = 1 << 20
"""What small pieces are joined to: one buffer of a system call, well within a processor's cache."""


_GROWN_PART_BYTES = 32 << 20
"""What a part of a large file is where it is sent without a copy: each costs a request."""


def write_options(
    capabilities: Capabilities | None,
    *,
    thread_count: int | None,
    part_bytes: int | None,
    memory_limit_bytes: int | None,
) -> TransferOptions:
    """Return what the user chose for writing, and what suits the store where they did not.

    Without `capabilities` what suits any remote one. Raises `InvalidInputError` for what cannot be.
    """
    options = TransferOptions.for_storage(
        is_remote=capabilities is None or capabilities.is_remote,
        local_threads=1,
        local_part_bytes=LOCAL_WRITE_BYTES,
        thread_count=thread_count,
        part_bytes=part_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )
    if part_bytes is not None or capabilities is None or not capabilities.streams_parts:
        return options
    most = max(options.memory_limit_bytes // options.thread_count, options.block_bytes)
    return replace(
        options,
        part_bytes=min(DEFAULT_PART_BYTES, most),
        grown_part_bytes=min(_GROWN_PART_BYTES, most),
    )


def part_bytes_for(capabilities: Capabilities, options: TransferOptions, planned_bytes: int) -> int:
    """Return the part size for a file of about `planned_bytes`, legal for the store.

    Raises `InvalidInputError` if the storage or the memory limit does not allow it.
    """
    grown = min(options.grown_part_bytes, planned_bytes // _GROWN_PART_COUNT // MIB * MIB)
    size = max(options.part_bytes, capabilities.min_part_bytes, grown)
    limit = options.memory_limit_bytes
    if capabilities.max_part_count is not None:
        size = max(size, -(-planned_bytes // min(_MAX_UPLOAD_PARTS, capabilities.max_part_count)))
    multiple = capabilities.part_multiple_bytes
    size = -(-size // multiple) * multiple
    most = capabilities.max_part_bytes
    if most is not None and size > most:
        raise InvalidInputError(
            f"A file of {planned_bytes} bytes in parts of {size} bytes is asked for; this storage "
            f"takes parts of {most} bytes at most.",
            next_step=f"Lower part_bytes to {most} or less."
            if options.part_bytes > most
            else "Save from more ranks, so that each writes less.",
        )
    needed = copies_of(capabilities) * size
    if capabilities.is_remote and needed > limit:
        raise InvalidInputError(
            f"A file of {planned_bytes} bytes needs parts of {size} bytes on this storage, which "
            f"take {needed} bytes of memory each; memory_limit_bytes is {limit}.",
            next_step=f"Raise memory_limit_bytes to {needed} or more.",
        )
    return size


class _Payload(NamedTuple):
    """Where the checksums of one payload lie: its first block, its chunk, its piece of the file."""

    first_block: int
    chunk: int
    piece: int
    size_bytes: int


class ShardFileWriter:
    """Writes one shard file from front to back, in parts, and records its checksums.

    The calling thread cuts parts and computes CRCs; `sending` does the rest. Large payloads are
    sent from where they lie and must not change before `finish` returns. Frames and small payloads
    are gathered, so that 20,000 of them cost neither 20,000 buffers nor as many checksums to
    combine.
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
        self.path = path
        self.position = 0
        self.block_bytes = options.block_bytes
        self.small_bytes = min(options.block_bytes, _SMALL_BYTES)
        self.part_bytes = part_bytes_for(store.capabilities, options, planned_bytes)
        self._sender = PartSender(
            store,
            path,
            part_bytes=self.part_bytes,
            planned_bytes=planned_bytes,
            options=options,
            deadline=deadline,
            on_bytes=on_bytes,
        )
        self._part: list[memoryview] = []
        self._part_size = 0
        self._frame: list[bytes] = []
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        # Of what was handed on, piece by piece: a payload, or all that was gathered before one.
        self._crcs: list[int] = []
        self._lengths: list[int] = []
        self._payloads: list[_Payload] = []
        self.frame_crcs: array[int] = array("I")
        self.chunk_crcs: array[int] = array("I")
        self.block_crcs: array[int] = array("I")

    def frame(self, data: bytes) -> None:
        """Append bytes that belong to no payload."""
        self._frame.append(data)
        self.position += len(data)

    def small_payload(self, data: bytes) -> None:
        """Append one payload of at most `small_bytes`, which is at most a block."""
        # Thousands of these: as few calls as there can be.
        frame = b"".join(self._frame)
        self._frame.clear()
        self.frame_crcs.append(integrity.crc32c_of(frame))
        crc = integrity.crc32c_of(data)
        if data:
            self.block_crcs.append(crc)
        self.chunk_crcs.append(crc)
        self.position += len(data)
        self._gathered += (frame, data)
        self._gathered_bytes += len(frame) + len(data)
        if self._gathered_bytes >= _GATHER_BYTES:
            self._hand_on_gathered()

    def payload(self, views: Iterable[memoryview]) -> int:
        """Append one payload given as consecutive byte views; return its length in bytes."""
        self._end_frame()
        self._hand_on_gathered()
        start = self.position
        hasher = integrity.BlockHasher(self.block_bytes)
        for view in views:
            # Hash and queue in bounded steps, so that sending starts before a huge view is hashed.
            for at in range(0, len(view), self.part_bytes):
                piece = view[at : at + self.part_bytes]
                hasher.update(piece)
                self.position += len(piece)
                self._append(piece)
        blocks = hasher.finish()
        length = self.position - start
        self._payloads.append(
            _Payload(len(self.block_crcs), len(self.chunk_crcs), len(self._crcs), length)
        )
        self.block_crcs.extend(blocks)
        # Known at the end: those of many payloads together cost less.
        self.chunk_crcs.append(0)
        self._crcs.append(0)
        self._lengths.append(length)
        return length

    def _combine_payloads(self) -> None:
        """Put the checksums of payloads where they belong, now that all are written."""
        blocks: array[int] = array("I")
        for payload in self._payloads:
            count = -(-payload.size_bytes // self.block_bytes)
            blocks += self.block_crcs[payload.first_block : payload.first_block + count]
        sizes = [payload.size_bytes for payload in self._payloads]
        found = integrity.combine_each(blocks, self.block_bytes, sizes)
        for payload, crc in zip(self._payloads, found, strict=True):
            self.chunk_crcs[payload.chunk] = self._crcs[payload.piece] = crc
        self._payloads.clear()

    def _end_frame(self) -> None:
        data = b"".join(self._frame)
        self._frame.clear()
        self.frame_crcs.append(integrity.crc32c_of(data))
        self._gather(data)

    def _gather(self, data: bytes) -> None:
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= _GATHER_BYTES:
            self._hand_on_gathered()

    def _hand_on_gathered(self) -> None:
        if not self._gathered_bytes:
            return
        data = b"".join(self._gathered)
        self._gathered.clear()
        self._gathered_bytes = 0
        # A second pass over these bytes costs less than combining the checksums of many pieces.
        self._crcs.append(integrity.crc32c_of(data))
        self._lengths.append(len(data))
        self._append(memoryview(data))

    def _append(self, view: memoryview) -> None:
        while len(view):
            if self._part_size == self.part_bytes:
                self._send(last=False)
            room = self.part_bytes - self._part_size
            piece, view = view[:room], view[room:]
            self._sender.claim()
            self._part.append(piece)
            self._part_size += len(piece)

    def _send(self, *, last: bool) -> None:
        views, size = self._part, self._part_size
        self._part, self._part_size = [], 0
        self._sender.send(views, size, last=last)

    def finish(self) -> tuple[int, int]:
        """Make the file visible and durable; return its length in bytes and its CRC-32C.

        Raises what the store raised; then nothing is visible, and `abort` leaves nothing behind.
        """
        self._end_frame()
        self._hand_on_gathered()
        self._send(last=True)
        self._combine_payloads()
        self._sender.complete(self.position)
        return self.position, integrity.combine_many(self._crcs, self._lengths)

    def abort(self) -> None:
        """Discard everything; idempotent; never raises in place of the error being handled."""
        self._sender.abort()


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
            block_bytes=file.block_bytes,
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
