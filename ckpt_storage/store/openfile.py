"""The last file that a thread read from, kept open for its next read.

Knows descriptors only. Called by `local`, for reads that follow one another: opening a file and
closing it take as long as a read of some hundred KiB from the kernel's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .posix import Posix

__all__ = ["KeptFile", "Opened"]

T = TypeVar("T")

Opened = tuple[int, int]
"""Descriptor and size (bytes) of a file."""


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
