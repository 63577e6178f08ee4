"""Writing regions of output files: many parts at a time, within the memory, streamed or copied.

A thread does one part at a time: it reads, checks, places and sends, so that one part is being
written while the next is being read. Long runs of stored bytes the storage copies by itself, where
it can; they are checked by the checksum that it tells, or else by reading the source.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES,
    MIB,
    REMOTE_THREADS,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.store.backend import PartCopy
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.budget import BUDGET
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import Workers

from .pieces import Part, copy_runs, cut, cut_region
from .plan import Plan, Region, number_unit_bytes
from .reads import Readable, SegmentReader

if TYPE_CHECKING:
    from .output import Site

Copies = Literal["auto", "never"]
"""Which parts the storage copies: those that it can, none."""

_LOCAL_THREADS = 2
_LEAST_THREADS = 2
"""One part is written while another is being read."""

_LOCAL_READ_BYTES = 2 * MIB
"""One read of a local disk, through a buffer that stays in the processor's cache."""

_COPY_REFUSALS = frozenset({"permission", "unsupported"})
"""Kinds of refusals of a copy after which its bytes are streamed."""


def transfer_options(
    source: Store, target: Store, *, memory_limit_bytes: int | None, thread_count: int | None = None
) -> TransferOptions:
    """Return threads and sizes that suit both storages within the memory limit."""
    is_remote = source.capabilities.is_remote or target.capabilities.is_remote
    threads = thread_count or (REMOTE_THREADS if is_remote else _LOCAL_THREADS)
    # A part in flight takes up to three times its bytes: read, put together, joined by a client.
    # All ranks plan alike, on nodes with more of them and with fewer.
    share_bytes = (memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES) // (3 * threads)
    share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
    return TransferOptions(
        thread_count=threads,
        part_bytes=max(min(DEFAULT_PART_BYTES, share_bytes), MIB // 16),
        memory_limit_bytes=memory_limit_bytes or default_memory_limit_bytes(),
    )


def paces(options: TransferOptions) -> tuple[Pacer, Pacer]:
    """Return what learns how many requests bear the storages that are read and written."""
    most = max(options.thread_count, _LEAST_THREADS)
    return Pacer(most), Pacer(most, start=REMOTE_THREADS)


UNKNOWN_CRC = -1
"""Stands where neither the storage nor the source tells a checksum of what was copied."""

Span = tuple[int, int, int]
"""Where bytes of a file begin, how many there are, and their CRC-32C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Bytes of the file at a position, as a rank wrote them: several spans if it has edges.

    `read_bytes` came to this process, `sent_bytes` left it, `copied_bytes` the storage copied.
    """

    file: int
    rank: int
    spans: Sequence[Span]
    read_bytes: int
    sent_bytes: int
    copied_bytes: int


def joined(spans: Iterable[Span]) -> Span:
    """Return spans that lie side by side, in any order, as one."""
    starts, lengths, crcs = zip(*sorted(spans), strict=True)
    if len(starts) == 1:
        return starts[0], lengths[0], crcs[0]
    crc32c = UNKNOWN_CRC if UNKNOWN_CRC in crcs else combine_many(crcs, lengths)
    return starts[0], sum(lengths), crc32c


_Moved = tuple[Sequence[Span], int, int]
"""What was written, and how many bytes were read for it, and copied by the storage."""

Begin = Callable[[Region], Upload]
End = Callable[[Region, Upload, Portion], None]


class RegionWriter:
    """Writes regions of a plan on one rank, within the memory limit, paced by both storages.

    `on_bytes` gets the bytes that are done, in several threads. After a failure the writer must not
    be used again: a thread that hangs may still fill a buffer.
    """

    def __init__(
        self, site: Site, plan: Plan, source: Readable, on_bytes: Callable[[int], None]
    ) -> None:
        options, able = site.options, site.target.capabilities
        self.site = site
        self.plan = plan
        self.able = able
        self.on_bytes = on_bytes
        self.has_failed = False
        self.window_bytes = read_bytes = options.part_bytes
        if not (able.is_remote or site.source.capabilities.is_remote):
            read_bytes = min(_LOCAL_READ_BYTES, read_bytes)
        self.reader = SegmentReader(
            plan.files,
            source=source,
            store=site.source,
            # Parallelism is ours: each thread reads for its own part.
            options=replace(options, thread_count=1, part_bytes=read_bytes),
            deadline=site.deadline,
            pacer=site.source_pace,
        )
        may_copy = site.setting.copies == "auto" and able.tokens_travel
        self.copies = may_copy and site.target.can_copy_from(site.source)
        self._free: list[memoryview] = []

    def write(self, regions: Iterable[Region], begin: Begin, end: End) -> None:
        """Write all parts of all regions side by side.

        Where the storage wants parts in order, each region is one thread's. `begin` gives the
        upload of a region; `end` is called, in some thread, once all of it was written. Raises what
        the stores raise, naming tensor and rank.
        """
        site, options = self.site, self.site.options
        count = max(options.thread_count, _LEAST_THREADS)
        with Workers(
            count,
            name=f"export to {self.plan.files[0].name}",
            deadline=site.deadline,
            limit=lambda: min(count, site.source_pace.limit(), site.target_pace.limit()),
        ) as workers:
            try:
                self._submit(workers, regions, begin, end)
            except BaseException:
                # Threads with parts in order look at this between two of them.
                self.has_failed = True
                raise

    def _submit(self, workers: Workers, regions: Iterable[Region], begin: Begin, end: End) -> None:
        """Hand all parts over, and wait until they are written."""
        site, options = self.site, self.site.options
        for region in regions:
            job = _Job(self, region, begin, end)
            # A store may join the views of a part, so a part counts twice.
            each = (2 if self.able.is_remote else 1) * job.window_bytes + job.read_bytes
            if each > options.memory_limit_bytes:
                raise InvalidInputError(
                    f"Parts of {job.window_bytes} bytes need {each} bytes of memory; "
                    f"memory_limit_bytes is {options.memory_limit_bytes}.",
                    next_step=f"Raise memory_limit_bytes to {each} or more.",
                )
            one_by_one = [[part] for part in job.parts]
            for parts in one_by_one if self.able.parallel_parts else [job.parts]:
                # First a place: a failure is heard there, and our own parts leave memory.
                workers.wait_for_place()
                BUDGET.acquire(each, limit_bytes=options.memory_limit_bytes, deadline=site.deadline)
                workers.submit(partial(job.do, parts), ended=partial(BUDGET.release, each))
        workers.drain()

    @contextmanager
    def buffer(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend `size_bytes`; fresh memory costs the kernel more than the copies through it."""
        # One list operation is atomic: no lock.
        try:
            found = self._free.pop()
        except IndexError:
            found = memoryview(b"")
        if len(found) < size_bytes:
            found = memoryview(bytearray(size_bytes))
        yield found[:size_bytes]
        self._free.append(found)


class _Job:
    """One region on its way."""

    def __init__(self, writer: RegionWriter, region: Region, begin: Begin, end: End) -> None:
        self._writer = writer
        self._region = region
        self._end = end
        self._file = writer.plan.files[region.file]
        self._unit = number_unit_bytes(writer.able, region.file_bytes)
        reader = writer.reader
        runs: Iterable[Part] = ()
        self.read_bytes = reader.prepare(region.file, region.start, region.stop)
        if writer.copies and not self._file.edges:
            pieces = reader.finder.pieces_of(region.file, region.start, region.stop)
            runs = copy_runs(pieces, reader.place_of, writer.able)
        self.parts = cut_region(region, runs, writer.able, stream_bytes=writer.window_bytes)
        self.window_bytes = max(one.size_bytes for p in self.parts for one in self._streams(p))
        self._lock = threading.Lock()
        self._left_bytes = region.size_bytes
        self._moved: list[_Moved] = []
        self._upload = begin(region)

    def do(self, parts: Iterable[Part]) -> None:
        """Do some parts, and what follows the last of all."""
        writer = self._writer
        for part in parts:
            if writer.has_failed:
                return
            try:
                self._do(part)
            except BaseException:
                writer.has_failed = True
                raise

    def _do(self, part: Part) -> None:
        writer, region, deadline = self._writer, self._region, self._writer.site.deadline
        deadline.check(f"Writing {self._file.name}")
        copied = self._copied(part, part.place) if part.place and writer.copies else None
        moved = [copied] if copied else [self._streamed(one) for one in self._streams(part)]
        deadline.watch.advanced(part.size_bytes)
        writer.on_bytes(part.size_bytes)
        with self._lock:
            self._moved += moved
            self._left_bytes -= part.size_bytes
            if self._left_bytes:
                return
        spans = [span for spans, _, _ in self._moved for span in spans]
        copied_bytes = sum(count for _, _, count in self._moved)
        portion = Portion(
            file=region.file,
            rank=region.owner,
            spans=sorted(spans) if self._file.edges else [joined(spans)],
            read_bytes=sum(count for _, count, _ in self._moved),
            sent_bytes=region.size_bytes - copied_bytes,
            copied_bytes=copied_bytes,
        )
        self._end(region, self._upload, portion)

    def _streams(self, part: Part) -> list[Part]:
        """Return the parts that a part is streamed as."""
        if part.place is None:
            return [part]
        run, writer = Part(start=part.start, stop=part.stop), self._writer
        return cut(run, writer.able, self._unit, writer.window_bytes)

    def _streamed(self, part: Part) -> _Moved:
        """Read and write a part."""
        writer, start, stop = self._writer, part.start, part.stop
        edges = self._file.edges
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        with writer.buffer(part.size_bytes) as window:
            read_bytes = writer.reader.fill(self._region.file, start, stop, window)
            spans = [
                (first, last - first, crc32c_of(window[first - start : last - start]))
                for first, last in itertools.pairwise((start, *inner, stop))
            ]
            begin_s = time.monotonic()
            is_last = stop == self._region.file_bytes
            self._upload.write_part(start // self._unit, start, [window], last=is_last)
            writer.site.target_pace.succeeded(time.monotonic() - begin_s, part.size_bytes)
        return spans, read_bytes, 0

    def _copied(self, part: Part, place: ChunkPlace) -> _Moved | None:
        """Have the storage copy a part; return None if it will not."""
        writer, first, length = self._writer, part.source_start, part.size_bytes
        source = writer.site.source.copy_source(place.path)
        if source is None:
            return None
        begin_s = time.monotonic()
        try:
            told = self._upload.copy_part(
                PartCopy(
                    number=part.start // self._unit,
                    offset=part.start,
                    source=source,
                    start=place.start + first,
                    length=length,
                    source_bytes=place.file_bytes,
                    last=part.stop == self._region.file_bytes,
                )
            )
        except (StorageError, IntegrityError) as error:
            if isinstance(error, StorageError) and error.kind in _COPY_REFUSALS:
                writer.copies = False
                return None
            raise writer.reader.explained(error, [place]) from error
        writer.site.target_pace.succeeded(time.monotonic() - begin_s, length)
        read_bytes, expected = 0, part.crc32c
        if told is None and (place.fqn or self._file.crc32c is not None):
            told, read_bytes = writer.reader.verify(place, first, first + length), length
        if expected not in {None, told}:
            # Raises if it is the source that is damaged.
            writer.reader.verify(place, first, first + length)
            raise StorageError(
                f"The storage copied bytes [{place.start + first}, {place.start + first + length}) "
                f"of {writer.site.source.url}/{place.path}, which belong to {place.fqn}, wrongly: "
                "the source is sound, and what it wrote has another checksum.",
                path=place.path,
                rank=place.rank,
                retryable=True,
                next_step="Try again; if it happens again, tell who runs the storage.",
            )
        return [(part.start, length, UNKNOWN_CRC if told is None else told)], read_bytes, length
