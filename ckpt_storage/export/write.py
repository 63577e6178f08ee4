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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.crc import combine_blocks, combine_many, crc32c_of
from ckpt_storage.format.exports import Sealed
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES,
    MIB,
    REMOTE_THREADS,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.source.model import Source
from ckpt_storage.store.backend import Part as UploadPart
from ckpt_storage.store.backend import PartCopy
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.pacing import BUDGET
from ckpt_storage.transfer.workers import Workers

from .layout import OutFile
from .plan import MIN_COPY_BYTES, Part, Plan, Region, cut, cut_region, number_unit_bytes
from .reads import SegmentReader

if TYPE_CHECKING:
    from .output import Site

Copies = Literal["auto", "never"]
"""Which parts the storage copies: those that it can, none."""

_LEAST_THREADS = 2
"""One part is written while another is being read."""

_COPY_REFUSALS = frozenset({"permission", "unsupported"})
"""Kinds of refusals of a copy after which its bytes are streamed."""


def transfer_options(
    source: Store, target: Store, *, memory_limit_bytes: int | None, thread_count: int | None = None
) -> TransferOptions:
    """Return threads and sizes that suit both storages within the memory limit."""
    is_remote = source.capabilities.is_remote or target.capabilities.is_remote
    threads = thread_count or (REMOTE_THREADS if is_remote else _LEAST_THREADS)
    threads = _LEAST_THREADS if threads == 1 else threads
    # A part in flight takes up to three times its bytes: read, put together, joined by a client.
    # All ranks plan alike, on nodes with more of them and with fewer.
    share_bytes = (memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES) // (3 * threads)
    share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
    return TransferOptions(
        thread_count=threads,
        part_bytes=max(min(DEFAULT_PART_BYTES, share_bytes), MIB // 16),
        memory_limit_bytes=memory_limit_bytes or default_memory_limit_bytes(),
    )


UNKNOWN_CRC = -1
"""Stands where neither the storage nor the source tells a checksum of what was copied."""

Span = tuple[int, int, int]
"""Where bytes of a file begin, how many there are, and their CRC-32C."""


@dataclass(slots=True)
class Result:
    """What one rank did. All mappings are by position of the file.

    Spans are those of whole regions, or, of a file with edges, of what lies between them.
    `read_bytes` came to this process, `sent_bytes` left it, `copied_bytes` the storage copied.
    `receipts` are of shared files, `sealed` the files that it sealed, or found sound.
    """

    spans: dict[int, list[Span]] = field(default_factory=dict)
    read_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    receipts: dict[int, list[UploadPart]] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)


def spans_of(results: Iterable[Result], file: int) -> list[Span]:
    """Return what all ranks wrote of the file at a position, in any order."""
    return [span for one in results for span in one.spans.get(file, ())]


def joined(spans: Iterable[Span]) -> Span:
    """Return spans that lie side by side, in any order, as one."""
    starts, lengths, crcs = zip(*sorted(spans), strict=True)
    if len(starts) == 1:
        return starts[0], lengths[0], crcs[0]
    crc32c = UNKNOWN_CRC if UNKNOWN_CRC in crcs else combine_many(crcs, lengths)
    return starts[0], sum(lengths), crc32c


@dataclass
class _Job:
    """One region on its way; `spans` are what was written of it."""

    region: Region
    file: OutFile
    upload: Upload
    unit: int
    left_bytes: int
    spans: list[Span] = field(default_factory=list)


