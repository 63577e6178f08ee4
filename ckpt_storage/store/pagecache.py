"""Files as they lie in the kernel's cache.

Knows which of a disk's pages are in memory, and how to bring in the few that are not; knows no
store. Called by `local`.
"""

from __future__ import annotations

import mmap

from .posix import Posix

__all__ = ["mapped_if_cached"]

_PIECE_BYTES = 1 << 20

_MISSING_SHARE = 16
"""What share of a file may be read from the disk, so that all of it is cached. Seen: 1 MiB of 600
that had just been written."""


def mapped_if_cached(posix: Posix, fd: int, full: str, size_bytes: int) -> mmap.mmap | None:
    """Return the memory of the open file `full` if nearly all of it is cached, else None.

    What is missing is read first, so that an error of the disk is one of a read. None, too, on file
    systems whose files others may change or that keep their own cache. Raises `OSError`.
    """
    if not size_bytes or not posix.is_own_disk(full):
        return None
    missing_bytes = size_bytes - posix.cached_bytes(fd, 0, size_bytes)
    if missing_bytes > size_bytes // _MISSING_SHARE:
        return None
    if missing_bytes:
        _read_missing(posix, fd, size_bytes)
    return posix.map_private(fd, size_bytes)


def _read_missing(posix: Posix, fd: int, size_bytes: int) -> None:
    scratch = memoryview(bytearray(_PIECE_BYTES))
    for start in range(0, size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size_bytes - start)
        if posix.cached_bytes(fd, start, length) < length:
            posix.preadv_all(fd, [scratch[:length]], start)
