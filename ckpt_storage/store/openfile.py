"""Files opened to be read, and the last one that a thread read from, kept open for its next read.

Knows descriptors only. Called by `local`. A file is kept for reads that follow one another: opening
and closing it take as long as a read of some hundred KiB from the kernel's cache.
"""

from __future__ import annotations

import errno
import os
import stat as stat_modes
from collections.abc import Callable
from typing import TypeVar

from .posix import Posix

__all__ = ["KeptFile", "Opened", "check_is_file", "open_file"]

T = TypeVar("T")

Opened = tuple[int, int]
"""Descriptor and size (bytes) of a file."""


def check_is_file(found: os.stat_result, full: str) -> None:
    """Raise as for an absent file if a folder or device bears the name."""
    if not stat_modes.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{full} is not a file")


def open_file(posix: Posix, full: str) -> Opened:
    """Open a file to read it. Raises `OSError`, and as for an absent file if it is none."""
    fd = posix.open_read(full)
    try:
        found = posix.fstat(fd)
        check_is_file(found, full)
    except BaseException:
        posix.close(fd)
        raise
    return fd, found.st_size


class KeptFile:
    """At most one open file, for the reads of one thread."""

    def __init__(self, posix: Posix) -> None:
        self._posix = posix
        self._full = ""
        self._opened: Opened | None = None

    def use(self, full: str, opened: Callable[[], Opened], use: Callable[[int, int], T]) -> T:
        """Return what `use` makes of the file at `full`, which `opened` opens if it is another.

        After an error nothing is kept: a file may have been replaced on a server.
        """
        if self._opened is None or full != self._full:
            self.close()
            self._full, self._opened = full, opened()
        try:
            return use(*self._opened)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close what is kept; idempotent."""
        kept, self._opened = self._opened, None
        if kept is not None:
            self._posix.close(kept[0])
