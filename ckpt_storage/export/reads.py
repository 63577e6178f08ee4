"""Parts of output files put together in memory out of verified ranges of the source.

Every block of the source is checked as it arrives; elements are placed by a handful of strided
copies for each read, never row by row. torch is imported only to cast, and for what it alone reads.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError, StorageError
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

from .layout import Elements, Layout, OutFile, Segment, Stored, out_file
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

    def require(self, chunks: Iterable[Key]) -> None:
        """Fetch what `place` needs for these chunks."""

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store and deadline of the step that begins."""

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return where a chunk lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What pieces are read with; a read takes at most `read_bytes`, or one block of the source.

    `pacer` is told of all reads: by it the caller decides how many parts it fills at a time.
    """

    finder: PieceFinder
    source: Readable
    store: Store
    deadline: Deadline
    read_bytes: int
    options: TransferOptions
    pacer: Pacer


class RegionReader:
    """Reads what bytes [start, stop) of one output file are made of; safe in any thread."""

    def __init__(self, reading: Reading, file: int, start: int, stop: int) -> None:
        """Fetch, in one go, what tells where the chunks lie.

        Raises `FormatError` for a chunk that is not as long as its tensor says.
        """
        self._reading = reading
        self._file = file
        pieces = list(reading.finder.pieces_of(file, start, stop))
        keys = {(p.segment.fqn, p.chunk_offsets): p for p in pieces if p.segment.fqn}
        reading.source.require(list(keys))
        self._places = {
            key: _checked(reading.source.place(*key), piece) for key, piece in keys.items()
        }
        blocks = [place.block_bytes for place in self._places.values()]
        # An element that does not divide the block is read whole.
        largest = max(blocks, default=1)
        self.scratch_bytes = max(reading.read_bytes, largest) + largest
        self._lock = threading.Lock()
        self._loaded: tuple[ChunkPlace, bytes] | None = None

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of bytes [start, stop) of the file."""
        return list(self._reading.finder.pieces_of(self._file, start, stop))

    def place_of(self, piece: Piece) -> ChunkPlace:
        """Return where the chunk of a piece lies."""
        segment = piece.segment
        if isinstance(segment, Stored) and segment.path:
            size = segment.size_bytes
            return ChunkPlace(path=segment.path, fqn="", start=0, size_bytes=size, file_bytes=size)
        return self._places[segment.fqn, piece.chunk_offsets]

    def fill(self, start: int, stop: int, window: memoryview, scratch: memoryview | None) -> int:
        """Put bytes [start, stop) of the file into `window`; return the bytes read.

        `scratch` has at least `scratch_bytes`, and is the calling thread's; without one, several
        reads are under way at a time, in buffers of their own. Raises what the store
        raises, with the tensor and the rank that wrote it, and `IntegrityError` for damage.
        """
        reading = self._reading
        for at, data in reading.finder.fixed_of(self._file, start, stop):
            window[at - start : at - start + len(data)] = data
        reads = []
        for piece in self.pieces_of(start, stop):
            place = self.place_of(piece)
            if place.kind == "raw":
                reads.append(self._read(piece, place, window, start))
            else:
                self._place_loaded(piece, place, window, start)
        return self._read_all(reads, scratch)

    def verify(self, place: ChunkPlace, start: int, stop: int, scratch: memoryview) -> int:
        """Read bytes [start, stop) of a payload and check them; return their CRC-32C.

        Where there are checksums, both are ends of blocks.
        """
        crc = 0
        step = len(scratch) - len(scratch) % place.block_bytes
        for at in range(start, stop, step):
            window = scratch[: min(step, stop - at)]
            self._read_all([bytes_read(place, window, at)], scratch)
            crc = crc32c_of(window, crc)
        return crc

    def _read_all(self, reads: Sequence[ChunkRead], scratch: memoryview | None) -> int:
        reading, options = self._reading, self._reading.options
        # With a scratch, parallelism is the caller's: each of its threads reads for its own part.
        options = dataclasses.replace(
            options,
            part_bytes=reading.read_bytes,
            thread_count=options.thread_count if scratch is None else 1,
        )
        ranges = RangeReader(reading.store, options, reading.deadline, pacer=reading.pacer)
        costs = costs_for(is_remote=reading.store.capabilities.is_remote)
        planned = ChunkReader(ranges, costs).plan(reads)
        if scratch is not None:
            planned = [
                one
                if one.into is not None
                else dataclasses.replace(one, into=scratch[: one.stop - one.start])
                for one in planned
            ]
        try:
            ranges.run(planned)
        except (StorageError, IntegrityError) as error:
            raise self.explained(error, [read.place for read in reads]) from error
        return sum(one.stop - one.start for one in planned)

    def _read(self, piece: Piece, place: ChunkPlace, window: memoryview, start: int) -> ChunkRead:
        memory = None
        run = piece.dest_run
        if piece.is_plain_copy and run is not None:
            memory = window[run.start - start : run.stop - start]
        return ChunkRead(
            place=place,
            item_bytes=piece.segment.source_item_bytes,
            chunk_sizes=piece.chunk_sizes,
            where=box_selection(piece.region),
            target=_Destination(piece.segment, _destination(piece, window, start), memory),
        )

    def _place_loaded(
        self, piece: Piece, place: ChunkPlace, window: memoryview, start: int
    ) -> None:
        """Place elements of an item that is no plain one: torch reads it whole."""
        with self._lock:
            if self._loaded is None or self._loaded[0] != place:
                self._loaded = place, self._load(place)
            data = self._loaded[1]
        found: Bits = np.ndarray(piece.chunk_sizes, _BITS[piece.segment.source_item_bytes], data)
        region = piece.region
        part = found[_index(region.offsets, region.sizes)]
        _put(piece.segment, part, _destination(piece, window, start))

    def _load(self, place: ChunkPlace) -> bytes:
        import torch  # noqa: PLC0415  # few need it

        from ckpt_storage.inspect.torchload import load_whole  # noqa: PLC0415  # imports torch

        needed, limit = 3 * place.size_bytes, self._reading.options.memory_limit_bytes
        if needed > limit:
            raise InvalidInputError(
                f"{place.fqn} in {place.path} is stored with strides; rearranging it takes "
                f"{needed} bytes of memory, and memory_limit_bytes is {limit}.",
                next_step=f"Raise memory_limit_bytes to {needed} or more.",
            )
        buffer = bytearray(place.size_bytes)
        self._read_all([bytes_read(place, memoryview(buffer))], None)
        flat = load_whole(buffer, place).contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

    def explained(
        self, error: StorageError | IntegrityError, places: Sequence[ChunkPlace]
    ) -> Exception:
        """Return `error` with the tensor that its file holds and the rank that wrote it."""
        reading = self._reading
        return explained(error, places, reading.source, phase=reading.deadline.phase)


