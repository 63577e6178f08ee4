"""Many byte ranges in: ranged reads in parallel, bounded, checked while they arrive.

Knows stores; knows no tensor, no format and no process group. Called by all that reads files of a
checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from .deadline import Deadline
from .errors import CheckpointError
from .options import TransferOptions
from .store.base import Store
from .workers import Workers, bounded

_READ_GRACE_S = 330.0


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
