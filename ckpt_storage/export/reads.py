"""Parts of output files put together in memory out of verified ranges of the source.

Every block of the source is checked as it arrives; elements are placed by a handful of strided
copies for each read, never row by row. torch is imported only to cast, and for what it alone reads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.selections import WindowCopy, box_selection
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import Explains, Key, TensorInfo, explained
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, bytes_read
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeReader

from .layout import Elements, OutFile, Stored
from .pieces import Piece, PieceFinder

Bits = NDArray[Any]
"""Elements of a dtype as unsigned integers of its size, or as the dtype where numpy has it."""

# numpy has no 16-byte integer; a copy of complex numbers keeps their bits.
_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Readable(Explains, Protocol):
    """What is read from: every `source.Source`, a file of `torch.save`, the files of a copy."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by FQN."""

    def places(self, keys: Sequence[Key]) -> Sequence[ChunkPlace]:
        """Return where chunks lie; fetches what tells it, in one go."""

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store and deadline of the step that begins."""

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return where a chunk lies."""


class SegmentReader:
    """Reads what output files are made of; safe in any thread.

    By `options`, each call has so many requests under way, and a read takes at most `part_bytes`,
    or one block of the source. `pacer` is told of all reads.
    """

    def __init__(
        self,
        files: Sequence[OutFile],
        *,
        source: Readable,
        store: Store,
        options: TransferOptions,
        deadline: Deadline,
        pacer: Pacer,
    ) -> None:
        self.finder = PieceFinder(files, source.tensors)
        self._source = source
        self._options = options
        self._ranges = RangeReader(store, options, deadline, pacer=pacer)
        costs = costs_for(is_remote=store.capabilities.is_remote)
        self._chunks = ChunkReader(self._ranges, costs)
        self._lock = threading.Lock()
        self._loaded: tuple[ChunkPlace, bytes] | None = None

    def prepare(self, file: int, start: int, stop: int) -> int:
        """Fetch what tells where bytes [start, stop) of a file come from, in one go.

        Return the length of the longest buffer that reading them takes.
        """
        keys = {piece.key for piece in self.finder.pieces_of(file, start, stop) if piece.key[0]}
        places = self._source.places(list(keys))
        largest = max((place.block_bytes for place in places), default=1)
        # An element that does not divide the block is read whole.
        return max(self._options.part_bytes, largest) + largest

    def place_of(self, piece: Piece) -> ChunkPlace:
        """Return where the chunk of a piece lies."""
        segment = piece.segment
        if isinstance(segment, Stored) and segment.path:
            size = segment.size_bytes
            return ChunkPlace(path=segment.path, fqn="", start=0, size_bytes=size, file_bytes=size)
        return self._source.place(*piece.key)

    def fill(self, file: int, start: int, stop: int, window: memoryview) -> int:
        """Put bytes [start, stop) of a file into `window`; return the bytes read.

        Errors name the tensor and the rank that wrote it.
        """
        for at, data in self.finder.fixed_of(file, start, stop):
            window[at - start : at - start + len(data)] = data
        reads = []
        for piece in self.finder.pieces_of(file, start, stop):
            read = _PieceRead.of(piece, self.place_of(piece), window, start)
            if read.place.kind == "raw":
                reads.append(read)
            else:
                read.put_whole(self._loaded_of(read.place))
        return self._read(reads)

    def verify(self, place: ChunkPlace, start: int, stop: int) -> int:
        """Read and check bytes [start, stop) of a payload, whole blocks; return their CRC-32C."""
        crc, block = 0, place.block_bytes
        step = max(block, self._options.part_bytes // block * block)
        buffer = memoryview(bytearray(min(step, stop - start)))
        for at in range(start, stop, step):
            window = buffer[: stop - at]
            self._read([bytes_read(place, window, at)])
            crc = crc32c_of(window, crc)
        return crc

    def _read(self, reads: Sequence[ChunkRead]) -> int:
        planned = self._chunks.plan(reads)
        try:
            self._ranges.run(planned)
        except (StorageError, IntegrityError) as error:
            raise self.explained(error, [read.place for read in reads]) from error
        return sum(one.stop - one.start for one in planned)

    def _loaded_of(self, place: ChunkPlace) -> bytes:
        """Return the elements of an item that is no plain one: torch reads it whole."""
        import torch  # noqa: PLC0415  # few need it

        from ckpt_storage.inspect.torchload import load_whole  # noqa: PLC0415  # imports torch

        with self._lock:
            if self._loaded is None or self._loaded[0] != place:
                needed, limit = 3 * place.size_bytes, self._options.memory_limit_bytes
                if needed > limit:
                    raise InvalidInputError(
                        f"{place.fqn} in {place.path} is stored with strides; rearranging it takes "
                        f"{needed} bytes of memory, and memory_limit_bytes is {limit}.",
                        next_step=f"Raise memory_limit_bytes to {needed} or more.",
                    )
                buffer = bytearray(place.size_bytes)
                self._read([bytes_read(place, memoryview(buffer))])
                flat = load_whole(buffer, place).contiguous().reshape(-1)
                data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
                self._loaded = place, data
            return self._loaded[1]

    def explained(
        self, error: StorageError | IntegrityError, places: Sequence[ChunkPlace]
    ) -> Exception:
        """Return `error` with the tensor that its file holds and the rank that wrote it."""
        return explained(error, places, self._source, phase=self._ranges.deadline.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceRead(ChunkRead):
    """A read of one piece into the part of a window where its elements belong."""

    piece: Piece
    out: Bits
    run: memoryview | None

    @classmethod
    def of(cls, piece: Piece, place: ChunkPlace, window: memoryview, start: int) -> Self:
        """Return the read for a window that begins at byte `start` of its file."""
        runs = piece.runs()
        kind = _BITS[piece.segment.item_bytes]
        out: Bits = np.ndarray(piece.dest_sizes, kind, window, piece.dest_start - start)
        return cls(
            place=place,
            item_bytes=piece.segment.source_item_bytes,
            chunk_sizes=piece.chunk_sizes,
            where=box_selection(piece.region),
            piece=piece,
            out=out[_index(piece.dest_offsets, piece.region.sizes)],
            run=None if runs is None else window[runs[1].start - start : runs[1].stop - start],
        )

    @property
    def memory(self) -> memoryview | None:
        """The bytes of the piece in the window, if they are one run of the chunk's."""
        return self.run

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy or convert elements from a window of the source."""
        size = self.piece.segment.source_item_bytes
        for copy in copies:
            strides = [stride * size for stride in copy.source_strides]
            at = copy.source_offset_elements * size
            found: Bits = np.ndarray(copy.sizes, _BITS[size], window, at, strides)
            self._put(found, self.out[_index(copy.dest_offsets, copy.sizes)])

    def put_whole(self, data: bytes) -> None:
        """Copy or convert elements out of those of the whole chunk."""
        piece, region = self.piece, self.piece.region
        kind = _BITS[piece.segment.source_item_bytes]
        found: Bits = np.ndarray(piece.chunk_sizes, kind, data)
        self._put(found[_index(region.offsets, region.sizes)], self.out)

    def _put(self, found: Bits, out: Bits) -> None:
        segment = self.piece.segment
        if isinstance(segment, Elements) and segment.dtype != segment.source_dtype:
            import torch  # noqa: PLC0415  # only to cast

            source = torch.from_numpy(found).view(getattr(torch, segment.source_dtype))
            torch.from_numpy(out).view(getattr(torch, segment.dtype)).copy_(source)
        else:
            np.copyto(out, found)


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return what gives a view of a box, of an array without dimensions too."""
    return (..., *(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)))
