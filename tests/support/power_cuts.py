"""System calls over a disk that loses unsynced data when the power is cut."""

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
    """System calls that can undo whatever is not durable yet.

    `graveyard` is a folder on the same file system that keeps replaced and removed files.
    """

    def __init__(self, graveyard: Path) -> None:
        self._graveyard = graveyard
        self._numbers = itertools.count()
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._dirty: dict[tuple[int, int], int] = {}
        graveyard.mkdir(parents=True, exist_ok=True)

    def power_cut(self, lost: Literal["data and names", "data"]) -> None:
        """Put the file system into a state that is possible after a power cut.

        "data and names": nothing unsynced survives. "data": names reached the disk before their
        content, as with delayed allocation; unsynced content is zeros.
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
        self._add_undo(path, lambda: Path(path).unlink(missing_ok=True))
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write content that is not durable."""
        self._mark_dirty(fd)
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Make content durable, but no name."""
        super().fsync(fd)
        status = os.fstat(fd)
        kept = self._dirty.pop((status.st_dev, status.st_ino), None)
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
        """Rename a file; the undo restores both names."""
        replaced = self._bury(target) if Path(target).exists() else None
        super().rename(source, target)

        def undo() -> None:
            Path(target).rename(source)
            if replaced is not None:
                os.link(replaced, target)

        self._add_undo(target, undo)

    def link(self, source: str, target: str) -> None:
        """Link a file."""
        super().link(source, target)
        self._add_undo(target, lambda: Path(target).unlink())

    def unlink(self, path: str) -> None:
        """Unlink a file; the undo restores it."""
        buried = self._bury(path)
        super().unlink(path)
        self._add_undo(path, lambda: os.link(buried, path))

    def mkdir(self, path: str) -> None:
        """Create a folder; the undo removes it with its content."""
        super().mkdir(path)
        self._add_undo(path, lambda: shutil.rmtree(path))

    def rmdir(self, path: str) -> None:
        """Remove a folder; the undo creates it, empty."""
        super().rmdir(path)
        self._add_undo(path, lambda: Path(path).mkdir())

    def _mark_dirty(self, fd: int) -> None:
        """Record that a file has unsynced content."""
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) not in self._dirty:
            self._dirty[status.st_dev, status.st_ino] = os.dup(fd)

    @staticmethod
    def _is_gone(folder: str, synced: str) -> bool:
        """Return whether a folder, or a parent of it, was removed from a synced folder."""
        below = Path(folder)
        if not below.is_relative_to(synced):
            return False
        return not Path(synced, below.relative_to(synced).parts[0]).exists()

    def _add_undo(self, path: str, undo: Callable[[], None]) -> None:
        self._undo.append((str(Path(path).parent), undo))

    def _bury(self, path: str) -> Path:
        """Return a second link of a file, kept in the graveyard."""
        kept = self._graveyard / str(next(self._numbers))
        os.link(path, kept)
        return kept
