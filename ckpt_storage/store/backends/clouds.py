"""What object stores have in common. The clients' own retries are off, as `Store` retries."""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.store.backend import (
    Buffers,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    Range,
    ShortReadError,
)
from ckpt_storage.store.problems import HttpFailure, meaning_of, response_in, unless_absent
from ckpt_storage.store.threads import report_progress

from .client_registry import ForeignFs
from .clients import ClientBackend

WRITE_ID = "ckpt-write-id"
"""Metadata that distinguishes one attempt to write a key from another."""

_AT_ONCE = 16

_CODES_OF_BOTH = frozenset({"", "404", "notFound"})
"""Codes for an absent object as well as for an absent bucket: of HEAD requests, and of Google."""

Preconditions: TypeAlias = Mapping[str, Any]
"""The arguments of a request that make it conditional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The body of a response; `first` is the offset of its first byte in the object."""

    pieces: AsyncIterator[bytes]
    first: int = 0
    total_bytes: int | None = None
    version: str | None = None


CLOUD = Capabilities(kind="generic", exclusive_create=True, if_match=True, atomic_replace=True)
"""What all clouds promise; other servers with the same API may ignore conditions."""

ObjectStat: TypeAlias = tuple[int, float | None, str, str | None]
"""Length in bytes, time of the last change, version and write id of an object."""

Page: TypeAlias = tuple[Sequence[ObjectInfo], Any]
"""One response to a listing, and the continuation of the listing, if any."""


