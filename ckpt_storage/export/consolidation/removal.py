"""Removing the exports that lie below a checkpoint that was deleted."""

from __future__ import annotations

import logging

from ckpt_storage.commit.slotlog import read_if_there, stamp
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    NAMES_PATH,
    SINGLE_NAME,
    Holder,
    is_weight_file,
)
from ckpt_storage.format.names import COMMITS, SAVES, new_write_id
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")

_NOTHING = "0" * 64
"""The fingerprint of what the holder makes: no export."""


def remove_exports(store: Store) -> list[str]:
    """Remove all exports directly below the root of `store`; return what else lies in them.

    The caller has made sure that what they were made of is gone. Works as a consolidation does
    that makes nothing: it becomes the holder, so that one under way publishes nothing any more,
    and stops where another becomes it. The index goes first, and the names last, so that a
    removal that was cut is gone on with. Files that no export writes are left where they are.
    Idempotent. Raises `StorageError`.
    """
    others: list[str] = []
    for entry in store.list("", recursive=False):
        folder = entry.path.rstrip("/")
        if entry.path.endswith("/") and folder not in {COMMITS, SAVES}:
            others += _remove(store, folder)
    return others


def _remove(store: Store, folder: str) -> list[str]:
    paths = _below(store, folder)
    if not any(path.startswith(f"{DOCUMENTS}/") for path in paths):
        return [f"{folder}/{path}" for path in paths]
    run_id = new_write_id()
    holder = Holder(run_id=run_id, fingerprint=_NOTHING, stamp=stamp())
    holder = holder.after(_holder(store, folder))
    store.replace(f"{folder}/{HOLDER_PATH}", holder.encode())
    uploads = _clear_uploads(store, folder, holder)
    paths = _below(store, folder)
    documents = [path for path in paths if path.startswith(f"{DOCUMENTS}/")]
    weights = sorted(path for path in paths if is_weight_file(path))
    records = [path for path in documents if path not in {NAMES_PATH, HOLDER_PATH}]
    for step in (
        [INDEX_NAME] if INDEX_NAME in paths else [],
        # Some libraries prefer it to an index, and to the other files.
        [path for path in weights if path == SINGLE_NAME],
        [path for path in weights if path != SINGLE_NAME],
        sorted(records),
        # Then this removal is forgotten, too.
        [NAMES_PATH, HOLDER_PATH],
    ):
        if step:
            if not _is_held(store, folder, run_id):
                log.info("%s: another consolidation works in %s; it stays", store.url, folder)
                return []
            store.delete([f"{folder}/{path}" for path in step])
    gone = {INDEX_NAME, *weights, *documents, HOLDER_PATH}
    left = [f"{folder}/{path}" for path in paths if path not in gone]
    # Where folders are more than a prefix.
    for empty in (folder, f"{folder}/{DOCUMENTS}"):
        is_used = any(path.startswith(f"{empty}/") for path in (*left, *uploads))
        if not is_used and not _below(store, empty):
            store.delete_folder(empty)
            break
    return left


def _clear_uploads(store: Store, folder: str, holder: Holder) -> set[str]:
    """Abort the uploads that dead consolidations left open; return the paths of those of others."""
    others: set[str] = set()

    def is_ours(path: str) -> bool:
        is_known = holder.wrote(path.removeprefix(f"{folder}/"))
        if not is_known:
            others.add(path)
        return is_known

    store.abort_uploads(folder, only=is_ours)
    if others:
        log.info("%s: others are writing, or once did, %s; it stays", store.url, min(others))
    return others


def _below(store: Store, folder: str) -> list[str]:
    try:
        entries = store.list(folder)
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return []
    return [entry.path.removeprefix(f"{folder}/") for entry in entries if entry.path[-1:] != "/"]


def _is_held(store: Store, folder: str, run_id: str) -> bool:
    holder = _holder(store, folder)
    return holder is not None and holder.run_id == run_id


def _holder(store: Store, folder: str) -> Holder | None:
    try:
        found = read_if_there(store, f"{folder}/{HOLDER_PATH}")
        return None if found is None else Holder.decode(found.data)
    except StorageError:
        raise
    except CheckpointError as error:
        log.warning("%s: who works in %s is not known: %s", store.url, folder, error)
        return None
