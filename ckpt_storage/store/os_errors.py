"""The folder of a local store, and the border where an `OSError` becomes a `StorageError`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ckpt_storage.errors import CheckpointError, InvalidInputError

from .backends.posix import Posix
from .problems import Call, explain

T = TypeVar("T")


def folder_of(full: str) -> str:
    """Return the full path of the folder that a file or folder lies in."""
    return os.path.split(full)[0]


class LocalRoot:
    """The folder that a store's paths are relative to; `folder` is its full path.

    Raises `InvalidInputError` for what can be no path.
    """

    def __init__(self, posix: Posix, root: str) -> None:
        if not root or "\0" in root:
            raise InvalidInputError(f"{root!r} names no folder.", next_step="Give a path.")
        # Made absolute now, because the process may change its working folder.
        self.folder = str(Path(root).absolute())
        self._posix = posix

    @property
    def url(self) -> str:
        """The root as a file:// URL, unquoted as fsspec has it."""
        return f"file://{self.folder}"

    def full(self, path: str) -> str:
        """Return the full path of what the store calls `path`."""
        return f"{self.folder.rstrip('/')}/{path}" if path else self.folder

    def shown(self, path: str) -> str:
        """Return the URL of what the store calls `path`, for messages."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    @contextlib.contextmanager
    def border(self, operation: str, path: str) -> Iterator[None]:
        """Turn every `OSError` of the block into a `StorageError`."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    error.add_note(f"{self._posix.free_bytes(self.folder)} bytes are free there")
            raise explain(error, Call(name=operation, path=self.shown(path))) from error

    def revalidated(self, full: str, attempt: Callable[[], T]) -> T:
        """Run `attempt`, and once more if a network file system's caches may have misled it.

        An NFS client remembers that a name was absent (a negative dentry) until it opens
        the folder, and answers ESTALE for a file replaced or removed on the server.
        """
        try:
            return attempt()
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ESTALE}:
                raise
        self._revalidate_folders(full)
        return attempt()

    def _revalidate_folders(self, full: str) -> None:
        below = os.path.relpath(folder_of(full), self.folder)
        folder = self.folder
        with contextlib.suppress(OSError):
            self._posix.open_folder(folder_of(folder))
            self._posix.open_folder(folder)
            for part in below.split("/") if below != "." else ():
                folder = f"{folder}/{part}"
                self._posix.open_folder(folder)