class CloudBackend(ClientBackend):
    """A prefix in a bucket; a derived class sends six kinds of requests, and uploads."""

    @abc.abstractmethod
    async def _head(self, fs: ForeignFs, path: str) -> ObjectStat:
        """Request the metadata of an object."""

    @abc.abstractmethod
    def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> contextlib.AbstractAsyncContextManager[Body]:
        """Request an object, or a range; with a negative `start`, the last `length` bytes."""

    @abc.abstractmethod
    async def _put(
        self, fs: ForeignFs, path: str, data: Buffers, write_id: str | None, terms: Preconditions
    ) -> None:
        """Put a whole object."""

    @abc.abstractmethod
    async def _delete(self, fs: ForeignFs, path: str, terms: Preconditions) -> None:
        """Delete an object; an absent object may be an error."""

    @abc.abstractmethod
    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> Page:
        """List the names that begin with `below`; folders have a path that ends in a slash."""

    @abc.abstractmethod
    def _terms(self, *, if_absent: bool = False, if_match: str | None = None) -> Preconditions:
        """Return the condition of a request."""

    def stat(self, path: str) -> ObjectInfo:
        size_bytes, at_s, version, write_id = self._run(self._head, path)
        info = ObjectInfo(path=path, size_bytes=size_bytes, modified_s=at_s)
        return replace(info, version=version, write_id=write_id)

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Request the object, and stop reading after `max_bytes`."""

        async def get(fs: ForeignFs) -> Content:
            data = bytearray()
            async with self._body(fs, path, None, 0) as body:
                async for piece in body.pieces:
                    data += piece
                    if max_bytes is not None and len(data) > max_bytes:
                        break
            return Content(data=bytes(data), version=body.version)

        return self._run(get)

    def tail(self, path: str, byte_count: int) -> Content:
        """Request a suffix range."""

        async def get(fs: ForeignFs) -> Content:
            async with self._body(fs, path, -byte_count, byte_count) as body:
                data = b"".join([bytes(piece) async for piece in body.pieces])
            return Content(data=data[-byte_count:], version=body.version)

        try:
            return self._run(get)
        except Exception as error:
            # An empty object has no such range.
            if meaning_of(error).kind != "range":
                raise
            return self.get(path, max_bytes=byte_count)

    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        total_bytes = None
        for start, view in ranges:
            count, total_bytes = self._run(self._fill, path, start, view)
            if count < len(view):
                raise ShortReadError(start + count)
        return total_bytes

    async def _fill(
        self, fs: ForeignFs, path: str, start: int, view: memoryview
    ) -> tuple[int, int | None]:
        """Return how many bytes were received, and the length of the object."""
        async with self._body(fs, path, start, len(view)) as body:
            if start != body.first:
                what = f"The server answers a read from byte {start} on with the bytes from byte "
                what += f"{body.first} on, of {body.total_bytes} bytes in all."
                step = "Use a server that honours the Range header, without Content-Encoding."
                raise UnsupportedByStoreError(what, next_step=step)
            count = 0
            async for piece in body.pieces:
                received = memoryview(piece)[: len(view) - count]
                view[count : count + len(received)] = received
                count += len(received)
                if count == len(view):
                    break
        return count, body.total_bytes

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Send the object in one request, whatever its size: some ignore conditions of uploads."""
        terms = self._terms(if_absent=if_absent, if_match=if_match)
        self._run(self._put, path, data, write_id, terms)

    def delete(self, paths: Sequence[str]) -> None:
        async def delete(fs: ForeignFs, path: str) -> None:
            with unless_absent():
                await self._delete(fs, path, {})

        async def delete_some(fs: ForeignFs, some: Sequence[str]) -> None:
            calls = (delete(fs, path) for path in some)
            # Wait for all: a late deletion could hit a new object of that name.
            results = await asyncio.gather(*calls, return_exceptions=True)
            failures = [error for error in results if error is not None]
            if failures:
                # Prefer a final error.
                raise min(failures, key=lambda error: meaning_of(error).retryable)

        for start in range(0, len(paths), _AT_ONCE):
            self._run(delete_some, paths[start : start + _AT_ONCE])
            report_progress()

    def delete_version(self, path: str, version: str) -> None:
        """Delete on condition; after a refusal compare the version, as the object may be gone."""
        with unless_absent():
            try:
                self._run(self._delete, path, self._terms(if_match=version))
            except Exception as error:
                if meaning_of(error).kind == "precondition" and self.stat(path).version == version:
                    # Swift compares an object in parts with another ETag than it reports.
                    what = f"{path}: this server refuses the version that it reports."
                    raise UnsupportedByStoreError(what) from error
                raise

    def copy_source(self, path: str) -> CopySource | None:
        """Return the object; copies are made within a bucket."""
        scope = f"{self.capabilities.kind} {self.endpoint} {self._bucket}"
        address, url = self._name(path), f"{self._location.url}/{path}"
        return CopySource(scope=scope, address=address, path=url)

    def delete_folder(self, path: str) -> None:
        folders: set[str] = set()
        for page in self._pages(path, recursive=True):
            self.delete([info.path for info in page if not info.path.endswith("/")])
            folders.update(info.path for info in page if info.path.endswith("/"))
        for folder in sorted(folders | {f"{path}/"} if folders else (), key=len, reverse=True):
            self.delete([folder])

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[ObjectInfo]]:
        below, more = self._name(f"{prefix}/" if prefix else ""), None
        while True:
            page, more = self._run(self._page, below, more, recursive=recursive)
            report_progress()
            yield page
            if not more:
                return

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        """The bucket, and the prefix of all names: "" or a text that ends in a slash."""
        bucket, _, prefix = self._root.partition("/")
        return bucket, f"{prefix}/" if prefix else ""

    @property
    def _bucket(self) -> str:
        return self._place[0]

    def _may_lack_bucket(self, error: BaseException) -> bool:
        response = response_in(error)
        return isinstance(response, HttpFailure) and response.error_code in _CODES_OF_BOTH

    def _check_bucket(self) -> None:
        self._run(self._page, self._name(""), None, recursive=False)

    def _name(self, path: str) -> str:
        return f"{self._place[1]}{path}"

    def _path(self, name: str) -> str:
        """Return the path of an object below the root; for others an absolute path.

        `Store.list` skips absolute paths.
        """
        prefix = self._place[1]
        return name[len(prefix) :] if name.startswith(prefix) else f"/{name}"

    def _listed(self, name: str, size_bytes: int = 0, at_s: float | None = None) -> ObjectInfo:
        return ObjectInfo(path=self._path(name), size_bytes=size_bytes, modified_s=at_s)


def range_header(start: int, length: int) -> str:
    """Return a Range header: `length` bytes from `start` on or, if it is negative, the last."""
    return f"bytes=-{length}" if start < 0 else f"bytes={start}-{start + length - 1}"


def client_timeouts(request_s: float) -> tuple[float, float]:
    """Return the seconds that a client waits for a connection, and for the next bytes."""
    return min(10.0, request_s), min(60.0, request_s)


def encoded(crc32c: int) -> str:
    """Return a CRC-32C in the spelling of object stores."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode("ascii")


def decoded(text: str) -> int:
    """Return the CRC-32C of such a text."""
    return int.from_bytes(base64.b64decode(text), "big")


def span_of(content_range: object, length: int | None) -> tuple[int, int | None]:
    """Return the first byte and the length of the object by a Content-Range header.

    Without the header the response is the whole object, of `length` bytes.
    """
    if not content_range:
        return 0, length
    span, _, total = str(content_range).rpartition("/")
    first = span.rpartition(" ")[2].partition("-")[0]
    return int(first) if first.isdigit() else 0, int(total) if total.isdigit() else None
