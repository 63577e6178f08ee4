"""Where the bytes of output files come from, and which runs of them a storage can copy by itself.

Pure. A run is copied from block edge to block edge of its source, because only there its checksum
is known without reading; what lies between two such runs is streamed. No part but the last of a
file is shorter than the storage's least, so a short gap takes bytes from the run behind it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ckpt_storage.format.boxes import Box, Grid, box_selection, find_grid, interval_boxes, run_of
from ckpt_storage.format.crc import combine_blocks
from ckpt_storage.source.model import Key, TensorInfo
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.transfer.chunks import ChunkPlace

from .layout import Elements, Fixed, OutFile, Segment, Stored, boxes_of
from .plan import ELEMENTS_BYTES, Region, number_unit_bytes

_MIN_COPY_BYTES = 1 << 20
"""Shorter runs are streamed even where the storage would copy them: a request costs as much."""

_COPY_BYTES = 256 << 20
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one chunk of the source that go to one place of an output file.

    Source: `region` of the chunk that begins at `chunk_offsets` (None: stored bytes), seen as an
    array of `chunk_sizes`; 1-dimensional where its elements follow one another in the segment.
    Destination: the array of shape `dest_sizes` that begins at byte `dest_start` of the file; in it
    the box of `region.sizes` at `dest_offsets`.
    """

    segment: Elements | Stored
    chunk_offsets: tuple[int, ...] | None
    chunk_sizes: tuple[int, ...]
    region: Box
    dest_start: int
    dest_sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]

    @property
    def key(self) -> Key:
        """The chunk, as its source knows it."""
        return self.segment.fqn, self.chunk_offsets

    def runs(self) -> tuple[range, range] | None:
        """Return its bytes in payload and file if they are one run in both and are not cast."""
        segment, size = self.segment, self.segment.item_bytes
        if isinstance(segment, Elements) and segment.dtype != segment.source_dtype:
            return None
        source = run_of(self.chunk_sizes, box_selection(self.region), size)
        where = box_selection(Box(self.dest_offsets, self.region.sizes))
        dest = run_of(self.dest_sizes, where, size)
        if source is None or dest is None:
            return None
        return source, range(self.dest_start + dest.start, self.dest_start + dest.stop)


class PieceFinder:
    """Finds the pieces of files, with look-up tables of the last few tensors; in any thread."""

    def __init__(self, files: Sequence[OutFile], tensors: Mapping[str, TensorInfo]) -> None:
        self._files = files
        self._info = lru_cache(maxsize=64)(lambda fqn: _findable(tensors[fqn]))

    def pieces_of(self, file: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield what makes up bytes [start, stop) of the file at a position, lazily.

        With what is fixed it is every byte of the interval once. No end may be within an element.
        """
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Stored):
                yield _run_piece(segment, None, segment.size_bytes, origin, first, last)
            elif isinstance(segment, Elements):
                yield from _pieces(self._info(segment.fqn), segment, origin, first, last)

    def fixed_of(self, file: int, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield bytes that are known before, and where in the file each begins."""
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Fixed):
                yield first, segment.data[first - origin : last - origin]

    def _segments(
        self, file: int, start: int, stop: int
    ) -> Iterator[tuple[Segment, int, int, int]]:
        """Yield the segments of an interval: where each begins, and its first and last byte."""
        one = self._files[file]
        for at in range(max(bisect_right(one.starts, start) - 1, 0), len(one.segments)):
            segment, origin = one.segments[at], one.starts[at]
            first, last = max(start, origin), min(stop, origin + segment.size_bytes)
            if origin >= stop:
                return
            if first < last:
                yield segment, origin, first, last


def _findable(info: TensorInfo) -> TensorInfo:
    """Return a tensor whose chunks are each one once, and found by place if they form a grid."""
    if isinstance(info.boxes, Grid):
        return info
    boxes = boxes_of(info)
    return replace(info, boxes=find_grid(info.shape, boxes) or boxes)


