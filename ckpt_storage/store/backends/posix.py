"""The POSIX calls the local store makes, one method each, so that tests can fail each of them.

Every method raises the `OSError` it got.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH114, PTH116  # one system call a method; a
# Path object would cost more than some of them.

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import sys
from collections.abc import Callable, Sequence

from ckpt_storage.options import PageCache

_IOV_MAX = os.sysconf("SC_IOV_MAX")

# A longer write is cut at multiples of this: what one call writes, the kernel caches in pages of up
# to as much. Not longer: blocks of 2 MiB and more are what the host of a virtual machine takes back
# of free memory, and to touch them anew takes most of a save's time (`docs/performance.md`).
_WRITE_BYTES = 1 << 20
BLOCK_BYTES = 4096
"""The block that file systems share between files: a page, as they all have by default."""

_AT_FDCWD = -100
_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
_RENAME_NOREPLACE = 1
_RWF_DONTCACHE = 0x80

# Magic numbers (linux/magic.h; that of ZFS is its own).
_BCACHEFS, _BTRFS, _F2FS = 0xCA451A4E, 0x9123683E, 0xF2F52010
_XFS, _ZFS = 0x58465342, 0x2FC12FC1
_SHARING_FILE_SYSTEMS = frozenset({_BCACHEFS, _BTRFS, _XFS})
_COMPRESSING_FILE_SYSTEMS = frozenset({_BCACHEFS, _BTRFS, _F2FS, _ZFS})

_MOST_INTERRUPTIONS = 10
"""How often a call is begun anew: a timer's signals may come faster than a long one ends."""

_UNSUPPORTED = frozenset(
    getattr(errno, name)
    for name in "EINVAL ENODEV ENOSYS ENOTSUP EOPNOTSUPP EPERM ESPIPE".split()  # noqa: SIM905  # short
)

_FULL_SYNC = "F_FULLFSYNC"
"""The command of macOS's `fcntl` that flushes the drive's cache too, which its fsync does not."""


def is_unsupported(error: OSError) -> bool:
    """Return whether `error` only says that a file system or kernel does not know a call."""
    return error.errno in _UNSUPPORTED


def is_known(call: Callable[[], None]) -> bool:
    """Make a call that promises nothing; return whether kernel and file system know it."""
    try:
        call()
    except OSError as error:
        if not is_unsupported(error):
            raise
        return False
    return True


def _no_such_call() -> OSError:
    return OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _function(name: str) -> Callable[..., int]:
    """Return a function of Linux's C library; while it runs, other Python threads do too.

    Raises `OSError` with ENOSYS where there is none.
    """
    # Elsewhere one of the same name takes other numbers, and fills structs of other lengths: that
    # of `statfs` has 120 bytes on Linux and 2,168 on macOS.
    if sys.platform != "linux":
        raise _no_such_call()
    return _linux_function(name)


@functools.cache
def _linux_function(name: str) -> Callable[..., int]:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        raise _no_such_call() from None
    return found


def _checked(call: Callable[..., int], *arguments: object) -> None:
    """Call, and again if a signal came between, as Python's own calls do. Raises `OSError`.

    Raises EINTR where signals keep coming.
    """
    number = 0
    for _ in range(1 + _MOST_INTERRUPTIONS):
        if not call(*arguments):
            return
        number = ctypes.get_errno()
        if number != errno.EINTR:
            break
    raise OSError(number, os.strerror(number))


def _file_system(path: str) -> int | None:
    """Return the magic number of the file system that `path` lies on, None if it is not told."""
    # Linux's struct is smaller; its first field is a long that names the file system.
    buffer = ctypes.create_string_buffer(512)
    try:
        failed = _function("statfs")(ctypes.c_char_p(os.fsencode(path)), buffer)
    except OSError:
        return None
    return None if failed else ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def _sync(fd: int) -> None:
    """Make what an open file or folder holds durable, through the drive's cache. Raises `OSError`.

    Where the file system refuses the stronger call nothing was synced by it, so the weaker one is
    the first; any other failure is final.
    """
    command = getattr(fcntl, _FULL_SYNC, None)
    if command is not None:
        try:
            fcntl.fcntl(fd, command)
        except OSError as error:
            if error.errno != errno.ENOTTY and not is_unsupported(error):
                raise
        else:
            return
    os.fsync(fd)


