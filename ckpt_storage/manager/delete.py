"""Deleting one checkpoint with its exports (I7)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckpt_storage.commit.attempt_files import attempts_there
from ckpt_storage.commit.deletion import delete as delete_commit
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointInProgressError,
    CheckpointNotFoundError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.export.removal import remove_exports
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
    expected_save_id: str | None = None,
) -> bool:
    """Delete the checkpoint at `url` and its exports; return whether there was anything to delete.

    The commit is deleted first, so that no reader sees half a checkpoint; after a crash, call it
    again. A record of a few hundred bytes stays, and so do files of other tools. Of a symbolic link
    only the link is removed. One process calls it; a save in flight fails with
    `CommitConflictError`. With `expected_save_id` only that save is deleted, not a save that has
    replaced it.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or not that save; unless `missing_ok`.
        InvalidInputError: another tool wrote it; unless `missing_ok`.
        StorageError, PhaseTimeoutError: deleted in part; call it again.

    """
    location, timeouts = Location.of(url, storage_options), Timeouts.of(timeout)
    path = Path(location.path) if location.is_local else None
    if path is not None and path.is_symlink():
        _unlink(path)
        return True
    is_deleted = False
    # Opening a store at a path would make the folder.
    if path is None or path.is_dir():
        store = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy())
        store = store.bounded(Deadline.of(timeouts, "commit"))
        slots = read_log(store)
        if not is_foreign(store, slots):
            has_saves = slots.head is not None or bool(attempts_there(store))
            is_deleted = has_saves and delete_with_exports(store, expected_save_id)
        elif not missing_ok:
            raise InvalidInputError(
                f"{location.url} was written by another tool.",
                path=location.url,
                next_step="Delete it with that tool, or as a folder.",
            )
    if not is_deleted and not missing_ok:
        what = "checkpoint" if expected_save_id is None else f"save {expected_save_id}"
        raise CheckpointNotFoundError(
            f"{location.url} holds no {what}.",
            path=location.url,
            next_step="ckpt_storage.list_checkpoints(root) shows what is there.",
        )
    return is_deleted


def delete_step(roots: Sequence[Root], step: int) -> bool:
    """Delete a step below each root; return whether it existed.

    Raises `CheckpointInProgressError` if it is in use.
    """
    is_deleted = False
    for root in roots:
        name = root.names.name_of(step)
        place = root.location.child(name)
        with root.in_use.reserved_for_deletion(name) as is_free:
            if not is_free:
                reason = root.in_use.reasons().get(name, "it is being deleted")
                raise CheckpointInProgressError(
                    f"{place.url} is in use: {reason}.",
                    path=place.url,
                    next_step="Wait until it is not, then delete it.",
                )
            is_deleted |= delete(
                place.target,
                storage_options=place.storage_options,
                timeout=root.timeouts,
                retry=root.retry,
                missing_ok=True,
            )
            root.forget(name)
    return is_deleted


def delete_with_exports(store: Store, expected_save_id: str | None) -> bool:
    """Delete a checkpoint, and then its exports; returns and raises as `deletion.delete`."""
    is_deleted = delete_commit(store, expected_save_id=expected_save_id)
    if is_deleted and (foreign_files := remove_exports(store)):
        log.info("%s: files of other tools stay, such as %s", store.url, foreign_files[0])
    return is_deleted


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"The link {path} cannot be removed: {error.strerror}.",
            kind="permission" if isinstance(error, PermissionError) else "other",
            path=str(path),
            next_step="Remove it by hand; its target is not deleted.",
        ) from error
    log.info("%s was a link; its target stays", path)
