"""Temporary files: written beside their target, synced, then renamed or linked to its name."""

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

_TEMP_NAME = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}", re.DOTALL)

_BLOCK_BYTES = 4096
_WRITE_BACK_BYTES = 1 << 20
"""For shorter writes a call costs more than an early write-back saves."""

# A file name has 255 bytes on most file systems; 50 characters take at most 200 of them.
_KEPT_NAME_CHARS = 50

_NO_LINKS = NO_CALL | {errno.EPERM, errno.EMLINK}


def is_temp_name(name: str) -> bool:
    """Return whether a file name is that of a temporary file."""
    return _TEMP_NAME.fullmatch(name) is not None


def temp_name(target_name: str) -> str:
    """Return a new name for the temporary file of `target_name`."""
    return f".{target_name[:_KEPT_NAME_CHARS]}.tmp-{os.urandom(8).hex()}"


def target_path(path: str) -> str | None:
    """Return the target of the temporary file at `path`; None if its name was shortened."""
    folder, name = os.path.split(path)
    match = _TEMP_NAME.fullmatch(name)
    if match is None or len(match[1]) >= _KEPT_NAME_CHARS:
        return None
    return f"{folder}/{match[1]}" if folder else match[1]


class TempFile:
    """A temporary file beside its target; several threads may write to it.

    Its creator ends it by `fsync_and_close` and `publish`, or by `discard`; a process that joined
    ends by `flush` and `detach`.
    """

    def __init__(
        self, posix: Posix, target: str, settings: Settings, name: str | None = None
    ) -> None:
        """Create the temporary file, or open `name`, which another process created."""
        self._posix = posix
        self._target = target
        self._sync = settings.sync_files
        self._drops_cache = settings.page_cache == "drop"
        self._folder, target_name = os.path.split(target)
        self.is_own = name is None
        self.name = name or temp_name(target_name)
        self._path = f"{self._folder}/{self.name}"
        # Of the descriptor, which its last user closes once the file was detached.
        self._lock = threading.Lock()
        self._user_count = 0
        self._is_detached = False
        # Held by `flush`, `fsync_and_close` and `publish`: a retry waits for the first call.
        self._ending = threading.Lock()
        self._state: Literal["open", "failed", "synced", "complete"] = "open"
        self._identity: tuple[int, int] | None = None
        if name is not None:
            self._fd: int | None = posix.open_write(self._path)
            return
        try:
            self._fd = posix.open_new(self._path)
        except OSError:
            # The response may be lost; nobody else uses the name.
            with contextlib.suppress(OSError):
                posix.unlink(self._path)
            raise

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write consecutive buffers at `offset`; may be retried."""
        with self._using() as fd:
            self._posix.pwritev_all(fd, buffers, offset)
            length = sum(view.nbytes for view in buffers)
            if self._sync and length >= _WRITE_BACK_BYTES:
                # Only whole blocks: a block that is not complete yet would be written twice.
                start = offset - offset % _BLOCK_BYTES
                end = (offset + length) // _BLOCK_BYTES * _BLOCK_BYTES
                self._posix.start_write_back(fd, start, end - start)

    def flush(self) -> None:
        """Make this process's writes durable and close the descriptor. A failure is final."""
        with self._ending:
            self._check_state("open")
            self._state = "failed"
            with self._using() as fd:
                self._sync_content(fd)
                if not self._sync:
                    self._posix.write_out(fd)
            # From now on any process with the receipts may complete it.
            self.is_own = False
            self._close_unused()
            self._state = "open"

    def detach(self) -> None:
        """Stop writing and keep the file for its owner; idempotent."""
        # The last writing thread closes the descriptor: a thread that hangs in the kernel could
        # otherwise write to another file that got its number.
        self._is_detached = True
        with contextlib.suppress(OSError):
            self._close_unused()

    def __del__(self) -> None:
        """Close the descriptor of an abandoned upload; the file is swept later."""
        with contextlib.suppress(BaseException):
            if self._fd is not None:
                self.detach()

    def discard(self) -> None:
        """Remove the temporary file; idempotent; does nothing once it is complete."""
        self.detach()
        if self._state != "complete":
            self._state = "failed"
            self._unlink()

    def fsync_and_close(self, total_bytes: int, *, by_several: bool = False) -> None:
        """Check the length, make the content durable and close the file; idempotent.

        by_several: other processes wrote to it too. After any error the file is removed: the kernel
        may have dropped the pages that an fsync could not write (Rebello et al., "Can Applications
        Recover from fsync Failures?", ATC 2020), and mounts report failed writes only at close(2).
        """
        with self._ending:
            if self._state in {"synced", "complete"}:
                return
            self._check_state("open")
            self._state = "failed"
            try:
                with self._using(alone=True) as fd:
                    if by_several:
                        # Makes a network file system ask the server for the length.
                        self._posix.close(self._posix.open_read(self._path))
                    self._check_length(fd, total_bytes)
                    self._sync_content(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._unlink()
                raise
            self._state = "synced"

    def publish(self, *, if_absent: bool) -> None:
        """Give the synced file its name, and make the name durable; may be retried.

        Raises `StorageError`, which is final, if only the sync of the name failed.
        """
        with self._ending:
            if self._state == "complete":
                return
            self._check_state("synced")
            try:
                self._name_by(self._posix.link if if_absent else self._posix.rename)
            except OSError as error:
                if not if_absent or error.errno not in _NO_LINKS:
                    raise
                what = f"{self._target} cannot be created exclusively: there are no hard links."
                step = "Let one job at a time save here; of a mounted bucket use its own URL."
                raise UnsupportedByStoreError(what, next_step=step) from error
            if if_absent:
                # The name exists now: a temporary name that stays is a leftover, not a failure.
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
        """Rename or link; after a lost response, a retransmitted call fails although it is done."""
        # Only the inode proves that: a second link may be a backup program's.
        try:
            call(self._path, self._target)
        except OSError:
            with contextlib.suppress(OSError):
                self._posix.open_folder(self._folder)
                target = self._posix.stat(self._target)
                if (target.st_dev, target.st_ino) == self._identity:
                    return
            raise

    def _sync_content(self, fd: int) -> None:
        if self._sync:
            self._posix.fsync(fd)
            if self._drops_cache:
                self._posix.forget(fd)

    def _check_length(self, fd: int, total_bytes: int) -> None:
        stat = self._posix.fstat(fd)
        self._identity = (stat.st_dev, stat.st_ino)
        if stat.st_size != total_bytes:
            what = f"{self._target} holds {stat.st_size} bytes instead of {total_bytes}"
            step = "Save again; if this repeats, check the file system."
            raise StorageError(f"{what}; it was not made visible.", next_step=step)

    def _check_state(self, expected: str) -> None:
        if self._state != expected:
            what = f"The upload of {self._target} has failed before."
            raise StorageError(what, next_step="Start a new upload.")

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._posix.unlink(self._path)

    @contextlib.contextmanager
    def _using(self, *, alone: bool = False) -> Iterator[int]:
        """Yield the descriptor; with `alone`, no other thread may use it then or later."""
        with self._lock:
            if alone and self._user_count:
                why = f"{self._user_count} of its parts are still being written"
                what = f"{self._target} cannot be completed: {why}."
                raise StorageError(what, next_step="Abort it and save again.")
            if self._fd is None and not self._is_detached and not self.is_own:
                self._fd = self._posix.open_write(self._path)
            if self._is_detached or self._fd is None:
                raise OSError(errno.EBADF, "the file is no longer open for writing")
            fd = self._fd
            self._user_count += 1
            if alone:
                self._is_detached = True
        # After a failure, such as a full disk, that of the close is ignored.
        quiet: contextlib.AbstractContextManager[None] = contextlib.suppress(OSError)
        try:
            yield fd
            quiet = contextlib.nullcontext()
        finally:
            with self._lock:
                self._user_count -= 1
            with quiet:
                if self._is_detached:
                    self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            fd = None
            if not self._user_count:
                fd, self._fd = self._fd, None
        if fd is not None:
            self._posix.close(fd)
