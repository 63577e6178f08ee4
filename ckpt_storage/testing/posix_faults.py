"""System calls that fail as they are told to, for testing the local store call by call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt_storage.store.backends.posix import Posix, as_bytes

from .faults import Rule, Script

__all__ = ["FaultPosix"]

T = TypeVar("T")


def _first_half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the views of the first half of the bytes; of a single byte, none."""
    left = sum(view.nbytes for view in buffers) // 2
    halves = []
    for view in map(as_bytes, buffers):
        halves.append(view[:left])
        left -= min(left, view.nbytes)
    return halves


class FaultPosix(Posix):
    """System calls around others that play a `Script`.

    Operations bear the names of the methods; the path of a call on a descriptor is that
    of the file. "torn" and "short" apply to writes, "short" to `preadv`. A crash
    closes every descriptor, as the death of a process does.
    """

    def __init__(self, rules: Sequence[Rule] = (), inner: Posix | None = None) -> None:
        self._inner = inner or Posix()
        self._open_paths: dict[int, str] = {}
        self.script = Script(rules)

    @property
    def open_count(self) -> int:
        """How many descriptors are open now."""
        return len(self._open_paths)

    def open_new(self, path: str) -> int:
        """Create a file; with a lost answer the file is there and its descriptor is not."""
        return self._open("open_new", path, self._inner.open_new)

    def open_read(self, path: str) -> int:
        """Open a file."""
        return self._open("open_read", path, self._inner.open_read)

    def open_write(self, path: str) -> int:
        """Open a file that another process made."""
        return self._open("open_write", path, self._inner.open_write)

    def open_folder(self, path: str) -> None:
        """Open and close a folder."""
        self._play("open_folder", path, lambda: self._inner.open_folder(path))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once; torn or short: the first half of the bytes."""
        return self._play(
            "pwritev",
            self._path_of(fd),
            lambda: self._inner.pwritev(fd, buffers, offset),
            lambda: self._inner.pwritev(fd, _first_half(buffers), offset),
        )

    def pwritev_uncached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once; torn or short: the first half of the bytes."""
        return self._play(
            "pwritev_uncached",
            self._path_of(fd),
            lambda: self._inner.pwritev_uncached(fd, buffers, offset),
            lambda: self._inner.pwritev_uncached(fd, _first_half(buffers), offset),
        )

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read once; short: the first half of the bytes."""
        return self._play(
            "preadv",
            self._path_of(fd),
            lambda: self._inner.preadv(fd, buffers, offset),
            lambda: self._inner.preadv(fd, _first_half(buffers), offset),
        )

    def copy_file_range(
        self, source_fd: int, source_offset: int, fd: int, offset: int, length: int
    ) -> int:
        """Copy once; torn or short: the first half of the bytes."""

        def copied(bytes_: int) -> int:
            return self._inner.copy_file_range(source_fd, source_offset, fd, offset, bytes_)

        return self._play(
            "copy_file_range",
            self._path_of(fd),
            lambda: copied(length),
            lambda: copied(max(1, length // 2)),
        )

    def allocate(self, fd: int, length: int) -> None:
        """Take space for a file."""
        self._play("allocate", self._path_of(fd), lambda: self._inner.allocate(fd, length))

    def start_write_back(self, fd: int, offset: int, length: int) -> None:
        """Begin to write to the disk."""
        self._play(
            "start_write_back",
            self._path_of(fd),
            lambda: self._inner.start_write_back(fd, offset, length),
        )

    def forget(self, fd: int) -> None:
        """Let the kernel drop what it caches."""
        self._play("forget", self._path_of(fd), lambda: self._inner.forget(fd))

    def read_on(self, fd: int) -> None:
        """Tell the kernel what will be read."""
        self._play("read_on", self._path_of(fd), lambda: self._inner.read_on(fd))

    def truncate(self, fd: int, length: int) -> None:
        """Set a file's length."""
        self._play("truncate", self._path_of(fd), lambda: self._inner.truncate(fd, length))

    def fstat(self, fd: int) -> os.stat_result:
        """Return what is known of an open file."""
        return self._play("fstat", self._path_of(fd), lambda: self._inner.fstat(fd))

    def fsync(self, fd: int) -> None:
        """Make an open file durable."""
        self._play("fsync", self._path_of(fd), lambda: self._inner.fsync(fd))

    def close(self, fd: int) -> None:
        """Release a descriptor, whatever the rules say, as Linux does."""
        path = self._path_of(fd)
        try:
            self._play("close", path, lambda: self._really_close(fd))
        finally:
            if fd in self._open_paths:
                self._really_close(fd)

    def rename(self, source: str, target: str) -> None:
        """Rename a file."""
        self._play("rename", target, lambda: self._inner.rename(source, target))

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file exclusively."""
        self._play("rename_new", target, lambda: self._inner.rename_new(source, target))

    def link(self, source: str, target: str) -> None:
        """Link a file."""
        self._play("link", target, lambda: self._inner.link(source, target))

    def unlink(self, path: str) -> None:
        """Unlink a file."""
        self._play("unlink", path, lambda: self._inner.unlink(path))

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._play("fsync_folder", path, lambda: self._inner.fsync_folder(path))

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        self._play("mkdir", path, lambda: self._inner.mkdir(path))

    def rmdir(self, path: str) -> None:
        """Remove a folder."""
        self._play("rmdir", path, lambda: self._inner.rmdir(path))

    def stat(self, path: str) -> os.stat_result:
        """Return what is known of a path."""
        return self._play("stat", path, lambda: self._inner.stat(path))

    def is_link(self, path: str) -> bool:
        """Return whether a path is a symbolic link."""
        return self._play("is_link", path, lambda: self._inner.is_link(path))

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        """Return the entries of a folder."""
        return self._play("scandir", path, lambda: self._inner.scandir(path))

    def shares_blocks(self, path: str) -> bool:
        """Return what the inner one finds; it is asked once and can do no harm."""
        return self._inner.shares_blocks(path)

    def free_bytes(self, path: str) -> int:
        """Return the free bytes."""
        return self._play("free_bytes", path, lambda: self._inner.free_bytes(path))

    def _open(self, operation: str, path: str, call: Callable[[str], int]) -> int:
        opened = []

        def keep() -> int:
            fd = call(path)
            opened.append(fd)
            self._open_paths[fd] = path
            return fd

        try:
            return self._play(operation, path, keep)
        except OSError:
            for fd in opened:
                self._really_close(fd)
            raise

    def _path_of(self, fd: int) -> str:
        # After a crash nothing is open, and code that cleans up still asks.
        return self._open_paths.get(fd, "")

    def _really_close(self, fd: int) -> None:
        del self._open_paths[fd]
        self._inner.close(fd)

    def _close_all(self) -> None:
        for fd in list(self._open_paths):
            self._really_close(fd)

    def _play(
        self,
        operation: str,
        path: str,
        call: Callable[[], T],
        half: Callable[[], T] | None = None,
    ) -> T:
        def error(rule: Rule) -> OSError:
            return OSError(rule.errno, os.strerror(rule.errno), path)

        return self.script.play(
            operation, path, call, error=error, half=half, on_crash=self._close_all
        )
