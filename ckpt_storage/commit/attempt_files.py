"""The files of attempts below saves/, and what killed processes left beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.format import names
from ckpt_storage.format.documents import MAX_SLOT_BYTES, unseal
from ckpt_storage.store.store import Store

from . import slotlog

log = logging.getLogger("ckpt_storage")

LEFTOVER_AGE_S = 24 * 3600.0
"""Age by the storage's clock from which an attempt that never committed may be fenced and freed."""


def delete_attempt(store: Store, save_id: str) -> None:
    """Delete the folder of one attempt: shard files, rank manifests, the rest, the manifest last.

    The caller has made sure that nobody can need it. Idempotent.
    """
    folder, manifest = names.save_folder(save_id), names.manifest_path(save_id)
    abort_uploads(store, folder)
    paths = sorted(entry.path for entry in store.list(folder) if not entry.path.endswith("/"))
    store.delete([path for path in paths if path.endswith(".distcp")])
    store.delete([p for p in paths if not p.endswith(".distcp") and p != manifest])
    store.delete([manifest])
    store.delete_folder(folder)


def abort_uploads(store: Store, folder: str, only: Callable[[str], bool] | None = None) -> None:
    """Abort the uploads that dead runs left open below a folder, `only` those that are meant.

    A failure is logged and stops nothing: they take room, but no part in any checkpoint.
    """
    try:
        count = store.abort_uploads(folder, only=only)
    except StorageError as error:
        log.warning("%s: uploads that are open there stay: %s", store.shown(folder), error)
    else:
        if count:
            log.info("%s: %d uploads that were left open are gone", store.shown(folder), count)


def sweep_temporary_files(store: Store, *, min_age_s: float = LEFTOVER_AGE_S) -> None:
    """Remove old temporary files beside `.metadata` and in commits/, which killed processes left.

    On disks old probes go, too. The temporary files of attempts go with these. A file of unknown
    age stays.
    """
    places = (names.STOCK_METADATA, names.COMMITS)
    files = [file for place in places for file in store.temporary_files(place)]
    entries = () if store.capabilities.is_remote else store.list("", recursive=False)
    probes = [entry for entry in entries if entry.path.startswith(names.PROBE_PREFIX)]
    if not files and not probes:
        return
    with suppress(UnsupportedByStoreError):
        newest_s = store.server_time(names.probe_path()) - min_age_s
        for file in files:
            if file.modified_s is not None and file.modified_s <= newest_s:
                store.remove_temporary_file(file)
        old = [probe.path for probe in probes if (probe.modified_s or newest_s + 1) <= newest_s]
        store.delete(old)


def attempts_there(store: Store) -> dict[str, float | None]:
    """Return, for each attempt, when its youngest file was written, by the storage's clock.

    None where the storage does not tell. What others keep in a folder of that name is left out.
    """
    times_s: dict[str, list[float | None]] = {}
    for entry in store.list(names.SAVES):
        save_id = entry.path.split("/")[1]
        if names.is_save_id(save_id):
            times_s.setdefault(save_id, []).append(entry.modified_s)
    return {
        save_id: None if None in times else max(filter(None, times), default=0.0)
        for save_id, times in times_s.items()
    }


def marker_of(store: Store, save_id: str) -> dict[str, object]:
    """Return what the marker of an attempt says, {} without one."""
    path = names.begun_path(save_id)
    decode = partial(unseal, path=path)
    return slotlog.read_decoded(store, path, decode, max_bytes=MAX_SLOT_BYTES) or {}
