"""The body of a request out of several views, without joining them; and whether to sign it."""

from __future__ import annotations

import io
import ipaddress
from collections.abc import AsyncIterator, Iterator, Sequence
from urllib.parse import urlsplit

from ckpt_storage.options import KIB

__all__ = ["ViewsBody", "is_private_path"]

_PIECE_BYTES = 256 * KIB


class ViewsBody:
    """Consecutive views as the body of one request; to botocore a file, to aiohttp a stream.

    What is handed to a connection are copies of a piece, made in the processor's cache: one that
    is being closed may still send what it was given, when the views have other content.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in views if view.nbytes]
        self._size = sum(len(view) for view in self._views)
        self._at = 0

    def __repr__(self) -> str:
        return f"ViewsBody({self._size} bytes)"

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most `size`; of a negative size all that are left."""
        stop = self._size if size < 0 else min(self._size, self._at + size)
        data = b"".join(self._between(self._at, stop))
        self._at = stop
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset (bytes) from the start, the position or the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the whole body in pieces, each a copy."""
        for start in range(0, self._size, _PIECE_BYTES):
            yield b"".join(self._between(start, min(self._size, start + _PIECE_BYTES)))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        at = 0
        for view in self._views:
            if start < at + len(view) and at < stop:
                yield view[max(0, start - at) : stop - at]
            at += len(view)


def is_private_path(endpoint_url: str | None) -> bool:
    """Return whether nobody can change bytes on their way to an endpoint: TLS, or this machine.

    There the SHA-256 of a body in the signature proves nothing that is not known already, and it
    costs more time than all the rest of sending. None is AWS itself, by TLS.
    """
    if endpoint_url is None:
        return True
    parts = urlsplit(endpoint_url)
    if parts.scheme == "https":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"