def _advise(fd: int, advice: str) -> None:
    if not hasattr(os, "posix_fadvise"):
        raise _no_such_call()
    os.posix_fadvise(fd, 0, 0, getattr(os, advice))


def as_bytes(view: memoryview) -> memoryview:
    """Return `view` as one dimension of unsigned bytes, without copying."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _up_to(limit_bytes: int, pending: list[memoryview], first: int) -> list[memoryview]:
    """Return views from `first` on, at most `limit_bytes` and `_IOV_MAX` of them in all."""
    taken, room = [], limit_bytes
    for view in pending[first : first + _IOV_MAX]:
        taken.append(view[:room])
        room -= view.nbytes
        if room <= 0:
            break
    return taken


def _drop(pending: list[memoryview], first: int, count: int) -> int:
    """Take `count` bytes off the views from `first` on; return the first that is not done."""
    while count:
        view = pending[first]
        if count < view.nbytes:
            pending[first] = view[count:]
            return first
        count -= view.nbytes
        first += 1
    return first


def _cut_at_blocks(source_offset: int, offset: int, length: int) -> list[int]:
    """Return the lengths of head, whole blocks and tail of a copy; all in one if they cannot be."""
    head = -offset % BLOCK_BYTES
    if (source_offset - offset) % BLOCK_BYTES or head + BLOCK_BYTES > length:
        return [length]
    tail = (length - head) % BLOCK_BYTES
    return [piece for piece in (head, length - head - tail, tail) if piece]


class Posix:
    """The system calls, straight through; holds no state and may be shared by threads."""

    def open_new(self, path: str) -> int:
        """Create a file that must not exist and return a descriptor for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_read(self, path: str) -> int:
        """Open a file for reading and return its descriptor."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_write(self, path: str) -> int:
        """Open a file that must exist for writing, leaving its content, and return its descriptor.

        No symbolic link is followed.
        """
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open_folder(self, path: str) -> None:
        """Open and close a folder, which makes a network file system revalidate its names."""
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once at `offset` (bytes), perhaps less than all; return the bytes written."""
        return os.pwritev(fd, buffers, offset)

    def pwritev_uncached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once as `pwritev` does; the kernel writes it back at once, and keeps no copy then.

        Raises what `is_unsupported` knows where kernel (Linux before 6.14) or file system cannot.
        """
        if sys.platform != "linux":
            raise _no_such_call()
        try:
            return os.pwritev(fd, buffers, offset, _RWF_DONTCACHE)
        except NotImplementedError:
            # A C library without the call.
            raise _no_such_call() from None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read once from `offset` (bytes), perhaps less than all; return the bytes read."""
        return os.preadv(fd, buffers, offset)

    def copy_file_range(
        self, source_fd: int, source_offset: int, fd: int, offset: int, length: int
    ) -> int:
        """Copy once within the kernel, perhaps less than `length` bytes; return the bytes copied.

        File systems that can share blocks do so where both offsets and the length are multiples
        of a block, and network ones may leave it to the server. Raises `OSError` with ENOSYS where
        the operating system has no such call.
        """
        if not hasattr(os, "copy_file_range"):
            raise _no_such_call()
        return os.copy_file_range(source_fd, fd, length, source_offset, offset)

    def pwritev_all(
        self,
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
        *,
        page_cache: PageCache = "keep",
    ) -> None:
        """Write all bytes of all buffers from `offset` (bytes) on, in as many calls as it takes.

        With "drop" by `pwritev_uncached`; raises what that raises.
        """
        write = self.pwritev if page_cache == "keep" else self.pwritev_uncached
        pending = [as_bytes(view) for view in buffers if view.nbytes]
        first = 0
        while first < len(pending):
            room = _WRITE_BYTES - offset % _WRITE_BYTES
            count = write(fd, _up_to(room, pending, first), offset)
            if count <= 0:
                raise OSError(errno.EIO, "the file system took no byte and gave no reason")
            offset += count
            first = _drop(pending, first, count)

    def preadv_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill all buffers from `offset` (bytes) on; return the bytes read, fewer only at the end.

        The descriptor's own position is neither used nor moved.
        """
        pending = [as_bytes(view) for view in buffers if view.nbytes]
        first = total = 0
        while first < len(pending):
            count = self.preadv(fd, pending[first : first + _IOV_MAX], offset + total)
            if count <= 0:
                break
            total += count
            first = _drop(pending, first, count)
        return total

    def copy_all(
        self, source_fd: int, source_offset: int, fd: int, offset: int, length: int
    ) -> int:
        """Copy `length` bytes within the kernel; return how many, fewer only at the source's end.

        Where both offsets lie alike within a block, whole blocks are copied by calls of their
        own, so that they can be shared.
        """
        total = 0
        for piece_bytes in _cut_at_blocks(source_offset, offset, length):
            end = total + piece_bytes
            while total < end:
                count = self.copy_file_range(
                    source_fd, source_offset + total, fd, offset + total, end - total
                )
                if count <= 0:
                    return total
                total += count
        return total

    def allocate(self, fd: int, length: int) -> None:
        """Give an open file the blocks of its first `length` bytes; it gets no longer by it.

        Raises ENOSPC or EDQUOT where there are not as many, and what `is_unsupported` knows where
        the file system cannot say.
        """
        # Not posix_fallocate: the C library imitates it by writing, and it changes the length.
        call = _function("fallocate")
        _checked(call, fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(length))

    def start_write_back(self, fd: int, offset: int, length: int) -> None:
        """Let the kernel begin to write a range to the disk; promises nothing.

        An error of writing back is still reported by the next `fsync`: only waiting takes it away.
        """
        call = _function("sync_file_range")
        flags = ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        _checked(call, fd, ctypes.c_int64(offset), ctypes.c_int64(length), flags)

    def forget(self, fd: int) -> None:
        """Let the kernel drop what it caches of an open file and has written; promises nothing.

        Raises what `is_unsupported` knows where the system has no such call, as macOS.
        """
        _advise(fd, "POSIX_FADV_DONTNEED")

    def read_on(self, fd: int) -> None:
        """Tell the kernel that an open file will be read on from wherever it is; promises nothing.

        Raises what `is_unsupported` knows where the system has no such call, as macOS.
        """
        _advise(fd, "POSIX_FADV_SEQUENTIAL")

    def truncate(self, fd: int, length: int) -> None:
        """Set an open file's length; gives back blocks that were allocated behind it."""
        os.ftruncate(fd, length)

    def fstat(self, fd: int) -> os.stat_result:
        """Return what is known of an open file."""
        return os.fstat(fd)

    def fsync(self, fd: int) -> None:
        """Make an open file's content and length durable."""
        _sync(fd)

    def write_out(self, fd: int) -> None:
        """Have a network file system send what was written, as closing does."""
        os.close(os.dup(fd))

    def close(self, fd: int) -> None:
        """Release a descriptor; on Linux it is gone even after an error."""
        os.close(fd)

    def lock_folder(self, path: str) -> int:
        """Return a descriptor that holds an exclusive lock of a folder until it is closed.

        Raises `BlockingIOError` at once where somebody else holds it.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of what bears it, in one step."""
        os.rename(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """Give a file another name that nothing bears (renameat2 with RENAME_NOREPLACE).

        Raises `OSError` with EEXIST if the name is taken, ENOSYS where the C library has
        no such call, EINVAL where the file system has not.
        """
        result = _function("renameat2")(
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(source)),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(target)),
            ctypes.c_uint(_RENAME_NOREPLACE),
        )
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), source, None, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name that nothing bears, in one step."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Take a name off a file."""
        os.unlink(path)

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        """Make one folder with the default mode."""
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove one empty folder."""
        os.rmdir(path)

    def stat(self, path: str) -> os.stat_result:
        """Return what is known of what a path leads to, through symbolic links."""
        return os.stat(path)

    def is_link(self, path: str) -> bool:
        """Return whether a path itself is a symbolic link."""
        return os.path.islink(path)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        """Return the entries of one folder, all at once, in no order."""
        with os.scandir(path) as entries:
            return list(entries)

    def shares_blocks(self, path: str) -> bool:
        """Return whether `path` lies on a file system on which a copy may share its blocks."""
        return _file_system(path) in _SHARING_FILE_SYSTEMS

    def may_compress(self, path: str) -> bool:
        """Return whether `path` lies on a file system where content may take less than its length.

        Blocks that were allocated there take their whole length, and are not compressed later.
        """
        return _file_system(path) in _COMPRESSING_FILE_SYSTEMS

    def free_bytes(self, path: str) -> int:
        """Return the bytes an unprivileged user may still write where `path` lies (statvfs)."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
