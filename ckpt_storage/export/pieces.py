"""Where the bytes of output files come from, and which runs of them a storage can copy by itself.

Pure. A run is copied from block edge to block edge of its source, because only there its checksum
is known without reading; what lies between two such runs is streamed. No part but the last of a
file is shorter than the storage's least, so a short gap takes bytes from the run behind it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.boxes import Box, Grid, GridBoxes, find_grid, interval_boxes
from ckpt_storage.format.crc import combine_blocks
from ckpt_storage.format.selections import box_selection, run_of, touched_spans
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.transfer.chunks import ChunkPlace

from .layout import Elements, Fixed, Layout, Stored
from .plan import ELEMENTS_BYTES, Region

_MIN_COPY_BYTES = 1 << 20
"""Shorter runs are streamed even where the storage would copy them: a request costs as much."""

_COPY_BYTES = 256 << 20
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one chunk of the source that go to one place of an output file.

    Source: box `region`, counted from the chunk's first element, of the chunk of `segment` that
    begins at `chunk_offsets` (None: stored bytes), seen as a C-order array of `chunk_sizes`
    elements. A chunk whose elements follow one another in the tensor is seen as a 1-dimensional
    array, so that its part of an interval is one run.
    Destination: the C-order array of shape `dest_sizes` whose first byte is byte `dest_start` of
    the file; in it the box of `region.sizes` at `dest_offsets`.
    """

    segment: Elements | Stored
    chunk_offsets: tuple[int, ...] | None
    chunk_sizes: tuple[int, ...]
    region: Box
    dest_start: int
    dest_sizes: tuple[int, ...]
    dest_offsets: tuple[int, ...]

    @property
    def source_run(self) -> range | None:
        """The bytes of the chunk's payload, if they are one run; else None."""
        where = box_selection(self.region)
        return run_of(self.chunk_sizes, where, self.segment.source_item_bytes)

    @property
    def dest_run(self) -> range | None:
        """The bytes of the file, if they are one run; else None."""
        where = box_selection(Box(self.dest_offsets, self.region.sizes))
        run = run_of(self.dest_sizes, where, self.segment.item_bytes)
        return run and range(self.dest_start + run.start, self.dest_start + run.stop)

    @property
    def is_plain_copy(self) -> bool:
        """Whether one run of stored bytes goes, as it is, to one run of the file."""
        return not self.segment.is_cast and None not in (self.source_run, self.dest_run)


