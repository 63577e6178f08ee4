"""One file on its way to its name: written under a temporary one, sealed, then published."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.options import PageCache

from .backends.posix import BLOCK_BYTES, Posix, is_unsupported

_DRAFT_NAME = re.compile(r"\..+\.tmp-[0-9a-f]{16}", re.DOTALL)

# What is written in one go and is shorter is left to the kernel: a call costs more than it brings.
_WRITE_BACK_BYTES = 1 << 20

# A file name has 255 bytes on most file systems: 50 characters are at most 200 of them,
# which leaves room for the dots and the random part.
_KEPT_NAME_CHARS = 50
_UNTOLD = "~"

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

_STAT_BLOCK_BYTES = 512


def is_draft_name(name: str) -> bool:
    """Return whether a file name is one that only a `Draft` gives."""
    return _DRAFT_NAME.fullmatch(name) is not None


def draft_name(target_name: str) -> str:
    """Return a new name for the temporary file of `target_name`; of "" it tells nothing."""
    return f".{target_name[:_KEPT_NAME_CHARS] or _UNTOLD}.tmp-{os.urandom(8).hex()}"


def is_meant(folder: str, name: str, only: Callable[[str], bool] | None) -> bool:
    """Return whether the temporary file `name` is one of those that `only` means.

    `only` is asked for the path that the file is to get; where its name was cut, nobody knows it.
    """
    if only is None:
        return True
    target_name = name[1 : -len(".tmp-") - 16]
    if len(target_name) >= _KEPT_NAME_CHARS or target_name == _UNTOLD:
        return False
    return only(f"{folder}/{target_name}" if folder else target_name)


def sync_folder(posix: Posix, path: str) -> None:
    """Make the names in a folder durable, where the file system lets a folder be synced."""
    try:
        posix.fsync_folder(path)
    except OSError as error:
        # Some FUSE and SMB mounts know no fsync of a folder; there is nothing better to call.
        if error.errno not in _NO_FOLDER_SYNC:
            raise


class Draft:
    """An open temporary file beside its target.

    The owner may `reserve`, calls `write` and `copy` any number of times (from several threads),
    `seal` once, one of `publish` and `publish_new`, and `discard` if anything failed. A process
    that joined another's file by its `name` calls `write` and `copy`, then `hand_over` or `leave`.
    """

    def __init__(
        self,
        posix: Posix,
        target: str,
        *,
        sync: bool,
        name: str | None = None,
        page_cache: PageCache = "keep",
    ) -> None:
        """Create the temporary file, or open the one called `name` that another process made.

        With `page_cache="drop"` the kernel is to keep no copy of what is on the disk.
        The target's folder must exist. Raises `OSError`.
        """
        self._posix = posix
        self._target = target
        self._sync = sync
        self._folder, target_name = os.path.split(target)
        self.name = name or draft_name(target_name)
        self._path = f"{self._folder}/{self.name}"
        self._lock = threading.Lock()
        # Of the descriptor; the last of them closes it once the file has ended.
        self._user_count = 0
        self._writer_count = 0
        self._is_reserving = False
        self._ended = False
        self._identity: tuple[int, int] | None = None
        self._reserved_bytes = 0
        self._sealed_bytes: int | None = None
        self._writes_back = sync
        self._is_uncached = page_cache == "drop"
        # Of what the kernel caches all the same: once it is on the disk.
        self._forgets = False
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
        """Write buffers one after the other from `offset` (bytes) on, without copying them.

        Raises `OSError`; what was written may then be written again.
        """
        with self._writing() as fd:
            if self._is_uncached and self._write_uncached(fd, buffers, offset):
                return
            self._posix.pwritev_all(fd, buffers, offset)
            if self._writes_back:
                self._write_back(fd, offset, offset + sum(view.nbytes for view in buffers))

    def _write_uncached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
        """Write so that the kernel keeps no copy; return whether it can, and then has."""
        try:
            self._posix.pwritev_all_uncached(fd, buffers, offset)
        except OSError as error:
            if not is_unsupported(error):
                raise
            self._is_uncached, self._forgets = False, True
            return False
        return True

    def reserve(self, total_bytes: int) -> None:
        """Take the blocks for `total_bytes` now, where the file system can.

        A file of many extents that grow is slower to write, and one that does not fit is better
        refused before hours than after. What is not used is given back by `seal`, which does not
        wait for a call that still runs; while one does, another changes nothing.

        Raises `OSError` only if the bytes will not fit: with EDQUOT, or with ENOSPC where the file
        system says the same of what is free.
        """
        # Blocks that are set aside would be more than compressed content takes.
        if not total_bytes or self._posix.may_compress(self._folder):
            return
        with self._lock:
            fd = self._open_fd()
            if self._is_reserving:
                return
            self._is_reserving = True
            self._user_count += 1
            self._reserved_bytes = max(self._reserved_bytes, total_bytes)
        try:
            self._posix.allocate(fd, total_bytes)
        except OSError as error:
            if error.errno == errno.EDQUOT:
                raise
            if error.errno == errno.ENOSPC and not self._fits(fd, total_bytes):
                raise
        finally:
            self._end_reserving(fd)

    def _fits(self, fd: int, total_bytes: int) -> bool:
        """Return whether a file of `total_bytes` may fit, with the blocks that it has."""
        try:
            own_bytes = self._posix.fstat(fd).st_blocks * _STAT_BLOCK_BYTES
            return self._posix.free_bytes(self._folder) + own_bytes >= total_bytes
        except OSError:
            # Nobody knows; a write will tell.
            return True

    def _end_reserving(self, fd: int) -> None:
        """Give back what came too late for `seal` to do so; such a file is only given its length.

        Its length was checked by then, so that nothing is added to it.
        """
        sealed_bytes = self._sealed_bytes
        with contextlib.suppress(OSError):
            if sealed_bytes is not None and self._reserved_bytes > sealed_bytes:
                self._posix.truncate(fd, sealed_bytes)
        with self._lock:
            self._is_reserving = False
        with contextlib.suppress(OSError):
            self._let_go()

    def _write_back(self, fd: int, start: int, end: int) -> None:
        """Begin to write a range to the disk, so that the `fsync` to come has less to wait for."""
        # Not O_DIRECT: through aligned buffers it was no faster on a virtual machine's disk, 1.3
        # times as slow with one write of 1 MiB at a time; and `pwritev_uncached` spares the page
        # cache as well.
        # A block of which more will be written is not sent twice.
        start, end = start - start % BLOCK_BYTES, end - end % BLOCK_BYTES
        if end - start < _WRITE_BACK_BYTES:
            return
        try:
            self._posix.start_write_back(fd, start, end - start)
        except OSError as error:
            if error.errno == errno.EINTR:
                return
            if not is_unsupported(error):
                raise
            self._writes_back = False

    def copy(
        self, source_path: str, source_start: int, length: int, offset: int
    ) -> tuple[int, int]:
        """Copy a range of another file to `offset` within the kernel; all in bytes.

        Return how many bytes were copied, fewer than `length` only at the source's end, and how
        long the source is. Raises `OSError`; the same range may then be copied again.
        """
        source_fd = self._posix.open_read(source_path)
        try:
            found_bytes = self._posix.fstat(source_fd).st_size
            with self._writing() as fd:
                count = self._posix.copy_all(source_fd, source_start, fd, offset, length)
                if self._is_uncached:
                    # Unless files share blocks, the kernel copies through its cache.
                    self._forgets = True
            return count, found_bytes
        finally:
            self._posix.close(source_fd)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """Count a writer in and out, and give it the descriptor."""
        with self._lock:
            fd = self._open_fd()
            self._user_count += 1
            self._writer_count += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._writer_count -= 1
            with contextlib.suppress(OSError):
                self._let_go()

    def sync(self) -> None:
        """Make what was written so far durable; the file stays open.

        A failure is final, as that of `seal` is: the file must be discarded. Raises `OSError`.
        """
        with self._writing() as fd:
            if self._sync:
                self._posix.fsync(fd)

    def hand_over(self) -> None:
        """Make what this process wrote durable and close the file, which its owner seals.

        After any error nothing vouches for the content: the owner must discard the file.
        Raises `OSError`, and `StorageError` while parts are being written.
        """
        fd = self._end()
        try:
            self._sync_content(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self._let_go()
            raise
        self._let_go()

    def leave(self) -> None:
        """Write no more, and leave the file to its owner; idempotent."""
        with self._lock:
            self._ended = True
            fd = None if self._user_count else self._take_fd()
        if fd is not None:
            with contextlib.suppress(OSError):
                self._posix.close(fd)

    def seal(self, total_bytes: int, *, by_several: bool = False) -> None:
        """Check the length, make the content durable and close the file.

        `by_several`: other processes wrote to it too. A network file system may not have told
        this one how long it is now, until it is opened again.

        After any error the temporary file is gone: a failed fsync must never be tried
        again, because the kernel may have dropped the pages it could not write
        (Rebello et al., "Can Applications Recover from fsync Failures?", ATC 2020), and
        network file systems report failed writes as late as close(2).
        Raises `OSError`, and `StorageError` if the file has another length.
        """
        fd = self._end()
        try:
            try:
                if by_several:
                    self._posix.close(self._posix.open_read(self._path))
                self._check_length(fd, total_bytes)
                # Before blocks are given back: a reservation that ends later does that itself.
                self._sealed_bytes = total_bytes
                if self._reserved_bytes > total_bytes:
                    self._posix.truncate(fd, total_bytes)
                self._sync_content(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._let_go()
                raise
            self._let_go()
        except BaseException:
            with contextlib.suppress(OSError):
                self.discard()
            raise

    def publish(self) -> None:
        """Give the sealed file its name, in place of what bears it, and make that durable.

        Raises `OSError` if the file did not get its name, and may then be called again;
        `StorageError` if it did and its folder could not be synced, which is final.
        """
        try:
            self._posix.rename(self._path, self._target)
        except OSError:
            # A network file system may have renamed and lost the answer; a retransmitted
            # call then finds no source.
            if not self._bears_target():
                raise
        self._sync_names()

    def publish_new(self) -> None:
        """Give the sealed file its name if nothing bears it, decided by the file system.

        Raises `OSError` with EEXIST if the name is taken, `UnsupportedByStoreError` if the
        file system can decide that in no way, and `StorageError` as `publish` does.
        """
        try:
            self._posix.link(self._path, self._target)
        except OSError as error:
            # Only the inode under the target name proves that the link was made: a second
            # link of the temporary file may be a backup program's.
            if self._bears_target():
                pass
            elif error.errno in _NO_LINKS:
                self._rename_new()
            else:
                raise
        # The name exists now, so a temporary name that stays is a leftover, not a failure.
        with contextlib.suppress(OSError):
            self._posix.unlink(self._path)
        self._sync_names()

    def discard(self) -> None:
        """Remove the temporary file; idempotent.

        The descriptor stays open while a thread still writes (one may hang in the
        kernel), because its number could otherwise be given to another file under that
        thread's hands; the last writer closes it. Raises `OSError`.
        """
        self.leave()
        with contextlib.suppress(FileNotFoundError):
            self._posix.unlink(self._path)

    def _sync_content(self, fd: int) -> None:
        # Whoever closes it later tells nobody of writes that only closing reports as failed.
        if self._sync or self._user_count > 1:
            self._posix.fsync(fd)
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        """Drop what the kernel keeps of the file, if it was to keep nothing and could not."""
        if not self._forgets:
            return
        try:
            self._posix.forget(fd)
        except OSError as error:
            if not is_unsupported(error):
                raise

    def _end(self) -> int:
        """Take no more writers, and return the descriptor; the caller is the last but `_let_go`."""
        with self._lock:
            if self._writer_count:
                raise StorageError(
                    f"{self._target} cannot be completed: {self._writer_count} of its parts "
                    "are still being written.",
                    path=self._target,
                    next_step="Abort it and save again.",
                )
            fd = self._open_fd()
            self._user_count += 1
            self._ended = True
        return fd

    def _let_go(self) -> None:
        """Count a user of the descriptor out; the last one, once the file has ended, closes it."""
        with self._lock:
            self._user_count -= 1
            fd = self._take_fd() if self._ended and not self._user_count else None
        if fd is not None:
            self._posix.close(fd)

    def _open_fd(self) -> int:
        """Return the descriptor. Raises `OSError` once the file has ended; under the lock."""
        if self._ended or self._fd is None:
            raise OSError(errno.EBADF, "the file is no longer open for writing")
        return self._fd

    def _take_fd(self) -> int | None:
        fd, self._fd = self._fd, None
        return fd

    def _check_length(self, fd: int, total_bytes: int) -> None:
        found = self._posix.fstat(fd)
        self._identity = (found.st_dev, found.st_ino)
        if found.st_size != total_bytes:
            raise StorageError(
                f"{self._target} holds {found.st_size} bytes instead of {total_bytes}; "
                "it was not made visible.",
                path=self._target,
                next_step="Save again; if it comes back, check the file system.",
            )

    def _bears_target(self) -> bool:
        """Return whether the target name provably leads to this very file."""
        try:
            self._posix.open_folder(self._folder)
            found = self._posix.stat(self._target)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _rename_new(self) -> None:
        try:
            self._posix.rename_new(self._path, self._target)
        except OSError as error:
            if self._bears_target():
                return
            if error.errno not in _NO_EXCLUSIVE_RENAME:
                raise
            raise UnsupportedByStoreError(
                f"{self._target} cannot be created exclusively: this file system has neither "
                "hard links nor renameat2 with RENAME_NOREPLACE.",
                kind="unsupported",
                path=self._target,
                next_step="Let only one job save here at a time, or pass commit_url= of a "
                "storage that has exclusive creation.",
            ) from error

    def _sync_names(self) -> None:
        if not self._sync:
            return
        try:
            sync_folder(self._posix, self._folder)
        except OSError as error:
            raise StorageError(
                f"{self._target} is complete and visible, but its name may not survive a power "
                f"cut: the fsync of its folder failed ({error.strerror}).",
                path=self._target,
                next_step="Look into the kernel log and the mount, then save again.",
            ) from error
