"""What the checksums of a rank manifest say of any byte range of a shard file.

Pure: knows the frames and blocks of `docs/format.md`, "Shard files"; reads nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ckpt_storage.errors import IntegrityError

from .crc import combine_many, crc32c_of
from .documents import FileRef
from .rank_manifest import RankManifest, ShardFile

_NEXT_STEP = "Restore the file from a copy, or use another checkpoint."


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a file that have one checksum: a frame, or a block of `fqn`."""

    start: int
    stop: int
    crc32c: int
    fqn: str | None


class Spans(Protocol):
    """The checksums of one file."""

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans that share a byte with `[start, stop)`, ascending."""

    def edge_before(self, offset: int) -> int:
        """Return the nearest edge between two spans at or before `offset` (bytes)."""

    def crc32c_of(self, start: int, stop: int) -> int:
        """Return the checksum of `[start, stop)`, both of which are edges."""

    def damage(self, span: Span) -> IntegrityError:
        """Return the error that says `span` is not what was written."""


class WholeFile:
    """A file of which only the checksum of all its bytes is known."""

    def __init__(self, file: FileRef, *, path: str) -> None:
        self._file = file
        self._path = path

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the one span there is."""
        size = self._file.size_bytes
        if start < min(stop, size):
            yield Span(start=0, stop=size, crc32c=self._file.crc32c, fqn=None)

    def edge_before(self, offset: int) -> int:
        """Return the end of the file or its start."""
        return self._file.size_bytes if offset >= self._file.size_bytes else 0

    def crc32c_of(self, start: int, stop: int) -> int:
        """Return the checksum of the whole file, or of nothing."""
        return self._file.crc32c if start < stop else 0

    def damage(self, span: Span) -> IntegrityError:
        """Return the error that says the file is not what was written."""
        return IntegrityError(
            f"{self._path} is damaged: it does not have the checksum {span.crc32c:08x} that it "
            "was written with.",
            path=self._path,
            offset=0,
            next_step=_NEXT_STEP,
        )


class ShardSpans:
    """The frames and blocks of one shard file, found by their place in it."""

    def __init__(self, document: RankManifest, file: ShardFile) -> None:
        self.path = file.path
        self.rank = document.rank
        self.size_bytes = file.size_bytes
        self._file = file
        self._fqns = document.fqns
        self._block_starts = file.block_starts()
        # Frame 0, payload 0, frame 1, ...: each begins where the one before it ends.
        self._edges = [edge for frame in file.frames() for edge in frame][:-1]

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans that share a byte with `[start, stop)`, ascending."""
        edges, items = self._edges, self._file.items
        at = max(0, bisect_right(edges, start) - 1)
        while at < len(edges) and edges[at] < stop:
            begin = edges[at]
            end = edges[at + 1] if at + 1 < len(edges) else self.size_bytes
            item = at // 2
            if at % 2:
                yield from self._blocks(item, begin, end, start, stop)
            elif begin < end and end > start:
                fqn = self._fqns[items.fqn[min(item, len(items) - 1)]] if len(items) else None
                yield Span(start=begin, stop=end, crc32c=items.frame_crcs[item], fqn=fqn)
            at += 1

    def _blocks(self, item: int, begin: int, end: int, start: int, stop: int) -> Iterator[Span]:
        file = self._file
        size, fqn = file.block_bytes, self._fqns[file.items.fqn[item]]
        crcs, first = file.items.block_crcs, self._block_starts[item]
        low = max(0, start - begin) // size
        high = -(-(min(stop, end) - begin) // size)
        for block in range(low, high):
            at = begin + block * size
            yield Span(start=at, stop=min(at + size, end), crc32c=crcs[first + block], fqn=fqn)

    def edge_before(self, offset: int) -> int:
        """Return the nearest edge between two spans at or before `offset` (bytes)."""
        if offset >= self.size_bytes:
            return self.size_bytes
        return next((span.start for span in self.within(offset, offset + 1)), 0)

    def crc32c_of(self, start: int, stop: int) -> int:
        """Return the checksum of `[start, stop)`, both of which are edges."""
        spans = list(self.within(start, stop))
        lengths = [span.stop - span.start for span in spans]
        return combine_many([span.crc32c for span in spans], lengths)

    def damage(self, span: Span) -> IntegrityError:
        """Return the error that says `span` is not what was written."""
        what = f"a block of {span.fqn}" if span.fqn else "its content"
        return IntegrityError(
            f"{self.path} (written by rank {self.rank}) is damaged: {what} at byte {span.start} "
            "does not have the checksum it was written with.",
            fqn=span.fqn,
            offset=span.start,
            path=self.path,
            rank=self.rank,
            next_step=_NEXT_STEP,
        )


class SpanCheck:
    """Holds ranges of one file, which come in any order from several threads, to its checksums.

    A span that is cut by the edge of a range is judged once all its pieces have come.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._lock = threading.Lock()
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}

    def take(self, start: int, view: memoryview) -> None:
        """Check `view`, the bytes from `start` on. Raises `IntegrityError` naming the block."""
        stop = start + len(view)
        for span in self._spans.within(start, stop):
            low, high = max(span.start, start), min(span.stop, stop)
            found = crc32c_of(view[low - start : high - start])
            if high - low < span.stop - span.start:
                whole = self._joined(span, low, high - low, found)
                if whole is None:
                    continue
                found = whole
            if found != span.crc32c:
                raise self._spans.damage(span)

    def _joined(self, span: Span, at: int, length: int, crc: int) -> int | None:
        """Note a piece of a span; return the checksum of the whole once all pieces are there."""
        with self._lock:
            pieces = self._pieces.setdefault(span.start, {})
            pieces[at] = crc, length
            if sum(size for _, size in pieces.values()) < span.stop - span.start:
                return None
            del self._pieces[span.start]
        ordered = [pieces[key] for key in sorted(pieces)]
        return combine_many([crc for crc, _ in ordered], [size for _, size in ordered])

    def check_complete(self) -> None:
        """Raise `IntegrityError` if a span came in part only: it was not judged."""
        for start in self._pieces:
            raise self._spans.damage(next(self._spans.within(start, start + 1)))
