"""Files as they lie in the kernel's cache.

Knows which of a disk's pages are in memory, and how to bring in the few that are not; knows no
store. Called by `local`.
"""

from __future__ import annotations

from .base import MappedFile
from .posix import Posix

__all__ = ["mapped_if_cached"]

_PIECE_BYTES = 1 << 20

_MISSING_SHARE, _MISSING_BYTES = 16, 8 << 20
"""What may be read from the disk, so that all of a file is cached: this share of it, and so much.
Seen: 1 MiB of 600 that had just been written."""


def mapped_if_cached(posix: Posix, fd: int, size_bytes: int) -> MappedFile | None:
    """Return the memory of an open file of this length if nearly all of it is cached, else None.

    What is missing is read first, so that an error of the disk is one of a read. None, too, on file
    systems whose files other hosts may change or that keep their own cache, and where the kernel
    cannot or will not map. Raises `OSError` of a read.
    """
    try:
        found = posix.fstat(fd)
        # Of another length it is the read's to complain of.
        if not size_bytes or found.st_size != size_bytes or not posix.is_own_disk(fd):
            return None
        missing_bytes = size_bytes - posix.cached_bytes(fd, 0, size_bytes)
        if missing_bytes > min(size_bytes // _MISSING_SHARE, _MISSING_BYTES):
            return None
        missing = _missing(posix, fd, size_bytes) if missing_bytes else []
        memory = posix.map_private(fd, size_bytes)
    except (OSError, ValueError):
        # No such call, no leave for it, no memory, no descriptor; or cut short since it was opened.
        return None
    scratch = memoryview(bytearray(_PIECE_BYTES if missing else 0))
    for start, length in missing:
        posix.preadv_all(fd, [scratch[:length]], start)
    marks = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return MappedFile(memory=memory, identity=":".join(map(str, marks)))


def _missing(posix: Posix, fd: int, size_bytes: int) -> list[tuple[int, int]]:
    pieces = (
        (start, min(_PIECE_BYTES, size_bytes - start))
        for start in range(0, size_bytes, _PIECE_BYTES)
    )
    return [
        (start, length)
        for start, length in pieces
        if posix.cached_bytes(fd, start, length) < length
    ]
