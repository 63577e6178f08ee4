"""A region cut into parts: some that the storage copies by itself, the rest put together by us.

Pure.

A run is copied from block edge to block edge of its source, because only there its checksum is
known without reading; what lies between two such runs is streamed. No part but the last of the
file is shorter than the storage's least, so a short gap takes bytes from the run behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckpt_storage.format.crc import combine_blocks
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.transfer.chunks import ChunkPlace

from .plan import Piece, Region

_ELEMENTS_BYTES = 64
"""Every multiple of it behind the header is an end of an element, whatever the dtype."""

_MIN_COPY_BYTES = 1 << 20
"""Shorter runs are streamed even where the storage would copy them: a request costs as much."""

_COPY_BYTES = 256 << 20
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Bytes [start, stop) of the file that are read, put together and written as one part."""

    number: int
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Bytes [start, stop) of the file that are, as they are, in `place` from `source_start` on.

    `source_start` counts from the payload's start. `crc32c` is that of the bytes, None if no
    manifest tells it.
    """

    number: int
    start: int
    stop: int
    is_last: bool
    place: ChunkPlace
    source_start: int
    crc32c: int | None

    @property
    def source_stop(self) -> int:
        """Where the bytes end in the payload."""
        return self.source_start + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRun:
    """Bytes [start, stop) of the file that one place holds from `source_start` on."""

    start: int
    stop: int
    place: ChunkPlace
    source_start: int

    def begun_at(self, start: int) -> CopyRun | None:
        """Return the run from `start`, or the next edge of a block, on; None if none is left."""
        if start <= self.start:
            return self
        source_start = self.source_start + start - self.start
        source_start += -source_start % _edge_bytes(self.place)
        begin = self.start + source_start - self.source_start
        if begin >= self.stop:
            return None
        return replace(self, start=begin, source_start=source_start)

    def ended_at(self, stop: int) -> CopyRun | None:
        """Return the run up to `stop`, or the edge of a block before; None if none is left."""
        if stop >= self.stop:
            return self
        source_stop = self.source_start + stop - self.start
        source_stop -= source_stop % _edge_bytes(self.place)
        end = self.start + source_stop - self.source_start
        return replace(self, stop=end) if end > self.start else None

    @property
    def size_bytes(self) -> int:
        """Bytes to copy."""
        return self.stop - self.start


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
) -> list[CopyRun]:
    """Return the runs of a region that the storage can copy, ascending."""
    least = capabilities.copy_min_bytes
    if least is None:
        return []
    runs = []
    for piece in pieces:
        source, dest = piece.source_run, piece.dest_run
        if not piece.is_plain_copy or source is None or dest is None:
            continue
        if source.stop - source.start < max(least, _MIN_COPY_BYTES):
            continue
        place = place_of(piece)
        start, stop = source.start, source.stop
        if place.crcs is not None:
            start += -start % place.block_bytes
            stop -= 0 if stop == place.size_bytes else stop % place.block_bytes
        if start < stop:
            begin = dest.start + start - source.start
            run = CopyRun(start=begin, stop=begin + stop - start, place=place, source_start=start)
            runs.append(run)
    return runs


def cut_region(
    region: Region, runs: Iterable[CopyRun], capabilities: Capabilities, *, stream_bytes: int
) -> list[StreamPart | CopyPart]:
    """Return the parts of a region of a shared upload, ascending.

    `runs` ascend; streamed parts have about `stream_bytes`, at least the storage's least and at
    most twice the larger of both.
    """
    unit = number_unit_bytes(capabilities, region.file_bytes)
    least_copy = max(unit, capabilities.copy_min_bytes or 0, _MIN_COPY_BYTES)
    parts: list[StreamPart | CopyPart] = []
    at = region.start
    for run in _fitted(region, runs, unit=unit, least=least_copy):
        parts += streamed(region, at, run.start, capabilities, stream_bytes=stream_bytes)
        parts += _copied(region, run, unit=unit, capabilities=capabilities)
        at = run.stop
    parts += streamed(region, at, region.stop, capabilities, stream_bytes=stream_bytes)
    return parts


def streamed(
    region: Region, start: int, stop: int, capabilities: Capabilities, *, stream_bytes: int
) -> list[StreamPart]:
    """Return parts of about equal length for bytes [start, stop) of a shared upload.

    They have at most `stream_bytes`, unless the storage's least is more than half of that.
    """
    unit = number_unit_bytes(capabilities, region.file_bytes)
    length = stop - start
    if not length:
        return []
    count = max(1, min(-(-length // stream_bytes), length // (unit + _ELEMENTS_BYTES)))
    cuts = [start + length * i // count for i in range(count + 1)]
    # A cut that moves down by less than this leaves both its parts long enough.
    edges = [start, *(cut - cut % _ELEMENTS_BYTES for cut in cuts[1:-1]), stop]
    return [
        StreamPart(number=begin // unit, start=begin, stop=end, is_last=end == region.file_bytes)
        for begin, end in itertools.pairwise(edges)
        if begin < end
    ]


def _fitted(region: Region, runs: Iterable[CopyRun], *, unit: int, least: int) -> list[CopyRun]:
    """Return those runs, shortened where need be, between which no part is too short."""
    kept: list[CopyRun] = []
    at = region.start
    for run in runs:
        fitted = run.begun_at(at + unit) if at < run.start < at + unit else run
        if fitted is not None and fitted.size_bytes >= least:
            kept.append(fitted)
            at = fitted.stop
    while kept and not region.ends_file and 0 < region.stop - kept[-1].stop < unit:
        last = kept.pop().ended_at(region.stop - unit)
        if last is not None and last.size_bytes >= least:
            kept.append(last)
    return kept


def _copied(
    region: Region, run: CopyRun, *, unit: int, capabilities: Capabilities
) -> list[CopyPart]:
    """Return parts of about equal length for a run, each with its checksum if it is known."""
    place = run.place
    block = _edge_bytes(place)
    most = max(_COPY_BYTES, 2 * unit)
    most = min(most, capabilities.copy_max_bytes or most)
    count = -(-run.size_bytes // most)
    cuts = [run.size_bytes * i // count for i in range(1, count)]
    source_stop = run.source_start + run.size_bytes
    inner = [run.source_start + cut for cut in cuts]
    edges = [run.source_start, *(cut - cut % block for cut in inner), source_stop]
    shift = run.start - run.source_start
    return [
        CopyPart(
            number=(begin + shift) // unit,
            start=begin + shift,
            stop=end + shift,
            is_last=end + shift == region.file_bytes,
            place=place,
            source_start=begin,
            crc32c=_crc_of(place, begin, end),
        )
        for begin, end in itertools.pairwise(edges)
    ]


def _edge_bytes(place: ChunkPlace) -> int:
    """Return the bytes by which a run of a payload is shortened or cut."""
    return _ELEMENTS_BYTES if place.crcs is None else place.block_bytes


def _crc_of(place: ChunkPlace, start: int, stop: int) -> int | None:
    """Return the checksum of whole blocks of a payload, from those of the blocks."""
    if place.crcs is None:
        return None
    size = place.block_bytes
    return combine_blocks(place.crcs[start // size : -(-stop // size)], size, stop - start)
