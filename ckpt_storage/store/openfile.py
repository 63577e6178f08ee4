"""Files opened to be read."""

from __future__ import annotations

import errno
import os
import stat as stat_modes

from .posix import Posix

__all__ = ["check_is_file", "open_file"]


def check_is_file(found: os.stat_result, full: str) -> None:
    """Raise as for an absent file if a folder or device bears the name."""
    if not stat_modes.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{full} is not a file")


def open_file(posix: Posix, full: str) -> tuple[int, int]:
    """Open a file to read it; return its descriptor and its size in bytes.

    Raises `OSError`, and as for an absent file if it is none.
    """
    fd = posix.open_read(full)
    try:
        found = posix.fstat(fd)
        check_is_file(found, full)
    except BaseException:
        posix.close(fd)
        raise
    return fd, found.st_size
