"""Hard links to files, durable and protected from edits."""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_modes

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.store.problems import check_copied

from .posix import NO_CALL, Posix
from .temp_files import temp_name

_NO_LINK = NO_CALL | {errno.EACCES, errno.EMLINK, errno.EPERM, errno.EXDEV}
"""Errors of a link after which the bytes are copied instead."""

_WRITE_BITS = 0o222


def link_file(posix: Posix, source: str, target: str, *, size_bytes: int, sync: bool) -> None:
    """Make `target` a hard link to `source`, replacing what is there; may be retried.

    The file loses its write bits, as an edit of one name would change the other. It is synced, as
    the save that wrote it may have had `sync_files=False`. Raises `UnsupportedByStoreError` if the
    file cannot be linked or the link does not appear as the same file, `IntegrityError` if it has
    another length.
    """
    folder, name = os.path.split(target)
    temporary = f"{folder}/{temp_name(name)}"
    fd = posix.open_read(source)
    try:
        stat = posix.fstat(fd)
        if not stat_modes.S_ISREG(stat.st_mode) or posix.is_link(source):
            raise UnsupportedByStoreError(f"{source} is not a plain file.")
        check_copied(source, stat.st_size, size_bytes)
        try:
            try:
                posix.link(source, temporary)
                linked = posix.stat(temporary)
                if (linked.st_dev, linked.st_ino) != (stat.st_dev, stat.st_ino):
                    # It was replaced, or a mount such as sshfs has an inode number per name.
                    what = f"{source} and its new name are not shown as one file."
                    raise UnsupportedByStoreError(what)
                if stat.st_mode & _WRITE_BITS:
                    posix.fchmod(fd, stat_modes.S_IMODE(stat.st_mode) & ~_WRITE_BITS)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                what = f"{source} cannot be linked to {target}: {error.strerror}."
                raise UnsupportedByStoreError(what) from error
            if sync:
                _sync(posix, fd, source)
            posix.rename(temporary, target)
        finally:
            # rename(2) keeps both names of one file. The response may be lost, too.
            with contextlib.suppress(OSError):
                posix.unlink(temporary)
        if sync:
            posix.sync_names(folder)
    finally:
        posix.close(fd)


def _sync(posix: Posix, fd: int, source: str) -> None:
    try:
        posix.fsync(fd)
    except OSError as error:
        # A second fsync could succeed although the first lost pages.
        what = f"{source} may not survive a power cut: its fsync failed ({error.strerror})."
        step = "Look into the kernel log and the mount; verify the checkpoint that it is part of."
        raise StorageError(what, retryable=False, next_step=step) from error
