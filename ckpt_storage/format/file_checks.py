"""What the checksums of a checkpoint say of any byte range of one file (`docs/format.md`)."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_storage.errors import IntegrityError

from .rank_manifest import RankManifest, ShardFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a file that have one checksum: a frame, or a block of `fqn`."""

    start: int
    stop: int
    crc32c: int
    fqn: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecks:
    """The checksums of one file: of spans that begin at `starts`, each up to the next or the end.

    `fqns[i]` is the value that span i belongs to, None in a file without values.
    """

    path: str
    size_bytes: int
    rank: int | None = None
    starts: Sequence[int]
    crcs: Sequence[int]
    fqns: Sequence[str | None]

    @classmethod
    def of_shard(cls, document: RankManifest, file: ShardFile) -> FileChecks:
        """Return the checksums of the frames and blocks of a shard file."""
        payloads, lengths = np.array([file.payload_start, file.payload_bytes], dtype=np.int64)
        counts = -(-lengths // file.block_bytes)
        firsts = np.cumsum(counts) - counts
        in_item = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        blocks = np.repeat(payloads, counts) + file.block_bytes * in_item
        frames = np.concatenate(([0], payloads + lengths))
        solid = frames < np.concatenate((payloads, [file.size_bytes]))
        starts = np.concatenate((frames[solid], blocks))
        crcs = np.array([*file.frame_crcs, *file.block_crcs], dtype=np.uint32)
        crcs = crcs[np.concatenate((solid, np.ones(len(blocks), dtype=np.bool_)))]
        numbers = np.arange(len(counts))
        # The frame behind the last item is told by that item.
        owners = np.concatenate(
            (np.append(numbers, len(counts) - 1)[solid], numbers.repeat(counts))
        )
        order = np.argsort(starts)
        names: list[str | None] = [document.fqns[name] for name in file.fqn]
        return cls(
            path=file.path,
            size_bytes=file.size_bytes,
            rank=document.rank,
            starts=array("q", starts[order].tobytes()),
            crcs=array("I", crcs[order].tobytes()),
            fqns=[names[at] if names else None for at in owners[order].tolist()],
        )

    def within(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans that share a byte with `[start, stop)`, ascending."""
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
        for at in range(max(first, 0), last if start < min(stop, self.size_bytes) else 0):
            end = self.starts[at + 1] if at + 1 < len(self.starts) else self.size_bytes
            yield Span(start=self.starts[at], stop=end, crc32c=self.crcs[at], fqn=self.fqns[at])

    def edge_before(self, offset: int) -> int:
        """Return the nearest edge between two spans at or before `offset` (bytes)."""
        if offset >= self.size_bytes:
            return self.size_bytes
        return next((span.start for span in self.within(offset, offset + 1)), 0)

    def edge_from(self, offset: int) -> int:
        """Return the nearest edge between two spans at or behind `offset` (bytes)."""
        return next((s.stop for s in self.within(offset, offset + 1) if s.start < offset), offset)

    def damage(self, span: Span) -> IntegrityError:
        """Return the error that says `span` is not what was written."""
        by = f" (written by rank {self.rank})" if self.rank is not None else ""
        what = f"a block of {span.fqn}" if span.fqn else "its content"
        return IntegrityError(
            f"{self.path}{by} is damaged: {what} at byte {span.start} does not have the checksum "
            "it was written with.",
            fqn=span.fqn,
            offset=span.start,
            path=self.path,
            rank=self.rank,
            next_step="Restore the file from a copy, or use another checkpoint.",
        )
