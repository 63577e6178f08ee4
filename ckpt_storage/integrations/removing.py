"""Deleting one checkpoint on behalf of a framework that decides itself what to keep.

Knows the safe order only by its names. Called by adapters, on one rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_storage.cleaning import delete_checkpoint
from ckpt_storage.consolidation.removal import remove_exports
from ckpt_storage.deadline import Deadline
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.slotlog import read_log
from ckpt_storage.stockfooter import is_foreign
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.probe import probe_exclusive_create

__all__ = ["remove"]


def remove(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None, timeouts: Timeouts
) -> None:
    """Delete the checkpoint at `url`: its commit first, then its files and exports; idempotent.

    A tombstone of a few hundred bytes stays, and what another tool committed there. Raises
    `StorageError`, `PhaseTimeoutError`.
    """
    location = Location.of(url, storage_options)
    retry = RetryPolicy()
    store = open_store(location, timeouts=timeouts, retry=retry)
    deadline = Deadline("commit", timeouts.commit)
    if is_foreign(store, read_log(store)):
        return
    exclusive = probe_exclusive_create(store, key=location.scope()).exclusive
    if delete_checkpoint(store, exclusive=exclusive, deadline=deadline, retry=retry):
        remove_exports(store)
