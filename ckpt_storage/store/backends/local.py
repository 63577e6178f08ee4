"""A folder of a POSIX file system: local disks and network mounts."""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_modes
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from ckpt_storage.errors import (
    InvalidInputError,
    StorageError,
    UnsafeContentError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.names import SAVES
from ckpt_storage.store.backend import (
    Backend,
    Buffers,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Part,
    Range,
    Settings,
    ShortReadError,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import changed, explain, too_long

from .links import link_file
from .mounts import durability_problem
from .posix import ABSENT, NO_CALL, Posix, folder_of, is_remains
from .temp_files import TempFile, is_temp_name, target_path

T = TypeVar("T")

# From this length on the kernel is advised to read twice as far ahead. POSIX_FADV_WILLNEED of the
# next range makes cold reads slower.
_READ_AHEAD_BYTES = 1 << 20


class _Token(str):
    """The token of an upload that this process began, which keeps its temporary file open."""

    __slots__ = ("file",)

    file: TempFile

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Another process joins by the text, without the open file.
        return str, (str(self),)


class LocalBackend(Backend):
    """One folder; only files that are being written stay open between calls.

    A folder below the root that a symbolic link moves out of it is neither written to nor deleted
    from, and its listing is empty, as another user may own the link. Links to files are followed in
    reads, and the root may be a link.

    ENOENT and ESTALE may come from stale caches of a network file system's client. The call is then
    repeated once after opening all folders of the path, which revalidates them.
    """

    capabilities = Capabilities(
        kind="posix",
        is_remote=False,
        exclusive_create=True,
        atomic_replace=True,
        parallel_parts=True,
        # Clients of network mounts write back whole pages, also the unchanged rest of a page.
        # These are the largest pages of common kernels.
        part_alignment_bytes=64 * 1024,
        tokens_travel=True,
        lists_uploads=True,
        has_temporary_files=True,
        copies_objects=True,
    )

    def __init__(
        self, place: str | Location, settings: Settings | None = None, *, posix: Posix | None = None
    ) -> None:
        root = place if isinstance(place, str) else place.target
        # Absolute, because the process may change its working folder.
        self.folder = str(Path(root).absolute())
        self._posix = posix or Posix()
        self._settings = settings or Settings()
        self._sync = self._settings.sync_files
        self._receipt = os.urandom(8).hex()
        # Files of uploads by token; those begun here live as long as their token. Single operations
        # on these mappings are atomic.
        self._own: MutableMapping[str, TempFile] = WeakValueDictionary()
        self._joined: dict[str, TempFile] = {}

    def stat(self, path: str) -> ObjectInfo:
        full = self._full(path)
        stat = self._retry_stale(full, lambda: self._posix.stat(full))
        _check_is_file(stat, full)
        return _info(path, stat)

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Return a file, whose length and bytes come from one descriptor."""
        with self._opened(path) as (fd, stat):
            if max_bytes is not None and stat.st_size > max_bytes:
                raise too_long(path, f"file://{self._full(path)}", stat.st_size, max_bytes)
            content = memoryview(bytearray(stat.st_size))
            data = bytes(content[: self._posix.preadv_all(fd, [content], 0)])
            return Content(data=data, version=_version_of(stat))

    def tail(self, path: str, byte_count: int) -> Content:
        """Return the end of a file, read through one descriptor."""
        with self._opened(path) as (fd, stat):
            content = memoryview(bytearray(min(byte_count, stat.st_size)))
            self._posix.preadv_all(fd, [content], stat.st_size - len(content))
            return Content(data=bytes(content), version=_version_of(stat))

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Fill the ranges through one descriptor; return the length of the file when opened."""
        with self._opened(path) as (fd, stat):
            is_advised = False
            for start, target in ranges:
                if target.nbytes >= _READ_AHEAD_BYTES and not is_advised:
                    is_advised = True
                    self._posix.advise_sequential(fd)
                count = self._posix.preadv_all(fd, [target], start)
                if count < target.nbytes:
                    raise ShortReadError(start + count)
        return stat.st_size

    def drop_caches(self, path: str) -> None:
        """Have the kernel drop the pages of a file; the next read opens it again."""
        with self._opened(path) as (fd, _):
            self._posix.forget(fd)

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Write a temporary file beside the target, sync it, rename or link it, sync the folder."""
        file = self._open_temp_file(path)
        try:
            file.write(data, 0)
            file.fsync_and_close(sum(view.nbytes for view in data))
            file.publish(if_absent=if_absent)
        except BaseException:
            with contextlib.suppress(OSError):
                file.discard()
            raise

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """Yield files and links to files, but no temporary files and none that vanish meanwhile."""
        if self._leads_out(self._full(prefix.strip("/"))):
            return
        for path, item in self._walk(prefix, recursive=recursive):
            if not recursive and _is_folder(item):
                yield ObjectInfo(path=f"{path}/", size_bytes=0)
                continue
            if is_temp_name(item.name) or is_remains(item.name):
                continue
            try:
                stat = self._posix.stat(self._full(path))
            except OSError as error:
                # ELOOP: a link to itself is no file.
                if error.errno not in ABSENT | {errno.ESTALE, errno.ELOOP}:
                    raise
            else:
                if stat_modes.S_ISREG(stat.st_mode):
                    yield _info(path, stat)

    def delete(self, paths: Sequence[str]) -> None:
        """Unlink files and make that durable, so that a later delete cannot overtake it."""
        folders: dict[str, None] = {}
        files = [*map(self._full, paths)]
        for folder in {*map(folder_of, files)}:
            self._check_inside(folder)
        for full in files:
            try:
                self._posix.unlink(full)
            except OSError as error:
                # A folder is no object, so there is nothing to delete.
                if error.errno not in ABSENT | {errno.EISDIR}:
                    raise
            else:
                folders[folder_of(full)] = None
        for folder in folders if self._sync else ():
            self._posix.sync_names(folder)

    def delete_version(self, path: str, version: str) -> None:
        """Compare and unlink while the folder is locked; then remove empty folders.

        Atomic among calls of this method, on one host or where the mount supports locks. It does
        not lock out replacements, so it is for write-once names.
        """
        full = self._full(path)
        folder = folder_of(full)
        self._check_inside(folder)
        try:
            lock = self._posix.lock_folder(folder)
        except BlockingIOError as error:
            raise StorageError(
                f"Another process is deleting in {folder}.", kind="precondition"
            ) from error
        except OSError as error:
            if error.errno in ABSENT:
                return
            if error.errno not in NO_CALL | {errno.EBADF, errno.ENOLCK, errno.EPERM}:
                raise
            raise UnsupportedByStoreError(f"The folder {folder} cannot be locked.") from error
        try:
            if _version_of(self._posix.stat(full)) != version:
                raise changed(full)
            self._posix.unlink(full)
            if self._sync:
                self._posix.sync_names(folder)
            for empty in dict.fromkeys((folder, self._full(SAVES), self.folder)):
                with contextlib.suppress(OSError):
                    self._posix.rmdir(empty)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
        finally:
            self._posix.close(lock)

    def begin_upload(self, path: str, *, write_id: str) -> str:
        file = self._open_temp_file(path)
        name = f"{folder_of(path)}/{file.name}".lstrip("/")
        token = _Token(name)
        token.file = file
        self._own[name] = file
        return token

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        self._temp_file(path, token).write(data, part.offset)
        return self._receipt

    def flush_parts(self, path: str, token: str) -> None:
        """Sync the file and close it."""
        file = self._temp_file(path, token)
        try:
            with self._final(path):
                file.flush()
        except BaseException:
            # Later calls on this upload fail.
            file.detach()
            raise

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        """Check the length, sync, rename or link; only a failed rename may be retried."""
        file = self._temp_file(path, token)
        with self._final(path):
            by_several = any(part.receipt != self._receipt for part in parts)
            file.fsync_and_close(sum(part.size_bytes for part in parts), by_several=by_several)
        file.publish(if_absent=False)
        self._forget(token)

    def abort_upload(self, path: str, token: str) -> None:
        full = self._temp_path(path, token)
        self._check_inside(folder_of(full))
        file = self._forget(token)
        if file is not None:
            file.discard()
        else:
            with contextlib.suppress(FileNotFoundError):
                self._posix.unlink(full)

    def leave_upload(self, path: str, token: str) -> None:
        file = self._known(token)
        if file is not None and not file.is_own:
            self._forget(token)
            file.detach()

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        prefix = prefix.strip("/")
        if self._leads_out(self._full(prefix)):
            return
        beside = self._scan(folder_of(prefix)) if prefix else ()
        for path, item in (
            *(entry for entry in beside if target_path(entry[0]) == prefix),
            *self._walk(prefix, recursive=True),
        ):
            if is_temp_name(item.name) and item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                    changed_s = item.stat(follow_symlinks=False).st_mtime
                    yield OpenUpload(path=target_path(path), token=path, modified_s=changed_s)

    def copy_source(self, path: str) -> CopySource:
        full = self._full(path)
        return CopySource(scope="posix", address=full, path=f"file://{full}")

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> None:
        """Link the file; a file system reports no checksum."""
        full = self._full(path)
        self._check_inside(folder_of(full))
        link_file(self._posix, source.address, full, size_bytes=size_bytes, sync=self._sync)

    def make_folders(self, folders: Sequence[str]) -> None:
        """Create the root, its parents and these folders; sync each name in the root or above."""
        made: set[str] = set()
        for folder in ("", *folders):
            full = self._full(folder.strip("/"))
            self._check_inside(full)
            self._posix.make_folder(full, root=self.folder, made=made, sync=self._sync)

    def durability_problem(self) -> str:
        return durability_problem(self.folder)

    def delete_folder(self, path: str) -> None:
        """Remove a folder and all below it durably, following no symbolic link."""
        full = self._full(path)
        self._check_inside(folder_of(full))
        if self._posix.remove_folder(full) and self._sync:
            self._posix.sync_names(folder_of(full))

    def _full(self, path: str) -> str:
        return f"{self.folder.rstrip('/')}/{path}" if path else self.folder

    def _leads_out(self, folder: str) -> bool:
        """Return whether symbolic links move a folder out of the root."""
        if folder == self.folder:
            return False
        root = self._posix.real_path(self.folder).rstrip("/")
        return not f"{self._posix.real_path(folder)}/".startswith(f"{root}/")

    def _check_inside(self, folder: str) -> None:
        """Refuse a folder that symbolic links move out of the root."""
        if self._leads_out(folder):
            raise UnsafeContentError(
                f"{folder} is, or lies behind, a symbolic link that leads out of {self.folder}.",
                path=folder,
                next_step="Replace the link by a folder, or give the URL of what it leads to.",
            )

    def _retry_stale(self, full: str, attempt: Callable[[], T]) -> T:
        """Run `attempt`, and once more if a network file system's caches may be stale."""
        try:
            return attempt()
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ESTALE}:
                raise
        below = os.path.relpath(folder_of(full), self.folder)
        folder = self.folder
        with contextlib.suppress(OSError):
            self._posix.open_folder(folder_of(folder))
            self._posix.open_folder(folder)
            for part in below.split("/") if below != "." else ():
                folder = f"{folder}/{part}"
                self._posix.open_folder(folder)
        return attempt()

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        full = self._full(path)

        def attempt() -> tuple[int, os.stat_result]:
            fd = self._posix.open_read(full)
            try:
                stat = self._posix.fstat(fd)
                _check_is_file(stat, full)
            except BaseException:
                self._posix.close(fd)
                raise
            return fd, stat

        fd, stat = self._retry_stale(full, attempt)
        try:
            yield fd, stat
        finally:
            self._posix.close(fd)

    @contextlib.contextmanager
    def _final(self, path: str) -> Iterator[None]:
        """Make errors of the block final: a failed fsync must not be retried."""
        try:
            yield
        except StorageError as error:
            error.retryable = False
            raise
        except OSError as error:
            failure = explain(error, "completion", f"file://{self._full(path)}")
            failure.retryable = False
            raise failure from error

    def _open_temp_file(self, path: str, name: str | None = None) -> TempFile:
        """Create a temporary file, or open `name`, which another process created."""
        full = self._full(path)
        self._check_inside(folder_of(full))
        try:
            return self._retry_stale(
                full, lambda: TempFile(self._posix, full, self._settings, name)
            )
        except FileNotFoundError as error:
            if name is not None:
                raise
            what = f"The folder {folder_of(full)} does not exist on this host."
            step = "Create it, as make_folders does; if another rank created it, check that all "
            step += "hosts share this file system."
            raise StorageError(what, kind="not-found", next_step=step) from error

    def _temp_file(self, path: str, token: str) -> TempFile:
        """Return the open file of an upload; join it if another process began the upload."""
        file = self._known(token)
        if file is None:
            joined = self._open_temp_file(path, os.path.split(self._temp_path(path, token))[1])
            # Two threads that open it at once both use the first.
            file = self._joined.setdefault(token, joined)
            if file is not joined:
                joined.detach()
        return file

    def _known(self, token: str) -> TempFile | None:
        return self._own.get(token) or self._joined.get(token)

    def _forget(self, token: str) -> TempFile | None:
        joined = self._joined.pop(token, None)
        return self._own.pop(token, None) or joined

    def _temp_path(self, path: str, token: str) -> str:
        """Return the full path of a temporary file; refuse a token that leads elsewhere."""
        folder, name = os.path.split(token)
        is_near = folder == folder_of(path) if path else ".." not in folder.split("/")
        if not is_near or folder.startswith("/") or not is_temp_name(name):
            what = f"The token of an upload of {path} names no temporary file."
            step = "Pass the result of the upload's `token()`."
            raise InvalidInputError(what, path=path, next_step=step)
        return self._full(token)

    def _walk(self, folder: str, *, recursive: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
        pending = [folder.strip("/")]
        while pending:
            for path, item in self._scan(pending.pop()):
                if recursive and item.is_dir(follow_symlinks=False):
                    pending.append(path)
                else:
                    yield path, item

    def _scan(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield path and entry of all that is in a folder; nothing if there is no folder."""
        try:
            items = self._posix.scandir(self._full(folder))
        except OSError as error:
            if error.errno == errno.ENOENT or (folder and error.errno == errno.ENOTDIR):
                return
            raise
        for item in items:
            yield f"{folder}/{item.name}".lstrip("/"), item


def _is_folder(item: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to a folder."""
    try:
        return item.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _info(path: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        path=path,
        size_bytes=stat.st_size,
        modified_s=stat.st_mtime,
        link_count=stat.st_nlink,
    )


def _version_of(stat: os.stat_result) -> str:
    return f"{stat.st_ino:x}-{stat.st_mtime_ns:x}"


def _check_is_file(stat: os.stat_result, full: str) -> None:
    """Raise as for an absent file if the name is that of a folder or device."""
    if not stat_modes.S_ISREG(stat.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{full} is not a file")
