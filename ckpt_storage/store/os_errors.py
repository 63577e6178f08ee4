"""The one border where an `OSError` of the operating system becomes a `StorageError`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)

from .posix import Posix

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
            free_bytes = None
            with contextlib.suppress(OSError):
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    free_bytes = self._posix.free_bytes(self.folder)
            raise map_os_error(
                error, operation=operation, path=self.shown(path), free_bytes=free_bytes
            ) from error

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


def _numbers(*names: str) -> frozenset[int]:
    """Return the error numbers that bear these names on this system."""
    return frozenset(value for name in names if (value := getattr(errno, name, None)) is not None)


_CONNECTION = _numbers(
    "ECONNABORTED",
    "ECONNREFUSED",
    "ECONNRESET",
    "EHOSTDOWN",
    "EHOSTUNREACH",
    "ENETDOWN",
    "ENETRESET",
    "ENETUNREACH",
    "ENOTCONN",
    "EPIPE",
    "EREMOTEIO",
)
# EIO stands here because a soft-mounted network file system reports a passing outage with
# it; repeating whole operations is safe, and a broken disk only costs the delay.
_PASSING = _numbers(
    "EAGAIN",
    "EBUSY",
    "EINTR",
    "EIO",
    "EMFILE",
    "ENFILE",
    "ENOBUFS",
    "ENOLCK",
    "ENOMEM",
    "ENOTEMPTY",
    "ESTALE",
)

_KINDS = (
    (_numbers("ENOENT"), "not-found", False),
    (_numbers("EEXIST"), "exists", False),
    (_numbers("EACCES", "EPERM", "EROFS"), "permission", False),
    (_numbers("ENOSPC", "EDQUOT"), "no-space", False),
    (_numbers("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EXDEV"), "unsupported", False),
    (_numbers("ETIMEDOUT"), "timeout", True),
    (_CONNECTION, "connection", True),
    (_PASSING, "other", True),
)

_NEXT_STEPS = {
    errno.ENOENT: "Check the spelling, and that every host has the same file system there.",
    errno.EEXIST: "Choose another name, or find out who made it.",
    errno.EACCES: "Check owner and mode of the folder for the user this process runs as.",
    errno.EPERM: "Check owner, mode and attributes of the folder for this process's user.",
    errno.EROFS: "The file system is mounted read-only; choose another folder or remount it.",
    errno.ENOSPC: "Free space there, or choose another file system.",
    errno.EDQUOT: "Free space below the quota, have it raised, or choose another file system.",
    errno.ENOTDIR: "Part of the path is a file; give a path whose parents are folders.",
    errno.EISDIR: "A folder bears that name; give the path of a file or remove the folder.",
    errno.ENAMETOOLONG: "Choose a shorter path; most file systems take 255 bytes per name.",
    errno.ELOOP: "Symbolic links on the path lead in a circle; mend them.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or use a file system without one.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n) or lower thread_count.",
    errno.ENOTEMPTY: "Something still writes there or holds files open; try again later.",
    errno.ESTALE: "The file was replaced or removed on the server; try again.",
    errno.EIO: "Look into the kernel log and the state of the disk or the mount.",
    errno.EXDEV: "The folder spans two file systems; choose one that lies on one.",
}


def map_os_error(
    error: OSError, *, operation: str, path: str, free_bytes: int | None = None
) -> StorageError:
    """Return the `StorageError` that says what `error` means for the user.

    `operation` is a noun, `path` a full path or URL, `free_bytes` what the file system
    still takes, where that could be asked.
    """
    number = error.errno
    name = errno.errorcode.get(number, str(number)) if number is not None else "no errno"
    text = error.strerror or str(error) or type(error).__name__
    message = f"The {operation} of {path} failed: {text} ({name})."
    next_step = _NEXT_STEPS.get(number or 0, "Check the file system and its mount.")
    kind, retryable = _judged(number)
    if kind == "no-space" and free_bytes is not None:
        message += f" {free_bytes} bytes are free there."
    if kind == "unsupported":
        return UnsupportedByStoreError(
            message,
            kind=kind,
            path=path,
            next_step=_NEXT_STEPS.get(number or 0, "This file system cannot do that; use another."),
        )
    return StorageError(message, kind=kind, retryable=retryable, path=path, next_step=next_step)


def _judged(number: int | None) -> tuple[str, bool]:
    """Return kind and retryable for an error number."""
    for numbers, kind, retryable in _KINDS:
        if number in numbers:
            return kind, retryable
    return "other", False
