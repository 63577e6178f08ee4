"""Parallel reads of many byte ranges, in bounded memory, checked as they arrive."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.backend import Range
from ckpt_storage.store.store import Store

from .budget import READ_BUDGET
from .objects import read_twice
from .pacing import Pacer
from .workers import Workers

_READ_GRACE_S = 330.0

_PIECE_BYTES = 1 << 20
"""Pieces of local reads, small enough to be checked in the processor's second-level cache."""


def ignore(_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """One ranged read: bytes `[start, stop)` of a file, and the functions that receive them.

    The bytes are read into `into`, a writable view of that length, or else into a buffer that is
    reused once `done` has returned. A thread of the reader calls `done` with the view. `file_bytes`
    is the length that the file must have. `check` gets the bytes as they arrive, with their
    distance from `start`, once per attempt, up to a multiple of `block_bytes` or the end.
    """

    path: str
    start: int
    stop: int
    file_bytes: int | None = None
    into: memoryview | None = None
    check: Callable[[memoryview, int], None] | None = None
    block_bytes: int = 1
    done: Callable[[memoryview], None] = ignore


class RangeReader:
    """Reads many byte ranges of one store, bounded; may be used by several threads.

    At most `options.thread_count` requests are in flight in each `run`, fewer after the storage
    throttled; consecutive readers share a `pacer`. Buffers, and responses that clients hold, take
    at most `memory_limit_bytes` in all reads of the process. All end by the deadline of the store.
    """

    def __init__(
        self, store: Store, options: TransferOptions, *, pacer: Pacer | None = None
    ) -> None:
        self.store, self.options = store, options
        # All at once: reads wait for the first byte, and a storage with too many throttles.
        self.pacer = pacer or Pacer(options.thread_count)

    def run(self, reads: Sequence[RangeRead], *, on_bytes: Callable[[int], None] = ignore) -> None:
        """Do all reads, begun in their order.

        Raises the first failure; the content of the targets is then undefined.
        """
        if reads:
            run = _Run(self, reads, on_bytes)
            try:
                run.go(reads)
            finally:
                run.cancelled.set()


class _Run:
    """One call of `RangeReader.run`: its buffers and its share of the memory."""

    def __init__(
        self, reader: RangeReader, reads: Sequence[RangeRead], on_bytes: Callable[[int], None]
    ) -> None:
        self.cancelled = threading.Event()
        self.deadline = reader.store.deadline
        self.on_bytes = on_bytes
        self._is_remote = reader.store.capabilities.is_remote
        self._limit_bytes = reader.options.memory_limit_bytes
        self._buffer_bytes = max((r.stop - r.start for r in reads if r.into is None), default=0)
        # Fresh memory costs the kernel more than the copy out of it, so buffers are reused.
        self.buffers: list[memoryview] = []
        largest_cost_bytes = max(map(self._cost_bytes, reads))
        affordable_count = self._limit_bytes // max(1, largest_cost_bytes)
        self._max_count = max(1, min(reader.options.thread_count, len(reads), affordable_count))
        self.pacer = reader.pacer
        self._store = reader.store.bounded(
            self.deadline, self.cancelled.is_set, throttled=self.pacer.slowed_down
        )

    def go(self, reads: Sequence[RangeRead]) -> None:
        batches = [[read] for read in reads]
        if self._max_count == 1:
            if not self._is_remote:
                # A read from the kernel's cache takes little longer than to open its file, so a
                # file is opened once.
                same_file = groupby(reads, key=lambda read: (read.path, read.file_bytes))
                batches = [list(batch) for _, batch in same_file]
            for batch in batches:
                self.deadline.check(f"Reading {batch[0].path}")
                cost_bytes = self._claim(batch)
                try:
                    self._read(batch)
                finally:
                    READ_BUDGET.release(cost_bytes)
            return
        # A read that still runs after a failure writes into targets that the caller may reuse, so
        # wait for it as long as one request may take.
        workers = Workers(
            self._max_count,
            name=f"read from {self._store.url}",
            deadline=self.deadline,
            limit=lambda: min(self._max_count, self.pacer.limit()),
            grace_s=_READ_GRACE_S,
        )
        with workers:
            try:
                for batch in batches:
                    ended = partial(READ_BUDGET.release, self._claim(batch))
                    workers.submit(partial(self._read, batch), ended=ended)
                workers.drain()
            finally:
                # Before `Workers` waits for its threads.
                self.cancelled.set()

    def _cost_bytes(self, read: RangeRead) -> int:
        """Return the memory that a read takes besides its target: a buffer, a client's copy."""
        buffer_bytes = self._buffer_bytes if read.into is None else 0
        return buffer_bytes + (read.stop - read.start if self._is_remote else 0)

    def _claim(self, batch: Sequence[RangeRead]) -> int:
        # Only one read is in flight at a time.
        cost_bytes = max(map(self._cost_bytes, batch))
        if cost_bytes:
            READ_BUDGET.acquire(cost_bytes, limit_bytes=self._limit_bytes, deadline=self.deadline)
        return cost_bytes

    def _read(self, batch: Sequence[RangeRead]) -> None:
        first = batch[0]
        ranges = _Ranges(self, batch, None if self._is_remote else _PIECE_BYTES)

        def read() -> None:
            if any(read.start < read.stop for read in batch):
                self._store.read(first.path, ranges, size_bytes=first.file_bytes)
            else:
                deque(ranges, maxlen=0)
            ranges.finish()

        # Ranges that were done before the mismatch are not read again.
        read_twice(self._store, first.path, read)

    def check(self, path: str) -> None:
        if self.cancelled.is_set():
            raise CheckpointError(f"The read of {path} was cancelled.")

    def buffer(self) -> memoryview:
        # One list operation is atomic, without a lock.
        try:
            return self.buffers.pop()
        except IndexError:
            return memoryview(bytearray(self._buffer_bytes))


class _Ranges:
    """The reads of one file as pieces for a store; a read is done once all of it is checked.

    A new iteration continues with the first read that is not done, from its first byte. `finish`
    ends the last read, as a client may refuse a response at its end. Remote reads (`piece_bytes`
    None) are checked only then.
    """

    def __init__(self, run: _Run, batch: Sequence[RangeRead], piece_bytes: int | None) -> None:
        self._run = run
        self._pending = deque(batch)
        self._piece_bytes = piece_bytes
        self._view = memoryview(b"")
        self._buffer: memoryview | None = None

    def __iter__(self) -> Iterator[Range]:
        while True:
            read = self._pending[0]
            self._run.deadline.check(f"Reading {read.path}")
            # Not the buffer of an earlier attempt: an abandoned request may still fill it.
            self._buffer = self._run.buffer() if read.into is None else None
            length = read.stop - read.start
            view = read.into if self._buffer is None else self._buffer[:length]
            assert view is not None  # noqa: S101  # either of the two
            self._view = view
            yield from self._pieces(read, view)
            if len(self._pending) == 1:
                return
            self._end()

    def finish(self) -> None:
        """Check the rest, and end the last read."""
        read = self._pending[0]
        if read.check is not None and self._piece_bytes is None and len(self._view):
            read.check(self._view, 0)
        self._end()

    def _end(self) -> None:
        read, run = self._pending[0], self._run
        run.check(read.path)
        read.done(self._view)
        # After `done`, which may raise a mismatch: then the read is repeated.
        self._pending.popleft()
        if self._buffer is not None:
            run.buffers.append(self._buffer)
        length = read.stop - read.start
        run.deadline.monitor.advanced(length)
        run.on_bytes(length)

    def _pieces(self, read: RangeRead, view: memoryview) -> Iterator[Range]:
        length, checked = len(view), 0
        check = None if self._piece_bytes is None else read.check
        step = (check and self._piece_bytes) or length or 1
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield read.start + start, view[start:stop]
            self._run.pacer.succeeded()
            self._run.check(read.path)
            block_end = stop if stop == length else stop - stop % read.block_bytes
            if check is not None and checked < block_end:
                check(view[checked:block_end], checked)
                checked = block_end
