"""The system calls of the local store, one method each, so that tests can fail each of them.

Every method raises the `OSError` of its call. The last methods make several of these calls.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH114, PTH116  # one system call a method; a
# Path object would cost more than some of them.

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat as stat_modes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

_IOV_MAX = os.sysconf("SC_IOV_MAX")

# Longer writes are split at multiples of this: the kernel may cache the bytes of one call in one
# folio. Hosts of virtual machines reclaim free blocks of 2 MiB and more, and to fault these in
# again takes most of a save's time.
_WRITE_BYTES = 1 << 20

_SYNC_FILE_RANGE_WRITE = 2

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
"""Errors for a name that does not exist."""

NO_CALL = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system or kernel that does not support a call."""

_NO_FULL_SYNC = NO_CALL | {errno.EINTR, errno.ENODEV, errno.ENOTTY, errno.EPERM, errno.ESPIPE}

# Names that NFS clients and FUSE give to a removed file that is still open.
_REMAINS = re.compile(r"\.(nfs|fuse_hidden)[0-9a-f]{8,}")


def _sync(fd: int) -> None:
    """Make what an open file or folder holds durable, through the drive's cache."""
    # fsync of macOS does not flush that cache. If the stronger call is refused, fsync follows.
    command = getattr(fcntl, "F_FULLFSYNC", None)
    if command is not None:
        try:
            fcntl.fcntl(fd, command)
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
        else:
            return
    os.fsync(fd)


def _advise(fd: int, advice: str) -> None:
    # A hint; some file systems refuse it.
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(fd, 0, 0, getattr(os, advice))


def _move_all(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    most_bytes: int,
) -> int:
    """Read or write until all is done or a call makes no progress; return the bytes moved."""
    pending = deque(view.cast("B") for view in buffers if view.nbytes)
    at = offset
    while pending:
        views, room = [], most_bytes - at % most_bytes
        for view in islice(pending, _IOV_MAX):
            views.append(view[:room])
            room -= view.nbytes
            if room <= 0:
                break
        count = call(fd, views, at)
        if count <= 0:
            break
        at += count
        while count:
            view = pending.popleft()
            if count < view.nbytes:
                pending.appendleft(view[count:])
            count -= min(count, view.nbytes)
    return at - offset


class Posix:
    """The system calls; without state, safe in any thread."""

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_write(self, path: str) -> int:
        """Open an existing file for writing, without following a symbolic link."""
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open_folder(self, path: str) -> None:
        """Open and close a folder, which makes a network file system revalidate its names."""
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once at `offset` (bytes), perhaps not all; return the bytes written."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read once at `offset` (bytes), perhaps not all; return the bytes read."""
        return os.preadv(fd, buffers, offset)

    def pwritev_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        count = _move_all(self.pwritev, fd, buffers, offset, _WRITE_BYTES)
        if count < sum(view.nbytes for view in buffers):
            raise OSError(errno.EIO, "the file system wrote nothing and reported no error")

    def preadv_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from `offset` (bytes) on; return the bytes read, fewer only at the end."""
        return _move_all(self.preadv, fd, buffers, offset, sys.maxsize)

    def start_write_back(self, fd: int, offset: int, length: int) -> None:
        """Start writing a range to the disk, so that `fsync` waits for less."""
        # Only Linux has it; the next fsync reports its errors.
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is not None:
            call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)

    def forget(self, fd: int) -> None:
        """Advise the kernel to drop the written pages of an open file."""
        _advise(fd, "POSIX_FADV_DONTNEED")

    def advise_sequential(self, fd: int) -> None:
        """Advise the kernel that an open file is read sequentially."""
        _advise(fd, "POSIX_FADV_SEQUENTIAL")

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def fsync(self, fd: int) -> None:
        _sync(fd)

    def write_out(self, fd: int) -> None:
        """Have a network file system send all writes, as closing does."""
        os.close(os.dup(fd))

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock_folder(self, path: str) -> int:
        """Return a descriptor that locks a folder; `BlockingIOError` if it is locked."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def fsync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def real_path(self, path: str) -> str:
        """Return a path with all links resolved, as far as it exists."""
        return os.path.realpath(path)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)

    def sync_names(self, path: str) -> None:
        """Make the names in a folder durable, if the file system can sync folders."""
        try:
            self.fsync_folder(path)
        except OSError as error:
            # Some FUSE and SMB mounts do not support it; there is no better call.
            if error.errno not in NO_CALL:
                raise

    def make_folder(self, path: str, *, root: str, made: set[str], sync: bool) -> None:
        """Create a folder and its parents, except `made`; `sync` each name in `root`, or `root`."""
        if path in made:
            return
        parent = folder_of(path)
        if parent != path and (len(path) > len(root) or not self._is_folder(parent)):
            self.make_folder(parent, root=root, made=made, sync=sync)
        try:
            self.mkdir(path)
        except OSError as error:
            # A read-only parent refuses an existing name, too, and the response may be lost.
            if not self._is_folder(path):
                if error.errno == errno.EEXIST:
                    raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file") from error
                raise
        if sync:
            try:
                self.sync_names(parent)
            except PermissionError:
                # A parent that is not readable cannot be synced; journaling file systems make the
                # name of a folder durable with the folder.
                self.sync_names(path)
        made.add(path)

    def _is_folder(self, path: str) -> bool:
        try:
            return stat_modes.S_ISDIR(self.stat(path).st_mode)
        except OSError:
            return False

    def remove_folder(self, path: str) -> bool:
        """Remove a folder and all below it, following no symbolic link; return if it existed."""
        if self.is_link(path):
            self.unlink(path)
            return True
        try:
            items = self.scandir(path)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise
        for item in items:
            if item.is_dir(follow_symlinks=False):
                self.remove_folder(item.path)
                continue
            try:
                self.unlink(item.path)
            except OSError as error:
                # EBUSY: the file is still open, and its folder stays, too.
                if error.errno not in {errno.ENOENT, errno.EBUSY}:
                    raise
        try:
            self.rmdir(path)
        except OSError as error:
            items = self.scandir(path) if error.errno == errno.ENOTEMPTY else []
            is_held = bool(items) and all(is_remains(item.name) for item in items)
            if error.errno != errno.ENOENT and not is_held:
                raise
        return True


def folder_of(path: str) -> str:
    """Return the parent folder of a path."""
    return os.path.split(path)[0]


def is_remains(name: str) -> bool:
    """Return whether a name is that of a removed file that is still open."""
    return _REMAINS.fullmatch(name) is not None
