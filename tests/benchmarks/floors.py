"""The floor of a storage: its bytes moved by the plainest fast code, with no format around them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import crc32c
import fsspec.core
import torch

_PART_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_PIECES_READ = 4
_BLOCK_BYTES = 64 << 10
_AT_ONCE = 8
_IO_VECTORS = 1024

Seen = Callable[[memoryview], object]
"""Takes each piece of what is read as soon as it is there."""


def checksum(view: memoryview) -> None:
    """Compute the CRC-32C of each block of 64 KiB, as a reader does that checks them."""
    for at in range(0, len(view), _BLOCK_BYTES):
        crc32c.crc32c(view[at : at + _BLOCK_BYTES])


def put_matrices(path: Path, matrices: Sequence[torch.Tensor]) -> list[int]:
    """Write matrices one after the other; return the CRC-32C of each block for `load_columns`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    crcs: list[int] = []
    with path.open("wb", 0) as file:
        for matrix in matrices:
            step = max(1, _PIECE_BYTES // matrix[0].nbytes)
            for rows in torch.split(matrix, step):
                array: Any = rows.contiguous().view(torch.uint8).reshape(-1).numpy()
                view = memoryview(array)
                starts = range(0, len(view), _BLOCK_BYTES)
                crcs += [crc32c.crc32c(view[at : at + _BLOCK_BYTES]) for at in starts]
                _whole(os.writev, file.fileno(), [view])
    return crcs


def load_columns(
    path: Path, crcs: Sequence[int], targets: Sequence[tuple[torch.Tensor, int, int]]
) -> None:
    """Fill targets with columns of the matrices of a file, in their order; plain code.

    With each target come the bytes of a row in the file and the first column. Reads 4 MiB, checks
    each MiB and copies the wanted columns out of it at once.
    """
    known, longest = iter(crcs), max(row_bytes for _, row_bytes, _ in targets)
    buffer = memoryview(bytearray(_PIECES_READ * max(_PIECE_BYTES, longest)))
    with path.open("rb", 0) as file:
        for target, row_bytes, first in targets:
            step = max(1, _PIECE_BYTES // row_bytes)
            for pieces in torch.split(target, _PIECES_READ * step):
                whole = buffer[: len(pieces) * row_bytes]
                _whole(os.readv, file.fileno(), [whole])
                for at, rows in enumerate(torch.split(pieces, step)):
                    piece = whole[at * step * row_bytes :][: len(rows) * row_bytes]
                    for start in range(0, len(piece), _BLOCK_BYTES):
                        if crc32c.crc32c(piece[start : start + _BLOCK_BYTES]) != next(known):
                            raise ValueError(f"{path} is damaged")
                    stored = torch.frombuffer(piece, dtype=rows.dtype).view(len(rows), -1)
                    rows.copy_(stored[:, first : first + rows.shape[1]])


class Floor(Protocol):
    """Whole files on one storage; paths are relative to its folder."""

    name: str

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        """Write a file of consecutive views, durable as far as the storage promises it."""

    def get(self, path: str, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        """Fill the views with the bytes of a file, piece by piece for `seen`."""

    def clear(self, folder: str) -> None:
        """Remove a folder that may be absent."""


class DiskFloor:
    """Files on a local disk or mount: one write and one fsync a file, reads into place."""

    name = "floor"

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb", 0) as file:
            _whole(os.writev, file.fileno(), views)
            os.fsync(file.fileno())

    def get(self, path: str, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        with (self._root / path).open("rb", 0) as file:
            if seen is None:
                _whole(os.readv, file.fileno(), views)
                return
            for view in views:
                for at in range(0, len(view), _PIECE_BYTES):
                    piece = view[at : at + _PIECE_BYTES]
                    _whole(os.readv, file.fileno(), [piece])
                    seen(piece)

    def clear(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def forget_cached(self) -> None:
        """Ask the kernel to drop what it caches of all files below the root."""
        for path in self._root.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(
    call: Callable[[int, Sequence[memoryview]], int], file: int, views: Sequence[memoryview]
) -> None:
    """Move all bytes of some views: Linux takes no more than 2 GiB, and 1,024 views, at once."""
    first = 0
    while first < len(views):
        count = call(file, views[first : first + _IO_VECTORS])
        if not count:
            raise EOFError("the file ends too early")
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views = [*views[:first], views[first][count:], *views[first + 1 :]]


class FsspecFloor:
    """Files on anything that fsspec reaches: ranges of 16 MiB, eight at a time."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url, **storage_options)
        self.name = f"floor: {type(self._fs).__name__} alone"

    def put(self, path: str, views: Sequence[memoryview]) -> None:
        target = f"{self._root}/{path}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(target, b"".join(views))

    def get(self, path: str, views: Sequence[memoryview], seen: Seen | None = None) -> None:
        steps = [(view, at) for view in views for at in range(0, len(view), _PART_BYTES)]
        pieces = [view[at : at + _PART_BYTES] for view, at in steps]
        starts = [0, *itertools.accumulate(map(len, pieces))]

        def fill(group: list[int]) -> None:
            begin, end = starts[group[0]], starts[group[-1] + 1]
            found = self._fs.cat_file(f"{self._root}/{path}", start=begin, end=end)
            for number in group:
                at, piece = starts[number] - begin, pieces[number]
                piece[:] = memoryview(found)[at : at + len(piece)]
                if seen is not None:
                    seen(piece)

        numbers = range(len(pieces))
        groups = itertools.groupby(numbers, lambda number: starts[number] // _PART_BYTES)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(fill, [list(group) for _, group in groups]))

    def clear(self, folder: str) -> None:
        target = f"{self._root}/{folder}".rstrip("/")
        self._fs.invalidate_cache()
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)
