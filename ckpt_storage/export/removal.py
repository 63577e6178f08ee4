"""Exports that lie directly below a checkpoint: those of other saves, and their removal."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckpt_storage.commit.slotlog import read_if_there, stamp
from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    NAMES_PATH,
    SINGLE_NAME,
    Holder,
    IndexTag,
    is_weight_file,
)
from ckpt_storage.format.names import COMMITS, SAVES, new_write_id
from ckpt_storage.store.store import Store

from .folder import holder_of, listed

log = logging.getLogger("ckpt_storage")

_NOTHING = "0" * 64
"""The identity of what a removal makes: no output."""


def stale_exports(store: Store, save_id: str) -> list[str]:
    """Return the folders directly below a checkpoint whose export is of another save.

    Asks one listing and one small read for each folder; a folder that may not be read counts
    as none.
    """
    found = []
    for entry in listed(store, ""):
        folder = entry.path.rstrip("/")
        if not entry.path.endswith("/") or folder in {COMMITS, SAVES}:
            continue
        try:
            index = read_if_there(store, f"{folder}/{INDEX_NAME}")
        except CheckpointError as error:
            log.debug("%s/%s is passed over: %s", store.url, folder, error)
            continue
        tag = None if index is None else IndexTag.of(index.data)
        if tag is not None and tag.save_id not in {None, save_id}:
            found.append(folder)
    return found


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
    holder = holder.after(holder_of(store, folder))
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
            now = holder_of(store, folder)
            if now is None or now.run_id != run_id:
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


def _clear_uploads(store: Store, folder: str, holder: Holder) -> Collection[str]:
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
    entries = listed(store, folder, recursive=True)
    return [entry.path.removeprefix(f"{folder}/") for entry in entries if entry.path[-1:] != "/"]
