"""Many byte ranges in: ranged reads in parallel, bounded, checked while they arrive."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.base import Store
from ckpt_storage.store.deadline import Deadline

from .pacing import Budget, Pacer
from .workers import Workers, bounded, in_one_thread

_READ_GRACE_S = 330.0

_BUDGET = Budget()
"""Of this process's reads. Not that of its writes: one that waits for what it is to write holds
memory already, and nobody may hold some and wait for more."""

# A child of fork has none of its parent's transfers, and perhaps a lock that nobody holds.
os.register_at_fork(after_in_child=_BUDGET.__init__)  # type: ignore[misc]  # of a plain object


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One ranged read: bytes `[start, stop)` of a file, and who takes them.

    With `target`, a writable view of that length, the bytes are read straight into it;
    otherwise into a buffer that is reused after `done` returns. `done` gets the view of the
    bytes, runs in a worker thread, verifies them and copies them out. `size_bytes` is the
    length the file must have.

    `check` gets the bytes as they arrive, with their distance from `start`, every byte once an
    attempt; what it gets ends at a multiple of `check_bytes`, or where `edge_before` says that
    the first so many bytes can be judged without the rest, or with the range.
    """

    path: str
    start: int
    stop: int
    done: Callable[[memoryview], None] = lambda _: None
    target: memoryview | None = None
    size_bytes: int | None = None
    check: Callable[[memoryview, int], None] | None = None
    check_bytes: int = 1
    edge_before: Callable[[int], int] | None = None


class _Arrivals:
    """Hands the bytes of one read to its check as they arrive, each once an attempt."""

    __slots__ = ("_checked", "_fetch", "_given_up", "_length", "_seen", "_view")

    def __init__(self, fetch: Fetch, view: memoryview, given_up: threading.Event) -> None:
        self._fetch = fetch
        self._given_up = given_up
        self._view = view
        self._length = len(view)
        self._seen = 0
        self._checked = 0

    def arrived(self, count: int) -> None:
        """Check what has arrived by now; `count` is the number of bytes from the start."""
        if count <= self._seen:
            # Each attempt begins with 0 and grows: this is another, and may bring other bytes.
            self._checked = 0
        self._seen = count
        # Of all that have arrived, the most that can be judged without the rest.
        stop, fetch = count, self._fetch
        if count < self._length:
            edge_before = fetch.edge_before
            stop = count - count % fetch.check_bytes if edge_before is None else edge_before(count)
        self._check(stop)

    def finish(self) -> None:
        """Check what the store did not report."""
        self._check(self._length)

    def _check(self, stop: int) -> None:
        if self._given_up.is_set():
            raise CheckpointError(f"The read of {self._fetch.path} was given up.")
        start, check = self._checked, self._fetch.check
        if start < stop and check is not None:
            check(self._view[start:stop], start)
            self._checked = stop


def run_fetches(
    store: Store,
    fetches: Sequence[Fetch],
    *,
    options: TransferOptions,
    deadline: Deadline,
    on_bytes: Callable[[int], None] = lambda _: None,
    pacer: Pacer | None = None,
) -> None:
    """Do all reads, at most `thread_count` at a time, in the given order of start.

    Where a request costs a round trip, how many are under way follows what the storage bears; who
    reads from it again passes the same `pacer`, which remembers.
    Buffers, and the answers that clients hold meanwhile, take at most `memory_limit_bytes` in
    all of the process's reads. Raises the first failure; targets are then undefined.
    """
    if not fetches:
        return
    run = _Run(store, fetches, options=options, deadline=deadline, on_bytes=on_bytes, pacer=pacer)
    try:
        if run.is_alone:
            run.in_one_thread(fetches)
        else:
            run.in_threads(fetches)
    finally:
        run.given_up.set()


