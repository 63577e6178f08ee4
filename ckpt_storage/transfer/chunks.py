"""Reads of selections of chunks: as few byte ranges, checked as they arrive, copied to targets.

A chunk is stored as the bytes of its elements in C order. A selection that is one long run of bytes
is read directly into its target's memory. Other selections are read in windows of bounded size and
copied out, by a few strided copies each; thousands of small tensors share one request.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Literal

from ckpt_storage.errors import CheckpointError, FormatError
from ckpt_storage.format.boxes import (
    Selection,
    WindowCopy,
    coalesce,
    round_out,
    run_of,
    selected_copies,
    touched_spans,
)
from ckpt_storage.format.crc import first_wrong_block
from ckpt_storage.format.rank_manifest import wrong_block
from ckpt_storage.options import DEFAULT_BLOCK_BYTES

from .ranges import RangeRead, RangeReader, ignore
from .read_costs import ReadCosts, costs_for

Gaps = Literal["none", "cheap"]
"""What is read between two selected elements: only the rest of their blocks, or also gaps that take
less time than another request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """The bytes of one chunk or blob in a file, and their checksums if there are any.

    `start` and `size_bytes` delimit the payload in the file, in bytes; `sizes` are those of the
    chunk, in elements; `file_bytes` is the length that the file must have, None if unknown. `crcs`
    are of blocks of `block_bytes`; None: no checksums. An opaque item can only be read by
    `torch.load`: start and size are those of the whole item.
    """

    path: str
    fqn: str
    start: int
    size_bytes: int
    sizes: tuple[int, ...] = ()
    file_bytes: int | None = None
    rank: int | None = None
    block_bytes: int = 1
    crcs: Sequence[int] | None = None
    kind: Literal["raw", "opaque"] = "raw"

    def check(self, view: memoryview, first_byte: int) -> None:
        """Raise `IntegrityError` unless `view` has the checksums of its blocks.

        It begins at `first_byte` of the payload, a multiple of `block_bytes`, and ends with a block
        or with the payload.
        """
        if self.crcs is None:
            return
        size = self.block_bytes
        at = first_wrong_block(view, size, self.crcs, first_byte // size)
        if at is not None:
            offset = self.start + first_byte + at
            raise wrong_block(self.path, offset, fqn=self.fqn, rank=self.rank)

    def unchecked(self) -> ChunkPlace:
        """Return the place without its checksums."""
        return dataclasses.replace(self, crcs=None, block_bytes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead(ABC):
    """Selected elements of one chunk; a subclass has their target.

    `where` has the positions in each dimension, relative to the chunk; None is the whole chunk.
    Each element is put once, by any thread.
    """

    place: ChunkPlace
    item_bytes: int
    chunk_sizes: tuple[int, ...]
    where: Selection | None

    @property
    @abstractmethod
    def memory(self) -> memoryview | None:
        """The target's memory, if it has the layout of the stored bytes."""

    @abstractmethod
    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements out of a window of checked bytes, which is reused afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BytesRead(ChunkRead):
    into: memoryview

    @property
    def memory(self) -> memoryview:
        return self.into

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        raise NotImplementedError((len(window), copies))  # the memory serves every selection


def bytes_read(place: ChunkPlace, memory: memoryview, start: int = 0) -> ChunkRead:
    """Return the read of the bytes of `place` from `start` on that fill `memory`."""
    stop = start + len(memory)
    return _BytesRead(
        place=place,
        item_bytes=1,
        chunk_sizes=(place.size_bytes,),
        where=None if (start, stop) == (0, place.size_bytes) else (range(start, stop),),
        into=memory,
    )


def is_about(error: CheckpointError, path: str) -> bool:
    """Return whether `error` is about the file at `path`, which stores may name by its URL."""
    return error.path is not None and (error.path == path or error.path.endswith(f"/{path}"))


class ChunkReader:
    """Reads selections of chunks through a `RangeReader`; may be used by several threads."""

    def __init__(self, ranges: RangeReader, costs: ReadCosts | None = None) -> None:
        self._ranges = ranges
        self._costs = costs or costs_for(ranges.store)

    def plan(
        self, reads: Sequence[ChunkRead], *, gaps: Gaps = "cheap", turn: int | None = None
    ) -> list[RangeRead]:
        """Return the ranges that serve all `reads`, in order of file and offset; nothing is read.

        A range has at most the options' `part_bytes`, or one larger block or element. With a
        `turn` the files alternate, and each turn begins with another file, so that many readers do
        not read one file at the same time. Raises `FormatError` for a place of another length than
        its chunk.
        """
        options = self._ranges.options
        total_bytes = sum(read.place.size_bytes for read in reads)
        plan = _Plan(self._costs, options.part_bytes, options.thread_count, total_bytes, gaps)
        for read in reads:
            plan.add(read)
        return plan.ranges(turn)

    def read(
        self,
        reads: Sequence[ChunkRead],
        *,
        gaps: Gaps = "cheap",
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Fill the targets of `reads`; all bytes are checked on return.

        Raises `IntegrityError` (file, FQN, offset) and the store's errors; the targets are then
        undefined.
        """
        self._ranges.run(self.plan(reads, gaps=gaps), on_bytes=on_bytes)

    def read_bytes(
        self, places: Sequence[ChunkPlace], *, on_bytes: Callable[[int], None] = ignore
    ) -> list[bytearray]:
        """Return all bytes of each place, checked."""
        buffers = [bytearray(place.size_bytes) for place in places]
        reads = [
            bytes_read(place, memoryview(buffer))
            for place, buffer in zip(places, buffers, strict=True)
        ]
        self.read(reads, on_bytes=on_bytes)
        return buffers


# Start and stop in the file, start in the payload, index of the read. The garbage collector ignores
# tuples of numbers, of which there may be thousands.
_Window = tuple[int, int, int, int]
_INTERVAL = itemgetter(0, 1)


class _Plan:
    """Divides reads into ranges of their own and windows that neighbours share."""

    def __init__(
        self, costs: ReadCosts, part_bytes: int, stream_count: int, total_bytes: int, gaps: Gaps
    ) -> None:
        max_bytes = part_bytes
        if stream_count > 1:
            # Keeps all streams busy to the end.
            fair_bytes = max(costs.part_min_bytes, total_bytes // stream_count)
            part_bytes = min(part_bytes, fair_bytes)
        self._part_bytes = part_bytes
        # Without gaps, few requests matter more than many in parallel.
        window_bytes = max_bytes if gaps == "none" else part_bytes
        self._window_bytes = min(window_bytes, costs.window_bytes)
        self._gap_bytes = 0 if gaps == "none" else costs.gap_bytes
        # Below this, a request of its own costs more than a copy out of a shared one.
        self._direct_min_bytes = min(costs.window_bytes // 2, costs.copy_bytes, part_bytes)
        self._copies_beat_requests = costs.copy_bytes > self._window_bytes
        self._direct: dict[str, list[RangeRead]] = {}
        self._windows: dict[str, list[_Window]] = {}
        self._reads: list[ChunkRead] = []

    def add(self, read: ChunkRead) -> None:
        place, where = read.place, read.where
        total = place.size_bytes
        if total != math.prod(read.chunk_sizes) * read.item_bytes:
            raise FormatError(
                f"{place.fqn} in {place.path} has {total} bytes; the metadata says "
                f"{list(read.chunk_sizes)} elements of {read.item_bytes} bytes.",
                path=place.path,
                rank=place.rank,
                next_step="Check that the checkpoint is complete and that its files belong "
                "together.",
            )
        if where is None:
            if 0 < total < self._direct_min_bytes and total <= self._window_bytes:
                # The fast path, for thousands of small tensors.
                window = (place.start, place.start + total, 0, len(self._reads))
                self._reads.append(read)
                self._windows.setdefault(place.path, []).append(window)
            elif total:
                self._add_run(read, 0, total)
            return
        if not all(where):
            return
        run = run_of(read.chunk_sizes, where, read.item_bytes)
        if run is not None:
            self._add_run(read, run.start, run.stop)
            return
        block = place.block_bytes
        grain = max(DEFAULT_BLOCK_BYTES if place.crcs is None else block, self._gap_bytes)
        spans = touched_spans(read.chunk_sizes, where, read.item_bytes, grain)
        rounded = [round_out(start, stop, block, total) for start, stop in spans]
        for first, last, _ in coalesce(rounded, 0, total):
            self._add_windows(read, first, last)

    def _add_run(self, read: ChunkRead, start: int, stop: int) -> None:
        """Plan a selection that is the bytes [start, stop) of the payload."""
        block, total = read.place.block_bytes, read.place.size_bytes
        first, last = round_out(start, stop, block, total)
        inner_start = start + -start % block
        inner_stop = stop if stop == total else stop - stop % block
        memory = None
        if inner_stop - inner_start >= self._direct_min_bytes:
            memory = read.memory
        if memory is None:
            self._add_windows(read, first, last)
            return
        step = self._step(self._part_bytes, read)
        if self._copies_beat_requests:
            # Parts of nearly equal size. One with an unaligned edge is copied with its neighbour.
            fair = -(-(last - first) // -(-(last - first) // step))
            step = min(step, fair + -fair % block)
            cuts = [*range(first, last, step), last]
        else:
            cuts = sorted({first, *range(inner_start, inner_stop, step), inner_stop, last})
        ranges = self._direct.setdefault(read.place.path, [])
        for at, end in pairwise(cuts):
            if start <= at and end <= stop:
                ranges.append(_into(read.place, memory[at - start : end - start], at))
            else:
                self._add_windows(read, at, end)

    def _step(self, max_bytes: int, read: ChunkRead) -> int:
        block = read.place.block_bytes
        step = max(block, max_bytes - max_bytes % block)
        return max(read.item_bytes, step - step % read.item_bytes)

    def _add_windows(self, read: ChunkRead, start: int, stop: int) -> None:
        origin, step = read.place.start, self._step(self._window_bytes, read)
        self._windows.setdefault(read.place.path, []).extend(
            (origin + at, origin + min(at + step, stop), at, len(self._reads))
            for at in range(start, stop, step)
        )
        self._reads.append(read)

    def ranges(self, turn: int | None) -> list[RangeRead]:
        files = []
        for path in sorted(self._direct.keys() | self._windows.keys()):
            reads, windows = self._direct.get(path, []), self._windows.get(path, [])
            windows.sort(key=_INTERVAL)
            intervals = list(map(_INTERVAL, windows))
            for start, stop, which in coalesce(intervals, self._gap_bytes, self._window_bytes):
                members = windows[which.start : which.stop]
                reads.append(
                    RangeRead(
                        path=path,
                        start=start,
                        stop=stop,
                        file_bytes=self._reads[members[0][3]].place.file_bytes,
                        done=partial(_put_windows, self._reads, members, start),
                    )
                )
            reads.sort(key=lambda read: read.start)
            files.append(reads)
        if turn is not None and files:
            first = turn % len(files)
            files = [*files[first:], *files[:first]]
            longest = max(map(len, files))
            return [reads[at] for at in range(longest) for reads in files if at < len(reads)]
        return [read for reads in files for read in reads]


def _into(place: ChunkPlace, memory: memoryview, start: int) -> RangeRead:
    return RangeRead(
        path=place.path,
        start=place.start + start,
        stop=place.start + start + len(memory),
        file_bytes=place.file_bytes,
        into=memory,
        check=partial(_check, place, start),
        block_bytes=place.block_bytes,
    )


def _check(place: ChunkPlace, first_byte: int, view: memoryview, offset: int) -> None:
    place.check(view, first_byte + offset)


def _put_windows(
    reads: Sequence[ChunkRead], members: Sequence[_Window], extent_start: int, view: memoryview
) -> None:
    for file_start, file_stop, start, number in members:
        part = view[file_start - extent_start : file_stop - extent_start]
        reads[number].place.check(part, start)
        put(reads[number], start, part)


def put(read: ChunkRead, start: int, part: memoryview) -> None:
    """Copy the selected elements in `part`, checked bytes of a chunk, to the target of `read`.

    `part` begins at byte `start` of the payload; both its ends lie between elements.
    """
    where, sizes, size = read.where, read.chunk_sizes, read.item_bytes
    run = range(read.place.size_bytes) if where is None else run_of(sizes, where, size)
    # `memory` costs as much as a small copy.
    memory = None if run is None else read.memory
    if run is not None and memory is not None:
        low, high = max(start, run.start), min(start + len(part), run.stop)
        if low < high:
            memory[low - run.start : high - run.start] = part[low - start : high - start]
        return
    selected = tuple(map(range, sizes)) if where is None else where
    copies = selected_copies(sizes, selected, start // size, (start + len(part)) // size)
    if copies:
        read.put(part, copies)
