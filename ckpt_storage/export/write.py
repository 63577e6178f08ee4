"""Writing regions of output files: many parts at a time, within the memory, streamed or copied.

A thread does one part at a time: it reads, checks, places and sends, so that one part is being
written while the next is being read. Long runs of stored bytes the storage copies by itself, where
it can; they are checked by the checksum that it tells, or else by reading the source.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

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
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.budget import BUDGET
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import Workers

from .pieces import FilePart, PieceFinder, Run, copy_runs, cut_region, cut_run
from .plan import Plan, Region
from .reads import Readable, Reading, RegionReader

Copies = Literal["auto", "always", "never"]
"""Which parts the storage copies: where that pays, wherever it can, none."""

_LOCAL_THREADS = 2
_REMOTE_THREADS = 8
_LEAST_THREADS = 2
"""One part is written while another is being read."""

_LOCAL_WINDOW_BYTES = 16 * MIB
"""Put together at a time for a local disk: many chunks side by side still give long reads."""

_LOCAL_READ_BYTES = 2 * MIB
"""One read of a local disk, through a buffer that stays in the processor's cache."""

_COPY_REFUSALS = frozenset({"permission", "unsupported"})
"""Kinds of refusals of a copy after which its bytes are streamed."""


def transfer_options(
    source: Store, target: Store, *, memory_limit_bytes: int | None, thread_count: int | None = None
) -> TransferOptions:
    """Return threads and sizes that suit both storages within the memory limit."""
    is_remote = source.capabilities.is_remote or target.capabilities.is_remote
    # All ranks plan alike, on nodes with more of them and with fewer.
    planned = DEFAULT_MEMORY_LIMIT_BYTES if memory_limit_bytes is None else memory_limit_bytes
    threads = thread_count or (_REMOTE_THREADS if is_remote else _LOCAL_THREADS)
    part_bytes = _LOCAL_WINDOW_BYTES
    # A part in flight takes up to three times its bytes: read, put together, joined by a client.
    share_bytes = planned // (3 * threads)
    if is_remote:
        part_bytes = DEFAULT_PART_BYTES
        share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
    return TransferOptions(
        thread_count=threads,
        part_bytes=max(min(part_bytes, share_bytes), MIB // 16),
        memory_limit_bytes=default_memory_limit_bytes()
        if memory_limit_bytes is None
        else memory_limit_bytes,
    )


class Paces:
    """What a transfer has learned of the storages it reads from and writes to; in any thread."""

    def __init__(self, options: TransferOptions) -> None:
        most = max(options.thread_count, _LEAST_THREADS)
        self.source = Pacer(most)
        self.target = Pacer(most, start=REMOTE_THREADS)

    def limit(self) -> int:
        """Return how many parts may be under way now: what both storages bear."""
        return min(self.source.limit(), self.target.limit())


class Buffers:
    """Memory of the parts of one transfer, kept from part to part; safe in any thread.

    Fresh memory costs the kernel more than the copies that go through it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._is_kept = True

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[memoryview]:
        """Lend a buffer of at least `size_bytes`; one in use when an error came is not kept."""
        with self._lock:
            fitting = [buffer for buffer in self._free if len(buffer) >= size_bytes]
            buffer = min(fitting, key=len, default=None)
            if buffer is not None:
                self._free.remove(buffer)
            elif self._free:
                # One that is too small would count against the limit for nothing.
                self._free.remove(min(self._free, key=len))
        if buffer is None:
            buffer = memoryview(bytearray(size_bytes))
        yield buffer
        with self._lock:
            if self._is_kept:
                self._free.append(buffer)

    @contextmanager
    def unkept(self) -> Iterator[None]:
        """Keep nothing that is not in use, for the time of a block."""
        with self._lock:
            self._is_kept = False
            self._free.clear()
        try:
            yield
        finally:
            with self._lock:
                self._is_kept = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Bytes [start, stop) of file number `file` - 1 as they were written.

    crc32c: of them; None where neither the storage nor the source tells it. spans: of files with
    edges, (start, length, CRC-32C) of consecutive bytes, cut at the edges and between parts.
    `read_bytes` came to this process, `sent_bytes` left it, `copied_bytes` the storage copied.
    """

    file: int
    start: int
    stop: int
    crc32c: int | None
    spans: Sequence[tuple[int, int, int]]
    read_bytes: int
    sent_bytes: int
    copied_bytes: int


Begin = Callable[[Region], Upload]
End = Callable[[Region, Upload, Portion], None]


class RegionWriter:
    """Writes regions of one plan on one rank; buffers are kept in between.

    Buffers take at most `options.memory_limit_bytes` of the process's budget. `paces` decides how
    many parts are under way; for what is heard of the target, uploads are begun on a store that
    tells it. `on_bytes` gets the bytes that are done; it is called from several threads. After a
    failure the writer must not be used again, since a thread that hangs may still fill a buffer.
    """

    def __init__(  # all named
        self,
        plan: Plan,
        *,
        source: Readable,
        source_store: Store,
        target_store: Store,
        options: TransferOptions,
        deadline: Deadline,
        copies: Copies = "auto",
        on_bytes: Callable[[int], None] = lambda _: None,
        paces: Paces | None = None,
    ) -> None:
        self.plan = plan
        self.capabilities = target_store.capabilities
        self.window_bytes = read_bytes = options.part_bytes
        if not (self.capabilities.is_remote or source_store.capabilities.is_remote):
            self.window_bytes = min(_LOCAL_WINDOW_BYTES, options.part_bytes)
            read_bytes = min(_LOCAL_READ_BYTES, options.part_bytes)
        self.paces = paces or Paces(options)
        self.source_store = source_store.bounded(deadline, throttled=self.paces.source.slowed_down)
        self.reading = Reading(
            finder=PieceFinder(plan.layout, source.tensors),
            source=source,
            store=self.source_store,
            deadline=deadline,
            read_bytes=read_bytes,
            options=options,
            pacer=self.paces.source,
        )
        self.options = options
        self.deadline = deadline
        self.buffers = Buffers()
        self.on_bytes = on_bytes
        self.copies = (
            copies != "never"
            and self.capabilities.tokens_travel
            and self.capabilities.copy_min_bytes is not None
            and target_store.can_copy_from(source_store, at_any_price=copies == "always")
        )
        self._align_bytes = self.capabilities.copy_align_bytes if copies == "auto" else 1
        self._waiting_bytes = 0

    def write(self, regions: Iterable[Region], begin: Begin, end: End) -> None:
        """Write all parts of all regions, side by side.

        `begin` gives the upload of a region; `end` is called, in some thread, once all of the
        region was written to it. Where uploads can be shared, part numbers count in units of
        `pieces.number_unit_bytes`, alike on all ranks; else they are the region's own, in order
        where the storage wants that. Raises what the stores raise, naming tensor and rank.
        """
        options = self.options
        count = max(options.thread_count, _LEAST_THREADS)
        with Workers(
            count,
            name=f"export to {self.plan.files[0].name}",
            deadline=self.deadline,
            limit=self._most_open,
        ) as workers:
            jobs: list[_Job] = []
            try:
                for region in regions:
                    job = _Job(self, region, begin, end)
                    jobs = [one for one in jobs if not one.has_ended] + [job]
                    for part in job.parts:
                        # First a place: a failure is heard there, and our own parts leave memory.
                        workers.wait_for_place()
                        self._claim(job.each_bytes)
                        workers.submit(
                            partial(job.do, part), ended=partial(BUDGET.release, job.each_bytes)
                        )
                workers.drain()
            except BaseException as error:
                for job in jobs:
                    job.fail(error)
                raise

    def parts_of(self, region: Region, reader: RegionReader) -> Sequence[FilePart]:
        """Return the parts that a region is written in."""
        if not self.capabilities.tokens_travel:
            size = region.file_bytes
            return [
                FilePart(number=number, start=start, stop=stop, is_last=stop == size)
                for number, start, stop in region.parts()
            ]
        runs = []
        if self.copies and not self.plan.files[region.file].edges:
            pieces = reader.pieces_of(region.start, region.stop)
            runs = [
                run
                for run in copy_runs(pieces, reader.place_of, self.capabilities)
                if run.place
                and not (run.place.start + run.source_start - run.start) % self._align_bytes
            ]
        return cut_region(region, runs, self.capabilities, stream_bytes=self.window_bytes)

    def each_bytes(self, window_bytes: int, scratch_bytes: int) -> int:
        """Return the memory that a part takes. Raises `InvalidInputError` if that is too much."""
        # A store may join the views of a part, so a part counts twice.
        windows = 2 if self.capabilities.is_remote else 1
        each, limit = windows * window_bytes + scratch_bytes, self.options.memory_limit_bytes
        if each > limit:
            raise InvalidInputError(
                f"Parts of {window_bytes} bytes need {each} bytes of memory; "
                f"memory_limit_bytes is {limit}.",
                next_step=f"Raise memory_limit_bytes to {each} or more.",
            )
        # One that waits, so that no thread does, where there is memory for it.
        self._waiting_bytes = each
        return each

    def _most_open(self) -> int:
        options = self.options
        count = max(options.thread_count, _LEAST_THREADS)
        limit = self.paces.limit()
        has_room = (count + 1) * self._waiting_bytes <= options.memory_limit_bytes
        return limit if limit < count else count + has_room

    def _claim(self, count: int) -> None:
        limit = self.options.memory_limit_bytes
        if BUDGET.held_bytes + count <= limit:
            BUDGET.acquire(count, limit_bytes=limit, deadline=self.deadline)
            return
        # Another transfer has what is missing; buffers that nobody claimed would come on top.
        with self.buffers.unkept():
            BUDGET.acquire(count, limit_bytes=limit, deadline=self.deadline)


class _Job:
    """One region on its way."""

    def __init__(self, writer: RegionWriter, region: Region, begin: Begin, end: End) -> None:
        self._writer = writer
        self._region = region
        self._end = end
        self._file = writer.plan.files[region.file]
        self._reader = RegionReader(writer.reading, region.file, region.start, region.stop)
        self.parts = writer.parts_of(region, self._reader)
        streams = [piece for part in self.parts for piece in self._as_streams(part)]
        self._window_bytes = max(part.size_bytes for part in streams)
        self.each_bytes = writer.each_bytes(self._window_bytes, self._reader.scratch_bytes)
        self._edges = self._file.edges
        self._lock = threading.Lock()
        self._left_count = len(self.parts)
        self._spans: dict[int, tuple[int, int | None]] = {}
        self._read_bytes = self._sent_bytes = self._copied_bytes = 0
        self._turn = threading.Condition()
        self._next_start = region.start
        self._failure: BaseException | None = None
        self.has_ended = False
        self._upload = begin(region)

    def do(self, part: FilePart) -> None:
        """Do one part, and what follows the last."""
        writer = self._writer
        try:
            writer.deadline.check(f"Writing {self._file.name}")
            if part.place is None or not writer.copies or not self._copied(part):
                for piece in self._as_streams(part):
                    self._stream(piece)
            writer.deadline.advanced(part.size_bytes)
            writer.on_bytes(part.size_bytes)
            with self._lock:
                self._left_count -= 1
                is_over = not self._left_count
            if is_over:
                self._end(self._region, self._upload, self._portion())
                self.has_ended = True
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell threads that wait for their turn that it will not come, and why."""
        with self._turn:
            self._failure = self._failure or error
            self._turn.notify_all()

    def _portion(self) -> Portion:
        starts = sorted(self._spans)
        lengths = [self._spans[start][0] for start in starts]
        crcs = [crc for start in starts if (crc := self._spans[start][1]) is not None]
        is_known = len(crcs) == len(starts)
        return Portion(
            file=self._region.file,
            start=self._region.start,
            stop=self._region.stop,
            crc32c=combine_many(crcs, lengths) if is_known else None,
            spans=tuple(zip(starts, lengths, crcs, strict=True)) if self._edges else (),
            read_bytes=self._read_bytes,
            sent_bytes=self._sent_bytes,
            copied_bytes=self._copied_bytes,
        )

    def _as_streams(self, part: FilePart) -> Sequence[FilePart]:
        """Return the parts that a part is streamed as."""
        if part.place is None:
            return [part]
        writer, run = self._writer, Run(start=part.start, stop=part.stop)
        return cut_run(self._region, run, writer.capabilities, stream_bytes=writer.window_bytes)

    def _stream(self, part: FilePart) -> None:
        writer, length = self._writer, part.size_bytes
        with (
            writer.buffers.taken(self._window_bytes) as buffer,
            writer.buffers.taken(self._reader.scratch_bytes) as scratch,
        ):
            window = buffer[:length]
            read_bytes = self._reader.fill(part.start, part.stop, window, scratch)
            spans = list(self._spans_of(part, window))
            with self._my_turn(part):
                begin_s = time.monotonic()
                self._upload.write_part(part.number, part.start, [window], last=part.is_last)
                writer.paces.target.succeeded(time.monotonic() - begin_s, length)
        with self._lock:
            self._spans.update(spans)
            self._read_bytes += read_bytes
            self._sent_bytes += length

    def _spans_of(
        self, part: FilePart, window: memoryview
    ) -> Iterator[tuple[int, tuple[int, int | None]]]:
        """Yield the checksums of a part, cut at the edges."""
        at, edges = part.start, self._edges
        number = bisect_right(edges, at)
        while at < part.stop:
            stop = min(edges[number], part.stop) if number < len(edges) else part.stop
            crc = crc32c_of(window[at - part.start : stop - part.start])
            yield at, (stop - at, crc)
            at, number = stop, number + 1

    @contextmanager
    def _my_turn(self, part: FilePart) -> Iterator[None]:
        """Wait until all bytes before the part were written, where the storage wants that."""
        if self._writer.capabilities.parallel_parts:
            yield
            return
        deadline = self._writer.deadline
        with self._turn:
            while self._next_start != part.start:
                if self._failure is not None:
                    # The same one: whichever thread is noticed first tells the cause.
                    raise self._failure
                deadline.check(f"Writing {self._file.name}")
                self._turn.wait(min(1.0, deadline.remaining_s() + 0.001))
        yield
        with self._turn:
            self._next_start = part.stop
            self._turn.notify_all()

    def _copied(self, part: FilePart) -> bool:
        """Have the storage copy a part; return False if it will not."""
        writer, place, length = self._writer, part.place, part.size_bytes
        assert place is not None  # noqa: S101  # the caller looked
        source = writer.source_store.copy_source(place.path)
        if source is None:
            return False
        begin_s = time.monotonic()
        try:
            told = self._upload.copy_part(
                part.number,
                part.start,
                source,
                place.start + part.source_start,
                length,
                source_bytes=place.file_bytes,
                last=part.is_last,
            )
        except (StorageError, IntegrityError) as error:
            if isinstance(error, StorageError) and error.kind in _COPY_REFUSALS:
                writer.copies = False
                return False
            raise self._reader.explained(error, [place]) from error
        writer.paces.target.succeeded(time.monotonic() - begin_s, length)
        stop = part.source_start + length
        read_bytes = 0
        is_wanted = bool(place.fqn) or self._file.crc32c is not None
        with writer.buffers.taken(self._reader.scratch_bytes) as scratch:
            if told is None and is_wanted:
                told = self._reader.verify(place, part.source_start, stop, scratch)
                read_bytes = length
            if part.crc32c not in {None, told}:
                # Raises if it is the source that is damaged.
                self._reader.verify(place, part.source_start, stop, scratch)
                raise _copied_wrongly(part, writer.source_store.url)
        with self._lock:
            self._spans[part.start] = length, told
            self._read_bytes += read_bytes
            self._copied_bytes += length
        return True


def _copied_wrongly(part: FilePart, url: str) -> StorageError:
    place = part.place
    assert place is not None  # noqa: S101  # it was copied
    start = place.start + part.source_start
    return StorageError(
        f"The storage copied bytes [{start}, {start + part.size_bytes}) of {url}/{place.path}, "
        f"which belong to {place.fqn}, wrongly: the source is sound, and what it wrote has another "
        "checksum.",
        path=place.path,
        rank=place.rank,
        retryable=True,
        next_step="Try again; if it happens again, tell who runs the storage.",
    )