class SegmentStream:
    """Reads segments one after another, in bounded windows; used by one thread."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        source: Readable,
        store: Store,
        options: TransferOptions,
        deadline: Deadline,
    ) -> None:
        file = out_file(1, "", segments)
        self._reading = Reading(
            finder=PieceFinder(Layout(files=(file,)), source.tensors),
            source=source,
            store=store,
            deadline=deadline,
            read_bytes=options.part_bytes,
            options=options,
            pacer=Pacer(options.thread_count),
        )
        self._windows = _windows(file, options.part_bytes)
        self._left = memoryview(b"")

    def take(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes; each view is the taker's to keep. Raises as a reader."""
        while count:
            if not self._left:
                start, stop = next(self._windows)
                self._left = memoryview(bytearray(stop - start))
                reader = RegionReader(self._reading, 0, start, stop)
                reader.fill(start, stop, self._left, None)
            view, self._left = self._left[:count], self._left[count:]
            count -= len(view)
            yield view


def _windows(file: OutFile, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive intervals of a file, none of which cuts an element."""
    start = 0
    for segment, begin in zip(file.segments, file.starts, strict=True):
        stop = begin + segment.size_bytes
        if stop - start <= most_bytes:
            continue
        if begin > start:
            yield start, begin
            start = begin
        item = segment.item_bytes if isinstance(segment, Elements) else 1
        step = max(item, most_bytes - most_bytes % item)
        while stop - start > most_bytes:
            yield start, start + step
            start += step
    if start < file.size_bytes:
        yield start, file.size_bytes


def _checked(place: ChunkPlace, piece: Piece) -> ChunkPlace:
    """Return `place`; raise `FormatError` if a piece cannot be cut out of it."""
    wanted = math.prod(piece.chunk_sizes) * piece.segment.source_item_bytes
    if place.kind == "raw" and place.size_bytes != wanted:
        raise FormatError(
            f"{place.fqn} in {place.path} has {place.size_bytes} bytes; the metadata says "
            f"{list(piece.chunk_sizes)} elements, {wanted} bytes.",
            path=place.path,
            rank=place.rank,
            next_step="Check that the checkpoint is complete and that its files belong together.",
        )
    return place


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return what gives a view of a box, of an array without dimensions too."""
    return (..., *(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)))


def _destination(piece: Piece, window: memoryview, start: int) -> Bits:
    out: Bits = np.ndarray(
        piece.dest_sizes, _BITS[piece.segment.item_bytes], window, piece.dest_start - start
    )
    found: Bits = out[_index(piece.dest_offsets, piece.region.sizes)]
    return found


class _Destination:
    """Where the elements of one piece belong in a window."""

    __slots__ = ("_out", "_segment", "memory")

    def __init__(self, segment: Elements | Stored, out: Bits, memory: memoryview | None) -> None:
        self._segment = segment
        self._out = out
        self.memory = memory

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy or convert elements from a window of the source."""
        item_bytes = self._segment.source_item_bytes
        for copy in copies:
            found: Bits = np.ndarray(
                copy.sizes,
                _BITS[item_bytes],
                window,
                copy.source_offset_elements * item_bytes,
                [stride * item_bytes for stride in copy.source_strides],
            )
            _put(self._segment, found, self._out[_index(copy.dest_offsets, copy.sizes)])


def _put(segment: Elements | Stored, found: Bits, out: Bits) -> None:
    if isinstance(segment, Elements) and segment.is_cast:
        import torch  # noqa: PLC0415  # only to cast

        source = torch.from_numpy(found).view(getattr(torch, segment.source_dtype))
        torch.from_numpy(out).view(getattr(torch, segment.dtype)).copy_(source)
    else:
        np.copyto(out, found)
