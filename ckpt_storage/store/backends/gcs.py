"""Google Cloud Storage through its JSON API: one request per call, generations as versions.

Works on buckets of the usual kinds; zonal ones (Rapid Storage) take no such uploads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from ckpt_storage.errors import StorageError
from ckpt_storage.options import KIB
from ckpt_storage.store.backend import (
    Buffers,
    Capabilities,
    Content,
    ObjectInfo,
    Part,
    Settings,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import ForeignAnswer, HttpFailure

from .clients import ForeignFs
from .remote import (
    CHUNK_BYTES,
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    RemoteBackend,
    check_waste,
    total_of,
)

T = TypeVar("T")

_WRITE_ID = "ckpt-write-id"
_PIECE_BYTES = 256 * KIB
_PAGE_COUNT = 1000
_BOUNDARY = "ckpt-storage-part"
_IF_GENERATION = "ifGenerationMatch"
_MEDIA = {"alt": "media"}
_NONE: Mapping[str, str] = {}

_OK = 200
_GOES_ON = 308
_FIRST_FAILURE = 400
_CHANGED = 412
_NO_RANGE = 416
_CANCELLED = 499
_GONE = frozenset({404, 410})


class GcsBackend(RemoteBackend):
    """A prefix in a bucket, with the session and the credentials of gcsfs.

    The token of an upload is the address of a resumable session.
    """

    capabilities = Capabilities(
        kind="gcs",
        exclusive_create=True,
        if_match=True,
        atomic_replace=True,
        part_multiple_bytes=256 * KIB,
        last_part_publishes=True,
    )

    def __init__(self, location: Location, settings: Settings) -> None:
        limit_s = settings.request_timeout_s
        super().__init__(location, location.storage_options, request_timeout_s=limit_s)
        self._read_timeout_s = min(READ_TIMEOUT_S, limit_s)
        bucket, _, self._prefix = self._client.root.partition("/")
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        # How many bytes each session holds, and whether they are the object. One that may hold
        # more than was told is not among them, and is asked.
        self._sessions: dict[str, tuple[int, bool]] = {}

    def stat(self, path: str) -> ObjectInfo:
        """Objects: get."""
        found = self._client.run(partial(self._ask, _document, "GET", self._address(path)))
        return ObjectInfo(
            path=path,
            size_bytes=int(found["size"]),
            modified_s=_seconds(found.get("updated")),
            version=str(found["generation"]),
            write_id=found.get("metadata", {}).get(_WRITE_ID, ""),
        )

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Objects: get with alt=media; the generation stands in the answer's headers."""

        async def take(answer: Any) -> Content:  # noqa: ANN401  # aiohttp's answer
            version = answer.headers.get("X-Goog-Generation")
            if version is None:
                raise ForeignAnswer("X-Goog-Generation")
            data = bytearray()
            while piece := await answer.content.read(CHUNK_BYTES):
                data += piece
                if max_bytes is not None and len(data) > max_bytes:
                    break
            return Content(data=bytes(data), version=version)

        address = f"/download{self._address(path)}"
        return self._client.run(partial(self._ask, take, "GET", address, query=_MEDIA))

    def _filled(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Objects: get with alt=media and Range, the body copied piece by piece."""
        return self._client.run(
            partial(
                self._ask,
                partial(_fill, start, view),
                "GET",
                f"/download{self._address(path)}",
                query=_MEDIA,
                headers={"Range": f"bytes={start}-{start + len(view) - 1}"},
                accepts={_NO_RANGE},
            )
        )

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Objects: insert, with ifGenerationMatch for a condition.

        In the form with two parts, as emulators ignore the condition in the plain one.
        """
        described = json.dumps({"name": self._name(path), **_metadata(write_id)})
        head = (
            f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}"
            f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        body = b"".join((head.encode(), *data, f"\r\n--{_BOUNDARY}--\r\n".encode()))
        query = {"uploadType": "multipart", **_condition("0" if if_absent else if_match)}
        self._post(_document, query, f'multipart/related; boundary="{_BOUNDARY}"', body)

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """Objects: list, with a delimiter for direct children only."""
        cut = len(self._name(""))
        for page in self._pages(prefix, recursive=recursive):
            for item in page.get("items", ()):
                # Consoles make folders as empty objects with a slash at the end.
                if not item["name"].endswith("/"):
                    yield ObjectInfo(
                        path=item["name"][cut:],
                        size_bytes=int(item["size"]),
                        modified_s=_seconds(item.get("updated")),
                    )
            for name in page.get("prefixes", ()):
                yield ObjectInfo(path=name[cut:], size_bytes=0)

    def delete(self, paths: Sequence[str]) -> None:
        """Objects: delete, several at a time."""

        async def delete_one(fs: ForeignFs, path: str) -> None:
            await self._ask(_nothing, "DELETE", self._address(path), fs, accepts=_GONE)

        self._client.run_all(delete_one, paths)

    def delete_version(self, path: str, version: str) -> None:
        """Objects: delete with ifGenerationMatch."""
        query, address = _condition(version), self._address(path)
        self._client.run(
            partial(self._ask, _nothing, "DELETE", address, query=query, accepts=_GONE)
        )

    def delete_folder(self, path: str) -> bool:
        """Delete every name below the prefix, page by page, also the folders of consoles."""
        cut = len(self._name(""))
        for page in self._pages(path, recursive=True):
            self.delete([item["name"][cut:] for item in page.get("items", ())])
        return True

    def begin_upload(
        self, path: str, *, write_id: str, if_absent: bool, size_hint: int | None, copies: bool
    ) -> str:
        """Begin a resumable session and return its address."""
        del size_hint, copies

        async def take(answer: Any) -> str | None:  # noqa: ANN401  # aiohttp's answer
            address: str | None = answer.headers.get("Location")
            return address

        query = {"uploadType": "resumable", "name": self._name(path)}
        query |= _condition("0" if if_absent else None)
        described = json.dumps(_metadata(write_id)).encode()
        session = self._post(take, query, "application/json; charset=UTF-8", described)
        if not session:
            raise ForeignAnswer("address for the upload")
        self._sessions[session] = 0, False
        return session

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """Send what the session does not hold yet; the last bytes end it and show the object."""
        del number
        body = memoryview(b"".join(data))
        end = offset + len(body)
        total_bytes = end if last else None
        known = self._sessions.pop(token, None)
        kept, is_over = known or self._send(token, b"", "*", total_bytes)
        while kept < end or (last and not is_over):
            if kept < offset or is_over:
                raise _stuck(path, f"holds {kept} bytes, and the part at {offset} cannot follow")
            start = kept
            span = f"{start}-{end - 1}" if start < end else "*"
            kept, is_over = self._send(token, body[start - offset :], span, total_bytes)
            if kept <= start and not is_over:
                raise _stuck(path, f"makes no progress at byte {start}", retryable=True)
        self._sessions[token] = kept, is_over
        return ""

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str, if_absent: bool
    ) -> None:
        """Ask the session whether it is over, unless the answer to its last part told it."""
        del write_id, if_absent
        total_bytes = sum(part.size_bytes for part in parts)
        kept, is_over = self._sessions.pop(token, (0, False))
        if not is_over:
            kept, is_over = self._send(token, b"", "*", total_bytes)
        if not is_over or kept != total_bytes:
            raise _stuck(path, f"holds {kept} of {total_bytes} bytes")

    def abort_upload(self, path: str, token: str) -> None:
        """Cancel the session."""
        del path
        self._sessions.pop(token, None)
        accepts = {*_GONE, _CANCELLED}
        self._client.run(partial(self._ask, _nothing, "DELETE", token, data=b"", accepts=accepts))

    def _send(
        self, session: str, data: memoryview | bytes, span: str, total_bytes: int | None
    ) -> tuple[int, bool]:
        """Send bytes to a session, none with the span "*"; return how many it holds, and if all."""

        async def take(answer: Any) -> tuple[int, bool]:  # noqa: ANN401  # aiohttp's answer
            if answer.status != _GOES_ON:
                return int((await _document(answer))["size"]), True
            end = answer.headers.get("Range", "").rpartition("-")[2]
            return int(end) + 1 if end.isdigit() else 0, False  # "bytes=0-524287" is 524288

        total = "*" if total_bytes is None else total_bytes
        headers = {"Content-Range": f"bytes {span}/{total}"}
        return self._client.run(
            partial(self._ask, take, "PUT", session, headers=headers, data=data)
        )

    def _post(
        self, take: Callable[[Any], Awaitable[T]], query: Mapping[str, str], kind: str, data: bytes
    ) -> T:
        """Put a whole object, or begin a session; `kind` is the type of the content."""
        request = partial(self._ask, take, "POST", f"/upload{self._objects}", query=query)
        return self._client.run(partial(request, headers={"Content-Type": kind}, data=data))

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        query = {
            "prefix": self._name(f"{prefix}/" if prefix else ""),
            "maxResults": str(_PAGE_COUNT),
            "fields": "kind,items(name,size,updated),prefixes,nextPageToken",
            **({} if recursive else {"delimiter": "/"}),
        }
        take = partial(_document, kind="objects")
        while True:
            page = self._client.run(partial(self._ask, take, "GET", self._objects, query=query))
            yield page
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def _name(self, path: str) -> str:
        """Return the object name of a path below the root."""
        return f"{self._prefix}/{path}" if self._prefix else path

    def _address(self, path: str) -> str:
        """Return the address of what is known of an object, below the server's."""
        return f"{self._objects}/{quote(self._name(path), safe='')}"

    async def _ask(
        self,
        take: Callable[[Any], Awaitable[T]],
        method: str,
        address: str,
        fs: ForeignFs,
        *,
        query: Mapping[str, str] = _NONE,
        headers: Mapping[str, str] = _NONE,
        data: memoryview | bytes | None = None,
        accepts: Collection[int] = (),
    ) -> T:
        """Send one request and return what `take` makes of the answer; an address may be a URL.

        Raises `FileExistsError` where nothing should have been there, which is the only condition
        that a session has, and `HttpFailure` for any other status from 400 on, but of `accepts`.
        """
        import aiohttp  # noqa: PLC0415  # comes with gcsfs
        import yarl  # noqa: PLC0415  # the same

        # A gzipped answer would be unpacked on the way, and no byte range could be checked.
        heads = {"Accept-Encoding": "identity", **headers}
        if data is not None:
            heads["Content-Length"] = str(len(data))
        # Looking for a token may ask another server, without regard to this loop.
        await asyncio.to_thread(fs.credentials.apply, heads)
        await fs._set_session()  # noqa: SLF001  # the only way to its TLS client certificate
        asked = dict(query)
        if fs.requester_pays:
            pays = fs.requester_pays
            asked["userProject"] = pays if isinstance(pays, str) else fs.project
        server = "" if "://" in address else str(fs.base).removesuffix("/storage/v1/")
        mark = "&" if "?" in address else "?"
        url = f"{server}{address}{mark if asked else ''}{urlencode(asked)}"
        async with fs.session.request(
            method,
            yarl.URL(url, encoded=True),
            headers=heads,
            data=_pieces(memoryview(data)) if data else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                sock_connect=min(CONNECT_TIMEOUT_S, self._read_timeout_s),
                sock_read=self._read_timeout_s,
            ),
        ) as answer:
            is_new = method == "PUT" or asked.get(_IF_GENERATION) == "0"
            if answer.status == _CHANGED and is_new:
                raise FileExistsError("something bears the name already")
            if answer.status >= _FIRST_FAILURE and answer.status not in accepts:
                raise _failure(answer.status, await answer.read())
            return await take(answer)


