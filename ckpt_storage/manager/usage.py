"""What a checkpoint holds, and how many bytes it takes: from its manifest and its files."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from ckpt_storage.commit.info import StorageUsage
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.source.model import read_manifest
from ckpt_storage.store import Location
from ckpt_storage.store.store import Store

log = logging.getLogger("ckpt_storage")


def usage_of(manifest: Manifest, location: Location) -> StorageUsage:
    """Return the usage of the checkpoint at a location; one `stat` a file on a local disk."""
    group_bytes = Counter[str]()
    own_bytes = 0
    groups = manifest.groups or [""] * len(manifest.files)
    for (file, _), group in zip(manifest.files, groups, strict=True):
        group_bytes[group] += file.size_bytes
        own_bytes += 0 if _is_shared(location, file.path) else file.size_bytes
    return StorageUsage(
        group_bytes=dict(sorted(group_bytes.items())),
        apparent_bytes=group_bytes.total(),
        own_bytes=own_bytes,
    )


def read_usage(store: Store, head: SlotRecord, location: Location) -> StorageUsage | None:
    """Read the usage of a commit; return None, and log why, if its manifest is unreadable.

    Raises `StorageError`, but not for a missing right.
    """
    try:
        return usage_of(read_manifest(store, head), location)
    except CheckpointError as error:
        if isinstance(error, StorageError) and error.kind != "permission":
            raise
        log.warning("%s: its usage is not known: %s", location.url, error)
        return None


def _is_shared(location: Location, path: str) -> bool:
    """Return whether a file has hard links elsewhere, or is missing: deleting it frees nothing."""
    if not location.is_local:
        return False
    try:
        return Path(location.path, path).lstat().st_nlink > 1
    except OSError:
        return True
