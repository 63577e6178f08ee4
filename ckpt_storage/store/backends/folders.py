"""Folders of a file system: made durably, and removed with all that they hold."""

from __future__ import annotations

import errno
import os
import re
import stat as stat_modes

from .posix import Posix

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What a call on a name answers if nothing bears it."""

# What an NFS client keeps of a removed file that a process still holds open.
_NFS_REMAINS = re.compile(r"\.nfs[0-9a-f]{8,}")

_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def folder_of(path: str) -> str:
    """Return the folder that a file or folder lies in."""
    return os.path.split(path)[0]


def is_remains(name: str) -> bool:
    """Return whether a name is one that an NFS client gives to a file that was removed."""
    return _NFS_REMAINS.fullmatch(name) is not None


def sync_folder(posix: Posix, full: str) -> None:
    """Make the names in a folder durable, where the file system lets a folder be synced."""
    try:
        posix.fsync_folder(full)
    except OSError as error:
        # Some FUSE and SMB mounts know no fsync of a folder; there is nothing better to call.
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_folder(posix: Posix, full: str, *, root: str, made: set[str], sync: bool) -> None:
    """Make a folder and its parents; with `sync`, sync each name that lies in `root` or is it.

    Names that were there already are synced too: who made them may have died before
    doing it. Those in `made` are left out; what was made is added to it.
    """
    chain = [full]
    while (parent := folder_of(chain[-1])) != chain[-1] and (
        len(chain[-1]) > len(root) or not _is_folder(posix, parent)
    ):
        chain.append(parent)
    for folder in reversed(chain):
        if folder in made:
            continue
        _make_one(posix, folder)
        if sync:
            try:
                sync_folder(posix, folder_of(folder))
            except PermissionError:
                # A parent that may be passed but not read cannot be synced; journaling file
                # systems carry a folder's own name along when the folder is.
                sync_folder(posix, folder)
        made.add(folder)


def _make_one(posix: Posix, full: str) -> None:
    try:
        posix.mkdir(full)
    except OSError as error:
        # A read-only or foreign parent refuses even what is there already, and an
        # answer may have been lost.
        if _is_folder(posix, full):
            return
        if error.errno == errno.EEXIST:
            raise NotADirectoryError(errno.ENOTDIR, f"{full} is a file") from error
        raise


def _is_folder(posix: Posix, full: str) -> bool:
    try:
        return stat_modes.S_ISDIR(posix.stat(full).st_mode)
    except OSError:
        return False


def remove_folder(posix: Posix, full: str) -> bool:
    """Remove a folder and all below it, following no symbolic link; return whether it was there.

    What an NFS client still holds open stays behind as a hidden file, with its folder.
    """
    if posix.is_link(full):
        posix.unlink(full)
        return True
    try:
        items = posix.scandir(full)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    for item in items:
        if item.is_dir(follow_symlinks=False):
            remove_folder(posix, item.path)
        else:
            _remove_file(posix, item)
    try:
        posix.rmdir(full)
    except FileNotFoundError:
        pass
    except OSError as error:
        left = posix.scandir(full) if error.errno == errno.ENOTEMPTY else ()
        if not left or not all(is_remains(item.name) for item in left):
            raise
    return True


def _remove_file(posix: Posix, item: os.DirEntry[str]) -> None:
    try:
        posix.unlink(item.path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EBUSY or not is_remains(item.name):
            raise
