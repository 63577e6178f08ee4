"""One request to the JSON API of Google Cloud Storage at a time, its status kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.options import KIB, MIB

from .backends.clients import Client, ForeignFs, in_daemon_thread
from .parts import taken_whole
from .problems import ForeignAnswer, HttpFailure

WRITE_ID = "ckpt-write-id"
"""Metadata that tells one attempt to write a name from another."""

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_CHUNK_BYTES = MIB
_PIECE_BYTES = 256 * KIB
_FIRST_FAILURE = 400
_OK = 200
_BOUNDARY = "ckpt-storage-part"

_WASTE_FACTOR = 4
"""A server that ignores ranges is put up with while it sends at most this many times the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; header names are compared without regard to case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self, kind: str = "object") -> Mapping[str, Any]:
        """Return the body decoded from JSON; raises `ForeignAnswer` if it is of another kind."""
        found: Any = json.loads(self.body)
        if not isinstance(found, Mapping) or found.get("kind") != f"storage#{kind}":
            raise ForeignAnswer(f"kind storage#{kind}")
        document: Mapping[str, Any] = found
        return document


class GcsRequests:
    """Single requests about one bucket, with the credentials that gcsfs found."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.bucket, _, self._prefix = client.root.partition("/")
        self._read_timeout_s = min(_READ_TIMEOUT_S, client.request_timeout_s)

    def name(self, path: str) -> str:
        """Return the object name of a path below the root."""
        return f"{self._prefix}/{path}" if self._prefix else path

    def objects(self) -> str:
        """Return the address of the bucket's objects, below the server's."""
        return f"/storage/v1/b/{quote(self.bucket, safe='')}/o"

    def named(self, name: str) -> str:
        """Return the address of an object by its name."""
        return f"{self.objects()}/{quote(name, safe='')}"

    def object(self, path: str) -> str:
        """Return the address of what is known of a path."""
        return self.named(self.name(path))

    def media(self, path: str) -> str:
        """Return the address of a path's content."""
        return f"/download{self.object(path)}"

    async def insert(
        self,
        fs: ForeignFs,
        path: str,
        data: bytes,
        *,
        condition: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Put a whole object; `condition` is the generation that must be there, "0" for none.

        In the form with two parts, as emulators ignore the condition in the plain one.
        """
        described = json.dumps({"name": self.name(path), "metadata": dict(metadata or {})})
        head = (
            f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}"
            f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        query = {"uploadType": "multipart"}
        if condition is not None:
            query["ifGenerationMatch"] = condition
        reply = await self.send(
            fs,
            "POST",
            f"/upload{self.objects()}",
            query=query,
            headers={"Content-Type": f'multipart/related; boundary="{_BOUNDARY}"'},
            data=b"".join((head.encode(), data, f"\r\n--{_BOUNDARY}--\r\n".encode())),
        )
        return reply.document()

    async def send(
        self,
        fs: ForeignFs,
        method: str,
        address: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        accepts: Collection[int] = (),
        most_bytes: int | None = None,
    ) -> Reply:
        """Send one request and return its answer; `address` may be a whole URL.

        Raises `HttpFailure` for a status of 400 and above that is not in `accepts`, and
        `TooLongError` for a body of more than `most_bytes`.
        """
        async with await self._opened(fs, method, address, query, headers, data) as answer:
            if answer.status >= _FIRST_FAILURE and answer.status not in accepts:
                raise _failure(answer.status, await answer.read())
            body = await taken_whole(answer.content.read, answer.content_length, most_bytes)
            return Reply(status=answer.status, headers=answer.headers.copy(), body=body)

    async def fetch(
        self, fs: ForeignFs, address: str, start: int, view: memoryview
    ) -> tuple[int, int | None]:
        """Fill `view` from `start` (bytes) on; return bytes read and the object's length."""
        headers = {"Range": f"bytes={start}-{start + len(view) - 1}"}
        async with await self._opened(
            fs, "GET", address, {"alt": "media"}, headers, None
        ) as answer:
            if answer.status >= _FIRST_FAILURE:
                raise _failure(answer.status, await answer.read())
            skip, total = _placed(answer, start, len(view))
            count = -skip
            async for piece in answer.content.iter_chunked(_CHUNK_BYTES):
                taken = piece[max(0, -count) :][: len(view) - max(0, count)]
                at = max(0, count)
                view[at : at + len(taken)] = taken
                count += len(piece)
                if count >= len(view):
                    break
        return max(0, min(count, len(view))), total

    async def _opened(
        self,
        fs: ForeignFs,
        method: str,
        address: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        data: bytes | None,
    ) -> Any:  # noqa: ANN401  # aiohttp's answer; aiohttp comes with gcsfs only
        import aiohttp  # noqa: PLC0415  # only with this backend
        import yarl  # noqa: PLC0415  # only with this backend

        heads = {**(headers or {}), **({} if data is None else {"Content-Length": str(len(data))})}
        # A gzipped answer would be unpacked on the way, and no byte range could be checked.
        heads["Accept-Encoding"] = "identity"
        # Looking for a token may ask another server, without regard to this loop.
        await in_daemon_thread(lambda: fs.credentials.apply(heads))
        await fs._set_session()  # noqa: SLF001  # the only way to its TLS client certificate
        asked = dict(query or {})
        if fs.requester_pays:
            pays = fs.requester_pays
            asked["userProject"] = pays if isinstance(pays, str) else fs.project
        server = str(fs.base).removesuffix("/storage/v1/")
        url = address if "://" in address else f"{server}{address}"
        if asked:
            url = f"{url}{'&' if '?' in url else '?'}{urlencode(asked)}"
        return fs.session.request(
            method,
            yarl.URL(url, encoded=True),
            headers=heads,
            data=_pieces(data) if data else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                sock_connect=min(_CONNECT_TIMEOUT_S, self._read_timeout_s),
                sock_read=self._read_timeout_s,
            ),
        )


async def _pieces(data: bytes) -> AsyncIterator[memoryview]:
    """Yield a body without copying it.

    aiohttp warns of large bytes, and sends what it can rewind a second time by itself, which
    a resumable session might take for a gap.
    """
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


def _placed(answer: Any, start: int, wanted: int) -> tuple[int, int | None]:  # noqa: ANN401  # aiohttp's answer
    """Return how many bytes of the body precede the range, and the object's length."""
    if answer.status != _OK:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        return 0, int(total) if total.isdigit() else None
    if start + wanted > _WASTE_FACTOR * wanted + _CHUNK_BYTES:
        raise UnsupportedByStoreError(
            f"The server answers a read of {wanted} bytes with the whole object of "
            f"{answer.content_length} bytes.",
            kind="unsupported",
            next_step="Store the object without Content-Encoding, or use another server.",
        )
    length: int | None = answer.content_length
    return start, length


def _failure(status: int, body: bytes) -> HttpFailure:
    """Return the failure that an answer's JSON body describes."""
    try:
        said = json.loads(body)["error"]
        reasons = said.get("errors") or [{}]
        code, message = str(reasons[0].get("reason", "")), str(said.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        code, message = "", body[:300].decode("utf-8", "replace")
    return HttpFailure(status=status, code=code, message=message)
