"""What some uploads can do before their first part: set space aside, or begin on the storage.

Knows the protocol of uploads only. Called by `retry_upload`, `remote_upload` and `sending`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Opening", "Reserving"]


@runtime_checkable
class Reserving(Protocol):
    """An upload that can take the space for an object before its bytes are sent."""

    def reserve(self, total_bytes: int) -> None:
        """Take space for about `total_bytes`; idempotent, and what is not used is given back.

        Does nothing where the storage cannot tell. Raises `StorageError` of kind "no-space" if
        that many bytes do not fit. The upload goes on without, also while a call that was given
        up still runs; it need not be made again.
        """


@runtime_checkable
class Opening(Protocol):
    """An upload that can begin on the storage while its first part is still being made."""

    def open(self) -> None:
        """Begin an object of several parts, without waiting for the answer; idempotent.

        Raises nothing of the storage's: that comes with the first part.
        """
