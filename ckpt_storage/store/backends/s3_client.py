"""How s3fs's client is set up, and the bodies that it is given to send."""

from __future__ import annotations

import io
import ipaddress
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from ckpt_storage.options import MIB
from ckpt_storage.store.location import Location

from .clients import address_of
from .clouds import CONNECT_TIMEOUT_S, READ_TIMEOUT_S

_POOL_CONNECTIONS = 64
_PIECE_BYTES = MIB


def client_options(location: Location, request_timeout_s: float) -> dict[str, Any]:
    """Return s3fs's options with timeouts, one attempt and room for parallel requests.

    What the user set stays. Checksums are computed and checked only where S3 requires it:
    other servers refuse the headers, and every byte is verified by our own CRCs. Bodies are
    signed where somebody could change them on the way.
    """
    options = location.storage_options
    ours = {
        "connect_timeout": min(CONNECT_TIMEOUT_S, request_timeout_s),
        "max_pool_connections": _POOL_CONNECTIONS,
        "read_timeout": min(READ_TIMEOUT_S, request_timeout_s),
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    theirs = options.get("config_kwargs") or {}
    signing = {"payload_signing_enabled": not _is_private(location)}
    return {
        **options,
        "config_kwargs": {**ours, **theirs, "s3": {**signing, **(theirs.get("s3") or {})}},
        "use_listings_cache": False,
    }


def _is_private(location: Location) -> bool:
    """Return whether nobody can change bytes on their way: by TLS, or within this machine.

    There the SHA-256 of a body in the signature proves nothing that is not known already, and it
    costs more time than all the rest of sending.
    """
    address = address_of(location, location.storage_options)
    if not address:  # AWS itself
        inner = location.storage_options.get("client_kwargs") or {}
        return all(place.get("use_ssl", True) for place in (location.storage_options, inner))
    parts = urlsplit(address)
    if parts.scheme == "https":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"


class ViewsBody:
    """Consecutive views as the body of one request; to botocore a file, to aiohttp a stream.

    What is handed to a connection are copies of a piece, made in the processor's cache: one that
    is being closed may still send what it was given, when the views have other content.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self._size = self._ends[-1] if self._ends else 0
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
        for number in range(bisect_right(self._ends, start), len(self._views)):
            view, end = self._views[number], self._ends[number]
            begin = end - len(view)
            if begin >= stop:
                return
            yield view[max(0, start - begin) : stop - begin]


TELLING = {
    "complete_multipart_upload": {"ETag"},
    "create_multipart_upload": {"UploadId"},
    "get_object": {"ETag"},
    "head_object": {"ETag"},
    "list_multipart_uploads": {"Bucket", "IsTruncated"},
    "list_objects_v2": {"IsTruncated", "KeyCount", "Name"},
    "put_object": {"ETag"},
    "upload_part": {"ETag"},
}
"""Fields of which every answer of S3 has one; a page in its place, answered with 200, has none."""
