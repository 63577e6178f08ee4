"""What the backends have in common that send requests through a client of fsspec's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.options import MIB
from ckpt_storage.store.backend import Backend, Range, ShortReadError
from ckpt_storage.store.location import Location

from .clients import Client

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
CHUNK_BYTES = MIB

_WASTE_FACTOR = 4
"""A server that ignores ranges is put up with while it sends at most this many times the range."""


class RemoteBackend(Backend):
    """A root that a client of fsspec's leads to; each range is read by a request of its own."""

    def __init__(
        self, location: Location, options: Mapping[str, Any], *, request_timeout_s: float
    ) -> None:
        self._client = Client(location, options, request_timeout_s=request_timeout_s)
        self.endpoint = self._client.endpoint

    def close(self) -> None:
        """Use the client no more; the last that does ends its connections."""
        self._client.close()

    def refresh(self) -> None:
        """Build the client anew, so that credentials are looked up again."""
        self._client.refresh()

    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        """Send a request for each range; its bytes are copied once, to where they belong."""
        total_bytes = None
        for start, view in ranges:
            count, total_bytes = self._filled(path, start, view)
            if count < len(view):
                raise ShortReadError(start + count)
        return total_bytes

    def _filled(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Read one range; return how many bytes came, none past the end, and the object's size."""
        raise NotImplementedError


def total_of(content_range: object) -> int | None:
    """Return the length of the object that a Content-Range header tells, if it does."""
    total = str(content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def check_waste(start: int, wanted: int, total_bytes: object) -> None:
    """Refuse an answer that is the whole object if that is many times the range."""
    if start + wanted > _WASTE_FACTOR * wanted + CHUNK_BYTES:
        raise UnsupportedByStoreError(
            f"The server answers a read of {wanted} bytes with the whole object of "
            f"{total_bytes} bytes.",
            kind="unsupported",
            next_step="Use a server that honours the Range header, and store the object without "
            "Content-Encoding.",
        )
