"""Parts on their way from one storage to another: how many at a time, and in what memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ckpt_storage.options import REMOTE_THREADS
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.budget import BUDGET
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.workers import Workers


class Paces:
    """What a transfer has learned of the storages it reads from and writes to; in any thread.

    Kept for as long as the transfer goes on: what was throttled once is not asked for as much
    again by the next file.
    """

    def __init__(self, most: int) -> None:
        self.source = Pacer(most)
        self.target = Pacer(most, start=REMOTE_THREADS)

    def limit(self) -> int:
        """Return how many parts may be under way now: what both storages bear."""
        return min(self.source.limit(), self.target.limit())


@contextmanager
def timed(pacer: Pacer, byte_count: int) -> Iterator[None]:
    """Tell `pacer` of the request that the block makes, unless it fails."""
    begin_s = time.monotonic()
    yield
    pacer.succeeded(time.monotonic() - begin_s, byte_count)


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


class PartWorkers:
    """Threads that each read and write a part, as many as storages and memory allow.

    Used as `Workers` are, by one thread, which claims the memory of a part in the order of the
    parts and before a thread has it: who holds memory never waits for more, nor for a part behind
    it. `each_bytes` is what one takes, `buffers` where it comes from.
    """

    def __init__(  # all named
        self,
        count: int,
        *,
        name: str,
        paces: Paces,
        each_bytes: int,
        limit_bytes: int,
        buffers: Buffers,
        deadline: Deadline,
    ) -> None:
        self._count = count
        self._paces = paces
        self._each_bytes = each_bytes
        self._limit_bytes = limit_bytes
        self._buffers = buffers
        self._deadline = deadline
        # One that waits, so that no thread does, where there is memory for it.
        self._waiting = 1 if (count + 1) * each_bytes <= limit_bytes else 0
        self._workers = Workers(count, name=name, deadline=deadline, limit=self._most_open)

    def _most_open(self) -> int:
        limit = self._paces.limit()
        return limit if limit < self._count else self._count + self._waiting

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._workers.__exit__(kind, error, traceback)

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a part once it may be under way; raise the failure of an earlier one."""
        # First a place: a failure is heard there, and our own parts leave memory for this one.
        self._workers.wait_for_place()
        self._claim()
        self._workers.submit(job, ended=self._release)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the memory of one part for a block of the thread that submits."""
        self._claim()
        try:
            yield
        finally:
            self._release()

    def drain(self) -> None:
        """Wait until every part has ended; raise the first failure."""
        self._workers.drain()

    def _claim(self) -> None:
        if BUDGET.held_bytes + self._each_bytes <= self._limit_bytes:
            self._acquire()
            return
        # Another transfer has what is missing; buffers that nobody claimed would come on top.
        with self._buffers.unkept():
            self._acquire()

    def _acquire(self) -> None:
        BUDGET.acquire(self._each_bytes, limit_bytes=self._limit_bytes, deadline=self._deadline)

    def _release(self) -> None:
        BUDGET.release(self._each_bytes)
