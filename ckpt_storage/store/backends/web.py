"""Read-only access to files on any HTTP server with ranges (RFC 9110, section 14)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any, Never
from urllib.parse import quote

from ckpt_storage.errors import StorageError
from ckpt_storage.store.backend import Backend, Capabilities
from ckpt_storage.store.problems import ForeignResponse, HttpFailure, unable

from .client_registry import ForeignFs
from .clouds import (
    Body,
    CloudBackend,
    ObjectStat,
    Page,
    client_timeouts,
    range_header,
    span_of,
)

_FIRST_FAILURE, _FORBIDDEN = 400, 403
_MESSAGE_BYTES = 300


class WebBackend(CloudBackend):
    """A folder below a URL; versions are ETags. HTTP has no listing, and nothing is written."""

    capabilities = Capabilities(kind="generic")

    async def _head(self, fs: ForeignFs, path: str) -> ObjectStat:
        async with self._request(fs, "HEAD", path) as response:
            if response.content_length is None:
                raise ForeignResponse("Content-Length")
            modified = response.headers.get("Last-Modified")
            at_s = None if modified is None else parsedate_to_datetime(modified).timestamp()
            return response.content_length, at_s, response.headers.get("ETag"), None

    @contextlib.asynccontextmanager
    async def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> AsyncIterator[Body]:
        headers = {} if start is None else {"Range": range_header(start, length)}
        async with self._request(fs, "GET", path, headers) as response:
            content_range = response.headers.get("Content-Range")
            first, total_bytes = span_of(content_range, response.content_length)
            is_whole = content_range is None and start is not None and start >= 0
            if is_whole and (start or total_bytes is None or total_bytes > length):
                raise unable(
                    self._location.url,
                    path,
                    "is on a server without ranges: it answers a request for "
                    f"{length} bytes of {path} with the whole file",
                    "Use a server that honours the Range header, or copy the files first.",
                )
            yield Body(
                pieces=response.content.iter_any(),
                first=first,
                total_bytes=total_bytes,
                version=response.headers.get("ETag"),
            )

    @contextlib.asynccontextmanager
    async def _request(
        self, fs: ForeignFs, method: str, path: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """Send one request, yield aiohttp's response; raise `HttpFailure` from status 400 on."""
        import aiohttp  # noqa: PLC0415  # comes with fsspec's client of HTTP
        import yarl  # noqa: PLC0415  # the same

        options = dict(fs.kwargs)
        # Of a compressed response no byte range could be checked.
        heads = {**options.pop("headers", {}), "Accept-Encoding": "identity", **(headers or {})}
        session = await fs.set_session()
        connect_s, read_s = client_timeouts(self._timeout_s)
        url = f"{self._location.target}/{quote(path)}" if path else self._location.target
        async with session.request(
            method,
            yarl.URL(url),
            headers=heads,
            timeout=aiohttp.ClientTimeout(sock_connect=connect_s, sock_read=read_s),
            **{"allow_redirects": True, **options},
        ) as response:
            if response.status >= _FIRST_FAILURE:
                body = await response.content.read(_MESSAGE_BYTES)
                message = body.decode("utf-8", "replace")
                raise HttpFailure(status=response.status, message=" ".join(message.split()))
            yield response

    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> Page:
        del fs, more, recursive
        raise unable(
            self._location.url,
            below,
            "cannot be listed: HTTP has no listing",
            "Give the URL of one checkpoint. Roots, and copies of checkpoints of other writers, "
            "need a storage that lists.",
        )

    def explain(self, error: BaseException) -> StorageError | None:
        if not isinstance(error, HttpFailure) or error.status != _FORBIDDEN:
            return None
        return StorageError(
            "The server refuses the read (403).",
            kind="permission",
            next_step="Check the URL: a bucket that the public may not list answers so for absent "
            "files, too. Otherwise pass the headers that the server asks for in storage_options, "
            "or use the bucket's own scheme (s3://, gs://, az://).",
        )

    def _refuse(self, *_: Any, **__: Any) -> Never:
        url = self._location.url
        raise unable(url, url, "can only be read", "Write to a storage that takes writes.")

    copy_source = Backend.copy_source
    put = delete = begin_upload = put_part = complete_upload = abort_upload = _refuse
    _put = _delete = _terms = _refuse

    @property
    def _bucket(self) -> str:
        return ""

    def _name(self, path: str) -> str:
        return path
