"""Parts of output files put together in memory out of verified ranges of the source.

Every block of the source is checked as it arrives; elements are placed by a handful of strided
copies for each read, never row by row. torch is imported only to cast, and for what it alone reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.boxes import Box, box_selection
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.inspect.reading import WORDS, ArrayRead
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import Explains, Key, TensorInfo, explained
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, bytes_read
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeReader

from .layout import Elements, OutFile, Stored
from .pieces import Piece, PieceFinder

Bits = NDArray[Any]
"""Elements of a dtype as words of its size."""


class Readable(Explains, Protocol):
    """What is read from: every `source.Source`, a file of `torch.save`, the files of a copy."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by FQN."""

    def places(self, keys: Sequence[Key]) -> Sequence[ChunkPlace]:
        """Return where chunks lie; fetches what tells it, in one go."""

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store and deadline of the step that begins."""


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
        self._chunks = ChunkReader(self._ranges)
        self._lock = threading.Lock()
        self._loaded: tuple[ChunkPlace, Bits] | None = None

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
        return self._source.places([piece.key])[0]

    def fill(self, file: int, start: int, stop: int, window: memoryview) -> int:
        """Put bytes [start, stop) of a file into `window`; return the bytes read.

        Errors name the tensor and the rank that wrote it.
        """
        for at, data in self.finder.fixed_of(file, start, stop):
            window[at - start : at - start + len(data)] = data
        reads = []
        for piece in self.finder.pieces_of(file, start, stop):
            read = _read_of(piece, self.place_of(piece), window, start)
            if read.place.kind == "raw":
                reads.append(read)
            else:
                read.fill(read.array, self._loaded_of(piece, read.place)[_index(piece.region)])
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

    def _loaded_of(self, piece: Piece, place: ChunkPlace) -> Bits:
        """Return the elements of an item that is no plain one: torch reads it whole."""
        from ckpt_storage.inspect.torchload import load_whole, words_of  # noqa: PLC0415  # torch

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
                word = WORDS[piece.segment.source_item_bytes]
                self._loaded = place, words_of(load_whole(buffer, place), word)
            return self._loaded[1].reshape(piece.chunk_sizes)

    def explained(
        self, error: StorageError | IntegrityError, places: Sequence[ChunkPlace]
    ) -> Exception:
        """Return `error` with the tensor that its file holds and the rank that wrote it."""
        return explained(error, places, self._source, phase=self._ranges.deadline.phase)


def _read_of(piece: Piece, place: ChunkPlace, window: memoryview, start: int) -> ArrayRead:
    """Return the read of a piece into a window that begins at byte `start` of its file."""
    segment, at = piece.segment, piece.dest_start - start
    whole: Bits = np.ndarray(piece.dest_sizes, WORDS[segment.item_bytes], window, at)
    kind: Callable[..., ArrayRead] = ArrayRead
    if isinstance(segment, Elements) and segment.dtype != segment.source_dtype:
        kind = partial(_CastRead, segment=segment)
    return kind(
        place=place,
        item_bytes=segment.source_item_bytes,
        chunk_sizes=piece.chunk_sizes,
        where=box_selection(piece.region),
        array=whole[_index(Box(piece.dest_offsets, piece.region.sizes))],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CastRead(ArrayRead):
    """A read of elements that are cast on their way."""

    segment: Elements

    @property
    def memory(self) -> None:
        """None: nothing goes there as it is stored."""

    def fill(self, out: Bits, found: Bits) -> None:
        """Cast elements, as torch does it."""
        import torch  # noqa: PLC0415  # only to cast

        source = torch.from_numpy(found).view(getattr(torch, self.segment.source_dtype))
        torch.from_numpy(out).view(getattr(torch, self.segment.dtype)).copy_(source)


def _index(box: Box) -> tuple[Any, ...]:
    """Return what gives a view of a box, of an array without dimensions too."""
    return (..., *map(slice, box.offsets, box.stops))
