"""System calls over a disk that forgets what was not synced when the power is cut."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ckpt_storage.store.backends.posix import Posix

__all__ = ["PowerCutPosix"]


class PowerCutPosix(Posix):
    """System calls that remember how to undo what is not yet durable.

    `graveyard` is a folder on the same file system that keeps what was replaced or removed.
    """

    def __init__(self, graveyard: Path) -> None:
        self._graveyard = graveyard
        self._numbers = itertools.count()
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._dirty: dict[tuple[int, int], int] = {}
        graveyard.mkdir(parents=True, exist_ok=True)

    def power_cut(self, lost: Literal["data and names", "data"]) -> None:
        """Make the file system what it may be after a power cut at this moment.

        "data and names": nothing that was not synced survives. "data": names made it to
        the disk before the content they lead to, as delayed allocation has it; such
        content is zeros.
        """
        if lost == "data and names":
            for _, undo in reversed(self._undo):
                undo()
        self._undo.clear()
        for fd in self._dirty.values():
            size_bytes = os.fstat(fd).st_size
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size_bytes)
        self.release()

    def release(self) -> None:
        """Close the descriptors kept for wiping; idempotent."""
        for fd in self._dirty.values():
            os.close(fd)
        self._dirty.clear()

    def open_new(self, path: str) -> int:
        """Create a file whose name is not durable."""
        fd = super().open_new(path)
        self._pending(path, lambda: Path(path).unlink(missing_ok=True))
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write content that is not durable."""
        self._soil(fd)
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Make content durable, but no name."""
        super().fsync(fd)
        found = os.fstat(fd)
        kept = self._dirty.pop((found.st_dev, found.st_ino), None)
        if kept is not None:
            os.close(kept)

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable, but no content."""
        super().fsync_folder(path)
        self._undo = [
            (folder, undo)
            for folder, undo in self._undo
            if folder != path and not self._is_gone(folder, path)
        ]

    def rename(self, source: str, target: str) -> None:
        """Rename a file; undone, both names lead to what they led to before."""
        replaced = self._buried(target) if Path(target).exists() else None
        super().rename(source, target)

        def undo() -> None:
            Path(target).rename(source)
            if replaced is not None:
                os.link(replaced, target)

        self._pending(target, undo)

    def link(self, source: str, target: str) -> None:
        """Link a file."""
        super().link(source, target)
        self._pending(target, lambda: Path(target).unlink())

    def unlink(self, path: str) -> None:
        """Unlink a file; undone, it is back."""
        buried = self._buried(path)
        super().unlink(path)
        self._pending(path, lambda: os.link(buried, path))

    def mkdir(self, path: str) -> None:
        """Make a folder; undone, it is gone with all it holds."""
        super().mkdir(path)
        self._pending(path, lambda: shutil.rmtree(path))

    def rmdir(self, path: str) -> None:
        """Remove a folder; undone, it is back and empty."""
        super().rmdir(path)
        self._pending(path, lambda: Path(path).mkdir())

    def _soil(self, fd: int) -> None:
        """Note that a file has content that a power cut takes."""
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) not in self._dirty:
            self._dirty[found.st_dev, found.st_ino] = os.dup(fd)

    @staticmethod
    def _is_gone(folder: str, synced: str) -> bool:
        """Return whether a folder is, or lies in, one that was removed from a synced folder."""
        below = Path(folder)
        if not below.is_relative_to(synced):
            return False
        return not Path(synced, below.relative_to(synced).parts[0]).exists()

    def _pending(self, path: str, undo: Callable[[], None]) -> None:
        self._undo.append((str(Path(path).parent), undo))

    def _buried(self, path: str) -> Path:
        """Return a second link of a file, which outlives its name."""
        kept = self._graveyard / str(next(self._numbers))
        os.link(path, kept)
        return kept
