"""Writing the regions of a plan: which part goes which way, many at a time, within the memory.

A region of a shared upload is cut by `storagecopy` into parts that the storage copies and parts
that `stream` puts together; one of another upload into the parts that the plan numbered. Each
thread does one part at a time, reading and writing, so that one part is being written while the
next is being read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.export.relay import Buffers, Paces, PartWorkers, timed
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.options import MIB, TransferOptions
from ckpt_storage.source.model import Source
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload

from .plan import ExportPlan, Region
from .storagecopy import CopyPart, CopyRun, StreamPart, copy_runs, cut_region, streamed
from .stream import WindowReader

Copies = Literal["auto", "always", "never"]
"""Which parts the storage copies: where that pays, wherever it can, none."""

_LOCAL_WINDOW_BYTES = 16 * MIB
"""Put together at a time for a local disk: many chunks side by side still give long reads."""

_LOCAL_READ_BYTES = 2 * MIB
"""One read of a local disk, through a buffer that stays in the processor's cache."""

_LEAST_THREADS = 2
"""One part is written while another is being read."""

_COPY_REFUSALS = frozenset({"permission", "unsupported"})
"""Kinds of refusals of a copy after which its bytes are streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Bytes [start, stop) of weight file `file` as they were written, with their CRC-32C.

    `read_bytes` came to this process, `sent_bytes` left it, `copied_bytes` were copied by the
    storage.
    """

    file: int
    start: int
    stop: int
    crc32c: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int


