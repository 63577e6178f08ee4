"""The store on a folder of a POSIX file system: local disks and network mounts.

Files come into being through `draft`, folders through `local_folders`, system calls go through
`posix`, and every `OSError` becomes a `StorageError` at the border of `local_root`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_modes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.options import PageCache

from .backends.posix import BLOCK_BYTES, Posix, is_unsupported
from .base import Arrived, Capabilities, Copied, CopySource, Entry, PathFilter, Plain, Stat, Version
from .draft import Draft, is_draft_name
from .local_folders import ABSENT, LocalFolders
from .local_shared import COPY_SCOPE, TICKET_FIELD, TICKET_KIND, LocalSharedUpload
from .local_upload import LocalUpload
from .os_errors import LocalRoot, folder_of
from .parts import TooLongError, check_bound, decode_ticket, too_long
from .problems import Call, explain


def check_is_file(found: os.stat_result, full: str) -> None:
    """Raise as for an absent file if a folder or device bears the name."""
    if not stat_modes.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, f"{full} is not a file")


def open_file(posix: Posix, full: str) -> tuple[int, int]:
    """Open a file to read it; return its descriptor and its size in bytes.

    Raises `OSError`, and as for an absent file if it is none.
    """
    fd = posix.open_read(full)
    try:
        found = posix.fstat(fd)
        check_is_file(found, full)
    except BaseException:
        posix.close(fd)
        raise
    return fd, found.st_size


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
    if_match=False,
    parallel_parts=True,
    is_remote=False,
    lists_uploads=True,
    tokens_travel=True,
    # A client of a network mount writes back whole pages, also the rest of one that it did not
    # change; the largest pages of common kernels.
    part_alignment_bytes=64 * 1024,
    copy_min_bytes=1,
    copy_align_bytes=BLOCK_BYTES,
)


class LocalStore(Plain):
    """A `Store` below one folder.

    Holds no descriptor between calls, so it pickles, forks and is shared by threads
    freely. `sync_files=False` leaves out every fsync and nothing else: a crash of the
    process then still shows old or new, a power cut may show anything. With
    `page_cache="drop"` the kernel is to keep no copy of what uploads have written, which
    changes nothing else; small files that are put whole are read soon and stay.
    """

    def __init__(
        self,
        root: str,
        *,
        sync_files: bool = True,
        page_cache: PageCache = "keep",
        posix: Posix | None = None,
    ) -> None:
        self._posix = posix or Posix()
        self._root = LocalRoot(self._posix, root)
        self._folders = LocalFolders(self._posix, self._root, sync=sync_files)
        self._sync = sync_files
        self._page_cache = page_cache

    def __repr__(self) -> str:
        return f"LocalStore({self._root.folder!r})"

    @property
    def url(self) -> str:
        """The root as a file:// URL, unquoted as fsspec has it."""
        return self._root.url

    @property
    def capabilities(self) -> Capabilities:
        """What POSIX promises; `create` still refuses where a mount does not keep it."""
        return _CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Make the root and folders below it, durably; the only method that makes folders."""
        made: set[str] = set()
        for folder in ("", *folders):
            with self._root.border("making", folder):
                self._folders.make(self._root.full(folder), made)

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Return a whole file, read through one descriptor, which tells its length first."""

        def read_all(fd: int, size_bytes: int) -> bytes:
            try:
                check_bound(size_bytes, most_bytes)
            except TooLongError as error:
                raise too_long(error, path=path, shown=self._root.shown(path)) from None
            content = bytearray(size_bytes)
            count = self._posix.preadv_all(fd, [memoryview(content)], 0)
            return bytes(memoryview(content)[:count])

        with self._root.border("read", path):
            return self._with_file(path, read_all)

    def read_version(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return a whole file; POSIX has no version that a replace could be made to match."""
        return Version(data=self.read(path, most_bytes=most_bytes), version=None)

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
                    f"{self._root.shown(path)} has {found_bytes} bytes instead of {size_bytes}.",
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
                    f"{self._root.shown(path)} ends at byte {start + count}, within the range "
                    f"[{start}, {start + target.nbytes}) that was asked for.",
                    path=path,
                    offset=min(start + count, found_bytes),
                    next_step="The file is damaged or not the one that was saved.",
                )

        with self._root.border("read", path):
            self._with_file(path, fill)

    def _read_on(self, fd: int) -> None:
        try:
            self._posix.read_on(fd)
        except OSError as error:
            if not is_unsupported(error):
                raise

    def stat(self, path: str) -> Stat:
        """Return size and time of a file; a folder is no object."""
        full = self._root.full(path)
        with self._root.border("stat", path):
            found = self._root.revalidated(full, lambda: self._posix.stat(full))
            check_is_file(found, full)
        return Stat(path=path, size_bytes=found.st_size, modified_s=found.st_mtime)

    def write(self, path: str, data: bytes) -> None:
        """Write a temporary file beside the target, sync it, rename it, sync the folder."""
        with self._root.border("write", path):
            self._put(path, data, Draft.publish, sync=self._sync)

    def create(self, path: str, data: bytes) -> None:
        """Write and sync a temporary file, then link it to the name if nothing bears it."""
        with self._root.border("exclusive creation", path):
            self._put(path, data, Draft.publish_new, sync=self._sync)

    def replace(self, path: str, data: bytes, *, if_match: str | None = None) -> None:
        """Write as `write` does; readers see the old file or the new one at every moment.

        Raises `StorageError` of kind "unsupported" with `if_match`.
        """
        if if_match is not None:
            refusal = OSError(errno.ENOTSUP, "POSIX has no conditional replace")
            raise explain(refusal, Call(name="conditional replace", path=self._root.shown(path)))
        with self._root.border("replace", path):
            self._put(path, data, Draft.publish, sync=self._sync)

    def start_upload(self, path: str, *, part_bytes: int) -> LocalUpload:
        """Open the temporary file; `part_bytes` does not matter here."""
        del part_bytes
        with self._root.border("write", path):
            draft = self._open_draft(path, sync=self._sync, page_cache=self._page_cache)
        return LocalUpload(
            draft, self._root.shown(path), lambda what: self._root.border(what, path)
        )

    def start_shared_upload(self, path: str, *, part_bytes: int) -> LocalSharedUpload:
        """Open the temporary file; `part_bytes` does not matter here."""
        del part_bytes
        with self._root.border("write", path):
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
        full = self._root.full(path)
        with self._root.border("joining of the upload", path):
            draft = self._root.revalidated(
                full,
                lambda: Draft(
                    self._posix, full, sync=self._sync, name=name, page_cache=self._page_cache
                ),
            )
        return self._shared(draft, path, role="member")

    def copy_source(self, path: str) -> CopySource | None:
        """Return the full path."""
        return CopySource(
            scope=COPY_SCOPE, address=self._root.full(path), path=self._root.shown(path)
        )

    def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
        """Return whether both roots lie on one file system of this host.

        Copies pay where blocks can be shared: elsewhere a read, a check and a write are as fast.
        """
        source = other.copy_source("")
        if source is None or source.scope != COPY_SCOPE:
            return False
        try:
            devices = {
                self._posix.stat(root).st_dev for root in (self._root.folder, source.address)
            }
        except OSError:
            return False
        return len(devices) == 1 and (at_any_price or self._copies_pay())

    def _copies_pay(self) -> bool:
        folder = Path(self._root.folder)
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return self._posix.shares_blocks(str(folder))

    def _shared(
        self, draft: Draft, path: str, *, role: Literal["owner", "member"]
    ) -> LocalSharedUpload:
        return LocalSharedUpload(
            draft,
            path,
            self._root.shown(path),
            lambda what: self._root.border(what, path),
            role=role,
        )

    def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
        """Return the files below a folder, sorted by path, without temporary ones.

        Symbolic links to files count as files; those to folders are shown but not
        followed. What vanishes during the walk is left out.
        """
        with self._root.border("listing", prefix):
            found = self._folders.entries(prefix.strip("/"), recursive=recursive)
        return sorted(found, key=lambda entry: entry.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Unlink files and make that durable, so that a later delete cannot overtake it."""
        folders: dict[str, str] = {}
        for path in paths:
            full = self._root.full(path)
            with self._root.border("deletion", path):
                try:
                    self._posix.unlink(full)
                except OSError as error:
                    # A folder bears no object of that name, so there is nothing to delete.
                    if error.errno not in ABSENT | {errno.EISDIR}:
                        raise
                else:
                    folders[folder_of(full)] = path
        for folder, path in folders.items():
            with self._root.border("deletion", path):
                self._folders.sync(folder)

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
        with self._root.border("deletion", path):
            self._folders.remove(self._root.full(folder))

    def abort_uploads(self, prefix: str, *, only: PathFilter | None = None) -> int:
        """Remove the temporary files below a folder, whoever made them; return how many."""
        with self._root.border("clearing", prefix):
            return self._folders.clear(prefix.strip("/"), only=only)

    def now_s(self, probe_path: str) -> float:
        """Return the time the file system gives a file that was just written.

        On a network mount that is the server's clock.
        """
        full = self._root.full(probe_path)
        with self._root.border("reading of the clock", probe_path):
            self._put(probe_path, b"clock\n", Draft.publish, sync=False)
            now_s = self._posix.stat(full).st_mtime
            with contextlib.suppress(FileNotFoundError):
                self._posix.unlink(full)
        return now_s

    def close(self) -> None:
        """Do nothing: no resource outlives a call."""

    def _with_file(self, path: str, use: Callable[[int, int], T]) -> T:
        """Return what `use` makes of the descriptor and the size (bytes) of an open file."""
        full = self._root.full(path)

        def attempt() -> T:
            fd, size_bytes = open_file(self._posix, full)
            try:
                return use(fd, size_bytes)
            finally:
                self._posix.close(fd)

        return self._root.revalidated(full, attempt)

    def _open_draft(self, path: str, *, sync: bool, page_cache: PageCache = "keep") -> Draft:
        full = self._root.full(path)
        try:
            return self._root.revalidated(
                full, lambda: Draft(self._posix, full, sync=sync, page_cache=page_cache)
            )
        except FileNotFoundError as error:
            folder = folder_of(full)
            raise StorageError(
                f"The folder {folder} is not visible on this host; the coordinator makes it "
                "before any rank writes.",
                kind="not-found",
                path=self._root.shown(path),
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
