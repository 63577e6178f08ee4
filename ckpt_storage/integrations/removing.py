"""Deleting one checkpoint on behalf of a framework that decides itself what to keep."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_storage.commit.cleaning import delete_checkpoint
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.commit.stockfooter import is_foreign
from ckpt_storage.errors import StorageError
from ckpt_storage.export.consolidation.removal import remove_exports
from ckpt_storage.format.names import SAVES
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store

__all__ = ["remove"]

log = logging.getLogger("ckpt_storage")


def remove(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None, timeouts: Timeouts
) -> None:
    """Delete the checkpoint at `url`: its commit first, then its files and exports; idempotent.

    A tombstone of a few hundred bytes stays, and what another tool left there, be it a folder or a
    file. Of a symbolic link the link alone goes: it means a checkpoint that has its own name.
    Where nothing is, nothing is made. Raises `StorageError`, `PhaseTimeoutError`.
    """
    location = Location.of(url, storage_options)
    if location.is_local and not _is_folder(Path(location.path)):
        return
    retry = RetryPolicy()
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry).bounded(deadline)
    found = read_log(store)
    if is_foreign(store, found) or (found.last is None and not _has_attempts(store)):
        return
    exclusive = probe_exclusive_create(store, scope=location.scope).exclusive
    if delete_checkpoint(store, exclusive=exclusive, deadline=deadline, retry=retry):
        remove_exports(store)


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder of its own; unlink a link to one."""
    if path.is_symlink():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"The link {path} cannot be removed: {error.strerror}.",
                kind="permission" if isinstance(error, PermissionError) else "other",
                path=str(path),
                next_step="Remove it by hand; what it means is left alone.",
            ) from error
        log.info("%s was a link, and what it means stays", path)
        return False
    if path.exists() and not path.is_dir():
        log.warning("%s is a file, which this package did not write; it stays", path)
        return False
    return path.is_dir()


def _has_attempts(store: Store) -> bool:
    """Return whether a save lies there that never was committed."""
    try:
        return bool(store.list(SAVES, recursive=False))
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return False
