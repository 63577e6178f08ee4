"""One file on its way to its name: written under a temporary one, synced, then named."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.store.backend import Settings

from .posix import NO_CALL, Posix

_DRAFT_NAME = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}", re.DOTALL)

_BLOCK_BYTES = 4096
_WRITE_BACK_BYTES = 1 << 20
"""Shorter writes are left to the kernel: a call costs more than it brings."""

# A file name has 255 bytes on most file systems: 50 characters are at most 200 of them,
# which leaves room for the dots and the random part.
_KEPT_NAME_CHARS = 50

_NO_LINKS = NO_CALL | {errno.EPERM, errno.EMLINK}


def is_draft_name(name: str) -> bool:
    """Return whether a file name is one that only a `Draft` gives."""
    return _DRAFT_NAME.fullmatch(name) is not None


def draft_name(target_name: str) -> str:
    """Return a new name for the temporary file of `target_name`."""
    return f".{target_name[:_KEPT_NAME_CHARS]}.tmp-{os.urandom(8).hex()}"


def target_path(path: str) -> str | None:
    """Return what path the temporary file at `path` is to get; None where its name was cut."""
    folder, name = os.path.split(path)
    found = _DRAFT_NAME.fullmatch(name)
    if found is None or len(found[1]) >= _KEPT_NAME_CHARS:
        return None
    return f"{folder}/{found[1]}" if folder else found[1]


class Draft:
    """A temporary file beside its target, which may be written to by several threads.

    Who made it ends it by `seal` and `publish`, or `discard`; who joined it by `flush` and `leave`.
    """

    def __init__(
        self, posix: Posix, target: str, settings: Settings, name: str | None = None
    ) -> None:
        """Create the temporary file, or open the one called `name` that another process made."""
        self._posix = posix
        self._target = target
        self._sync = settings.sync_files
        self._drops_cache = settings.page_cache == "drop"
        self._folder, target_name = os.path.split(target)
        self.is_own = name is None
        self.name = name or draft_name(target_name)
        self._path = f"{self._folder}/{self.name}"
        # Of the descriptor; the last of its users closes it once the file has ended.
        self._lock = threading.Lock()
        self._user_count = 0
        self._has_ended = False
        # One ending at a time: a repeated one waits for the one before it.
        self._ending = threading.Lock()
        self._state: Literal["open", "failed", "sealed", "complete"] = "open"
        self._identity: tuple[int, int] | None = None
        if name is not None:
            self._fd: int | None = posix.open_write(self._path)
            return
        try:
            self._fd = posix.open_new(self._path)
        except OSError:
            # An error may be a lost answer, and the name is ours alone.
            with contextlib.suppress(OSError):
                posix.unlink(self._path)
            raise

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write buffers one after the other from `offset` on; after an error the same again."""
        with self._using() as fd:
            self._posix.pwritev_all(fd, buffers, offset)
            length = sum(view.nbytes for view in buffers)
            if self._sync and length >= _WRITE_BACK_BYTES:
                # A block of which more will be written is not sent to the disk twice.
                start = offset - offset % _BLOCK_BYTES
                end = (offset + length) // _BLOCK_BYTES * _BLOCK_BYTES
                self._posix.start_write_back(fd, start, end - start)

    def flush(self) -> None:
        """Make what this process wrote durable; close it until used again. A failure is final."""
        with self._ending:
            self._check_state("open")
            self._state = "failed"
            with self._using() as fd:
                self._sync_content(fd)
                if not self._sync:
                    self._posix.write_out(fd)
            # From here on any process that has the receipts may complete it.
            self.is_own = False
            self._close_unused()
            self._state = "open"

    def leave(self) -> None:
        """Write no more, and leave the file to its owner; idempotent."""
        # The last thread that writes closes the descriptor: its number could otherwise be given
        # to another file under the hands of one that hangs in the kernel.
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._close_unused()

    def __del__(self) -> None:
        """Close the descriptor of an upload that nobody ended; the file is swept later."""
        # A finalizer has nobody to raise to.
        with contextlib.suppress(BaseException):
            if self._fd is not None:
                self.leave()

    def discard(self) -> None:
        """Remove the temporary file; idempotent; changes nothing once it is complete."""
        self.leave()
        if self._state != "complete":
            self._state = "failed"
            self._unlink()

    def seal(self, total_bytes: int, *, by_several: bool = False) -> None:
        """Check the length, make the content durable and close the file; once.

        by_several: other processes wrote to it too. After any error the file is gone: the kernel
        may have dropped the pages that an fsync could not write (Rebello et al., "Can Applications
        Recover from fsync Failures?", ATC 2020), and mounts tell of failed writes only at close(2).
        """
        with self._ending:
            if self._state in {"sealed", "complete"}:
                return
            self._check_state("open")
            self._state = "failed"
            try:
                with self._using(alone=True) as fd:
                    if by_several:
                        # A network file system asks the server anew how long it is.
                        self._posix.close(self._posix.open_read(self._path))
                    self._check_length(fd, total_bytes)
                    self._sync_content(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._unlink()
                raise
            self._state = "sealed"

    def publish(self, *, if_absent: bool) -> None:
        """Give the sealed file its name, and make that durable; may be called again.

        Raises `StorageError` if only the sync of the name failed, for good.
        """
        with self._ending:
            if self._state == "complete":
                return
            self._check_state("sealed")
            try:
                self._name_by(self._posix.link if if_absent else self._posix.rename)
            except OSError as error:
                if not if_absent or error.errno not in _NO_LINKS:
                    raise
                what = f"{self._target} cannot be created exclusively: there are no hard links."
                step = "Let one job at a time save here; of a mounted bucket use its own URL."
                raise UnsupportedByStoreError(what, kind="unsupported", next_step=step) from error
            if if_absent:
                # The name exists now, so a temporary name that stays is a leftover, not a failure.
                with contextlib.suppress(OSError):
                    self._posix.unlink(self._path)
            self._state = "failed"
            try:
                if self._sync:
                    self._posix.sync_names(self._folder)
            except OSError as error:
                what = f"{self._target} is there, but its name may not survive a power cut"
                why = f"the fsync of its folder failed ({error.strerror})"
                step = "Look into the kernel log and the mount, then save again."
                raise StorageError(f"{what}: {why}.", next_step=step) from error
            self._state = "complete"

    def _name_by(self, call: Callable[[str, str], None]) -> None:
        """Rename or link; an answer may be lost, and a retransmitted call finds it done."""
        # Only the inode proves that: a second link may be a backup program's.
        try:
            call(self._path, self._target)
        except OSError:
            with contextlib.suppress(OSError):
                self._posix.open_folder(self._folder)
                found = self._posix.stat(self._target)
                if (found.st_dev, found.st_ino) == self._identity:
                    return
            raise

    def _sync_content(self, fd: int) -> None:
        if self._sync:
            self._posix.fsync(fd)
            if self._drops_cache:
                self._posix.forget(fd)

    def _check_length(self, fd: int, total_bytes: int) -> None:
        found = self._posix.fstat(fd)
        self._identity = (found.st_dev, found.st_ino)
        if found.st_size != total_bytes:
            what = f"{self._target} holds {found.st_size} bytes instead of {total_bytes}"
            step = "Save again; if it comes back, check the file system."
            raise StorageError(f"{what}; it was not made visible.", next_step=step)

    def _check_state(self, wanted: str) -> None:
        if self._state != wanted:
            what = f"The upload of {self._target} has failed before."
            raise StorageError(what, next_step="Start a new one.")

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._posix.unlink(self._path)

    @contextlib.contextmanager
    def _using(self, *, alone: bool = False) -> Iterator[int]:
        """Give the descriptor while anyone uses it; `alone`: refused to others from now on."""
        with self._lock:
            if alone and self._user_count:
                why = f"{self._user_count} of its parts are still being written"
                what = f"{self._target} cannot be completed: {why}."
                raise StorageError(what, next_step="Abort it and save again.")
            if self._fd is None and not self._has_ended and not self.is_own:
                self._fd = self._posix.open_write(self._path)
            if self._has_ended or self._fd is None:
                raise OSError(errno.EBADF, "the file is no longer open for writing")
            fd = self._fd
            self._user_count += 1
            if alone:
                self._has_ended = True
        # The first failure is raised: a full disk, say, and not the close after it.
        quiet: contextlib.AbstractContextManager[None] = contextlib.suppress(OSError)
        try:
            yield fd
            quiet = contextlib.nullcontext()
        finally:
            with self._lock:
                self._user_count -= 1
            with quiet:
                if self._has_ended:
                    self._close_unused()

    def _close_unused(self) -> None:
        """Close the descriptor unless a thread has it."""
        with self._lock:
            fd = None
            if not self._user_count:
                fd, self._fd = self._fd, None
        if fd is not None:
            self._posix.close(fd)
