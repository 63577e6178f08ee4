"""The folders of a local store: made durably, listed, cleared of temporary files, removed.

System errors leave it as `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat as stat_modes
from collections.abc import Sequence

from .backends.posix import Posix
from .base import Entry, PathFilter
from .draft import is_draft_name, is_meant, sync_folder
from .os_errors import LocalRoot, folder_of

# What an NFS client keeps of a removed file that a process still holds open.
_NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What a call on a name answers if nothing bears it."""


def _is_object_name(name: str) -> bool:
    return not (is_draft_name(name) or _NFS_REMAINS.fullmatch(name))


class LocalFolders:
    """The folders below one root; `sync=False` leaves out every fsync. Methods raise `OSError`."""

    def __init__(self, posix: Posix, root: LocalRoot, *, sync: bool) -> None:
        self._posix = posix
        self._root = root
        self._sync = sync

    def make(self, full: str, made: set[str]) -> None:
        """Make a folder and its parents, and sync each name that lies in the root or is it.

        Names that were there already are synced too: who made them may have died before
        doing it. Those in `made` are left out; what was made is added to it.
        """
        chain = [full]
        while (parent := folder_of(chain[-1])) != chain[-1] and (
            len(chain[-1]) > len(self._root.folder) or not self._is_folder(parent)
        ):
            chain.append(parent)
        for folder in reversed(chain):
            if folder not in made:
                self._make_one(folder)
                self._sync_new(folder, folder_of(folder))
                made.add(folder)

    def entries(self, folder: str, *, recursive: bool) -> list[Entry]:
        """Return the files below a folder in no order; with `recursive=False` its folders too.

        Temporary files are left out, and what vanishes during the walk.
        """
        found: list[Entry] = []
        pending = [folder]
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
        return found

    def clear(self, folder: str, *, only: PathFilter | None) -> int:
        """Remove the temporary files below a folder that `only` means; return how many."""
        count = 0
        pending = [folder]
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
                        self._posix.unlink(self._root.full(path))
                        count += 1
        return count

    def remove(self, full: str) -> None:
        """Remove a folder and all below it durably, following no symbolic link; idempotent.

        What an NFS client still holds open stays behind as a hidden file, with its folder.
        """
        if self._posix.is_link(full):
            self._posix.unlink(full)
        elif not self._remove_below(full):
            return
        self.sync(folder_of(full))

    def sync(self, full: str) -> None:
        """Make the names in a folder durable, if this store is to."""
        if self._sync:
            sync_folder(self._posix, full)

    def _make_one(self, full: str) -> None:
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

    def _sync_new(self, full: str, parent: str) -> None:
        try:
            self.sync(parent)
        except PermissionError:
            # A parent that may be passed but not read cannot be synced; journaling file
            # systems carry a folder's own name along when the folder is.
            self.sync(full)

    def _is_folder(self, full: str) -> bool:
        try:
            return stat_modes.S_ISDIR(self._posix.stat(full).st_mode)
        except OSError:
            return False

    def _scan(self, folder: str) -> Sequence[os.DirEntry[str]]:
        """Return the entries of a folder, none if there is no such folder below the root."""
        try:
            return self._posix.scandir(self._root.full(folder))
        except OSError as error:
            if error.errno == errno.ENOENT or (folder and error.errno == errno.ENOTDIR):
                return []
            raise

    def _entry(self, path: str) -> Sequence[Entry]:
        try:
            found = self._posix.stat(self._root.full(path))
        except OSError as error:
            if error.errno in ABSENT | {errno.ESTALE}:
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
            if error.errno in ABSENT:
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
