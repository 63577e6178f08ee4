"""Moving bytes: one shard file out, many byte ranges in; bounded, parallel, checksummed.

Knows stores and checksums; knows no tensor, no format and no process group. Called by `writer`,
`reader` and `catalog`. Threads are daemons with names and a deadline: one that is stuck in the
kernel is abandoned, never joined at exit.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from . import integrity
from .deadline import Deadline
from .errors import CheckpointError, InvalidInputError
from .manifest import ItemTable, ShardFile
from .options import TransferOptions
from .store.base import Capabilities, Store, Upload

_GRACE_S = 10.0
_READ_GRACE_S = 330.0
_REPORT_S = 1.0

_MAX_UPLOAD_PARTS = 9_000
"""Below S3's 10,000, so that a plan whose sizes were estimated still fits."""


class Workers:
    """A few daemon threads that run jobs in parallel; the first failure stops the rest.

    Used as a context manager by one thread. `submit` blocks while `limit` jobs wait or run.
    Leaving the block waits at most a grace period for running jobs when it is left by an
    exception, and none are started any more.
    """

    def __init__(
        self,
        count: int,
        *,
        name: str,
        deadline: Deadline,
        limit: int | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._deadline = deadline
        self._name = name
        self._grace_s = grace_s
        self._limit = limit or 2 * count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open_count = 0
        self._failure: BaseException | None = None
        self._cancelled = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._cancelled:
                    job()
            except BaseException as error:  # noqa: BLE001  # handed to the submitting thread
                with self._changed:
                    self._failure = self._failure or error
                    self._cancelled = True
            finally:
                del job
                with self._changed:
                    self._open_count -= 1
                    self._changed.notify_all()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`; raise the failure of an earlier one, or `PhaseTimeoutError`."""
        self._wait(lambda: self._open_count < self._limit)
        with self._changed:
            self._open_count += 1
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until every job has ended; raise the first failure, or `PhaseTimeoutError`."""
        self._wait(lambda: self._open_count == 0)

    def _join(self, end: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not ready() and self._failure is None:
                if not self._changed.wait(min(1.0, self._deadline.remaining_s() + 0.001)):
                    self._deadline.check(self._name)
            if self._failure is not None:
                raise self._failure
        self._deadline.check(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancelled = True
        for _ in self._threads:
            self._jobs.put(None)
        begin = time.monotonic()
        end = begin + max(1.0, min(self._grace_s, self._deadline.remaining_s()))
        self._join(min(end, begin + _REPORT_S))
        if isinstance(error, CheckpointError) and any(t.is_alive() for t in self._threads):
            # Other ranks must not wait for what hangs here; and requests are given up now.
            self._deadline.failed(error)
        self._join(end)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck and error is not None:
            error.add_note(
                f"{', '.join(stuck)} still runs: memory that was being filled or sent must not "
                "be used again."
            )


def bounded(store: Store, deadline: Deadline, cancelled: Callable[[], bool] | None = None) -> Store:
    """Return `store` with every operation, retries included, ending by `deadline`.

    Once `cancelled` returns True no request is begun any more. Once what the deadline belongs to
    has failed, those under way are given up as well.
    """
    narrow = getattr(store, "with_deadline", None)
    if narrow is None:
        return store
    given_up = deadline.has_failed if deadline.is_watched else None
    narrowed: Store = narrow(deadline.at_monotonic_s, cancelled, given_up)
    return narrowed


def part_bytes_for(capabilities: Capabilities, options: TransferOptions, planned_bytes: int) -> int:
    """Return the part size for a file of about `planned_bytes`, legal for the store.

    Raises `InvalidInputError` if the memory limit does not allow it.
    """
    size = max(options.part_bytes, capabilities.min_part_bytes)
    limit = options.memory_limit_bytes
    if capabilities.max_part_count is not None:
        size = max(size, -(-planned_bytes // min(_MAX_UPLOAD_PARTS, capabilities.max_part_count)))
    multiple = capabilities.part_multiple_bytes
    size = -(-size // multiple) * multiple
    # A store may join the views of a part, so a part counts twice.
    if capabilities.is_remote and 2 * size > limit:
        raise InvalidInputError(
            f"A file of {planned_bytes} bytes needs parts of {size} bytes on this storage, two of "
            f"them in memory; memory_limit_bytes is {limit}.",
            next_step=f"Raise memory_limit_bytes to {2 * size} or more.",
        )
    return size


class ShardFileWriter:
    """Writes one shard file from front to back, in parts, and records its checksums.

    The calling thread cuts parts and computes CRCs while `thread_count` others send earlier
    parts. Buffers are sent from where they lie and must not change before `finish` returns. At
    most `memory_limit_bytes` of them are in flight.
    """

    def __init__(  # one call site, all named
        self,
        store: Store,
        path: str,
        *,
        options: TransferOptions,
        planned_bytes: int,
        deadline: Deadline,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        capabilities = store.capabilities
        self.path = path
        self.position = 0
        self._store = bounded(store, deadline)
        self._options = options
        self._deadline = deadline
        self._on_bytes = on_bytes
        self.part_bytes = part_bytes_for(capabilities, options, planned_bytes)
        self._workers = self._start_workers(capabilities)
        self._upload: Upload | None = None
        self._part: list[memoryview] = []
        self._part_size = 0
        self._part_count = 0
        self._sent_bytes = 0
        self._frame_crc = 0
        self._frame_bytes = 0
        self._crcs: list[int] = []
        self._lengths: list[int] = []
        self.frame_crcs: array[int] = array("I")
        self.chunk_crcs: array[int] = array("I")
        self.block_crcs: array[int] = array("I")

    def _start_workers(self, capabilities: Capabilities) -> Workers | None:
        """Return the threads that send; None where the calling thread does it as well itself.

        One local file takes one write at a time, and bytes that were just hashed are still in
        the cache: a second thread would only contend for them.
        """
        options = self._options
        if options.thread_count == 1 and not capabilities.is_remote:
            return None
        count = options.thread_count if capabilities.parallel_parts else 1
        # A store may join the views of a part, so a part counts twice against the limit.
        in_flight = max(1, options.memory_limit_bytes // (2 * self.part_bytes))
        return Workers(
            min(count, in_flight),
            name=f"write {self.path}",
            deadline=self._deadline,
            limit=max(1, min(count + 1, in_flight)),
        )

    def frame(self, data: bytes) -> None:
        """Append bytes that belong to no payload."""
        if data:
            self._frame_crc = integrity.crc32c_of(data, self._frame_crc)
            self._frame_bytes += len(data)
            self._append(memoryview(data))

    def payload(self, views: Iterable[memoryview]) -> int:
        """Append one payload given as consecutive byte views; return its length in bytes."""
        self._end_frame()
        start = self.position
        hasher = integrity.BlockHasher(self._options.block_bytes)
        for view in views:
            # Hash and queue in bounded steps, so that sending starts before a huge view is hashed.
            for at in range(0, len(view), self.part_bytes):
                piece = view[at : at + self.part_bytes]
                hasher.update(piece)
                self._append(piece)
        blocks = hasher.finish()
        length = self.position - start
        crc = integrity.combine_blocks(blocks, self._options.block_bytes, length)
        self.block_crcs.extend(blocks)
        self.chunk_crcs.append(crc)
        self._crcs.append(crc)
        self._lengths.append(length)
        return length

    def _end_frame(self) -> None:
        self.frame_crcs.append(self._frame_crc)
        self._crcs.append(self._frame_crc)
        self._lengths.append(self._frame_bytes)
        self._frame_crc = 0
        self._frame_bytes = 0

    def _append(self, view: memoryview) -> None:
        while len(view):
            if self._part_size == self.part_bytes:
                self._send(last=False)
            room = self.part_bytes - self._part_size
            piece, view = view[:room], view[room:]
            self._part.append(piece)
            self._part_size += len(piece)
            self.position += len(piece)

    def _send(self, *, last: bool) -> None:
        if self._upload is None:
            self._upload = self._store.start_upload(self.path, part_bytes=self.part_bytes)
        upload, number, offset = self._upload, self._part_count, self._sent_bytes
        views, size = self._part, self._part_size
        self._part, self._part_size = [], 0
        self._part_count += 1
        self._sent_bytes += size

        def send() -> None:
            upload.write_part(number, offset, views, last=last)
            views.clear()
            self._deadline.advanced(size)
            self._on_bytes(size)

        if self._workers is None:
            self._deadline.check(f"Writing {self.path}")
            send()
        else:
            self._workers.submit(send)

    def finish(self) -> tuple[int, int]:
        """Make the file visible and durable; return its length in bytes and its CRC-32C.

        Raises what the store raised; then nothing is visible and nothing is left behind.
        """
        self._end_frame()
        self._send(last=True)
        if self._workers is not None:
            self._workers.drain()
        upload = self._upload
        if upload is None:  # pragma: no cover  # _send made it
            raise CheckpointError(f"{self.path} has no upload.")
        upload.complete(self.position)
        self._deadline.ended_file()
        self._stop()
        return self.position, integrity.combine_many(self._crcs, self._lengths)

    def abort(self) -> None:
        """Discard everything; idempotent; never raises in place of the error being handled."""
        self._stop()
        if self._upload is not None:
            self._upload.abort()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)


class ShardTable:
    """Collects the items of a shard file as columns while the file is written."""

    def __init__(self) -> None:
        self.fqn: list[int] = []
        self.dtype: list[int] = []
        self.offsets: list[tuple[int, ...] | None] = []
        self.sizes: list[tuple[int, ...] | None] = []
        self.item_start: list[int] = []
        self.item_bytes: list[int] = []
        self.payload_start: list[int] = []
        self.payload_bytes: list[int] = []

    def shard_file(self, file: ShardFileWriter, size_bytes: int, crc32c: int) -> ShardFile:
        """Return the record of the finished `file`."""
        return ShardFile(
            path=file.path,
            size_bytes=size_bytes,
            crc32c=crc32c,
            block_bytes=file._options.block_bytes,  # noqa: SLF001  # same module
            items=ItemTable(
                fqn=self.fqn,
                dtype=self.dtype,
                offsets=self.offsets,
                sizes=self.sizes,
                item_start=self.item_start,
                item_bytes=self.item_bytes,
                payload_start=self.payload_start,
                payload_bytes=self.payload_bytes,
                chunk_crcs=file.chunk_crcs,
                block_crcs=file.block_crcs,
                frame_crcs=file.frame_crcs,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One ranged read: bytes `[start, stop)` of a file, and who takes them.

    With `target`, a writable view of that length, the bytes are read straight into it;
    otherwise into a buffer that is reused after `done` returns. `done` gets the view of the
    bytes, runs in a worker thread, verifies them and copies them out. `size_bytes` is the
    length the file must have.
    """

    path: str
    start: int
    stop: int
    done: Callable[[memoryview], None] = lambda _: None
    target: memoryview | None = None
    size_bytes: int | None = None
    check: Callable[[memoryview, int], None] | None = None
    check_bytes: int = 1


class _Arrivals:
    """Hands the bytes of one read to its check as they arrive, each once an attempt."""

    def __init__(self, fetch: Fetch, view: memoryview, given_up: threading.Event) -> None:
        self._fetch = fetch
        self._given_up = given_up
        self._view = view
        self._seen = 0
        self._checked = 0

    def arrived(self, count: int) -> None:
        """Check what has arrived by now; `count` is the number of bytes from the start."""
        if count <= self._seen:
            # Within an attempt the number grows: this is another one, and may bring other bytes.
            self._checked = 0
        self._seen = count
        self._check(count if count == len(self._view) else count - count % self._fetch.check_bytes)

    def finish(self) -> None:
        """Check what the store did not report."""
        self._check(len(self._view))

    def _check(self, stop: int) -> None:
        if self._given_up.is_set():
            raise CheckpointError(f"The read of {self._fetch.path} was given up.")
        start = self._checked
        if start < stop and self._fetch.check is not None:
            self._fetch.check(self._view[start:stop], start)
            self._checked = stop


def run_fetches(
    store: Store,
    fetches: Sequence[Fetch],
    *,
    options: TransferOptions,
    deadline: Deadline,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Do all reads, `thread_count` at a time, in the given order of start.

    Buffers take at most `memory_limit_bytes` in all. Raises the first failure; targets are then
    undefined.
    """
    if not fetches:
        return
    given_up = threading.Event()
    store = bounded(store, deadline, given_up.is_set)
    largest = max((f.stop - f.start for f in fetches if f.target is None), default=0)
    affordable = options.memory_limit_bytes // max(1, largest)
    count = max(1, min(options.thread_count, len(fetches), affordable))
    # One buffer per thread: fresh memory costs the kernel more than the copy out of it.
    scratch = threading.local()

    def run(fetch: Fetch) -> None:
        length = fetch.stop - fetch.start
        view = fetch.target
        if view is None:
            buffer = getattr(scratch, "buffer", None)
            if buffer is None:
                buffer = scratch.buffer = memoryview(bytearray(largest))
            view = buffer[:length]
        arrivals = _Arrivals(fetch, view, given_up)
        if length:
            store.read_into(
                fetch.path,
                fetch.start,
                view,
                size_bytes=fetch.size_bytes,
                arrived=arrivals.arrived if fetch.target is not None else None,
            )
        arrivals.finish()
        fetch.done(view)
        deadline.advanced(length)
        on_bytes(length)

    try:
        if count == 1:
            for fetch in fetches:
                deadline.check(f"Reading {fetch.path}")
                run(fetch)
            return
        # A read that still runs after a failure would write into targets that the caller may
        # fill from elsewhere by then: wait for it, as long as one request may take.
        workers = Workers(
            count, name=f"read from {store.url}", deadline=deadline, grace_s=_READ_GRACE_S
        )
        with workers, _setting(given_up):
            for fetch in fetches:
                workers.submit(partial(run, fetch))
            workers.drain()
    finally:
        given_up.set()


@contextmanager
def _setting(given_up: threading.Event) -> Iterator[None]:
    """Set the event when the block is left, before what is around it waits."""
    try:
        yield
    finally:
        given_up.set()
