"""The memory that holds the S3 server's bytes: recycled buffers and immutable runs of them.

Fresh pages cost the kernel about as much time as the copy into them, so a large buffer that no
object uses any more is used again instead of being given back.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["PIECE_BYTES", "BufferPool", "Payload", "Segment"]

_POOLED_FROM_BYTES = 64 * 1024
_IDLE_LIMIT_BYTES = 2 << 30
PIECE_BYTES = 4 << 20
"""What a body is received in, so that clients that send the same bytes in parts of other sizes are
served alike, each from memory that the one before gave back."""


class BufferPool:
    """Anonymous memory maps in power-of-two sizes, kept while nobody uses them.

    A map that was never touched costs no memory, so rounding a size up costs addresses only.
    At most 2 GiB stay idle.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection inside `take` may end a `Segment`, which calls `_give`.
        self._lock = threading.RLock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0

    def take(self, size_bytes: int) -> Segment:
        """Return a writable segment of exactly `size_bytes` bytes, whose content is arbitrary."""
        if size_bytes < _POOLED_FROM_BYTES:
            return Segment(memoryview(bytearray(size_bytes)))
        class_bytes = 1 << (size_bytes - 1).bit_length()
        with self._lock:
            idle = self._idle.get(class_bytes)
            block = idle.pop() if idle else None
            if block is not None:
                self._idle_bytes -= len(block)
        if block is None:
            block = mmap.mmap(-1, class_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        return Segment(memoryview(block)[:size_bytes], block, self)

    def give(self, block: mmap.mmap) -> None:
        """Take back a map that no live segment covers any more."""
        with self._lock:
            if self._idle_bytes + len(block) <= _IDLE_LIMIT_BYTES:
                self._idle.setdefault(len(block), []).append(block)
                self._idle_bytes += len(block)


class Segment:
    """One buffer, written once by whoever took it and only read after that.

    Its memory is used again as soon as the segment is garbage, so a slice of `view` must not
    outlive the segment.
    """

    __slots__ = ("_block", "_pool", "view")

    def __init__(
        self,
        view: memoryview,
        block: mmap.mmap | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self.view = view
        self._block = block
        self._pool = pool

    def __del__(self) -> None:
        if self._pool is not None and self._block is not None:
            self._pool.give(self._block)


@dataclass(frozen=True, slots=True)
class _Slice:
    segment: Segment
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Payload:
    """An immutable run of bytes made of slices of segments; copying one copies no bytes."""

    slices: tuple[_Slice, ...] = ()
    _ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = tuple(accumulate(piece.stop - piece.start for piece in self.slices))
        object.__setattr__(self, "_ends", ends)

    @classmethod
    def of_segment(cls, segment: Segment, size_bytes: int | None = None) -> Payload:
        """Wrap the first `size_bytes` bytes (None: all) of a segment."""
        stop = len(segment.view) if size_bytes is None else size_bytes
        return cls((_Slice(segment, 0, stop),)) if stop else cls()

    @classmethod
    def of_bytes(cls, data: bytes) -> Payload:
        """Wrap bytes without copying them."""
        return cls.of_segment(Segment(memoryview(data)))

    @classmethod
    def joined(cls, payloads: Iterable[Payload]) -> Payload:
        """Return the concatenation of `payloads`."""
        return cls(tuple(piece for payload in payloads for piece in payload.slices))

    @property
    def size_bytes(self) -> int:
        """Length of the run."""
        return self._ends[-1] if self._ends else 0

    def cut(self, start: int, stop: int) -> Payload:
        """Return bytes `[start, stop)`, clipped to the run."""
        found: list[_Slice] = []
        index = bisect_right(self._ends, start)
        at = self._ends[index - 1] if index else 0
        for piece in self.slices[index:]:
            if at >= stop:
                break
            low = piece.start + max(0, start - at)
            high = piece.start + min(piece.stop - piece.start, stop - at)
            if low < high:
                found.append(_Slice(piece.segment, low, high))
            at += piece.stop - piece.start
        return Payload(tuple(found))

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes in order as views, valid while the payload lives."""
        for piece in self.slices:
            yield piece.segment.view[piece.start : piece.stop]

    def to_bytes(self) -> bytes:
        """Return a copy."""
        return b"".join(self.views())

    def md5(self) -> bytes:
        """Return the MD5 digest, 16 bytes."""
        digest = hashlib.md5(usedforsecurity=False)
        for view in self.views():
            digest.update(view)
        return digest.digest()