def _pieces(
    info: TensorInfo, segment: Elements, origin: int, first: int, last: int
) -> Iterator[Piece]:
    """Yield the pieces of bytes [first, last) of the file, of a segment that begins at `origin`."""
    wanted, size = segment.box, segment.item_bytes
    targets, at = [], first
    for inner in interval_boxes(wanted.sizes, (first - origin) // size, (last - origin) // size):
        offsets = tuple(a + b for a, b in zip(inner.offsets, wanted.offsets, strict=True))
        targets.append((at, Box(offsets, inner.sizes)))
        at += inner.volume * size
    for number in info.overlapping(_hull([box for _, box in targets])):
        chunk = info.boxes[number]
        run = None
        if chunk.intersect(wanted) == chunk:
            run = run_of(wanted.sizes, box_selection(chunk.relative_to(wanted)), size)
        if run is not None:
            low, high = max(first, origin + run.start), min(last, origin + run.stop)
            if low < high:
                begin = origin + run.start
                yield _run_piece(segment, chunk.offsets, chunk.volume, begin, low, high)
            continue
        for begin, box in targets:
            part = chunk.intersect(box)
            if part is not None:
                yield Piece(
                    segment=segment,
                    chunk_offsets=chunk.offsets,
                    chunk_sizes=chunk.sizes,
                    region=part.relative_to(chunk),
                    dest_start=begin,
                    dest_sizes=box.sizes,
                    dest_offsets=part.relative_to(box).offsets,
                )


def _run_piece(
    segment: Elements | Stored,
    offsets: tuple[int, ...] | None,
    volume: int,
    origin: int,
    first: int,
    last: int,
) -> Piece:
    """Return bytes [first, last) of the file, in which a chunk lies in a row from `origin` on."""
    count = (last - first) // segment.item_bytes
    return Piece(
        segment=segment,
        chunk_offsets=offsets,
        chunk_sizes=(volume,),
        region=Box(((first - origin) // segment.item_bytes,), (count,)),
        dest_start=first,
        dest_sizes=(count,),
        dest_offsets=(0,),
    )


def _hull(boxes: Sequence[Box]) -> Box:
    starts = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = map(max, zip(*(box.stops for box in boxes), strict=True))
    return Box(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes [start, stop) of a file, which are streamed, or which one place holds as they are.

    With `place` the storage copies them from there: from byte `source_start` of the payload on.
    """

    start: int
    stop: int
    place: ChunkPlace | None = None
    source_start: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes to write."""
        return self.stop - self.start

    @property
    def edge_bytes(self) -> int:
        """The bytes by which it may be shortened or cut, counted from where it comes from."""
        place = self.place
        return ELEMENTS_BYTES if place is None or place.crcs is None else place.block_bytes

    @property
    def crc32c(self) -> int | None:
        """The checksum of whole blocks of a payload, if those of the blocks are known."""
        place = self.place
        if place is None or place.crcs is None:
            return None
        size, stop = place.block_bytes, self.source_start + self.size_bytes
        crcs = place.crcs[self.source_start // size : -(-stop // size)]
        return combine_blocks(crcs, size, self.size_bytes)


def copy_runs(
    pieces: Iterable[Piece], place_of: Callable[[Piece], ChunkPlace], able: Capabilities
) -> Iterator[Part]:
    """Yield the runs of a region that the storage can copy."""
    for piece in pieces:
        runs = piece.runs()
        if runs is None or len(runs[0]) < max(able.copy_min_bytes or 0, _MIN_COPY_BYTES):
            continue
        place, (source, dest) = place_of(piece), runs
        payload_bytes = math.prod(piece.chunk_sizes) * piece.segment.item_bytes
        if place.kind != "raw" or place.size_bytes != payload_bytes:
            continue
        start, stop, shift = source.start, source.stop, dest.start - source.start
        if place.crcs is not None:
            start += -start % place.block_bytes
            stop -= 0 if stop == place.size_bytes else stop % place.block_bytes
        if start < stop:
            yield Part(start=start + shift, stop=stop + shift, place=place, source_start=start)


def cut_region(
    region: Region, runs: Iterable[Part], able: Capabilities, *, stream_bytes: int
) -> list[Part]:
    """Return the parts of a region, ascending; `runs` may be copied."""
    unit = number_unit_bytes(able, region.file_bytes)
    least = max(unit, able.copy_min_bytes or 0, _MIN_COPY_BYTES)
    stretches: list[Part] = []
    at = region.start
    for run in sorted(runs, key=lambda run: run.start):
        edge, shift = run.edge_bytes, run.start - run.source_start
        begin, end = run.start, run.stop
        if at < begin < at + unit:
            # What is streamed before it would be too short.
            begin = at + unit + (shift - at - unit) % edge
        if region.stop < region.file_bytes and 0 < region.stop - end < unit:
            end = region.stop - unit
            end -= (end - shift) % edge
        if end - begin >= least:
            fitted = replace(run, start=begin, stop=end, source_start=begin - shift)
            stretches += [Part(start=at, stop=begin), fitted]
            at = end
    stretches.append(Part(start=at, stop=region.stop))
    return [part for one in stretches for part in cut(one, able, unit, stream_bytes)]


def cut(run: Part, able: Capabilities, unit: int, stream_bytes: int) -> list[Part]:
    """Return parts of about equal length, none shorter than `unit` unless the run is.

    Streamed ones have at most `stream_bytes`, or twice the storage's least where that is more.
    """
    length, first, edge = run.size_bytes, run.source_start, run.edge_bytes
    if run.place is None:
        first, edge = run.start, math.lcm(edge, able.part_multiple_bytes)
        # A cut that moves down to an edge leaves both its parts long enough.
        count = max(1, min(-(-length // stream_bytes), length // (unit + edge)))
    else:
        most = max(_COPY_BYTES, 2 * unit)
        count = -(-length // min(most, able.copy_max_bytes or most))
    shift = run.start - first
    cuts = [first + length * i // count for i in range(1, count)]
    edges = [first, *(at - at % edge for at in cuts), first + length]
    return [
        replace(run, start=begin + shift, stop=end + shift, source_start=begin)
        for begin, end in itertools.pairwise(edges)
        if begin < end
    ]