class _Run:
    """One call of `run_fetches`: its pace, its buffers and its share of the memory."""

    def __init__(
        self,
        store: Store,
        fetches: Sequence[Fetch],
        *,
        options: TransferOptions,
        deadline: Deadline,
        on_bytes: Callable[[int], None],
        pacer: Pacer | None,
    ) -> None:
        self.given_up = threading.Event()
        self._is_remote = store.capabilities.is_remote
        self._options = options
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._buffer_bytes = max(
            (f.stop - f.start for f in fetches if self._needs_buffer(f)), default=0
        )
        # Fresh memory costs the kernel more than the copy out of it: buffers are used again.
        self._buffers: list[memoryview] = []
        self._claimed: list[Fetch] = []
        dearest = max(map(self._cost_bytes, fetches))
        affordable = options.memory_limit_bytes // max(1, dearest)
        most = max(1, min(options.thread_count, len(fetches), affordable))
        # All at once: reads wait for the first byte, and a storage that has too many says so.
        self._pacer = pacer or Pacer(most)
        self._most = most
        self._store = bounded(
            store, deadline, self.given_up.is_set, throttled=self._pacer.slowed_down
        )

    @property
    def is_alone(self) -> bool:
        """Whether one read at a time is all there may be."""
        return self._most == 1

    def _needs_buffer(self, fetch: Fetch) -> bool:
        """Return whether the bytes of a read need memory that is used again."""
        return fetch.target is None

    def _cost_bytes(self, fetch: Fetch) -> int:
        """Return the memory that a read takes beside its target: a buffer, a client's copy."""
        buffer_bytes = self._buffer_bytes if self._needs_buffer(fetch) else 0
        return buffer_bytes + (fetch.stop - fetch.start if self._is_remote else 0)

    def in_one_thread(self, fetches: Sequence[Fetch]) -> None:
        if self._is_remote:
            self._one_by_one(fetches, self._store)
        else:
            # From a kernel's cache a read takes little longer than its way to a thread and back,
            # which leads to another core, where nothing of what was read is in cache.
            try:
                in_one_thread(self._store, partial(self._one_by_one, fetches))
            finally:
                # A thread that was left behind in a read gives nothing back.
                self._release_claimed()

    def _one_by_one(self, fetches: Sequence[Fetch], store: Store) -> None:
        self._store = store
        for fetch in fetches:
            self._deadline.check(f"Reading {fetch.path}")
            self._claim(fetch)
            self._claimed.append(fetch)
            try:
                self._read(fetch)
            finally:
                self._release_claimed()

    def in_threads(self, fetches: Sequence[Fetch]) -> None:
        # A read that still runs after a failure would write into targets that the caller may
        # fill from elsewhere by then: wait for it, as long as one request may take.
        workers = Workers(
            self._most,
            name=f"read from {self._store.url}",
            deadline=self._deadline,
            limit=lambda: min(self._most, self._pacer.limit()),
            grace_s=_READ_GRACE_S,
        )
        with workers, _setting(self.given_up):
            for fetch in fetches:
                self._claim(fetch)
                workers.submit(partial(self._read, fetch), ended=partial(self._release, fetch))
            workers.drain()

    def _claim(self, fetch: Fetch) -> None:
        cost_bytes = self._cost_bytes(fetch)
        if cost_bytes:
            limit_bytes = self._options.memory_limit_bytes
            _BUDGET.acquire(cost_bytes, limit_bytes=limit_bytes, deadline=self._deadline)

    def _release(self, fetch: Fetch) -> None:
        cost_bytes = self._cost_bytes(fetch)
        if cost_bytes:
            _BUDGET.release(cost_bytes)

    def _release_claimed(self) -> None:
        """Give back what is claimed for the one read under way, unless that was done before."""
        try:
            fetch = self._claimed.pop()
        except IndexError:
            return
        self._release(fetch)

    def _read(self, fetch: Fetch) -> None:
        length = fetch.stop - fetch.start
        buffer = None
        if fetch.target is not None:
            view = fetch.target
        else:
            buffer = self._buffer()
            view = buffer[:length]
        self._read_into(fetch, view)
        fetch.done(view)
        # Not after a failure: a request that was left behind may still fill the buffer.
        if buffer is not None:
            self._buffers.append(buffer)
        self._deadline.advanced(length)
        self._on_bytes(length)

    def _buffer(self) -> memoryview:
        # One list operation is atomic: no lock.
        try:
            return self._buffers.pop()
        except IndexError:
            return memoryview(bytearray(self._buffer_bytes))

    def _read_into(self, fetch: Fetch, view: memoryview) -> None:
        arrivals = _Arrivals(fetch, view, self.given_up)
        length = len(view)
        if length:
            begin_s = time.monotonic()
            self._store.read_into(
                fetch.path,
                fetch.start,
                view,
                size_bytes=fetch.size_bytes,
                arrived=None if fetch.target is None and fetch.check is None else arrivals.arrived,
            )
            if self._is_remote or not self.is_alone:
                # Of a disk that is asked for one thing at a time nothing is to be learned.
                self._pacer.succeeded(time.monotonic() - begin_s, length)
        arrivals.finish()


@contextmanager
def _setting(given_up: threading.Event) -> Iterator[None]:
    """Set the event when the block is left, before what is around it waits."""
    try:
        yield
    finally:
        given_up.set()
