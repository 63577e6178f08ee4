"""Exports that lie directly below a checkpoint: those of other saves, and their removal."""

from __future__ import annotations

import logging

from ckpt_storage.commit.delete import abort_uploads
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
    for folder in _folders(store):
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
    removal that was cut is gone on with. Files that no export writes are left where they are, and
    so are uploads of others, and all uploads where they cannot be listed. Idempotent. Raises
    `StorageError`.
    """
    return [path for folder in _folders(store) for path in _remove(store, folder)]


def _folders(store: Store) -> list[str]:
    own = {f"{COMMITS}/", f"{SAVES}/"}
    entries = listed(store, "")
    return [e.path.rstrip("/") for e in entries if e.path.endswith("/") and e.path not in own]


def _remove(store: Store, folder: str) -> list[str]:
    paths = _below(store, folder)
    if not any(path.startswith(f"{DOCUMENTS}/") for path in paths):
        return [f"{folder}/{path}" for path in paths]
    run_id = new_write_id()
    holder = Holder(run_id=run_id, fingerprint=_NOTHING, stamp=stamp())
    holder = holder.after(holder_of(store, folder))
    store.replace(f"{folder}/{HOLDER_PATH}", holder.encode())
    others: set[str] = set()

    def is_ours(path: str) -> bool:
        is_known = holder.wrote(path.removeprefix(f"{folder}/"))
        if not is_known:
            others.add(path)
        return is_known

    abort_uploads(store, folder, is_ours)
    if others:
        log.info("%s: others are writing, or once did, %s; it stays", store.url, min(others))
    paths = _below(store, folder)
    weights = {path for path in paths if is_weight_file(path)}
    documents = {path for path in paths if path.startswith(f"{DOCUMENTS}/")}
    for step in (
        {INDEX_NAME}.intersection(paths),
        # Some libraries prefer it to an index, and to the other files.
        weights & {SINGLE_NAME},
        weights - {SINGLE_NAME},
        documents - {NAMES_PATH, HOLDER_PATH},
        # Then this removal is forgotten, too.
        {NAMES_PATH, HOLDER_PATH},
    ):
        if step:
            now = holder_of(store, folder)
            if now is None or now.run_id != run_id:
                log.info("%s: another consolidation works in %s; it stays", store.url, folder)
                return []
            store.delete([f"{folder}/{path}" for path in sorted(step)])
    gone = {INDEX_NAME, HOLDER_PATH, *weights, *documents}
    left = [f"{folder}/{path}" for path in paths if path not in gone]
    # Where folders are more than a prefix.
    for empty in (folder, f"{folder}/{DOCUMENTS}"):
        is_used = any(path.startswith(f"{empty}/") for path in (*left, *others))
        if not is_used and not _below(store, empty):
            store.delete_folder(empty)
            break
    return left


def _below(store: Store, folder: str) -> list[str]:
    entries = listed(store, folder, recursive=True)
    return [entry.path.removeprefix(f"{folder}/") for entry in entries if entry.path[-1:] != "/"]
