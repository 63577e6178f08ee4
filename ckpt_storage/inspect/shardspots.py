"""What of a shard file is checked together: its frames, and its payloads in runs of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.manifest import RankManifest, ShardFile
from ckpt_storage.transfer.chunks import ChunkPlace

_WIDEST = 1 << 20
"""Bytes of a span: few enough for ranges of one read, many enough to be cheap."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard file, and the rank manifest that describes it."""

    rank: int
    document: RankManifest
    file: ShardFile


def total_bytes_of(shards: Sequence[Shard]) -> int:
    """Return the bytes of all files together, as they were written."""
    return sum(shard.file.size_bytes for shard in shards)


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count` equal parts of the bytes of all shard files, one after another.

    Parts begin and end within files, so that one large file is no one's alone.
    """

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether what cannot be divided belongs to this part."""
        return self.number == 0

    def stretches(self, files: Iterable[tuple[str, int]]) -> dict[str, range]:
        """Return what of each file, by path, lies in this part; only those of which something does.

        `files` are paths with lengths in bytes, in an order that is the same for all parts.
        """
        given = list(files)
        total = sum(size_bytes for _, size_bytes in given)
        low = total * self.number // self.count
        high = total * (self.number + 1) // self.count
        found: dict[str, range] = {}
        begin = 0
        for path, size_bytes in given:
            stretch = range(max(low - begin, 0), min(high - begin, size_bytes))
            if stretch or (self.leads and not size_bytes):
                found[path] = stretch
            begin += size_bytes
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a file that are checked together, and what to call them."""

    place: ChunkPlace
    start: int
    stop: int
    what: str


def spans_of(shard: Shard, part_bytes: int) -> list[Span]:
    """Return frames and payloads of a file in order; large payloads in several spans of blocks.

    A span of blocks has at most `part_bytes`, or one block.
    """
    rank, document, file = shard.rank, shard.document, shard.file
    items = file.items
    starts = file.block_starts()
    spans: list[Span] = []
    for index, (start, stop) in enumerate(file.frames()):
        # A frame is the end of one item and the beginning of the next; the last has no next.
        fqn = document.fqns[items.fqn[min(index, len(items) - 1)]] if len(items) else ""
        frame = ChunkPlace(
            path=file.path,
            fqn=fqn,
            start=start,
            size_bytes=stop - start,
            rank=rank,
            block_bytes=max(1, stop - start),
            crcs=(items.frame_crcs[index],),
        )
        what = f"what surrounds the bytes of {fqn}" if fqn else "the content"
        spans.append(Span(place=frame, start=start, stop=stop, what=what))
        if index == len(items):
            break
        place = ChunkPlace(
            path=file.path,
            fqn=document.fqns[items.fqn[index]],
            start=items.payload_start[index],
            size_bytes=items.payload_bytes[index],
            rank=rank,
            block_bytes=file.block_bytes,
            crcs=items.block_crcs[starts[index] : starts[index + 1]],
        )
        step = max(1, min(_WIDEST, part_bytes) // file.block_bytes) * file.block_bytes
        end = place.start + place.size_bytes
        spans.extend(
            Span(place=place, start=at, stop=min(at + step, end), what=f"a block of {place.fqn}")
            for at in range(place.start, end, step)
        )
    return spans


def grouped(spans: Sequence[Span], part_bytes: int) -> list[list[Span]]:
    """Return runs of spans, each of at most `part_bytes`, or of one span that is larger."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.stop - groups[-1][0].start <= part_bytes:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def fqn_at(document: RankManifest, file: ShardFile, offset: int) -> str | None:
    """Return the value in whose item the byte `offset` of a file lies."""
    items = file.items
    for index in range(len(items) - 1, -1, -1):
        if items.item_start[index] <= offset:
            return document.fqns[items.fqn[index]]
    return None


class ArrivedSpans:
    """Holds consecutive spans, read in one go, to their checksums while their bytes arrive.

    `damaged` has each block that is not as it was written; one attempt to read begins it anew.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._base = spans[0].start
        self._starts = [span.start - self._base for span in spans]
        self.damaged: list[tuple[Span, IntegrityError]] = []

    def edge_before(self, count: int) -> int:
        """Return the last edge between two blocks within the first `count` bytes."""
        at = bisect_right(self._starts, count) - 1
        inside = count - self._starts[at]
        return count - inside % self._spans[at].place.block_bytes

    def check(self, view: memoryview, first: int) -> None:
        """Judge the bytes from `first` on, which begin and end between blocks."""
        if not first:
            self.damaged.clear()
        stop = first + len(view)
        at = bisect_right(self._starts, first) - 1
        while at < len(self._spans) and self._starts[at] < stop:
            span, begin = self._spans[at], self._starts[at]
            low, high = max(begin, first), min(begin + span.stop - span.start, stop)
            self._judge(span, view[low - first : high - first], self._base + low)
            at += 1

    def _judge(self, span: Span, view: memoryview, start: int) -> None:
        place, at = span.place, 0
        while at < len(view):
            try:
                place.check(view[at:], start + at - place.start)
            except IntegrityError as error:
                self.damaged.append((span, error))
                at = (error.offset or 0) - start + place.block_bytes
            else:
                break