class RegionWriter:
    """Writes regions, one after the other, of one plan on one rank; buffers are kept in between.

    Buffers take at most `options.memory_limit_bytes` of the process's budget. `paces` decides how
    many parts are under way; for what is heard of the target, uploads are begun on a store that
    tells it. `on_bytes` gets the bytes of weight files that are done; it is called from several
    threads. After a failure the writer must not be used again, since a thread that hangs may still
    fill a buffer.
    """

    def __init__(  # one call site, all named
        self,
        plan: ExportPlan,
        *,
        source: Source,
        source_store: Store,
        target_store: Store,
        options: TransferOptions,
        deadline: Deadline,
        copies: Copies = "auto",
        on_bytes: Callable[[int], None] = lambda _: None,
        paces: Paces | None = None,
    ) -> None:
        capabilities = target_store.capabilities
        window_bytes = read_bytes = options.part_bytes
        if not (capabilities.is_remote or source_store.capabilities.is_remote):
            window_bytes = min(_LOCAL_WINDOW_BYTES, options.part_bytes)
            read_bytes = min(_LOCAL_READ_BYTES, options.part_bytes)
        paces = paces or paces_for(options)
        store = source_store.bounded(deadline, throttled=paces.source.slowed_down)
        self._means = _Means(
            source_store=store,
            capabilities=capabilities,
            reader=WindowReader(
                plan,
                source,
                store,
                deadline=deadline,
                read_bytes=read_bytes,
                options=options,
                pacer=paces.source,
            ),
            paces=paces,
            options=options,
            window_bytes=window_bytes,
            deadline=deadline,
            buffers=Buffers(),
            on_bytes=on_bytes,
        )
        self._copies = (
            copies != "never"
            and capabilities.copy_min_bytes is not None
            and target_store.can_copy_from(source_store, at_any_price=copies == "always")
        )
        self._copy_align_bytes = capabilities.copy_align_bytes if copies == "auto" else 1

    def write(self, region: Region, upload: Upload) -> Portion:
        """Write all parts of `region` to `upload`, which stays open; return what was written.

        Where uploads can be shared, a region is cut anew: part numbers then count in units of
        `storagecopy.number_unit_bytes`, alike on all ranks. Any other takes the region's own
        parts, in order where the storage wants that. Raises what the stores raise, naming tensor
        and rank; `IntegrityError` for damage of the source.
        """
        reader = self._means.reader
        reader.require(region)
        try:
            return _Job(self._means, region, upload, self._cut(region)).run()
        finally:
            reader.forget()

    def _cut(self, region: Region) -> Sequence[StreamPart | CopyPart]:
        if not self._means.capabilities.tokens_travel:
            return [
                StreamPart(
                    number=part.number, start=part.start, stop=part.stop, is_last=part.is_last
                )
                for part in region.parts()
            ]
        means = self._means
        runs: list[CopyRun] = []
        if self._copies:
            pieces = means.reader.pieces_of(region.file, region.start, region.stop)
            runs = [
                run
                for run in copy_runs(pieces, means.reader.place_of, means.capabilities)
                if not (run.place.start + run.source_start - run.start) % self._copy_align_bytes
            ]
        return cut_region(region, runs, means.capabilities, stream_bytes=means.window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """What the regions of one writer are written with."""

    source_store: Store
    capabilities: Capabilities
    reader: WindowReader
    paces: Paces
    options: TransferOptions
    window_bytes: int
    deadline: Deadline
    buffers: Buffers
    on_bytes: Callable[[int], None]


def paces_for(options: TransferOptions) -> Paces:
    """Return what is to decide how many parts of one consolidation are under way on a rank."""
    return Paces(max(options.thread_count, _LEAST_THREADS))


class _Job:
    """One region on its way."""

    def __init__(
        self,
        means: _Means,
        region: Region,
        upload: Upload,
        parts: Sequence[StreamPart | CopyPart],
    ) -> None:
        self._means = means
        self._region = region
        self._upload = upload
        self._parts = parts
        self._lock = threading.Lock()
        self._crcs: dict[int, tuple[int, int]] = {}
        self._read_bytes = self._sent_bytes = self._copied_bytes = 0
        self._turn = threading.Condition()
        self._next_start = region.start
        self._failure: BaseException | None = None
        self._copies_refused = False
        self._scratch_bytes = means.reader.scratch_bytes()
        streams = [piece for part in parts for piece in self._as_streams(part)]
        self._window_bytes = max(part.stop - part.start for part in streams)

    def run(self) -> Portion:
        """Do all parts; raise the first failure."""
        region, means = self._region, self._means
        each_bytes = self._each_bytes()
        with PartWorkers(
            self._thread_count(each_bytes),
            name=f"consolidate file {region.file} from byte {region.start}",
            paces=means.paces,
            each_bytes=each_bytes,
            limit_bytes=means.options.memory_limit_bytes,
            buffers=means.buffers,
            deadline=means.deadline,
        ) as workers:
            try:
                for part in self._parts:
                    workers.submit(partial(self._do, part))
                workers.drain()
            except BaseException as error:
                self._fail(error)
                raise
        order = sorted(self._crcs)
        crcs, lengths = zip(*(self._crcs[start] for start in order), strict=True)
        return Portion(
            file=region.file,
            start=region.start,
            stop=region.stop,
            crc32c=combine_many(crcs, lengths),
            read_bytes=self._read_bytes,
            sent_bytes=self._sent_bytes,
            copied_bytes=self._copied_bytes,
        )

    def _each_bytes(self) -> int:
        """Return the memory that one part takes."""
        # A store may join the views of a part, so a part counts twice.
        windows = 2 if self._means.capabilities.is_remote else 1
        return windows * self._window_bytes + self._scratch_bytes

    def _thread_count(self, each_bytes: int) -> int:
        """Return how many threads may work at a time within the memory limit."""
        options = self._means.options
        affordable = options.memory_limit_bytes // each_bytes
        if not affordable:
            raise InvalidInputError(
                f"Parts of {self._window_bytes} bytes need {each_bytes} bytes of memory; "
                f"memory_limit_bytes is {options.memory_limit_bytes}.",
                next_step=f"Raise memory_limit_bytes to {each_bytes} or more.",
            )
        return min(max(options.thread_count, _LEAST_THREADS), affordable, len(self._parts))

    def _do(self, part: StreamPart | CopyPart) -> None:
        try:
            self._means.deadline.check("Consolidating")
            if isinstance(part, StreamPart):
                self._stream(part)
            elif self._copies_refused or not self._copied(part):
                for piece in self._as_streams(part):
                    self._stream(piece)
        except BaseException as error:
            self._fail(error)
            raise
        self._means.on_bytes(part.stop - part.start)

    def _as_streams(self, part: StreamPart | CopyPart) -> Sequence[StreamPart]:
        """Return the parts that a part is streamed as."""
        if isinstance(part, StreamPart):
            return [part]
        return streamed(
            self._region,
            part.start,
            part.stop,
            self._means.capabilities,
            stream_bytes=self._means.window_bytes,
        )

    def _fail(self, error: BaseException) -> None:
        """Tell threads that wait for their turn that it will not come, and why."""
        with self._turn:
            self._failure = self._failure or error
            self._turn.notify_all()

    def _stream(self, part: StreamPart) -> None:
        means, length = self._means, part.stop - part.start
        with (
            means.buffers.taken(self._window_bytes) as buffer,
            means.buffers.taken(self._scratch_bytes) as scratch,
        ):
            window = buffer[:length]
            read_bytes = means.reader.fill(
                self._region.file, part.start, part.stop, window, scratch
            )
            crc32c = crc32c_of(window)
            with self._my_turn(part), timed(means.paces.target, length):
                self._upload.write_part(part.number, part.start, [window], last=part.is_last)
        with self._lock:
            self._crcs[part.start] = crc32c, length
            self._read_bytes += read_bytes
            self._sent_bytes += length

    @contextmanager
    def _my_turn(self, part: StreamPart) -> Iterator[None]:
        """Wait until all bytes before the part were written, where the storage wants that."""
        if self._means.capabilities.parallel_parts:
            yield
            return
        deadline = self._means.deadline
        with self._turn:
            while self._next_start != part.start:
                if self._failure is not None:
                    # The same one: whichever thread is noticed first tells the cause.
                    raise self._failure
                deadline.check("Consolidating")
                self._turn.wait(min(1.0, deadline.remaining_s() + 0.001))
        yield
        with self._turn:
            self._next_start = part.stop
            self._turn.notify_all()

    def _copied(self, part: CopyPart) -> bool:
        """Have the storage copy a part; return False if it will not.

        What it copied is checked: by the checksum that it tells, or by reading the source.
        """
        means, place, length = self._means, part.place, part.stop - part.start
        source = means.source_store.copy_source(place.path)
        if source is None:
            return False
        try:
            with timed(means.paces.target, length):
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
                self._copies_refused = True
                return False
            raise means.reader.explained(error, [place]) from error
        means.deadline.advanced(length)
        read_bytes = 0
        if told is None:
            with means.buffers.taken(self._scratch_bytes) as scratch:
                told = means.reader.verify(place, part.source_start, part.source_stop, scratch)
            read_bytes = length
        if part.crc32c not in {None, told}:
            with means.buffers.taken(self._scratch_bytes) as scratch:
                # Raises if it is the source that is damaged.
                means.reader.verify(place, part.source_start, part.source_stop, scratch)
            raise _copied_wrongly(part, means.source_store.url)
        with self._lock:
            self._crcs[part.start] = told, length
            self._read_bytes += read_bytes
            self._copied_bytes += length
        return True


def _copied_wrongly(part: CopyPart, url: str) -> StorageError:
    place = part.place
    start, stop = place.start + part.source_start, place.start + part.source_stop
    return StorageError(
        f"The storage copied bytes [{start}, {stop}) of {url}/{place.path}, which belong to "
        f"{place.fqn}, wrongly: the source is sound, and what it wrote has another checksum.",
        path=place.path,
        rank=place.rank,
        phase="consolidate",
        retryable=True,
        next_step="Consolidate again; if it happens again, tell who runs the storage.",
    )
