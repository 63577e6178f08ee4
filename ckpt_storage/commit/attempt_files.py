"""Files of attempts below saves/, and temporary files of killed processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.format import names
from ckpt_storage.format.documents import MAX_SLOT_BYTES, unseal
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects

log = logging.getLogger("ckpt_storage")

LEFTOVER_AGE_S = 24 * 3600.0
"""The age, by the storage's clock, at which an uncommitted attempt may be fenced and freed."""


def delete_attempt(store: Store, save_id: str) -> None:
    """Delete the folder of one attempt: shard files, other files, the manifest last.

    The caller makes sure that no process needs it. Idempotent.
    """
    folder, manifest = names.save_folder(save_id), names.manifest_path(save_id)
    abort_uploads(store, folder)
    paths = sorted(entry.path for entry in store.list(folder) if not entry.path.endswith("/"))
    store.delete([path for path in paths if path.endswith(".distcp")])
    store.delete([p for p in paths if not p.endswith(".distcp") and p != manifest])
    store.delete([manifest])
    store.delete_folder(folder)


def abort_uploads(store: Store, folder: str, only: Callable[[str], bool] | None = None) -> None:
    """Abort the unfinished uploads of dead processes below a folder, or `only` some of them.

    A failure is only logged: the uploads use space, but belong to no checkpoint.
    """
    try:
        count = store.abort_uploads(folder, only=only)
    except StorageError as error:
        log.warning("%s: unfinished uploads stay: %s", store.shown(folder), error)
    else:
        if count:
            log.info("%s: %d unfinished uploads were aborted", store.shown(folder), count)


def sweep_temporary_files(store: Store, *, min_age_s: float = LEFTOVER_AGE_S) -> None:
    """Remove old temporary files of killed processes beside `.metadata` and in commits/.

    On disks, old probes are removed, too. A file of unknown age stays. Temporary files of attempts
    are deleted with the attempts.
    """
    places = (names.STOCK_METADATA, names.COMMITS) if store.capabilities.has_temporary_files else ()
    files = [file for place in places for file in store.open_uploads(place)]
    entries = () if store.capabilities.is_remote else store.list("", recursive=False)
    probes = [entry for entry in entries if entry.path.startswith(names.PROBE_PREFIX)]
    if not files and not probes:
        return
    with suppress(UnsupportedByStoreError):
        newest_s = store.server_time(names.probe_path()) - min_age_s
        for file in files:
            if file.modified_s is not None and file.modified_s <= newest_s:
                store.abort_upload(file)
        old = [probe.path for probe in probes if (probe.modified_s or newest_s + 1) <= newest_s]
        store.delete(old)


def attempts_there(store: Store) -> dict[str, float | None]:
    """Return the time of the youngest file of each attempt, by the storage's clock.

    None if the storage has no times. Files of other tools below saves/ are ignored.
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
    """Return the body of the marker of an attempt, {} without a marker."""
    path = names.begun_path(save_id)
    decode = partial(unseal, path=path)
    return objects.read_decoded(store, path, decode, max_bytes=MAX_SLOT_BYTES) or {}
