"""One S3 request at a time, through the client that s3fs configures."""

from __future__ import annotations

import functools
import io
import ipaddress
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.options import MIB
from ckpt_storage.store.problems import ForeignAnswer
from ckpt_storage.store.timed import moved

from .clients import Client, ForeignFs
from .remote import CONNECT_TIMEOUT_S, READ_TIMEOUT_S

_POOL_CONNECTIONS = 64
_PIECE_BYTES = MIB


def client_options(options: Mapping[str, Any], request_timeout_s: float) -> dict[str, Any]:
    """Return s3fs's options with timeouts, one attempt and room for parallel requests.

    What the user set stays. Checksums are computed and checked only where S3 requires it:
    other servers refuse the headers, and every byte is verified by our own CRCs. Bodies are
    signed where somebody could change them on the way.
    """
    ours = {
        "connect_timeout": min(CONNECT_TIMEOUT_S, request_timeout_s),
        "max_pool_connections": _POOL_CONNECTIONS,
        "read_timeout": min(READ_TIMEOUT_S, request_timeout_s),
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    theirs = options.get("config_kwargs") or {}
    signing = {"payload_signing_enabled": not _is_private(options)}
    return {
        **options,
        "config_kwargs": {**ours, **theirs, "s3": {**signing, **(theirs.get("s3") or {})}},
        "use_listings_cache": False,
    }


def _is_private(options: Mapping[str, Any]) -> bool:
    """Return whether nobody can change bytes on their way: by TLS, or within this machine.

    There the SHA-256 of a body in the signature proves nothing that is not known already, and it
    costs more time than all the rest of sending.
    """
    inner = options.get("client_kwargs") or {}
    named = [options.get("endpoint_url"), inner.get("endpoint_url")]
    named += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    endpoint = next(filter(None, named), None)
    if endpoint is None:  # AWS itself
        return bool(options.get("use_ssl", True) and inner.get("use_ssl", True))
    parts = urlsplit(str(endpoint))
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

    def key(self, path: str) -> str:
        """Return the key of a path below the root; of "" the root's, without a slash."""
        return "/".join(filter(None, (self._place[1], path)))

    def below(self, folder: str) -> str:
        """Return the prefix of the keys below a folder; "" is the whole bucket."""
        key = self.key(folder.rstrip("/"))
        return f"{key}/" if key else ""

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


def code_of(error: BaseException) -> str:
    """Return the S3 error code that a client error carries, or ""."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return ""
    return str(response.get("Error", {}).get("Code", ""))
