"""Deleting one checkpoint by its URL, or one step of a run, with its exports (I7)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckpt_storage.commit.delete import attempts_there
from ckpt_storage.commit.delete import delete as delete_commit
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointInProgressError,
    CheckpointNotFoundError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.export.export_folder import remove_exports
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .root import Root

log = logging.getLogger("ckpt_storage")


def delete(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    missing_ok: bool = False,
) -> bool:
    """Delete the checkpoint at `url` and its exports; return whether there was anything to delete.

    The commit goes first, so that no reader meets a half; cut at any point, call it again. A record
    of a few hundred bytes stays, and so does what another tool left there. Of a symbolic link the
    link alone goes. One process calls it; a save that is under way fails with
    `CommitConflictError`.

    Raises:
        CheckpointNotFoundError: nothing of ours is there; unless `missing_ok`.
        InvalidInputError: another tool wrote it; unless `missing_ok`.
        StorageError, PhaseTimeoutError: deleted in part; call it again.

    """
    location = Location.of(url, storage_options)
    timeouts, retry = Timeouts.of(timeout), retry or RetryPolicy()
    is_link = location.is_local and _unlinked(Path(location.path))
    is_deleted = is_link or _deleted(location, timeouts, retry, missing_ok=missing_ok)
    if not is_deleted and not missing_ok:
        raise CheckpointNotFoundError(
            f"{location.url} holds no checkpoint.",
            path=location.url,
            next_step="ckpt_storage.list_checkpoints(root) shows what is there.",
        )
    return is_deleted


def _deleted(
    location: Location, timeouts: Timeouts, retry: RetryPolicy, *, missing_ok: bool
) -> bool:
    if location.is_local and not Path(location.path).is_dir():
        # To open a store there would make the folder.
        return False
    deadline = Deadline("commit", timeouts.commit)
    store = open_store(location, timeouts=timeouts, retry=retry).bounded(deadline)
    found = read_log(store)
    if is_foreign(store, found):
        if missing_ok:
            return False
        raise InvalidInputError(
            f"{location.url} was written by another tool.",
            path=location.url,
            next_step="Delete it with that tool, or as a folder.",
        )
    if found.head is None and not attempts_there(store):
        return False
    return delete_commit_and_exports(store)


def delete_commit_and_exports(store: Store, *, expected_save_id: str | None = None) -> bool:
    """Delete what lies there, and then its exports; returns and raises as `commit.delete`."""
    is_deleted = delete_commit(store, expected_save_id=expected_save_id)
    if is_deleted and (others := remove_exports(store)):
        log.info("%s: files of others stay, such as %s", store.url, others[0])
    return is_deleted


def _unlinked(path: Path) -> bool:
    """Remove a link; return whether it was one."""
    if not path.is_symlink():
        return False
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
    return True


def delete_step(roots: Sequence[Root], step: int, *, timeouts: Timeouts) -> bool:
    """Delete a step below each root; return whether it was there. Raises if it is in use."""
    is_deleted = False
    for root in roots:
        name = root.names.name_of(step)
        place = root.location.child(name)
        with root.uses.deleting(name) as may:
            if not may:
                raise CheckpointInProgressError(
                    f"{place.url} is in use: {root.uses.now().get(name, 'it is being deleted')}.",
                    path=place.url,
                    next_step="Wait for that to end, then delete it.",
                )
            is_deleted |= _deleted(place, timeouts, root.retry, missing_ok=True)
            root.forget(name)
    return is_deleted
