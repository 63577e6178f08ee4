"""Space for an object that is about to be written, where a storage can set it aside.

Knows the protocol of uploads only. Called by `retry_upload` and `filewriter`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Reserving"]


@runtime_checkable
class Reserving(Protocol):
    """An upload that can take the space for an object before its bytes are sent."""

    def reserve(self, total_bytes: int) -> None:
        """Take space for about `total_bytes`; idempotent, and what is not used is given back.

        Does nothing where the storage cannot tell. Raises `StorageError` of kind "no-space" if
        that many bytes do not fit. The upload goes on without, also while a call that was given
        up still runs; it need not be made again.
        """
