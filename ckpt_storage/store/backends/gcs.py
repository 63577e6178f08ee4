"""Google Cloud Storage through its JSON API, with the session and the credentials of gcsfs.

Works on buckets of the usual kinds; zonal ones (Rapid Storage) take no such uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.crc import combine_many, crc32c_of, crc32c_of_all
from ckpt_storage.options import KIB
from ckpt_storage.store.backend import Buffers, CopySource, Part, Settings
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import (
    ForeignResponse,
    HttpFailure,
    check_copied,
    damaged,
    unless_absent,
    upload_error,
)
from ckpt_storage.store.threads import report_progress

from . import clouds
from .client_registry import ForeignFs

_PIECE_BYTES = 256 * KIB
_PAGE_COUNT = 1000
_BOUNDARY = "ckpt-storage-part"
_NONE: Mapping[str, Any] = {}

_GOES_ON = 308
_FIRST_FAILURE = 400
_CANCELLED = 499


class GcsBackend(clouds.CloudBackend):
    """A prefix in a bucket; versions are generations, tokens are URLs of resumable sessions."""

    capabilities = replace(
        clouds.CLOUD,
        kind="gcs",
        part_multiple_bytes=256 * KIB,
        last_part_publishes=True,
        copies_objects=True,
        copies_with_checksum=True,
    )

    def __init__(self, location: Location, settings: Settings) -> None:
        super().__init__(location, settings)
        # Stored bytes by session, and the checksum of the object once it is complete. A session
        # whose last request failed is not in it: its state is requested.
        self._sessions: dict[str, tuple[int, str | None]] = {}

    async def _head(self, fs: ForeignFs, path: str) -> clouds.ObjectStat:
        resource = await self._document(fs, "GET", self._address(path))
        write_id = resource.get("metadata", {}).get(clouds.WRITE_ID, "")
        at_s, version = _seconds(resource.get("updated")), str(resource["generation"])
        return int(resource["size"]), at_s, version, write_id

    @contextlib.asynccontextmanager
    async def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> AsyncIterator[clouds.Body]:
        headers = {} if start is None else {"Range": clouds.range_header(start, length)}
        address = f"/download{self._address(path)}"
        async with self._request(
            fs, "GET", address, query={"alt": "media"}, headers=headers
        ) as response:
            version = response.headers.get("X-Goog-Generation")
            if version is None and (start is None or start < 0):
                raise ForeignResponse("X-Goog-Generation")
            first, total_bytes = clouds.span_of(
                response.headers.get("Content-Range"), response.content_length
            )
            pieces = response.content.iter_any()
            yield clouds.Body(pieces=pieces, first=first, total_bytes=total_bytes, version=version)

    async def _put(
        self,
        fs: ForeignFs,
        path: str,
        data: Buffers,
        write_id: str | None,
        terms: clouds.Preconditions,
    ) -> None:
        """Send a multipart form, as emulators ignore conditions of simple uploads."""
        # The service refuses a body with another checksum.
        checksum = {"crc32c": clouds.encoded(crc32c_of_all(data))}
        described = json.dumps({"name": self._name(path), **checksum, **_metadata(write_id)})
        head = (
            f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}"
            f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = b"".join((head.encode(), *data, f"\r\n--{_BOUNDARY}--\r\n".encode()))
        headers = {"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'}
        query, at = {"uploadType": "multipart", **terms}, f"/upload{self._objects}"
        await self._document(fs, "POST", at, query=query, headers=headers, data=body)

    async def _delete(self, fs: ForeignFs, path: str, terms: clouds.Preconditions) -> None:
        await self._remove(fs, self._address(path), query=terms)

    async def _remove(self, fs: ForeignFs, /, address: str, **more: Any) -> None:
        async with self._request(fs, "DELETE", address, **more):
            pass

    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> clouds.Page:
        query = {
            "prefix": below,
            "maxResults": str(_PAGE_COUNT),
            "fields": "kind,items(name,size,updated),prefixes,nextPageToken",
            **({} if recursive else {"delimiter": "/"}),
            **({"pageToken": more} if more else {}),
        }
        page = await self._document(fs, "GET", self._objects, kind="objects", query=query)
        entries = [
            self._listed(item["name"], int(item["size"]), _seconds(item.get("updated")))
            for item in page.get("items", ())
        ]
        entries += map(self._listed, page.get("prefixes", ()))
        return entries, page.get("nextPageToken")

    def _terms(
        self, *, if_absent: bool = False, if_match: str | None = None
    ) -> clouds.Preconditions:
        generation = "0" if if_absent else if_match
        return {} if generation is None else {"ifGenerationMatch": generation}

    def begin_upload(self, path: str, *, write_id: str) -> str:
        query = {"uploadType": "resumable", "name": self._name(path)}
        data = json.dumps(_metadata(write_id)).encode()

        async def begin(fs: ForeignFs) -> str:
            headers = {"Content-Type": "application/json; charset=UTF-8"}
            at = f"/upload{self._objects}"
            async with self._request(
                fs, "POST", at, query=query, headers=headers, data=data
            ) as response:
                return str(response.headers.get("Location", ""))

        session = self._run(begin)
        if not session:
            raise ForeignResponse("address for the upload")
        self._sessions[session] = 0, None
        return session

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        """Send the bytes that the session does not hold; the last ones complete the object."""
        body, offset = memoryview(b"".join(data)), part.offset
        end = offset + len(body)
        total_bytes = end if last else None
        known = self._sessions.pop(token, None)
        kept, whole = known or self._send(token, total_bytes)
        while kept < end or (last and whole is None):
            if kept < offset or whole is not None:
                raise upload_error(path, f"holds {kept} bytes; the part at {offset} cannot follow")
            start = kept
            kept, whole = self._send(token, total_bytes, start, body[start - offset :])
            if kept <= start and whole is None:
                raise upload_error(path, f"makes no progress at byte {start}", retryable=True)
        self._sessions[token] = kept, whole
        return str(crc32c_of(body) if part.crc32c is None else part.crc32c)

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        """Ask the session for its state, unless the response to its last part completed it."""
        sizes = [part.size_bytes for part in parts]
        sent = clouds.encoded(combine_many([int(part.receipt) for part in parts], sizes))
        kept, whole = self._sessions.pop(token, (0, None))
        if whole is None:
            kept, whole = self._send(token, sum(sizes))
        if whole is None or kept != sum(sizes):
            raise upload_error(path, f"holds {kept} of {sum(sizes)} bytes")
        # "": an emulator that computes none.
        if whole not in {"", sent}:
            what = f"{path} holds other bytes than were sent: its CRC-32C is {whole}, not {sent}."
            raise damaged(path, what, 0)

    def abort_upload(self, path: str, token: str) -> None:
        self._sessions.pop(token, None)
        with unless_absent():
            try:
                self._run(self._remove, token, data=b"")
            except HttpFailure as error:
                if error.status != _CANCELLED:
                    raise

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> int | None:
        """Send Rewrite requests, each with the token of the response before, until it is done.

        "Objects: rewrite" returns the metadata of the copy, whose crc32c is that of its content.
        """
        address = f"{self._objects}/{quote(source.address, safe='')}/rewriteTo"
        address += f"{self._address(path).removeprefix('/storage/v1')}"

        async def rewrite(fs: ForeignFs, query: Mapping[str, str]) -> Mapping[str, Any]:
            kind = "rewriteResponse"
            return await self._document(fs, "POST", address, kind, data=b"", query=query)

        response = self._run(rewrite, {})
        while not response["done"]:
            report_progress()
            response = self._run(rewrite, {"rewriteToken": response["rewriteToken"]})
        made = response["resource"]
        check_copied(source.path, int(made["size"]), size_bytes)
        crc32c = made.get("crc32c")
        return clouds.decoded(crc32c) if crc32c else None

    def _send(
        self, session: str, total_bytes: int | None, start: int = 0, data: memoryview | bytes = b""
    ) -> tuple[int, str | None]:
        """Send bytes, or none, to a session; return how many it holds.

        And the checksum of the object, once it is complete.
        """
        span = f"{start}-{start + len(data) - 1}" if data else "*"
        headers = {"Content-Range": f"bytes {span}/{'*' if total_bytes is None else total_bytes}"}

        async def send(fs: ForeignFs) -> tuple[int, str | None]:
            async with self._request(fs, "PUT", session, headers=headers, data=data) as response:
                if response.status != _GOES_ON:
                    stored = _checked(await response.read())
                    return int(stored["size"]), str(stored.get("crc32c", ""))
                end = response.headers.get("Range", "").rpartition("-")[2]
                return int(end) + 1 if end.isdigit() else 0, None  # "bytes=0-524287" is 524288

        return self._run(send)

    @property
    def _objects(self) -> str:
        return f"/storage/v1/b/{quote(self._place[0], safe='')}/o"

    def _address(self, path: str) -> str:
        return f"{self._objects}/{quote(self._name(path), safe='')}"

    async def _document(
        self, fs: ForeignFs, method: str, address: str, kind: str = "object", **more: Any
    ) -> Mapping[str, Any]:
        """Send one request and return its response, a JSON document of that kind."""
        async with self._request(fs, method, address, **more) as response:
            return _checked(await response.read(), kind)

    @contextlib.asynccontextmanager
    async def _request(
        self,
        fs: ForeignFs,
        method: str,
        address: str,
        *,
        query: Mapping[str, Any] = _NONE,
        headers: Mapping[str, str] = _NONE,
        data: memoryview | bytes | None = None,
    ) -> AsyncIterator[Any]:
        """Send one request, yield aiohttp's response; raise `HttpFailure` from status 400 on."""
        import aiohttp  # noqa: PLC0415  # comes with gcsfs
        import yarl  # noqa: PLC0415  # the same

        # Of a compressed response no byte range could be checked.
        heads = {"Accept-Encoding": "identity", **headers}
        if data is not None:
            heads["Content-Length"] = str(len(data))
        # A lookup of a token may block on a request to another server.
        await asyncio.to_thread(fs.credentials.apply, heads)
        await fs._set_session()  # noqa: SLF001  # the only way to its TLS client certificate
        parameters = dict(query)
        if pays := fs.requester_pays:
            parameters["userProject"] = pays if isinstance(pays, str) else fs.project
            if not parameters["userProject"]:
                raise InvalidInputError(
                    f"requester_pays is set for {self._location.url}, but no project to bill is "
                    "known.",
                    path=self._location.url,
                    next_step="Name it: storage_options={'requester_pays': 'my-project'}.",
                )
        server = "" if "://" in address else str(fs.base).removesuffix("/storage/v1/")
        mark = "&" if "?" in address else "?"
        url = f"{server}{address}{mark if parameters else ''}{urlencode(parameters)}"
        connect_s, read_s = clouds.client_timeouts(self._timeout_s)
        async with fs.session.request(
            method,
            yarl.URL(url, encoded=True),
            headers=heads,
            data=_pieces(memoryview(data)) if data else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(sock_connect=connect_s, sock_read=read_s),
        ) as response:
            if response.status >= _FIRST_FAILURE:
                raise _failure(response.status, await response.read())
            yield response


async def _pieces(data: memoryview) -> AsyncIterator[memoryview]:
    """Yield a body in pieces: aiohttp cannot resend an iterator by itself."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _checked(body: bytes, kind: str = "object") -> Mapping[str, Any]:
    """Return a JSON document; raise `ForeignResponse` if it is of another kind."""
    document: Any = json.loads(body)
    if not isinstance(document, Mapping) or document.get("kind") != f"storage#{kind}":
        raise ForeignResponse(f"kind storage#{kind}")
    return document


def _metadata(write_id: str | None) -> Mapping[str, Mapping[str, str]]:
    return {"metadata": {} if write_id is None else {clouds.WRITE_ID: write_id}}


def _failure(status: int, body: bytes) -> HttpFailure:
    try:
        details = json.loads(body)["error"]
        reasons = details.get("errors") or [{}]
        code, message = str(reasons[0].get("reason", "")), str(details.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        code, message = "", body[:300].decode("utf-8", "replace")
    return HttpFailure(status=status, code=code, message=message)


def _seconds(stamp: str | None) -> float | None:
    return None if stamp is None else datetime.fromisoformat(stamp).timestamp()