class PieceFinder:
    """Finds pieces, with look-up tables of the last few tensors; safe in any thread.

    `tensors` is `source.tensors`.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, TensorInfo]) -> None:
        self._layout = layout
        self._chunks = lru_cache(maxsize=64)(lambda fqn: _Chunks(tensors[fqn]))

    def fixed_of(self, file: int, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield bytes that are known before, and where in the file each begins."""
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Fixed):
                yield first, segment.data[first - origin : last - origin]

    def pieces_of(self, file: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces that make up bytes [start, stop) of file number `file` - 1, lazily.

        Together with what is fixed they are every byte of the interval once; pieces of one segment
        follow one another. Raises `InvalidInputError` if an end is within an element.
        """
        for segment, origin, first, last in self._segments(file, start, stop):
            if isinstance(segment, Stored):
                yield Piece(
                    segment=segment,
                    chunk_offsets=None,
                    chunk_sizes=(segment.size_bytes,),
                    region=Box((first - origin,), (last - first,)),
                    dest_start=first,
                    dest_sizes=(last - first,),
                    dest_offsets=(0,),
                )
            elif isinstance(segment, Elements):
                item = segment.item_bytes
                (begin, cut), (end, cut_end) = (
                    divmod(byte - origin, item) for byte in (first, last)
                )
                if cut or cut_end:
                    raise InvalidInputError(
                        f"Bytes [{start}, {stop}) of {self._layout.files[file].name} cut an "
                        f"element of {segment.name}.",
                        next_step="Ask for whole regions or parts; this is a bug.",
                    )
                yield from self._chunks(segment.fqn).pieces(segment, origin, begin, end)

    def _segments(
        self, file: int, start: int, stop: int
    ) -> Iterator[tuple[Fixed | Elements | Stored, int, int, int]]:
        one = self._layout.files[file]
        at = max(bisect_right(one.starts, start) - 1, 0)
        while at < len(one.segments) and one.starts[at] < stop:
            segment, origin = one.segments[at], one.starts[at]
            first, last = max(start, origin), min(stop, origin + segment.size_bytes)
            if first < last:
                yield segment, origin, first, last
            at += 1


class _Chunks:
    """The chunks of one tensor, by place."""

    __slots__ = ("_at", "_boxes", "_grid", "_info", "_shape", "_starts")

    def __init__(self, info: TensorInfo) -> None:
        shape = self._shape = info.shape
        self._info = info
        boxes = list(dict.fromkeys(box for box in info.boxes if not box.is_empty))
        self._at: Mapping[tuple[int, ...], Box] = {}
        if not isinstance(info.boxes, GridBoxes):
            self._at = {box.offsets: box for box in reversed(boxes)}
        self._grid: Grid | None = None
        self._starts: list[int] | None = None
        if all(run_of(shape, box_selection(box), 1) for box in boxes):
            # Whole tensors and dim-0 shards: each chunk is an interval of the tensor.
            boxes.sort(key=self._linear)
            self._starts = [self._linear(box) for box in boxes]
        else:
            self._grid = find_grid(shape, boxes)
        self._boxes = boxes

    def _linear(self, box: Box) -> int:
        """Return the position of the box's first element in the tensor's C order."""
        return touched_spans(self._shape, box_selection(box), 1).first

    def pieces(self, segment: Elements, origin: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of elements [start, stop) of a segment that begins at byte `origin`."""
        wanted = segment.box
        is_whole = wanted.sizes == self._shape
        if not is_whole and self._chunk_at(wanted.offsets) == wanted:
            yield self._piece(segment, wanted, 0, start, stop, origin)
            return
        if is_whole and self._starts is not None:
            starts = self._starts
            for at in range(bisect_right(starts, start) - 1, bisect_left(starts, stop)):
                box, first = self._boxes[at], starts[at]
                low, high = max(start, first), min(stop, first + box.volume)
                if low < high:
                    yield self._piece(segment, box, first, low, high, origin)
            return
        at = origin + start * segment.item_bytes
        for inner in interval_boxes(wanted.sizes, start, stop):
            offsets = tuple(a + b for a, b in zip(inner.offsets, wanted.offsets, strict=True))
            box = Box(offsets, inner.sizes)
            for chunk in self._meeting(box):
                part = chunk.intersect(box)
                if part is not None:
                    yield Piece(
                        segment=segment,
                        chunk_offsets=chunk.offsets,
                        chunk_sizes=chunk.sizes,
                        region=part.relative_to(chunk),
                        dest_start=at,
                        dest_sizes=box.sizes,
                        dest_offsets=part.relative_to(box).offsets,
                    )
            at += box.volume * segment.item_bytes

    def _piece(
        self, segment: Elements, chunk: Box, first: int, start: int, stop: int, origin: int
    ) -> Piece:
        """Return elements [start, stop) of a segment in which `chunk` begins at element `first`."""
        return Piece(
            segment=segment,
            chunk_offsets=chunk.offsets,
            chunk_sizes=(chunk.volume,),
            region=Box((start - first,), (stop - start,)),
            dest_start=origin + start * segment.item_bytes,
            dest_sizes=(stop - start,),
            dest_offsets=(0,),
        )

    def _chunk_at(self, offsets: tuple[int, ...]) -> Box | None:
        if isinstance(self._info.boxes, GridBoxes):
            return self._info.chunk_at(offsets)
        return self._at.get(offsets)

    def _meeting(self, box: Box) -> Iterable[Box]:
        if self._grid is None:
            return self._boxes
        return [self._boxes[self._grid.owners[cell]] for cell in self._grid.intersecting(box)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes [start, stop) of the file, which are streamed, or one place holds them as they are.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart(Run):
    """A run that is written as one part; `crc32c` is None if no document tells it."""

    number: int
    is_last: bool
    crc32c: int | None = None


def number_unit_bytes(capabilities: Capabilities, file_bytes: int) -> int:
    """Return the bytes by which part numbers count: number = start // unit.

    No part but the last of a file may be shorter, so that all members of an upload number their
    parts without asking each other, and no number is beyond the storage's last.
    """
    unit = capabilities.min_part_bytes
    if capabilities.max_part_count is not None:
        unit = max(unit, -(-file_bytes // capabilities.max_part_count))
    return unit


def copy_runs(
    pieces: Iterable[Piece], place_of: Callable[[Piece], ChunkPlace], capabilities: Capabilities
) -> list[Run]:
    """Return the runs of a region that the storage can copy, ascending."""
    if capabilities.copy_min_bytes is None:
        return []
    least = max(capabilities.copy_min_bytes, _MIN_COPY_BYTES)
    runs = []
    for piece in pieces:
        source, dest = piece.source_run, piece.dest_run
        if piece.segment.is_cast or source is None or dest is None or len(source) < least:
            continue
        place = place_of(piece)
        if place.kind != "raw":
            continue
        start, stop = source.start, source.stop
        if place.crcs is not None:
            start += -start % place.block_bytes
            stop -= 0 if stop == place.size_bytes else stop % place.block_bytes
        if start < stop:
            begin = dest.start + start - source.start
            run = Run(start=begin, stop=begin + stop - start, place=place, source_start=start)
            runs.append(run)
    return runs


def cut_region(
    region: Region, runs: Iterable[Run], capabilities: Capabilities, *, stream_bytes: int
) -> list[FilePart]:
    """Return the parts of a region of a shared upload, ascending; `runs` ascend, too."""
    unit = number_unit_bytes(capabilities, region.file_bytes)
    least = max(unit, capabilities.copy_min_bytes or 0, _MIN_COPY_BYTES)
    parts: list[FilePart] = []
    at = region.start
    for run in runs:
        edge, shift = _edge_bytes(run.place), run.start - run.source_start
        begin, end = run.start, run.stop
        if at < begin < at + unit:
            # What is streamed before it would be too short.
            begin = at + unit + (shift - at - unit) % edge
        if not region.ends_file and 0 < region.stop - end < unit:
            end = region.stop - unit
            end -= (end - shift) % edge
        if end - begin >= least:
            fitted = replace(run, start=begin, stop=end, source_start=begin - shift)
            for one in (Run(start=at, stop=begin), fitted):
                parts += cut_run(region, one, capabilities, stream_bytes=stream_bytes)
            at = end
    rest = Run(start=at, stop=region.stop)
    return parts + cut_run(region, rest, capabilities, stream_bytes=stream_bytes)


def cut_run(
    region: Region, run: Run, capabilities: Capabilities, *, stream_bytes: int
) -> list[FilePart]:
    """Return parts of about equal length for a run of a shared upload.

    Streamed ones have about `stream_bytes`: not more, unless the storage's least is more than half
    of that, and then at most twice that least.
    """
    unit = number_unit_bytes(capabilities, region.file_bytes)
    place, length = run.place, run.size_bytes
    if place is None:
        # A cut that moves down to an edge leaves both its parts long enough.
        count = max(1, min(-(-length // stream_bytes), length // (unit + ELEMENTS_BYTES)))
        first = run.start
    else:
        most = max(_COPY_BYTES, 2 * unit)
        count = -(-length // min(most, capabilities.copy_max_bytes or most))
        first = run.source_start
    shift, edge = run.start - first, _edge_bytes(place)
    cuts = [first + length * i // count for i in range(1, count)]
    edges = [first, *(cut - cut % edge for cut in cuts), first + length]
    return [
        FilePart(
            number=(begin + shift) // unit,
            start=begin + shift,
            stop=end + shift,
            is_last=end + shift == region.file_bytes,
            place=place,
            source_start=begin,
            crc32c=_crc_of(place, begin, end),
        )
        for begin, end in itertools.pairwise(edges)
        if begin < end
    ]


def _edge_bytes(place: ChunkPlace | None) -> int:
    """Return the bytes by which a run is shortened or cut."""
    return ELEMENTS_BYTES if place is None or place.crcs is None else place.block_bytes


def _crc_of(place: ChunkPlace | None, start: int, stop: int) -> int | None:
    """Return the checksum of whole blocks of a payload, from those of the blocks."""
    if place is None or place.crcs is None:
        return None
    size = place.block_bytes
    crcs: Sequence[int] = place.crcs[start // size : -(-stop // size)]
    return combine_blocks(crcs, size, stop - start)
