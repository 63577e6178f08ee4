"""What some uploads can do besides `write_part`: take parts without waiting until they are sent.

Knows the protocol of uploads only. Called by `retry_upload`, `remote_upload` and `sending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Queueing"]


@runtime_checkable
class Queueing(Protocol):
    """An upload that one thread can hand all parts to, in order, while earlier ones are sent.

    It repeats requests itself, so a part that failed is the end of it. Who queues parts calls
    `write_part` for none.
    """

    @property
    def pause_s(self) -> float:
        """For how long (seconds) it waits at least before it repeats a request."""

    def queue_part(
        self,
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
        *,
        last: bool,
        freed: Callable[[], None],
    ) -> bool:
        """Take a part as `write_part` does, but return before it is sent.

        `freed` is called once, by any thread, when nobody reads the buffers any more: the part is
        on the storage then, or `check` or `complete` raises why it is not. It must not wait nor
        raise. The object may become visible once the part that is `last` was taken. Return False
        where parts cannot be queued; nothing was taken then. Raises what ended the upload.
        """

    def check(self) -> None:
        """Raise `StorageError` if the upload has ended before its last part was taken, or hangs."""
