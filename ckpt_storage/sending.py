"""The parts of one object on their way to a storage: space, memory, pace, order of ending.

Knows stores and uploads; knows no checksum and no format. Called by `filewriter`.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .deadline import Deadline
from .options import TransferOptions
from .pacing import BUDGET, Pacer
from .store.base import Stoppable, Store, Upload
from .store.queueing import Queueing
from .store.reserving import Opening, Reserving
from .workers import Workers, bounded

__all__ = ["REMOTE_COPIES", "PartSender"]

REMOTE_COPIES = 2
"""What a part takes on its way to a server: clients join its views, and sockets keep a copy."""

_FIRST_REQUESTS = 8
"""How many go out before anything is known of the storage: 128 MiB in parts of 16 MiB, which is
what 4 GB/s carry in a round trip of 30 ms."""

_SPARE_PARTS = 3
"""What an upload that sends in place may copy all the same; see `Capabilities.in_place_views`."""

_FREE_SHARE = 256
"""What share of a part sent in place may be copies that do not count: the envelopes of tensors."""

_LOOK_S = 0.2
"""How often who waits for a queued part looks whether the upload still goes on."""


class _Part(NamedTuple):
    """A part to be queued; `claimed_bytes` of memory are its own until it is sent."""

    number: int
    offset: int
    views: list[memoryview]
    size_bytes: int
    claimed_bytes: int
    last: bool


class PartSender:
    """Sends the parts of one new object; ended by `complete` or `abort`.

    One thread claims, fills and sends one part after the other. An upload that queues parts gets
    them from that thread; parts that take no memory may wait for their turn meanwhile, so that the
    next ones are made while the storage has yet to answer. Else, where a request costs a round
    trip, or several local writes were asked for, threads send them; or the caller's own does,
    while their bytes, just hashed, are still in the processor's cache. The memory of the process's
    transfers together stays below `memory_limit_bytes`.
    """

    def __init__(  # one call site, all named
        self,
        store: Store,
        path: str,
        *,
        part_bytes: int,
        planned_bytes: int,
        options: TransferOptions,
        deadline: Deadline,
        on_bytes: Callable[[int], None],
    ) -> None:
        capabilities = store.capabilities
        self._path = path
        self._what = f"Writing {path}"
        self._part_bytes = part_bytes
        self._planned_bytes = planned_bytes
        self._limit_bytes = options.memory_limit_bytes
        self._in_place_views = capabilities.in_place_views
        is_copied = capabilities.is_remote and not self._in_place_views
        self._cost_bytes = part_bytes * (REMOTE_COPIES if is_copied else 1)
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._upload: Upload | None = None
        self._queueing: Queueing | None = None
        self._part_count = 0
        self._sent_bytes = 0
        self._claimed_bytes = 0
        self._copied_bytes = 0
        most = options.thread_count if capabilities.parallel_parts else 1
        if self._in_place_views:
            spare_bytes = _SPARE_PARTS * part_bytes
            self._limit_bytes = max(self._cost_bytes, self._limit_bytes - spare_bytes)
        else:
            most = max(1, min(most, options.memory_limit_bytes // self._cost_bytes))
        self._pacer = Pacer(most, start=_FIRST_REQUESTS if capabilities.is_remote else most)
        self._store = bounded(store, deadline, throttled=self._pacer.slowed_down)
        self._is_remote = capabilities.is_remote
        self._thread_count = most
        self._workers: Workers | None = None
        self._queued_count = 0
        self._is_queued = False
        self._ahead: deque[_Part] = deque()
        self._freed: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

    def open(self) -> None:
        """Let an object of several parts begin on the storage while the first one is made."""
        if self._planned_bytes > self._part_bytes and self._is_remote:
            upload = self._begun()
            if isinstance(upload, Opening):
                upload.open()

    def fill(self, size_bytes: int, *, lent: bool) -> None:
        """Wait until there is memory for bytes of the next part; to be called before each.

        `lent` bytes lie in memory that is the state's own.
        """
        if self._in_place_views:
            self._copied_bytes += 0 if lent else size_bytes
            if self._copied_bytes <= self._part_bytes // _FREE_SHARE:
                return
        self._claim()

    def _claim(self) -> None:
        if not self._claimed_bytes:
            BUDGET.acquire(self._cost_bytes, limit_bytes=self._limit_bytes, deadline=self._deadline)
            self._claimed_bytes = self._cost_bytes

    def send(self, views: list[memoryview], size_bytes: int, *, last: bool) -> None:
        """Send the next part: consecutive views, taken out of the list once nobody reads them.

        Raises what sending it, or an earlier one, raised.
        """
        if self._in_place_views and len(views) > self._in_place_views:
            self._claim()
        upload = self._begun()
        number, offset = self._part_count, self._sent_bytes
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        self._copied_bytes = 0
        self._part_count += 1
        self._sent_bytes += size_bytes
        part = _Part(number, offset, views, size_bytes, claimed_bytes, last)
        if self._queueing is not None and self._queue(self._queueing, part):
            return

        def send() -> None:
            begin_s = time.monotonic()
            upload.write_part(number, offset, views, last=last)
            self._sent(time.monotonic() - begin_s, size_bytes)

        def end() -> None:
            views.clear()
            BUDGET.release(claimed_bytes)

        try:
            workers = self._started_workers()
        except BaseException:
            # A process may have no more threads.
            end()
            raise
        if workers is not None:
            workers.submit(send, ended=end)
            return
        try:
            self._deadline.check(self._what)
            send()
        finally:
            end()

    def _sent(self, seconds: float, size_bytes: int) -> None:
        self._pacer.succeeded(seconds, size_bytes)
        self._deadline.advanced(size_bytes)
        self._on_bytes(size_bytes)

    def _started_workers(self) -> Workers | None:
        if self._workers is None and (self._is_remote or self._thread_count > 1):
            self._workers = Workers(
                self._thread_count,
                name=f"write {self._path}",
                deadline=self._deadline,
                limit=self._pacer.limit,
            )
        return self._workers

    def hand_over(self) -> None:
        """Wait until the storage's client has all parts that were sent so far.

        Raises what failed.
        """
        if self._queueing is not None:
            self._hand_over(self._queueing)

    def _queue(self, upload: Queueing, part: _Part) -> bool:
        """Hand a part over in its turn; return False where none can be queued.

        Then the claim stays with the caller.
        """
        if self._is_queued and not part.claimed_bytes and not part.last:
            # What it is made of is there anyway: to wait here would only idle this thread.
            self._ahead.append(part)
            while self._ahead and self._has_room(upload):
                self._lend(upload, self._ahead.popleft())
            return True
        try:
            self._hand_over(upload)
        except BaseException:
            BUDGET.release(part.claimed_bytes)
            raise
        if part.number == 0:
            self._pacer.guess_refusals(upload.pause_s)
        self._is_queued = self._lend(upload, part)
        return self._is_queued

    def _hand_over(self, upload: Queueing) -> None:
        while self._ahead:
            self._lend(upload, self._ahead.popleft())

    def _has_room(self, upload: Queueing) -> bool:
        while not self._freed.empty():
            self._await_freed(upload)
        return self._queued_count < self._pacer.limit()

    def _lend(self, upload: Queueing, part: _Part) -> bool:
        """Give a part to `upload` once there is room for it; return whether it was taken."""
        begin_s = time.monotonic()
        freed, size_bytes, claimed_bytes = self._freed, part.size_bytes, part.claimed_bytes

        def is_freed() -> None:
            # In whichever thread: what depends on the phase is seen to in ours.
            BUDGET.release(claimed_bytes)
            freed.put((time.monotonic() - begin_s, size_bytes))

        try:
            while not self._has_room(upload):
                self._await_freed(upload)
            self._deadline.check(self._what)
            upload.check()
            begin_s = time.monotonic()
            is_taken = upload.queue_part(
                part.number, part.offset, part.views, last=part.last, freed=is_freed
            )
        except BaseException:
            BUDGET.release(claimed_bytes)
            raise
        if is_taken:
            part.views.clear()
            self._queued_count += 1
        return is_taken

    def _await_freed(self, upload: Queueing) -> None:
        """Wait until one more of the queued parts was sent. Raises what failed."""
        while True:
            try:
                seconds, size_bytes = self._freed.get(
                    timeout=min(_LOOK_S, self._deadline.remaining_s() + 0.001)
                )
            except queue.Empty:
                self._deadline.check(self._what)
                upload.check()
            else:
                break
        upload.check()
        self._queued_count -= 1
        self._sent(seconds, size_bytes)

    def complete(self, total_bytes: int) -> None:
        """Wait until all parts are on the storage, make the object visible and durable.

        Raises what failed.
        """
        upload = self._begun()
        if self._workers is not None:
            self._workers.drain()
        if self._queueing is not None:
            while self._queued_count:
                self._await_freed(self._queueing)
        upload.complete(total_bytes)
        self._deadline.ended_file()
        self._stop()

    def abort(self) -> None:
        """Discard everything; idempotent. Raises `StorageError` if that fails."""
        if isinstance(self._upload, Stoppable):
            # First: threads that wait for it would be waited for.
            self._upload.stop()
        self._stop()
        if self._upload is not None:
            self._upload.abort()

    def _begun(self) -> Upload:
        if self._upload is None:
            upload = self._store.start_upload(self._path, part_bytes=self._part_bytes)
            self._queueing = upload if isinstance(upload, Queueing) else None
            self._upload = upload
            if isinstance(self._upload, Reserving):
                self._upload.reserve(self._planned_bytes)
        return self._upload

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)
        self._ahead.clear()
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        BUDGET.release(claimed_bytes)
