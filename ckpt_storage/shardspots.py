"""What of a shard file is checked together: its frames, and its payloads in runs of blocks.

Knows rank manifests; reads nothing. Called by `verification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .manifest import RankManifest, ShardFile
from .source import Place

__all__ = ["Shard", "Span", "fqn_at", "grouped", "spans_of", "total_bytes_of"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a file that are checked together, and what to call them."""

    place: Place
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
        frame = Place(
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
        place = Place(
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
