"""Reads the bytes of output files from their source, verified, part by part.

Elements are placed by a few strided copies for each read, never row by row. torch is imported only
to cast, and for items that only torch can read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.boxes import Box, box_selection, interval_boxes, run_of
from ckpt_storage.format.crc import combine_blocks, combine_many, crc32c_of
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.reading import WORDS, ArrayRead
from ckpt_storage.source.model import Key, Source, explained
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, bytes_read
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.read_costs import costs_for

from .plan import ELEMENTS_BYTES, Elements, Fixed, OutFile, Segment, Stored

Bits = NDArray[Any]
"""Elements of a dtype as words of its size."""


_OPAQUE_COPIES = 3
"""As read, as torch loads it, and rearranged."""


class Piece(NamedTuple):
    """Elements `part` of one `chunk` of the source, all counted as in the tensor.

    They belong into a `box` whose elements are contiguous, from byte `start` of the output file on.
    """

    segment: Elements | Stored
    chunk: Box
    box: Box
    part: Box
    start: int

    @property
    def key(self) -> Key:
        """The chunk, as its source knows it."""
        return self.segment.fqn, self.chunk.offsets if isinstance(self.segment, Elements) else None


class SegmentReader:
    """Reads the content of output files, in reads of `part_bytes` or a block; thread-safe."""

    def __init__(self, files: Sequence[OutFile], source: Source, ranges: RangeReader) -> None:
        self._files, self._source, self._ranges = files, source, ranges
        self._options, self._chunks = ranges.options, ChunkReader(ranges)
        self._lock = threading.Lock()
        self._loaded: tuple[ChunkPlace, Bits] | None = None

    def pieces(self, file: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of bytes [start, stop) of the file at a position, lazily.

        Pieces and fixed bytes cover the interval exactly. No end may be within an element.
        """
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Fixed):
                continue
            wanted, size, at = segment.box, DTYPES[segment.dtype].item_bytes, first
            info = self._source.tensors[segment.fqn] if isinstance(segment, Elements) else None
            begin, end = (first - origin) // size, (last - origin) // size
            for inner in interval_boxes(wanted.sizes, begin, end):
                box = Box(tuple(map(add, inner.offsets, wanted.offsets)), inner.sizes)
                chunks = [info.boxes[n] for n in info.overlapping(box)] if info else [wanted]
                for chunk in chunks:
                    part = chunk.intersect(box)
                    if part is not None:
                        yield Piece(segment, chunk, box, part, at)
                at += box.volume * size

    def stored_range(self, file: int, start: int, stop: int) -> tuple[ChunkPlace, int] | None:
        """Return the place that has an interval contiguously, and its first byte there; or None."""
        first: Piece | None = None
        begin, source_at, dest_at = 0, 0, start
        for piece in self.pieces(file, start, stop):
            segment = piece.segment
            size = DTYPES[segment.dtype].item_bytes
            source, dest = (
                run_of(whole.sizes, box_selection(piece.part.relative_to(whole)), size)
                for whole in (piece.chunk, piece.box)
            )
            if source is None or dest is None or piece.start + dest.start != dest_at:
                return None
            if first is None:
                first, begin, source_at = piece, source.start, source.start
            is_next = piece.key == first.key and source.start == source_at
            if not is_next or segment.dtype != segment.source_dtype:
                return None
            source_at, dest_at = source.stop, dest_at + len(source)
        if first is None or dest_at != stop:
            return None
        place, size = self.place_of(first), DTYPES[first.segment.dtype].item_bytes
        is_raw = place.kind == "raw" and place.size_bytes == first.chunk.volume * size
        return (place, begin) if is_raw else None

    def prepare(self, file: int, start: int, stop: int) -> int:
        """Fetch the places of an interval; return the length of the longest read."""
        keys = {piece.key for piece in self.pieces(file, start, stop) if piece.segment.fqn}
        places = self._source.places(list(keys))
        # torch reads items of other kinds whole, in `_loaded_of`.
        whole = [place.size_bytes for place in places if place.kind != "raw"]
        whole_bytes = _OPAQUE_COPIES * max(whole, default=0)
        largest = max((place.block_bytes for place in places), default=1)
        window_bytes = costs_for(self._ranges.store).window_bytes
        # An element that does not divide the block is read whole.
        return max(min(self._options.part_bytes, window_bytes), largest) + largest + whole_bytes

    def place_of(self, piece: Piece) -> ChunkPlace:
        """Return where the chunk of a piece lies."""
        segment = piece.segment
        if isinstance(segment, Stored) and segment.path:
            return place_of_file(segment.path, segment.size_bytes)
        return self._source.places([piece.key])[0]

    def fill(self, file: int, start: int, stop: int, window: memoryview) -> int:
        """Put bytes [start, stop) of a file into `window`; return the bytes read."""
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Fixed):
                window[first - start : last - start] = segment.data[first - origin : last - origin]
        reads = []
        for piece in self.pieces(file, start, stop):
            segment, chunk, place = piece.segment, piece.chunk, self.place_of(piece)
            kind = WORDS[DTYPES[segment.dtype].item_bytes]
            box: Bits = np.ndarray(piece.box.sizes, kind, window, piece.start - start)
            inner, is_whole = piece.part.relative_to(chunk), piece.part == chunk
            is_cast = segment.dtype != segment.source_dtype
            read = (partial(_CastRead, segment=segment) if is_cast else ArrayRead)(
                place=place,
                item_bytes=DTYPES[segment.source_dtype].item_bytes,
                chunk_sizes=chunk.sizes,
                where=None if is_whole else box_selection(inner),
                array=box[_index(piece.part.relative_to(piece.box))],
            )
            if place.kind == "raw":
                reads.append(read)
            else:
                whole = self._loaded_of(piece, place)
                read.fill(read.array, whole[_index(inner)])
        return self._read(reads)

    def checksum(self, place: ChunkPlace, start: int, stop: int) -> tuple[int, int]:
        """Read and check bytes [start, stop) of a payload; return CRC-32C and bytes read."""
        crc, read_bytes, step = 0, 0, self._options.part_bytes
        buffer = memoryview(bytearray(min(step, stop - start)))
        for at in range(start, stop, step):
            window = buffer[: stop - at]
            read_bytes += self._read([bytes_read(place, window, at)])
            crc = crc32c_of(window, crc)
        return crc, read_bytes

    def known_checksum(self, place: ChunkPlace, start: int, stop: int) -> tuple[int, int] | None:
        """Return the CRC-32C of bytes [start, stop) of a payload, and the bytes read for it.

        Only ends that are no whole blocks are read. None where the checkpoint has no checksums.
        """
        block = place.block_bytes
        first, last = -(-start // block) * block, stop // block * block
        last = stop if stop == place.size_bytes else last
        if place.crcs is None or last <= first:
            return None
        whole = combine_blocks(place.crcs[first // block : -(-last // block)], block, last - first)
        head, tail = self.checksum(place, start, first), self.checksum(place, last, stop)
        lengths = (first - start, last - first, stop - last)
        return combine_many((head[0], whole, tail[0]), lengths), head[1] + tail[1]

    def _read(self, reads: Sequence[ChunkRead]) -> int:
        planned = self._chunks.plan(reads)
        try:
            self._ranges.run(planned)
        except (StorageError, IntegrityError) as error:
            raise explained(error, [read.place for read in reads], self._source) from error
        return sum(read.stop - read.start for read in planned)

    def _segments(
        self, file: int, start: int, stop: int
    ) -> Iterator[tuple[Segment, int, int, int]]:
        """Yield the segments of an interval: where each begins, and its first and last byte."""
        segments, starts = self._files[file].segments, self._files[file].starts
        for at in range(max(bisect_right(starts, start) - 1, 0), len(segments)):
            segment, origin = segments[at], starts[at]
            first, last = max(start, origin), min(stop, origin + segment.size_bytes)
            if origin >= stop:
                return
            if first < last:
                yield segment, origin, first, last

    def _loaded_of(self, piece: Piece, place: ChunkPlace) -> Bits:
        """Return the elements of an item that is not stored plainly: torch reads it whole."""
        from ckpt_storage.inspect.torchload import load_whole, words_of  # noqa: PLC0415  # torch

        with self._lock:
            if self._loaded is None or self._loaded[0] != place:
                needed, limit = _OPAQUE_COPIES * place.size_bytes, self._options.memory_limit_bytes
                if needed > limit:
                    raise InvalidInputError(
                        f"{place.fqn} in {place.path} is stored with strides; rearranging it takes "
                        f"{needed} bytes of memory, and memory_limit_bytes is {limit}.",
                        next_step=f"Raise memory_limit_bytes to {needed} or more.",
                    )
                buffer = bytearray(place.size_bytes)
                self._read([bytes_read(place, memoryview(buffer))])
                kind = WORDS[DTYPES[piece.segment.source_dtype].item_bytes]
                self._loaded = place, words_of(load_whole(buffer, place), kind)
            return self._loaded[1].reshape(piece.chunk.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CastRead(ArrayRead):
    segment: Elements | Stored

    @property
    def memory(self) -> None:
        """None: no element is written as it is stored."""

    def fill(self, out: Bits, stored: Bits) -> None:
        """Cast elements, as torch does it."""
        import torch  # noqa: PLC0415  # only to cast

        source = torch.from_numpy(stored).view(getattr(torch, self.segment.source_dtype))
        torch.from_numpy(out).view(getattr(torch, self.segment.dtype)).copy_(source)


def values_reader(
    ranges: RangeReader, source: Source, segments: Sequence[Elements | Stored]
) -> Callable[[str], Iterator[memoryview]]:
    """Return a function that yields an FQN's bytes, read in windows; FQNs must come in order."""
    # Each begins where an element of any dtype may, so that no window cuts an element.
    gaps = [Fixed(b"\0" * (-part.size_bytes % ELEMENTS_BYTES)) for part in segments]
    parts = [part for pair in zip(segments, gaps, strict=True) for part in pair]
    file = OutFile(name="", segments=parts)
    starts = {part.fqn: at for at, part in zip(file.starts[::2], segments, strict=False)}
    sizes = {part.fqn: part.size_bytes for part in segments}
    reader = SegmentReader([file], source, ranges)
    step = ranges.options.part_bytes - ranges.options.part_bytes % ELEMENTS_BYTES

    @lru_cache(maxsize=1)
    def window_at(begin: int) -> memoryview:
        window = memoryview(bytearray(min(step, file.size_bytes - begin)))
        reader.prepare(0, begin, begin + len(window))
        reader.fill(0, begin, begin + len(window), window)
        return window

    def read(fqn: str) -> Iterator[memoryview]:
        at = starts[fqn]
        end = at + sizes[fqn]
        while at < end:
            view = window_at(at - at % step)[at % step :][: end - at]
            at += len(view)
            yield view

    return read


def place_of_file(path: str, size_bytes: int) -> ChunkPlace:
    """Return the place of a whole stored file."""
    return ChunkPlace(path=path, fqn="", start=0, size_bytes=size_bytes, file_bytes=size_bytes)


def _index(box: Box) -> tuple[Any, ...]:
    """Return the index of the view of a box, also for arrays without dimensions."""
    return (..., *map(slice, box.offsets, box.stops))
