"""The parts of one object on their way to a storage: space, memory, pace, order of ending."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_storage.options import TransferOptions
from ckpt_storage.store.base import Capabilities, Reserving, Store, Upload
from ckpt_storage.store.deadline import Deadline

from .pacing import BUDGET, Pacer
from .workers import Workers, bounded

__all__ = ["PartSender", "copies_of"]

_FIRST_REQUESTS = 8
"""How many go out before anything is known of the storage: 128 MiB in parts of 16 MiB, which is
what 4 GB/s carry in a round trip of 30 ms."""


def copies_of(capabilities: Capabilities) -> int:
    """Return how many times a part is in memory on its way: most remote clients join its views."""
    return 2 if capabilities.is_remote and not capabilities.streams_parts else 1


class PartSender:
    """Sends the parts of one new object; ended by `complete` or `abort`.

    Where a request costs a round trip, or several local writes were asked for, threads send the
    parts. Else the caller's own thread does, while their bytes, just hashed, are still in the
    processor's cache. The memory of the process's transfers together stays below
    `memory_limit_bytes`.
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
        self._cost_bytes = part_bytes * copies_of(capabilities)
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._upload: Upload | None = None
        self._part_count = 0
        self._sent_bytes = 0
        self._claimed_bytes = 0
        most = options.thread_count if capabilities.parallel_parts else 1
        most = max(1, min(most, options.memory_limit_bytes // self._cost_bytes))
        self._pacer = Pacer(most, start=_FIRST_REQUESTS if capabilities.is_remote else most)
        self._store = bounded(store, deadline, throttled=self._pacer.slowed_down)
        self._is_remote = capabilities.is_remote
        self._thread_count = most
        self._workers: Workers | None = None

    def claim(self) -> None:
        """Wait until there is memory for the next part; to be called before its bytes are made."""
        if not self._claimed_bytes:
            BUDGET.acquire(self._cost_bytes, limit_bytes=self._limit_bytes, deadline=self._deadline)
            self._claimed_bytes = self._cost_bytes

    def send(self, views: list[memoryview], size_bytes: int, *, last: bool) -> None:
        """Send the next part: consecutive views, taken out of the list once nobody reads them.

        Raises what sending it, or an earlier one, raised.
        """
        upload = self._begun()
        number, offset = self._part_count, self._sent_bytes
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        self._part_count += 1
        self._sent_bytes += size_bytes

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

    def complete(self, total_bytes: int) -> None:
        """Wait until all parts are on the storage, make the object visible and durable.

        Raises what failed.
        """
        upload = self._begun()
        if self._workers is not None:
            self._workers.drain()
        upload.complete(total_bytes)
        self._deadline.ended_file()
        self._stop()

    def abort(self) -> None:
        """Discard everything; idempotent. Raises `StorageError` if that fails."""
        self._stop()
        if self._upload is not None:
            self._upload.abort()

    def _begun(self) -> Upload:
        if self._upload is None:
            self._upload = self._store.start_upload(self._path, part_bytes=self._part_bytes)
            if isinstance(self._upload, Reserving):
                self._upload.reserve(self._planned_bytes)
        return self._upload

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        BUDGET.release(claimed_bytes)
