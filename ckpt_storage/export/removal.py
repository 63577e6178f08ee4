"""Removal of the exports below a checkpoint."""

from __future__ import annotations

import logging

from ckpt_storage.commit.attempt_files import abort_uploads
from ckpt_storage.commit.slotlog import stamp
from ckpt_storage.format import exports, names
from ckpt_storage.format.exports import (
    DOCUMENTS,
    GUARD,
    GUARD_NAME,
    HOLDER_PATH,
    LIBRARY_INDEXES,
    NAMES_PATH,
)
from ckpt_storage.source.file_versions import listed
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import is_there

from .folder import paths_below, uploaded_file
from .owners import holder_of

log = logging.getLogger("ckpt_storage")

_NO_CONTENT = "0" * 64
"""The fingerprint of a removal, which has no output."""


def find_exports(store: Store) -> list[str]:
    """Return the folders of exports directly below the root of `store`."""
    folders = [entry.path[:-1] for entry in listed(store) if entry.path.endswith("/")]
    return [folder for folder in folders if is_there(store, f"{folder}/{NAMES_PATH}")]


def remove_exports(store: Store) -> list[str]:
    """Remove all exports directly below the root of `store`; return paths of other files in them.

    The removal becomes the holder, so a running consolidation publishes nothing; it stops when
    another run becomes the holder. The index is deleted first and the names last, so the next
    removal continues an interrupted one. Files and uploads of other programs stay. Idempotent.
    """
    paths = [entry.path for entry in listed(store) if entry.path.endswith("/")]
    own = {f"{names.COMMITS}/", f"{names.SAVES}/"}
    return [rest for path in paths if path not in own for rest in _remove(store, path[:-1])]


def _remove(store: Store, folder: str) -> list[str]:
    paths = paths_below(store, folder)
    if not any(path.startswith(f"{DOCUMENTS}/") for path in paths):
        return [f"{folder}/{path}" for path in paths]
    run_id = names.new_write_id()
    holder = exports.Holder(run_id=run_id, fingerprint=_NO_CONTENT, stamp=stamp())
    store.replace(f"{folder}/{HOLDER_PATH}", holder.encode())
    others: list[str] = []

    def is_ours(path: str) -> bool:
        is_known = exports.is_output_file(uploaded_file(path).removeprefix(f"{folder}/"))
        others.extend(() if is_known else (path,))
        return is_known

    abort_uploads(store, folder, is_ours)
    paths = paths_below(store, folder)
    indexes = LIBRARY_INDEXES.intersection(paths)
    weights = {path for path in paths if exports.is_weight_file(path)}
    documents = {path for path in paths if path.startswith(f"{DOCUMENTS}/")}
    guard = {GUARD_NAME} if weights or GUARD_NAME in paths else set()
    is_guarded = False
    for step in (
        indexes,
        weights,
        guard,
        documents - {NAMES_PATH, HOLDER_PATH},
        # The record of this removal is deleted last.
        {NAMES_PATH, HOLDER_PATH},
    ):
        if step:
            now = holder_of(store, folder)
            if now is None or now.run_id != run_id:
                log.info("%s: another run holds the export %s, which stays", store.url, folder)
                return []
            if guard and not is_guarded:
                # Readers must not load the files that are not deleted yet as a whole export.
                store.replace(f"{folder}/{GUARD_NAME}", GUARD)
                is_guarded = True
            store.delete([f"{folder}/{path}" for path in sorted(step)])
    foreign = [
        f"{folder}/{path}" for path in paths if path not in {*indexes, *guard, *weights, *documents}
    ]
    # On storages where folders are more than a prefix.
    for empty in (folder, f"{folder}/{DOCUMENTS}"):
        is_used = any(path.startswith(f"{empty}/") for path in (*foreign, *others))
        if not is_used and not paths_below(store, empty):
            store.delete_folder(empty)
            break
    return foreign
