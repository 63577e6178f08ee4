"""One shard file out: cut into parts, checksummed block by block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ckpt_storage.format.crc import BlockHasher, combine_each, combine_many, crc32c_of
from ckpt_storage.format.rank_manifest import ItemTable, ShardFile
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import PartSender, part_bytes_for

_SMALL_BYTES = 64 << 10
"""Up to here joining costs less than a buffer of its own."""

_GATHER_BYTES = 1 << 20
"""What small pieces are joined to: one buffer of a system call, well within a processor's cache."""


class _Payload(NamedTuple):
    """Where the checksums of one payload lie: its first block, its piece of the file."""

    first_block: int
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
        self.frame_crcs.append(crc32c_of(frame))
        crc = crc32c_of(data)
        if data:
            self.block_crcs.append(crc)
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
        hasher = BlockHasher(self.block_bytes)
        for view in views:
            # Hash and queue in bounded steps, so that sending starts before a huge view is hashed.
            for at in range(0, len(view), self.part_bytes):
                piece = view[at : at + self.part_bytes]
                hasher.update(piece)
                self.position += len(piece)
                self._append(piece)
        blocks = hasher.finish()
        length = self.position - start
        self._payloads.append(_Payload(len(self.block_crcs), len(self._crcs), length))
        self.block_crcs.extend(blocks)
        # Known at the end: those of many payloads together cost less.
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
        found = combine_each(blocks, self.block_bytes, sizes)
        for payload, crc in zip(self._payloads, found, strict=True):
            self._crcs[payload.piece] = crc
        self._payloads.clear()

    def _end_frame(self) -> None:
        data = b"".join(self._frame)
        self._frame.clear()
        self.frame_crcs.append(crc32c_of(data))
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
        self._crcs.append(crc32c_of(data))
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
        return self.position, combine_many(self._crcs, self._lengths)

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
                block_crcs=file.block_crcs,
                frame_crcs=file.frame_crcs,
            ),
        )
