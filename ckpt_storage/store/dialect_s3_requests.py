"""One S3 request at a time, through the client that s3fs configures."""

from __future__ import annotations

import functools
import io
import ipaddress
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.options import KIB

from .backends.clients import Client, ForeignFs
from .problems import ForeignAnswer
from .timed import moved

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


_TELLING = {
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


class S3Requests:
    """Single requests to one bucket, with the options that s3fs was given."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        bucket, prefix, _ = self._client.fs.split_path(f"{self._client.root}/")
        return bucket, prefix.rstrip("/")

    @property
    def bucket(self) -> str:
        """The bucket, or the ARN of an access point."""
        return self._place[0]

    @property
    def prefix(self) -> str:
        """The key of the root, without a slash at its end."""
        return self._place[1]

    def key(self, path: str) -> str:
        """Return the key of a path below the root."""
        return f"{self.prefix}/{path}" if self.prefix else path

    def send(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request by the client's method and return the answer."""
        return self._client.run(lambda fs: self.request(fs, method, **arguments))

    async def request(self, fs: ForeignFs, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request on the loop.

        Raises `UnsupportedByStoreError` if the installed botocore does not know an
        argument: a condition must never be left out in silence.
        """
        await fs.set_session()
        client = await fs.get_s3(self.bucket)
        name = client.meta.method_to_api_mapping[method]
        known = client.meta.service_model.operation_model(name).input_shape.members
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            raise UnsupportedByStoreError(
                f"The installed botocore cannot send {', '.join(unknown)} with {name}.",
                kind="unsupported",
                next_step="Run: pip install -U 'ckpt-storage[s3]'",
            )
        body = arguments.get("Body")
        if isinstance(body, bytes):
            # In pieces, because aiohttp warns of large bytes.
            arguments["Body"] = ViewsBody([memoryview(body)])
        extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        accepted = {key: value for key, value in extra.items() if key in known}
        answer: Mapping[str, Any] = await getattr(client, method)(
            Bucket=self.bucket, **{**accepted, **arguments}
        )
        telling = _TELLING.get(method)
        if telling and telling.isdisjoint(answer):
            raise ForeignAnswer(" or ".join(sorted(telling)))
        return answer

    def pages(self, method: str, cursors: Mapping[str, str], **arguments: object) -> Iterator[Any]:
        """Yield the pages of a listing; `cursors` maps an answer's field to the argument."""
        position: dict[str, object] = {}
        while True:
            page = self.send(method, **arguments, **position)
            moved()
            yield page
            position = {to: page[of] for of, to in cursors.items() if page.get(of)}
            if not page.get("IsTruncated") or not position:
                return


def code_of(error: Exception) -> str:
    """Return the S3 error code that a client error carries, or ""."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return ""
    return str(response.get("Error", {}).get("Code", ""))
