"""System calls with scripted faults, for testing file systems call by call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.testing.faults import Rule, Script, first_half, played

__all__ = ["FaultPosix"]

P = ParamSpec("P")
T = TypeVar("T")


def _halved(buffers: Sequence[memoryview]) -> list[memoryview]:
    return first_half([view.cast("B") for view in buffers if view.nbytes])


def _os_error(rule: Rule, path: str) -> OSError:
    return OSError(rule.errno, os.strerror(rule.errno), path)


class FaultPosix(Posix):
    """System calls around others that play a `Script`.

    Operations have the names of the methods; the path of a call on a descriptor is that of the
    file, and the path of `rename` and `link` is the new name. "torn" and "short" apply to writes,
    "short" also to `preadv`. A crash closes every descriptor, as the death of a process does.
    """

    def __init__(self, rules: Sequence[Rule] = (), inner: Posix | None = None) -> None:
        self.inner = inner or Posix()
        self._open_paths: dict[int, str] = {}
        self.script = Script(rules, error=_os_error, on_crash=self._close_all)

    @property
    def open_count(self) -> int:
        """The number of open descriptors."""
        return len(self._open_paths)

    def path_of(self, target: object) -> str:
        """Return a path, or that of an open descriptor; after a crash nothing is open."""
        return target if isinstance(target, str) else self._open_paths.get(target, "")  # type: ignore[call-overload]

    def open_new(self, path: str) -> int:
        """Create a file; with "lost_answer" the file exists, and its descriptor is closed."""
        return self._open(self.inner.open_new, path)

    def open_read(self, path: str) -> int:
        """Open a file."""
        return self._open(self.inner.open_read, path)

    def open_write(self, path: str) -> int:
        """Open a file that another process created."""
        return self._open(self.inner.open_write, path)

    pwritev = played(
        Posix.pwritev,
        lambda inner, fd, buffers, offset: inner.pwritev(fd, _halved(buffers), offset),
    )
    preadv = played(
        Posix.preadv, lambda inner, fd, buffers, offset: inner.preadv(fd, _halved(buffers), offset)
    )
    rename = played(Posix.rename, target=1)
    link = played(Posix.link, target=1)

    def close(self, fd: int) -> None:
        """Release a descriptor whatever the fault, as Linux does."""
        try:
            self.script.play("close", self.path_of(fd), lambda: self._really_close(fd))
        finally:
            if fd in self._open_paths:
                self._really_close(fd)

    def _open(self, call: Callable[[str], int], path: str) -> int:
        opened = []

        def keep() -> int:
            opened.append(call(path))
            self._open_paths[opened[0]] = path
            return opened[0]

        try:
            return self.script.play(call.__name__, path, keep)
        except OSError:
            for fd in opened:
                self._really_close(fd)
            raise

    def _really_close(self, fd: int) -> None:
        del self._open_paths[fd]
        self.inner.close(fd)

    def _close_all(self) -> None:
        for fd in list(self._open_paths):
            self._really_close(fd)


for _call in (
    *(Posix.open_folder, Posix.forget, Posix.advise_sequential),
    *(Posix.fchmod, Posix.fstat, Posix.fsync, Posix.write_out, Posix.unlink, Posix.is_link),
    *(Posix.fsync_folder, Posix.mkdir, Posix.rmdir, Posix.stat, Posix.scandir),
):
    setattr(FaultPosix, _call.__name__, played(_call))
