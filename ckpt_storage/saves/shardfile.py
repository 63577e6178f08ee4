"""The shard file of one rank: its items, written with their table. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import BlockHasher, crc32c_of
from ckpt_storage.format.rank_manifest import (
    COLUMNS,
    NO_HASH,
    RankManifest,
    ShardFile,
    Vocabulary,
)
from ckpt_storage.format.shard_item import PAYLOAD_ALIGN_BYTES, tensor_envelope
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.writing import ObjectWriter

from .hashes import new_hash

_SMALL_BYTES = 64 << 10
"""Up to this size joining costs less than a buffer of its own."""

_GATHER_BYTES = 1 << 20
"""Size of the buffer that small pieces are joined to, well within a processor's cache."""

_ZEROS = tuple(bytes(length) for length in range(PAYLOAD_ALIGN_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item and the source of its bytes; independent of DCP and tensors.

    `dtype` is None for a blob, which has no box. `views` yields the payload, `payload_bytes` long,
    as windows of at most about its argument in bytes; they do not change while they are referenced.
    `unsafe` names the type for which `load` refuses a blob.
    """

    fqn: str
    dtype: str | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    payload_bytes: int
    views: Callable[[int], Iterable[memoryview | bytes]]
    unsafe: str | None = None


class ShardFileWriter:
    """Writes one shard file, front to back: large payloads without a copy, the rest gathered.

    Payloads of items for which `is_hashed` returns True are hashed; without it none is.
    """

    def __init__(
        self,
        writer: ObjectWriter,
        block_bytes: int,
        is_hashed: Callable[[Item], bool] | None = None,
    ) -> None:
        self.position = 0
        self.block_bytes = block_bytes
        self.small_bytes = min(block_bytes, _SMALL_BYTES)
        self.part_bytes = writer.part_bytes
        self.hashes: list[bytes] = []
        self._writer = writer
        self._is_hashed = is_hashed
        self._frame: list[bytes] = []
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        # Numbers alone: Python's garbage collector does not follow them, of however many items.
        self.vocabulary = Vocabulary()
        self.rows: list[tuple[int, ...]] = []
        self.frame_crcs: array[int] = array("I")
        self.block_crcs: array[int] = array("I")

    def frame(self, data: bytes) -> None:
        """Append bytes between payloads."""
        self._frame.append(data)
        self.position += len(data)

    def small_payload(self, data: bytes) -> None:
        """Append one payload of at most `small_bytes`, which is at most a block."""
        # Thousands of these: as few calls as there can be.
        frame = b"".join(self._frame)
        self._frame.clear()
        self.frame_crcs.append(crc32c_of(frame))
        if data:
            self.block_crcs.append(crc32c_of(data))
        self.position += len(data)
        self._gathered += (frame, data)
        self._gathered_bytes += len(frame) + len(data)
        if self._gathered_bytes >= _GATHER_BYTES:
            self._flush_gathered()

    def payload(
        self, views: Iterable[memoryview], also: Callable[[memoryview], object] | None = None
    ) -> None:
        """Append one payload, as consecutive byte views; `also` gets each piece of it."""
        self._end_frame()
        blocks = BlockHasher(self.block_bytes, also)
        for view in views:
            self._writer.write(view, blocks)
            self.position += len(view)
        self.block_crcs.extend(blocks.finish())

    def _end_frame(self) -> None:
        data = b"".join(self._frame)
        self._frame.clear()
        self.frame_crcs.append(crc32c_of(data))
        self._gathered.append(data)
        self._flush_gathered()

    def _flush_gathered(self) -> None:
        data = b"".join(self._gathered)
        self._gathered.clear()
        self._gathered_bytes = 0
        # A second pass over these bytes costs less than combining checksums of many pieces.
        self._writer.write(memoryview(data))

    def append(self, item: Item) -> None:
        """Append one item."""
        self.frame(_ZEROS[-self.position % PAYLOAD_ALIGN_BYTES])
        start, length, box, tail = self.position, item.payload_bytes, None, b""
        if item.dtype is not None:
            box = Box(item.offsets, item.sizes)
            head, tail = tensor_envelope(item.dtype, item.sizes)
            self.frame(head)
        payload_start = self.position
        views = item.views(self.part_bytes)
        digest = None if self._is_hashed is None or not self._is_hashed(item) else new_hash()
        if length <= self.small_bytes:
            data = b"".join(views)
            self.small_payload(data)
            if digest is not None:
                digest.update(data)
        else:
            self.payload(map(memoryview, views), None if digest is None else digest.update)
        if self._is_hashed is not None:
            self.hashes.append(NO_HASH if digest is None else digest.digest())
        actual_length = self.position - payload_start
        if actual_length != length:
            raise CheckpointError(f"{item.fqn} has {actual_length} bytes, not {length}.")
        if tail:
            self.frame(tail)
        numbers = self.vocabulary.numbers(item.fqn, item.dtype, box)
        self.rows.append((*numbers, start, self.position - start, payload_start, length))

    def complete(self, path: str) -> WrittenShard:
        """Make the file, which has an item at least, visible and durable; return what it holds."""
        self._end_frame()
        self._writer.complete()
        size_bytes, crc32c = self.position, self._writer.crc32c
        return WrittenShard(file=self, path=path, size_bytes=size_bytes, crc32c=crc32c)

    def abort(self) -> None:
        """Discard everything; idempotent. Raises `StorageError` if that fails."""
        self._writer.abort()

    def abort_after(self, error: BaseException) -> None:
        """Discard everything because of `error`, which notes a failure to do so; idempotent."""
        try:
            self.abort()
        except StorageError as failure:
            error.add_note(f"Discarding the upload failed too: {failure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """A shard file that is complete; its items have the numbers of its own vocabulary.

    `age` and `moving` as for `ShardFile`.
    """

    file: ShardFileWriter
    path: str
    size_bytes: int
    crc32c: int
    age: int | None = None
    moving: Sequence[int] = ()

    def numbered(self, known: Vocabulary) -> ShardFile:
        """Return the file with its table; adds names, dtypes and boxes of the items to `known`."""
        fqns, dtypes, boxes = known.merge(self.file.vocabulary)
        fqn, dtype, box, *places = zip(*self.file.rows, strict=True)
        columns = (
            [fqns[number] for number in fqn],
            [-1 if number < 0 else dtypes[number] for number in dtype],
            [-1 if number < 0 else boxes[number] for number in box],
            *map(list, places),
        )
        return ShardFile(
            path=self.path,
            size_bytes=self.size_bytes,
            crc32c=self.crc32c,
            block_bytes=self.file.block_bytes,
            **dict(zip(COLUMNS, columns, strict=True)),
            block_crcs=self.file.block_crcs,
            frame_crcs=self.file.frame_crcs,
            hashes=b"".join(self.file.hashes),
            age=self.age,
            moving=self.moving,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedShard:
    """A file of an earlier save, of which `manifest` is the rank manifest, under another name."""

    manifest: RankManifest
    stored: ShardFile
    path: str

    @property
    def size_bytes(self) -> int:
        """The length of the file."""
        return self.stored.size_bytes

    def numbered(self, known: Vocabulary) -> ShardFile:
        """Return the file with its table; adds names, dtypes and boxes of the items to `known`."""
        file = self.manifest.renumbered(self.stored, known, self.path)
        return replace(file, age=1 + (self.stored.age or 0))


Shard = WrittenShard | ReusedShard


def write_shard(
    path: str,
    writer: ObjectWriter,
    items: Iterable[Item],
    *,
    block_bytes: int,
    deadline: Deadline,
    is_hashed: Callable[[Item], bool] | None = None,
) -> WrittenShard:
    """Write `items`, one at least, to a shard file; after any error no upload stays open."""
    file = ShardFileWriter(writer, block_bytes, is_hashed)
    try:
        for item in items:
            file.append(item)
            deadline.check(f"Writing {path}")
        return file.complete(path)
    except BaseException as error:
        file.abort_after(error)
        raise
