"""The store on a folder of a POSIX file system: local disks and network mounts.

Knows POSIX semantics and what NFS makes of them; knows nothing of checkpoints. Files come
into being through `draft`, system calls go through `posix`, and every `OSError` becomes a
`StorageError` in `os_errors`. Called by `open_store` and by tests.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import os
import re
import stat as stat_modes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from ckpt_storage.errors import CheckpointError, IntegrityError, InvalidInputError, StorageError
from ckpt_storage.options import PageCache

from .base import Arrived, Capabilities, CopySource, Entry, PathFilter, Stat, Store, Version
from .bounds import TooLongError, check_bound, too_long
from .draft import Draft, is_draft_name, is_meant, sync_folder
from .local_shared import COPY_SCOPE, TICKET_FIELD, TICKET_KIND, LocalSharedUpload
from .local_upload import LocalUpload
from .openfile import KeptFile, Opened
from .os_errors import map_os_error
from .posix import BLOCK_BYTES, Posix, is_unsupported
from .tickets import decode_ticket

__all__ = ["LocalStore"]

T = TypeVar("T")

# Read and checked before it leaves a processor's second-level cache.
_PIECE_BYTES = 1 << 20

# Reads of as much are told to the kernel, which then reads twice as far ahead; not by
# POSIX_FADV_WILLNEED of what comes next, with which cold reads took longer.
_READ_ON_BYTES = 1 << 20

_CAPABILITIES = Capabilities(
    kind="posix",
    exclusive_create=True,
    atomic_replace=True,
    replace_if_match=False,
    parallel_parts=True,
    reads_total_size=True,
    cheap_stat=True,
    is_remote=False,
    can_list_uploads=True,
    shared_uploads=True,
    # A client of a network mount writes back whole pages, also the rest of one that it did not
    # change; the largest pages of common kernels.
    shared_align_bytes=64 * 1024,
    copy_part_min_bytes=1,
    copy_align_bytes=BLOCK_BYTES,
)

# What an NFS client keeps of a removed file that a process still holds open.
_NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


def _is_object_name(name: str) -> bool:
    return not (is_draft_name(name) or _NFS_REMAINS.fullmatch(name))


class LocalStore:
    """A `Store` below one folder.

    Holds no descriptor between calls, so it pickles, forks and is shared by threads
    freely; what `reading_in_turn` gives is for one thread. `sync_files=False` leaves out
    every fsync and nothing else: a crash of the process then still shows old or new, a
    power cut may show anything. With `page_cache="drop"` the kernel is to keep no copy of
    what uploads have written, which changes nothing else; small files that are put whole
    are read soon and stay.
    """

    def __init__(
        self,
        root: str,
        *,
        sync_files: bool = True,
        page_cache: PageCache = "keep",
        posix: Posix | None = None,
    ) -> None:
        if not root or "\0" in root:
            raise InvalidInputError(f"{root!r} names no folder.", next_step="Give a path.")
        # Made absolute now, because the process may change its working folder.
        self._root = str(Path(root).absolute())
        self._sync = sync_files
        self._page_cache = page_cache
        self._posix = posix or Posix()
        self._copies_pay: bool | None = None
        self._kept: KeptFile | None = None

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def url(self) -> str:
        """The root as a file:// URL, unquoted as fsspec has it."""
        return f"file://{self._root}"

    @property
    def capabilities(self) -> Capabilities:
        """What POSIX promises; `create` still refuses where a mount does not keep it.

        Copies pay where blocks can be shared: elsewhere a read, a check and a write are as fast.
        """
        if self._copies_pay is None:
            folder = Path(self._root)
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            self._copies_pay = self._posix.shares_blocks(str(folder))
        if self._copies_pay:
            return dataclasses.replace(_CAPABILITIES, copies_pay=True)
        return _CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Make the root and folders below it, durably; the only method that makes folders."""
        made: set[str] = set()
        for folder in ("", *folders):
            with self._border("making", folder):
                self._make_folder(self._full(folder), made)

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return a whole file, read through one descriptor, which tells its length first."""

        def read_all(fd: int, size_bytes: int) -> bytes:
            try:
                check_bound(size_bytes, most_bytes)
            except TooLongError as error:
                raise too_long(error, path=path, shown=self._shown(path)) from None
            content = bytearray(size_bytes)
            count = self._posix.preadv_all(fd, [memoryview(content)], 0)
            return bytes(memoryview(content)[:count])

        with self._border("read", path):
            return self._with_file(path, read_all)

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return a whole file; POSIX has no version that a replace could be made to match."""
        return Version(data=self.read(path, most_bytes=most_bytes), token=None)

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fill `target` from `start` (bytes) on, without a buffer in between.

        Raises `IntegrityError` with path and offset if the file is not `size_bytes` long
        or ends early.
        """

        def fill(fd: int, found_bytes: int) -> None:
            if size_bytes is not None and found_bytes != size_bytes:
                raise IntegrityError(
                    f"{self._shown(path)} has {found_bytes} bytes instead of {size_bytes}.",
                    path=path,
                    offset=min(found_bytes, size_bytes),
                    next_step="The file is damaged or not the one that was saved.",
                )
            count, step = 0, target.nbytes if arrived is None else _PIECE_BYTES
            if arrived is not None:
                # A file that was replaced meanwhile is opened and read once more.
                arrived(0)
            if target.nbytes >= _READ_ON_BYTES:
                self._read_on(fd)
            while count < target.nbytes:
                piece = target[count : count + step]
                taken = self._posix.preadv_all(fd, [piece], start + count)
                count += taken
                if taken < piece.nbytes:
                    break
                if arrived is not None:
                    arrived(count)
            if count < target.nbytes:
                raise IntegrityError(
                    f"{self._shown(path)} ends at byte {start + count}, within the range "
                    f"[{start}, {start + target.nbytes}) that was asked for.",
                    path=path,
                    offset=min(start + count, found_bytes),
                    next_step="The file is damaged or not the one that was saved.",
                )

        with self._border("read", path):
            self._with_file(path, fill)

    @contextlib.contextmanager
    def reading_in_turn(self) -> Iterator[LocalStore]:
        """Give this store for the reads of one thread: it keeps open what it read from last."""
        view = copy.copy(self)
        view._kept = kept = KeptFile(self._posix)  # noqa: SLF001  # the same class
        try:
            yield view
        finally:
            with self._border("close", ""):
                kept.close()

    def _read_on(self, fd: int) -> None:
        try:
            self._posix.read_on(fd)
        except OSError as error:
            if not is_unsupported(error):
                raise

    def stat(self, path: str) -> Stat:
        """Return size and time of a file; a folder is no object."""
        full = self._full(path)
        with self._border("stat", path):
            found = self._revalidated(full, lambda: self._posix.stat(full))
            _check_is_file(found, full)
        return Stat(size_bytes=found.st_size, modified_s=found.st_mtime)

    def write(self, path: str, data: bytes) -> None:
        """Write a temporary file beside the target, sync it, rename it, sync the folder."""
        with self._border("write", path):
            self._put(path, data, Draft.publish, sync=self._sync)

    def create(self, path: str, data: bytes) -> None:
        """Write and sync a temporary file, then link it to the name if nothing bears it."""
        with self._border("exclusive creation", path):
            self._put(path, data, Draft.publish_new, sync=self._sync)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Write as `write` does; readers see the old file or the new one at every moment.

        Raises `StorageError` of kind "unsupported" with `if_match`.
        """
        if if_match is not None:
            raise map_os_error(
                OSError(errno.ENOTSUP, "POSIX has no conditional replace"),
                operation="conditional replace",
                path=self._shown(path),
            )
        with self._border("replace", path):
            self._put(path, data, Draft.publish, sync=self._sync)

    def start_upload(self, path: str, *, part_bytes: int) -> LocalUpload:
        """Open the temporary file; `part_bytes` does not matter here."""
        del part_bytes
        with self._border("write", path):
            draft = self._open_draft(path, sync=self._sync, page_cache=self._page_cache)
        return LocalUpload(draft, self._shown(path), lambda what: self._border(what, path))

    def start_shared_upload(self, path: str, *, part_bytes: int) -> LocalSharedUpload:
        """Open the temporary file; `part_bytes` does not matter here."""
        del part_bytes
        with self._border("write", path):
            draft = self._open_draft(path, sync=self._sync, page_cache=self._page_cache)
        return self._shared(draft, path, role="owner")

    def join_upload(self, path: str, ticket: str, *, part_bytes: int) -> LocalSharedUpload:
        """Open the owner's temporary file, which must be visible on this host."""
        del part_bytes
        name = decode_ticket(ticket, TICKET_KIND, path, {TICKET_FIELD})[TICKET_FIELD]
        if not is_draft_name(name) or "/" in name:
            raise InvalidInputError(
                f"The ticket of {path} names no temporary file.",
                path=path,
                next_step="Pass on what `ticket()` returned.",
            )
        full = self._full(path)
        with self._border("joining of the upload", path):
            draft = self._revalidated(
                full,
                lambda: Draft(
                    self._posix, full, sync=self._sync, name=name, page_cache=self._page_cache
                ),
            )
        return self._shared(draft, path, role="member")

    def copy_source(self, path: str) -> CopySource | None:
        """Return the full path."""
        return CopySource(scope=COPY_SCOPE, address=self._full(path), path=self._shown(path))

    def can_copy_from(self, other: Store) -> bool:
        """Return whether both roots lie on one file system of this host."""
        source = other.copy_source("")
        if source is None or source.scope != COPY_SCOPE:
            return False
        try:
            devices = {self._posix.stat(root).st_dev for root in (self._root, source.address)}
        except OSError:
            return False
        return len(devices) == 1

    def _shared(
        self, draft: Draft, path: str, *, role: Literal["owner", "member"]
    ) -> LocalSharedUpload:
        return LocalSharedUpload(
            draft, path, self._shown(path), lambda what: self._border(what, path), role=role
        )

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return the files below a folder, sorted by path, without temporary ones.

        Symbolic links to files count as files; those to folders are shown but not
        followed. What vanishes during the walk is left out.
        """
        found: list[Entry] = []
        pending = [prefix.strip("/")]
        with self._border("listing", prefix):
            while pending:
                folder = pending.pop()
                for item in self._scan(folder):
                    path = f"{folder}/{item.name}" if folder else item.name
                    if item.is_dir(follow_symlinks=not recursive):
                        if recursive:
                            pending.append(path)
                        else:
                            found.append(Entry(path=f"{path}/", size_bytes=0))
                    elif _is_object_name(item.name):
                        found.extend(self._entry(path))
        return sorted(found, key=lambda entry: entry.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Unlink files and make that durable, so that a later delete cannot overtake it."""
        folders: dict[str, str] = {}
        for path in paths:
            full = self._full(path)
            with self._border("deletion", path):
                try:
                    self._posix.unlink(full)
                except OSError as error:
                    # A folder bears no object of that name, so there is nothing to delete.
                    if error.errno not in _ABSENT | {errno.EISDIR}:
                        raise
                else:
                    folders[_folder_of(full)] = path
        for folder, path in folders.items():
            with self._border("deletion", path):
                self._sync_folder(folder)

    def delete_folder(self, path: str) -> None:
        """Remove a folder and all below it, following no symbolic link; idempotent.

        What an NFS client still holds open stays behind as a hidden file, with its
        folder. Raises `InvalidInputError` for an empty path.
        """
        folder = path.strip("/")
        if not folder:
            raise InvalidInputError(
                f"delete_folder would delete everything below {self.url}.",
                next_step="Name a folder below the root.",
            )
        full = self._full(folder)
        with self._border("deletion", path):
            if self._posix.is_link(full):
                self._posix.unlink(full)
            elif not self._remove_below(full):
                return
            self._sync_folder(_folder_of(full))

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Remove the temporary files below a folder, whoever made them; return how many."""
        count = 0
        pending = [prefix.strip("/")]
        with self._border("clearing", prefix):
            while pending:
                folder = pending.pop()
                for item in self._scan(folder):
                    path = f"{folder}/{item.name}" if folder else item.name
                    if item.is_dir(follow_symlinks=False):
                        pending.append(path)
                    elif (
                        is_draft_name(item.name)
                        and item.is_file(follow_symlinks=False)
                        and is_meant(folder, item.name, only)
                    ):
                        with contextlib.suppress(FileNotFoundError):
                            self._posix.unlink(self._full(path))
                            count += 1
        return count

    def now_s(self, probe_path: str) -> float:
        """Return the time the file system gives a file that was just written.

        On a network mount that is the server's clock.
        """
        full = self._full(probe_path)
        with self._border("reading of the clock", probe_path):
            self._put(probe_path, b"clock\n", Draft.publish, sync=False)
            now_s = self._posix.stat(full).st_mtime
            with contextlib.suppress(FileNotFoundError):
                self._posix.unlink(full)
        return now_s

    def close(self) -> None:
        """Do nothing: no resource outlives a call."""

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _shown(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    @contextlib.contextmanager
    def _border(self, operation: str, path: str) -> Iterator[None]:
        """Turn every `OSError` of the block into a `StorageError`."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            free_bytes = None
            with contextlib.suppress(OSError):
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    free_bytes = self._posix.free_bytes(self._root)
            raise map_os_error(
                error, operation=operation, path=self._shown(path), free_bytes=free_bytes
            ) from error

    def _revalidated(self, full: str, attempt: Callable[[], T]) -> T:
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
        below = os.path.relpath(_folder_of(full), self._root)
        folder = self._root
        with contextlib.suppress(OSError):
            self._posix.open_folder(_folder_of(folder))
            self._posix.open_folder(folder)
            for part in below.split("/") if below != "." else ():
                folder = f"{folder}/{part}"
                self._posix.open_folder(folder)

    def _with_file(self, path: str, use: Callable[[int, int], T]) -> T:
        """Return what `use` makes of the descriptor and the size (bytes) of an open file."""
        full = self._full(path)

        def opened() -> Opened:
            fd = self._posix.open_read(full)
            try:
                found = self._posix.fstat(fd)
                _check_is_file(found, full)
            except BaseException:
                self._posix.close(fd)
                raise
            return fd, found.st_size

        def attempt() -> T:
            if self._kept is not None:
                return self._kept.use(full, opened, use)
            fd, size_bytes = opened()
            try:
                return use(fd, size_bytes)
            finally:
                self._posix.close(fd)

        return self._revalidated(full, attempt)

    def _open_draft(self, path: str, *, sync: bool, page_cache: PageCache = "keep") -> Draft:
        full = self._full(path)
        try:
            return self._revalidated(
                full, lambda: Draft(self._posix, full, sync=sync, page_cache=page_cache)
            )
        except FileNotFoundError as error:
            folder = _folder_of(full)
            raise StorageError(
                f"The folder {folder} is not visible on this host; the coordinator makes it "
                "before any rank writes.",
                kind="not-found",
                path=self._shown(path),
                next_step="Is the path on a file system that all hosts share?",
            ) from error

    def _put(self, path: str, data: bytes, publish: Callable[[Draft], None], *, sync: bool) -> None:
        draft = self._open_draft(path, sync=sync)
        try:
            draft.write([memoryview(data)], 0)
            draft.seal(len(data))
            publish(draft)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.discard()
            raise

    def _make_folder(self, full: str, made: set[str]) -> None:
        """Make a folder and its parents, and sync each name that lies in the root or is it.

        Names that were there already are synced too: who made them may have died before
        doing it.
        """
        chain = [full]
        while (parent := _folder_of(chain[-1])) != chain[-1] and (
            len(chain[-1]) > len(self._root) or not self._is_folder(parent)
        ):
            chain.append(parent)
        for folder in reversed(chain):
            if folder not in made:
                self._make_one_folder(folder)
                self._sync_new_folder(folder, _folder_of(folder))
                made.add(folder)

    def _make_one_folder(self, full: str) -> None:
        try:
            self._posix.mkdir(full)
        except OSError as error:
            # A read-only or foreign parent refuses even what is there already, and an
            # answer may have been lost.
            if self._is_folder(full):
                return
            if error.errno == errno.EEXIST:
                raise NotADirectoryError(errno.ENOTDIR, f"{full} is a file") from error
            raise

    def _sync_new_folder(self, full: str, parent: str) -> None:
        try:
            self._sync_folder(parent)
        except PermissionError:
            # A parent that may be passed but not read cannot be synced; journaling file
            # systems carry a folder's own name along when the folder is.
            self._sync_folder(full)

    def _sync_folder(self, full: str) -> None:
        if self._sync:
            sync_folder(self._posix, full)

    def _is_folder(self, full: str) -> bool:
        try:
            return stat_modes.S_ISDIR(self._posix.stat(full).st_mode)
        except OSError:
            return False

    def _scan(self, folder: str) -> Sequence[os.DirEntry[str]]:
        """Return the entries of a folder, none if there is no such folder below the root."""
        try:
            return self._posix.scandir(self._full(folder))
        except OSError as error:
            if error.errno == errno.ENOENT or (folder and error.errno == errno.ENOTDIR):
                return []
            raise

    def _entry(self, path: str) -> Sequence[Entry]:
        try:
            found = self._posix.stat(self._full(path))
        except OSError as error:
            if error.errno in _ABSENT | {errno.ESTALE}:
                return []
            raise
        if not stat_modes.S_ISREG(found.st_mode):
            return []
        return [Entry(path=path, size_bytes=found.st_size, modified_s=found.st_mtime)]

    def _remove_below(self, full: str) -> bool:
        """Remove a folder and what it holds; return whether there was one."""
        try:
            items = self._posix.scandir(full)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
        for item in items:
            if item.is_dir(follow_symlinks=False):
                self._remove_below(item.path)
            else:
                self._remove_file(item)
        try:
            self._posix.rmdir(full)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not self._only_remains(full):
                raise
        return True

    def _remove_file(self, item: os.DirEntry[str]) -> None:
        try:
            self._posix.unlink(item.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.EBUSY or not _NFS_REMAINS.fullmatch(item.name):
                raise

    def _only_remains(self, full: str) -> bool:
        return all(_NFS_REMAINS.fullmatch(item.name) for item in self._posix.scandir(full))


def _folder_of(full: str) -> str:
    return os.path.split(full)[0]


def _check_is_file(found: os.stat_result, full: str) -> None:
    """Raise as for an absent file if a folder or device bears the name."""
    if not stat_modes.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{full} is not a file")