async def _pieces(data: memoryview) -> AsyncIterator[memoryview]:
    """Yield a body without copying it.

    aiohttp warns of large bytes, and sends what it can rewind a second time by itself, which
    a resumable session might take for a gap.
    """
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


async def _nothing(answer: Any) -> None:  # noqa: ANN401  # aiohttp's answer
    """Take no notice of a body."""
    await answer.read()


async def _document(answer: Any, *, kind: str = "object") -> Mapping[str, Any]:  # noqa: ANN401  # aiohttp's answer
    """Return a body decoded from JSON; raises `ForeignAnswer` if it is of another kind."""
    found: Any = json.loads(await answer.read())
    if not isinstance(found, Mapping) or found.get("kind") != f"storage#{kind}":
        raise ForeignAnswer(f"kind storage#{kind}")
    return found


async def _fill(start: int, view: memoryview, answer: Any) -> tuple[int, int | None]:  # noqa: ANN401  # aiohttp's answer
    """Fill `view` from `start` (bytes) on; return bytes read and the object's length.

    An answer of 200 is the whole object: its first bytes are skipped, unless that would be many
    times what was asked for.
    """
    skip, count, total_bytes = 0, 0, total_of(answer.headers.get("Content-Range"))
    if answer.status == _NO_RANGE:
        return 0, None
    if answer.status == _OK:
        skip, total_bytes = start, answer.content_length
        check_waste(start, len(view), total_bytes)
    read = answer.content.read
    while skip and (piece := await read(min(CHUNK_BYTES, skip))):
        skip -= len(piece)
    while count < len(view) and (piece := await read(min(CHUNK_BYTES, len(view) - count))):
        view[count : count + len(piece)] = piece
        count += len(piece)
    return count, total_bytes


def _condition(generation: str | None) -> dict[str, str]:
    """Return the query that asks for a generation; "0" is for none, None asks for nothing."""
    return {} if generation is None else {_IF_GENERATION: generation}


def _metadata(write_id: str | None) -> Mapping[str, Mapping[str, str]]:
    return {"metadata": {} if write_id is None else {_WRITE_ID: write_id}}


def _failure(status: int, body: bytes) -> HttpFailure:
    """Return the failure that an answer's JSON body describes."""
    try:
        said = json.loads(body)["error"]
        reasons = said.get("errors") or [{}]
        code, message = str(reasons[0].get("reason", "")), str(said.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        code, message = "", body[:300].decode("utf-8", "replace")
    return HttpFailure(status=status, code=code, message=message)


def _stuck(path: str, what: str, *, retryable: bool = False) -> StorageError:
    """Return the error that a session cannot go on."""
    return StorageError(
        f"The upload of {path} {what}.",
        retryable=retryable,
        path=path,
        next_step="Try again later; the fault is the storage's." if retryable else "Save again.",
    )


def _seconds(stamp: str | None) -> float | None:
    """Return Unix seconds for a timestamp of RFC 3339."""
    return None if stamp is None else datetime.fromisoformat(stamp).timestamp()
