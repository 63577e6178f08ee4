"""fsspec's `memory://`: a dict in this process, with every operation one step under a lock."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.store.backend import (
    Backend,
    Buffers,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    Part,
    PartCopy,
    Range,
    Settings,
    ShortReadError,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import changed, check_source

# All memory:// file systems of a process share one dict, so they share one lock.
_LOCK = threading.RLock()
_OPEN: dict[str, dict[int, bytes]] = {}


class MemoryBackend(Backend):
    """A storage with every ability, within one process. A version is a digest."""

    capabilities = Capabilities(
        kind="memory",
        is_remote=False,
        shared=False,
        exclusive_create=True,
        if_match=True,
        atomic_replace=True,
        parallel_parts=True,
        tokens_travel=True,
        copy_min_bytes=1,
    )

    def __init__(self, location: Location, settings: Settings | None = None) -> None:
        self._root = str(MemoryFileSystem._strip_protocol(location.target)).rstrip("/")  # noqa: SLF001  # fsspec's own way
        self._fs: Any = MemoryFileSystem()

    def stat(self, path: str) -> ObjectInfo:
        with _LOCK:
            return self._info(self._full(path))

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        data = self._data(self._full(path))
        content = data if max_bytes is None else data[: max_bytes + 1]
        return Content(data=content, version=_version(data))

    def tail(self, path: str, byte_count: int) -> Content:
        data = self._data(self._full(path))
        return Content(data=data[max(0, len(data) - byte_count) :], version=_version(data))

    def read(self, path: str, ranges: Iterable[Range]) -> int | None:
        """Copy from one version of the object."""
        data = self._data(self._full(path))
        for start, view in ranges:
            piece = data[start : start + view.nbytes]
            view[: len(piece)] = piece
            if len(piece) < view.nbytes:
                raise ShortReadError(start + len(piece))
        return len(data)

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        full, content = self._full(path), b"".join(data)
        with _LOCK:
            if if_absent and full in self._fs.store:
                raise FileExistsError(path)
            if if_match is not None and _version(self._data(full)) != if_match:
                raise changed(path)
            self._fs.pipe_file(full, content)
            self._fs.store[full].write_id = write_id

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        below = f"{self._full(prefix)}/"
        entries: dict[str, ObjectInfo] = {}
        with _LOCK:
            for full in self._fs.store:
                if not full.startswith(below):
                    continue
                child, slash, _ = full[len(below) :].partition("/")
                if slash and not recursive:
                    path = f"{below}{child}/"[len(self._root) + 1 :]
                    entries[path] = ObjectInfo(path=path, size_bytes=0)
                else:
                    entries[full] = self._info(full)
        return iter(entries.values())

    def delete(self, paths: Sequence[str]) -> None:
        with _LOCK:
            for path in paths:
                self._fs.store.pop(self._full(path), None)

    def delete_version(self, path: str, version: str) -> None:
        with _LOCK:
            full = self._full(path)
            if full in self._fs.store and _version(self._data(full)) != version:
                raise changed(path)
            self.delete([path])

    def begin_upload(self, path: str, *, write_id: str) -> str:
        token = os.urandom(16).hex()
        _OPEN[token] = {}
        return token

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        _pieces(path, token)[part.number] = b"".join(data)
        return ""

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        whole = self._data(copy.source.address)
        check_source(copy, len(whole))
        data = whole[copy.start : copy.start + copy.length]
        _pieces(path, token)[copy.number] = data
        return Part(
            number=copy.number, offset=copy.offset, size_bytes=len(data), crc32c=crc32c_of(data)
        )

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        with _LOCK:
            pieces = _pieces(path, token)
            data = [memoryview(pieces[part.number]) for part in parts]
            self.put(path, data, write_id=write_id)
            del _OPEN[token]

    def abort_upload(self, path: str, token: str) -> None:
        _OPEN.pop(token, None)

    def copy_source(self, path: str) -> CopySource | None:
        full = self._full(path)
        return CopySource(scope="memory", address=full, path=f"memory:/{full}")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _file(self, full: str) -> Any:
        try:
            return self._fs.store[full]
        except KeyError:
            raise FileNotFoundError(full) from None

    def _data(self, full: str) -> bytes:
        with _LOCK:
            data: bytes = self._file(full).getvalue()
            return data

    def _info(self, full: str) -> ObjectInfo:
        file, path = self._file(full), full[len(self._root) + 1 :]
        info = ObjectInfo(path=path, size_bytes=len(file.getvalue()))
        write_id = getattr(file, "write_id", None)
        return replace(info, modified_s=file.modified.timestamp(), write_id=write_id)


def _pieces(path: str, token: str) -> dict[int, bytes]:
    try:
        return _OPEN[token]
    except KeyError:
        raise FileNotFoundError(f"the upload of {path} is over") from None


def _version(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
