"""Writes of new objects in parts: the size of parts, their memory, and the threads that send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.crc import BlockHasher, combine, crc32c_of
from ckpt_storage.options import DEFAULT_PART_BYTES, LOCAL_WRITE_BYTES, MIB, TransferOptions
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .budget import BUDGET
from .pacing import Pacer
from .workers import Workers

_MAX_UPLOAD_PARTS = 9_000
"""Below S3's 10,000, as sizes of a plan are estimates."""

_GROWN_PART_COUNT = 16
"""Parts of a file before they grow: enough to send in parallel."""

_GROWN_PART_BYTES = 32 << 20
"""Size of the parts of a large file that are sent without a copy: each costs a request."""


def write_options(
    capabilities: Capabilities | None,
    *,
    thread_count: int | None,
    part_bytes: int | None,
    memory_limit_bytes: int | None,
) -> TransferOptions:
    """Return the user's options for writing, completed by defaults that suit the store.

    Without `capabilities` the defaults suit any remote store. Raises `InvalidInputError` for
    values that contradict each other.
    """
    options = TransferOptions.for_storage(
        is_remote=capabilities is None or capabilities.is_remote,
        local_threads=1,
        local_part_bytes=LOCAL_WRITE_BYTES,
        thread_count=thread_count,
        part_bytes=part_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )
    if part_bytes is not None or capabilities is None or not capabilities.streams_parts:
        return options
    most = max(options.memory_limit_bytes // options.thread_count, options.block_bytes)
    return replace(
        options,
        part_bytes=min(DEFAULT_PART_BYTES, most),
        grown_part_bytes=min(_GROWN_PART_BYTES, most),
    )


def part_bytes_for(capabilities: Capabilities, options: TransferOptions, planned_bytes: int) -> int:
    """Return the part size for a file of about `planned_bytes`, legal for the store.

    Raises `InvalidInputError` if the storage or the memory limit does not allow it.
    """
    grown = min(options.grown_part_bytes, planned_bytes // _GROWN_PART_COUNT // MIB * MIB)
    size = max(options.part_bytes, capabilities.min_part_bytes, grown)
    limit = options.memory_limit_bytes
    if capabilities.max_part_count is not None:
        size = max(size, -(-planned_bytes // min(_MAX_UPLOAD_PARTS, capabilities.max_part_count)))
    multiple = capabilities.part_multiple_bytes
    size = -(-size // multiple) * multiple
    most = capabilities.max_part_bytes
    if most is not None and size > most:
        what = f"A file of {planned_bytes} bytes needs parts of {size} bytes"
        step = "Save from more ranks, so that each writes less."
        if options.part_bytes > most:
            step = f"Lower part_bytes to {most} or less."
        text = f"{what}; this storage takes parts of {most} bytes at most."
        raise InvalidInputError(text, next_step=step)
    needed = copies_of(capabilities) * size
    if capabilities.is_remote and needed > limit:
        what = f"A file of {planned_bytes} bytes needs parts of {size} bytes on this storage"
        what += f", which take {needed} bytes of memory each; memory_limit_bytes is {limit}."
        raise InvalidInputError(what, next_step=f"Raise memory_limit_bytes to {needed} or more.")
    return size


def copies_of(capabilities: Capabilities) -> int:
    """Return how often a part is in memory while it is sent: most clients join its views."""
    return 2 if capabilities.is_remote and not capabilities.streams_parts else 1


class ObjectWriter:
    """Writes one new object from front to back, in parts; ended by `complete` or `abort`.

    On remote storage, or with several threads, threads send the parts; else the caller's thread
    does, while the bytes are still in the processor's cache. All transfers of the process together
    take at most `memory_limit_bytes`. Buffers must not change until `complete` returns: each part
    is sent with the checksum that `write` computed.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        planned_bytes: int,
        options: TransferOptions,
        deadline: Deadline,
        on_bytes: Callable[[int], None],
    ) -> None:
        capabilities = store.capabilities
        self.part_bytes = part_bytes_for(capabilities, options, planned_bytes)
        self._part: list[memoryview] = []
        self._part_size = self._part_crc = 0
        self._what = f"Writing {path}"
        self._limit_bytes = options.memory_limit_bytes
        self._cost_bytes = self.part_bytes * copies_of(capabilities)
        self._deadline = deadline
        self._on_bytes = on_bytes
        self._part_count = 0
        self._sent_bytes = 0
        # Of the parts that were submitted; after `complete`, of the object.
        self.crc32c = 0
        self._claimed_bytes = 0
        most = options.thread_count if capabilities.parallel_parts else 1
        most = max(1, min(most, options.memory_limit_bytes // self._cost_bytes))
        self._pacer = Pacer(most)
        self._upload = store.bounded(deadline, throttled=self._pacer.slowed_down).upload(path)
        self._workers: Workers | None = None
        if capabilities.is_remote or most > 1:
            self._workers = Workers(
                most, name=f"write {path}", deadline=deadline, limit=self._pacer.limit
            )

    def write(self, view: memoryview, blocks: BlockHasher | None = None) -> None:
        """Append bytes, and their block checksums to `blocks`.

        Waits for memory; raises the failure of an earlier part.
        """
        while len(view):
            if self._part_size == self.part_bytes:
                self._send(last=False)
            if not self._claimed_bytes:
                BUDGET.acquire(
                    self._cost_bytes, limit_bytes=self._limit_bytes, deadline=self._deadline
                )
                self._claimed_bytes = self._cost_bytes
            room = self.part_bytes - self._part_size
            piece, view = view[:room], view[room:]
            crc32c = crc32c_of(piece) if blocks is None else blocks.update(piece)
            self._part.append(piece)
            self._part_size += len(piece)
            self._part_crc = combine(self._part_crc, crc32c, len(piece))

    def _send(self, *, last: bool) -> None:
        views, size_bytes = self._part, self._part_size
        self._part, self._part_size = [], 0
        part_crc, self._part_crc = self._part_crc, 0
        self.crc32c = combine(self.crc32c, part_crc, size_bytes)
        number, offset = self._part_count, self._sent_bytes
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        self._part_count += 1
        self._sent_bytes += size_bytes

        def send() -> None:
            self._upload.write_part(number, offset, views, last=last, crc32c=part_crc)
            self._pacer.succeeded()
            self._deadline.monitor.advanced(size_bytes)
            self._on_bytes(size_bytes)

        def end() -> None:
            views.clear()
            BUDGET.release(claimed_bytes)

        if self._workers is not None:
            self._workers.submit(send, ended=end)
            return
        try:
            self._deadline.check(self._what)
            send()
        finally:
            end()

    def complete(self) -> None:
        """Wait until all parts are on the storage, make the object visible and durable.

        Raises what failed.
        """
        self._send(last=True)
        if self._workers is not None:
            self._workers.drain()
        self._upload.complete(self._sent_bytes)
        self._deadline.monitor.advanced(file_count=1)
        self._stop()

    def abort(self) -> None:
        """Discard everything; idempotent. Raises `StorageError` if that fails."""
        self._stop()
        self._upload.abort()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.__exit__(None, None, None)
        claimed_bytes, self._claimed_bytes = self._claimed_bytes, 0
        BUDGET.release(claimed_bytes)