class RegionWriter:
    """Writes regions of a plan on one rank, within the memory limit, paced by both storages.

    `begin` gives the upload of a region. In some thread `end` gets it with the region's CRC-32C
    once all is written and noted in `result`, and `on_bytes` the bytes that are done. After a
    failure a thread that hangs may still fill a buffer: the writer must not be used again.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        source: Source,
        result: Result,
        *,
        begin: Callable[[Region], Upload],
        end: Callable[[Region, Upload, int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        able = site.target.capabilities
        self._site, self._plan, self._able, self._result = site, plan, able, result
        self._begin, self._end, self._on_bytes = begin, end, on_bytes
        self._has_failed = False
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._reader = SegmentReader(
            plan.files,
            source=source,
            store=site.source,
            # Parallelism is ours: each thread reads for its own part.
            options=replace(site.options, thread_count=1),
            deadline=site.deadline,
            pacer=site.source_pace,
        )
        may_copy = site.setting.copies == "auto" and able.tokens_travel
        self._copies = may_copy and site.target.can_copy_from(site.source)

    def write(self, regions: Iterable[Region]) -> None:
        """Write all parts side by side; in order where the storage wants that of a file.

        Raises what the stores raise, naming tensor and rank.
        """
        site = self._site
        with Workers(
            site.options.thread_count,
            name=f"export to {self._plan.files[0].name}",
            deadline=site.deadline,
            # Neither is ever more than there are threads.
            limit=lambda: min(site.source_pace.limit(), site.target_pace.limit()),
        ) as workers:
            try:
                for region in regions:
                    self._submit(workers, region)
                workers.drain()
            except BaseException:
                # Threads with parts in order look at this between two of them.
                self._has_failed = True
                raise

    def _submit(self, workers: Workers, region: Region) -> None:
        """Hand the parts of a region over, as fast as there are threads and memory."""
        site, limit_bytes = self._site, self._site.options.memory_limit_bytes
        read_bytes = self._reader.prepare(region.file, region.start, region.stop)
        parts = cut_region(
            region, self._runs(region), self._able, stream_bytes=site.options.part_bytes
        )
        unit = number_unit_bytes(self._able, region.file_bytes)
        window_bytes = max(one.size_bytes for p in parts for one in self._streams(p, unit))
        # A store may join the views of a part, so a part counts twice.
        each = (2 if self._able.is_remote else 1) * window_bytes + read_bytes
        if each > limit_bytes:
            raise InvalidInputError(
                f"Parts of {window_bytes} bytes need {each} bytes of memory; "
                f"memory_limit_bytes is {limit_bytes}.",
                next_step=f"Raise memory_limit_bytes to {each} or more.",
            )
        file, upload = self._plan.files[region.file], self._begin(region)
        job = _Job(region, file, upload, unit, region.size_bytes)
        for some in [[part] for part in parts] if self._able.parallel_parts else [parts]:
            # First a place: a failure is heard there, and our own parts leave memory.
            workers.wait_for_place()
            BUDGET.acquire(each, limit_bytes=limit_bytes, deadline=site.deadline)
            workers.submit(partial(self._do, job, some), ended=partial(BUDGET.release, each))

    def _runs(self, region: Region) -> Iterator[Part]:
        """Yield the runs of a region that the storage can copy."""
        if not self._copies or self._plan.files[region.file].edges:
            return
        for piece in self._reader.pieces(region.file, region.start, region.stop):
            found = piece.run()
            least = max(self._able.copy_min_bytes or 0, MIN_COPY_BYTES)
            if found is None or len(found[0]) < least:
                continue
            place, (run, start) = self._reader.place_of(piece), found
            if place.kind == "raw" and place.size_bytes == piece.chunk_bytes:
                shift = start - run.start
                yield Part(start=start, stop=run.stop + shift, place=place, shift=shift)

    def _streams(self, part: Part, unit: int) -> list[Part]:
        """Return the parts that a part is streamed as."""
        if part.place is None:
            return [part]
        run = Part(start=part.start, stop=part.stop)
        return cut(run, self._able, unit, self._site.options.part_bytes)

    def _do(self, job: _Job, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._has_failed:
                return
            try:
                self._write(job, part)
            except BaseException:
                # Before the memory of others is waited for.
                self._has_failed = True
                raise

    def _write(self, job: _Job, part: Part) -> None:
        """Do a part, and what follows the last of its region."""
        region, deadline = job.region, self._site.deadline
        deadline.check(f"Writing {job.file.name}")
        if not (part.place and self._copies and self._copied(job, part, part.place)):
            for one in self._streams(part, job.unit):
                self._streamed(job, one)
        deadline.watch.advanced(part.size_bytes)
        self._on_bytes(part.size_bytes)
        with self._lock:
            job.left_bytes -= part.size_bytes
            if job.left_bytes:
                return
            whole = joined(job.spans)
            spans = job.spans if job.file.edges else [whole]
            self._result.spans.setdefault(region.file, []).extend(spans)
        self._end(region, job.upload, whole[2])

    def _streamed(self, job: _Job, part: Part) -> None:
        """Read and write a part."""
        start, stop, edges = part.start, part.stop, job.file.edges
        inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
        # Fresh memory costs the kernel more than the copies through it. No thread keeps its own:
        # there are more of them than parts in flight.
        with self._lock:
            whole = self._free.pop() if self._free else memoryview(b"")
        if len(whole) < part.size_bytes:
            whole = memoryview(bytearray(part.size_bytes))
        window = whole[: part.size_bytes]
        read_bytes = self._reader.fill(job.region.file, start, stop, window)
        spans = [
            (first, last - first, crc32c_of(window[first - start : last - start]))
            for first, last in itertools.pairwise((start, *inner, stop))
        ]
        begin_s, is_last = time.monotonic(), stop == job.region.file_bytes
        job.upload.write_part(start // job.unit, start, [window], last=is_last)
        self._site.target_pace.succeeded(time.monotonic() - begin_s, part.size_bytes)
        with self._lock:
            self._free.append(whole)
            job.spans += spans
            self._result.read_bytes += read_bytes
            self._result.sent_bytes += part.size_bytes

    def _copied(self, job: _Job, part: Part, place: ChunkPlace) -> bool:
        """Have the storage copy a part; return whether it did."""
        site, reader = self._site, self._reader
        first, length = part.start - part.shift, part.size_bytes
        source = site.source.copy_source(place.path)
        if source is None:
            return False
        copy = PartCopy(
            number=part.start // job.unit,
            offset=part.start,
            source=source,
            start=place.start + first,
            length=length,
            source_bytes=place.file_bytes,
            last=part.stop == job.region.file_bytes,
        )
        begin_s = time.monotonic()
        try:
            told = job.upload.copy_part(copy)
        except (StorageError, IntegrityError) as error:
            if isinstance(error, StorageError) and error.kind in _COPY_REFUSALS:
                self._copies = False
                return False
            raise reader.explained(error, [place]) from error
        site.target_pace.succeeded(time.monotonic() - begin_s, length)
        read_bytes, expected = 0, None
        if place.crcs is not None:
            block = place.block_bytes
            crcs = place.crcs[first // block : -(-(first + length) // block)]
            expected = combine_blocks(crcs, block, length)
        if told is None and (place.fqn or job.file.crc32c is not None):
            told, read_bytes = reader.verify(place, first, first + length), length
        if expected not in {None, told}:
            # Raises if it is the source that is damaged.
            reader.verify(place, first, first + length)
            raise StorageError(
                f"The storage copied bytes [{copy.start}, {copy.start + length}) "
                f"of {site.source.url}/{place.path}, which belong to {place.fqn}, wrongly: "
                "the source is sound, and what it wrote has another checksum.",
                path=place.path,
                rank=place.rank,
                retryable=True,
                next_step="Try again; if it happens again, tell who runs the storage.",
            )
        with self._lock:
            job.spans.append((part.start, length, UNKNOWN_CRC if told is None else told))
            self._result.read_bytes += read_bytes
            self._result.copied_bytes += length
        return True
