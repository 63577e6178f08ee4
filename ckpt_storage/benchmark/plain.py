"""The floor of a storage: its bytes moved by the plainest fast code, with no format around them.

A local disk gets one write and one fsync a file, and reads into place. Other storages get whole
objects and ranges through fsspec's file system.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ckpt_storage.checksums import crcs_of_blocks
from ckpt_storage.options import DEFAULT_BLOCK_BYTES
from ckpt_storage.store import Location
from ckpt_storage.store.posix import Posix

_PART_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_CACHED_BYTES = 256 << 10
_AT_ONCE = 8
_IO_VECTORS = 1024


Seen = Callable[[memoryview], object]
"""Takes each piece of what is read as soon as it is there."""


def checksum(view: memoryview) -> None:
    """Compute the CRC-32C of each block, as a reader does that holds them to something."""
    crcs_of_blocks(view, DEFAULT_BLOCK_BYTES)


class Plain(Protocol):
    """Whole files on one storage; paths are relative to its folder."""

    put_name: str
    """What `put` does."""
    by: str
    """Behind what is done: by which client."""

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        """Write a file of consecutive views, durable as far as the storage promises it."""

    def get(
        self, path: str, views: Sequence[memoryview], start: int = 0, *, seen: Seen | None = None
    ) -> None:
        """Fill the views with consecutive bytes from `start` on, piece by piece for `seen`."""

    def whole(self, path: str, size_bytes: int) -> memoryview:
        """Return a whole file, mapped or read into a buffer that the next call uses again."""

    def through(self, source: str, output: str) -> None:
        """Read a whole file piece by piece and write it again, durable."""

    def clear(self, folder: str) -> None:
        """Remove a folder that may be absent."""


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Write all bytes of some views: Linux takes no more than 2 GiB at once."""
    while views:
        views = _behind(views, os.writev(descriptor, views))


def _read_all(descriptor: int, views: Sequence[memoryview], start: int) -> int:
    """Fill some views from `start` (bytes) on, and return where they end."""
    while views:
        count = os.preadv(descriptor, views, start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        start += count
        views = _behind(views, count)
    return start


def _behind(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return what of `views` lies behind their first `count` bytes."""
    for at, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[at + 1 :]] if count else views[at:]
        count -= view.nbytes
    return []


class PlainDisk:
    """Files on a local disk or mount."""

    put_name = "write, fsync"
    by = ""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        """Write and fsync one file."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            if len(views) > _IO_VECTORS:
                for at in range(0, len(views), _IO_VECTORS):
                    _write_all(descriptor, views[at : at + _IO_VECTORS])
            else:
                for view in views:
                    _write_all(descriptor, [view])
            Posix().fsync(descriptor)
        finally:
            os.close(descriptor)

    def get(
        self, path: str, views: Sequence[memoryview], start: int = 0, *, seen: Seen | None = None
    ) -> None:
        """Read into place."""
        descriptor = os.open(self._root / path, os.O_RDONLY)
        try:
            if seen is not None:
                for piece in _pieces(views, _PIECE_BYTES):
                    start = _read_all(descriptor, [piece], start)
                    seen(piece)
                return
            for at in range(0, len(views), _IO_VECTORS):
                start = _read_all(descriptor, views[at : at + _IO_VECTORS], start)
        finally:
            os.close(descriptor)

    def whole(self, path: str, size_bytes: int) -> memoryview:
        """Map a file; privately writable, as torch wants it."""
        with (self._root / path).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY))

    def through(self, source: str, output: str) -> None:
        """Read and write a file by way of one small buffer."""
        target = self._root / output
        target.parent.mkdir(parents=True, exist_ok=True)
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with (self._root / source).open("rb", 0) as reader, target.open("wb", 0) as writer:
            while count := reader.readinto(buffer):
                writer.write(buffer[:count])
            Posix().fsync(writer.fileno())

    def clear(self, folder: str) -> None:
        """Remove a folder."""
        shutil.rmtree(self._root / folder, ignore_errors=True)

    @property
    def can_forget(self) -> bool:
        """Whether this system has the call that `forget_cached` makes; macOS has not."""
        return hasattr(os, "posix_fadvise")

    def forget_cached(self) -> None:
        """Ask the kernel to drop what it caches of all files below the root."""
        for path in self._root.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class PlainFsspec:
    """Files on anything that fsspec reaches."""

    put_name = "put"

    def __init__(self, location: Location) -> None:
        import fsspec.core  # noqa: PLC0415  # local benchmarks need none

        self._buffer = bytearray()

        self._fs, self._root = fsspec.core.url_to_fs(location.target, **location.storage_options)
        self.by = f" by fsspec's {type(self._fs).__name__} alone"

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        """Put one file."""
        target = f"{self._root}/{path}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(target, b"".join(views))

    def get(
        self, path: str, views: Sequence[memoryview], start: int = 0, *, seen: Seen | None = None
    ) -> None:
        """Read ranges and copy them into place."""

        def fetch(begin: int, length: int) -> memoryview:
            target = f"{self._root}/{path}"
            return memoryview(self._fs.cat_file(target, start=begin, end=begin + length))

        _in_parallel(fetch, views, start, seen)

    def whole(self, path: str, size_bytes: int) -> memoryview:
        """Read a file into the buffer."""
        self._buffer = _at_least(self._buffer, size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        self.get(path, [view])
        return view

    def through(self, source: str, output: str) -> None:
        """Read a whole file and put it again."""
        data = self._fs.cat_file(f"{self._root}/{source}")
        self.put(output, [memoryview(data)])

    def clear(self, folder: str) -> None:
        """Remove a folder."""
        target = f"{self._root}/{folder}".rstrip("/")
        self._fs.invalidate_cache()
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)


def _pieces(views: Sequence[memoryview], most_bytes: int) -> Iterator[memoryview]:
    for view in views:
        for at in range(0, len(view), most_bytes):
            yield view[at : at + most_bytes]


def _in_parallel(
    fetch: Callable[[int, int], memoryview],
    views: Sequence[memoryview],
    start: int,
    seen: Seen | None,
) -> None:
    """Fill consecutive views by ranges of at most one part, small views by one range together."""

    def fill(pieces: Sequence[memoryview], begin: int) -> None:
        found, at = fetch(begin, sum(map(len, pieces))), 0
        for piece in pieces if seen is None else _pieces(pieces, _CACHED_BYTES):
            piece[:] = found[at : at + len(piece)]
            at += len(piece)
            if seen is not None:
                seen(piece)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        running: list[Future[None]] = []
        group: list[memoryview] = []
        group_bytes = 0
        for view in views:
            for at in range(0, len(view), _PART_BYTES):
                piece = view[at : at + _PART_BYTES]
                if group and group_bytes + len(piece) > _PART_BYTES:
                    running.append(threads.submit(fill, group, start))
                    start, group, group_bytes = start + group_bytes, [], 0
                group.append(piece)
                group_bytes += len(piece)
        running.append(threads.submit(fill, group, start))
        for each in running:
            each.result()


def _at_least(buffer: bytearray, size_bytes: int) -> bytearray:
    return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)


def plain_storage(location: Location) -> Plain:
    """Return the floor of the storage at `location`."""
    if location.is_local:
        return PlainDisk(location.target)
    return PlainFsspec(location)
