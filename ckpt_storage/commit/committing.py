"""The coordinator's last part of a save: is it complete, then commit it, publish it, clean up.

The order of the documents is that of `docs/guarantees.md`, I1 and I8.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ckpt_storage._version import __version__
from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord, with_footer
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from . import attempt as commit
from . import cleaning, publishing
from .assemble import assemble, check_files, check_reports
from .attempt import Grant
from .stock import planned_of, stock_metadata, stock_note

log = logging.getLogger("ckpt_storage")


def commit_save(
    store: Store,
    grant: Grant,
    *,
    world_size: int,
    metadata: Metadata,
    reports: Sequence[RankReport | None],
    storage_meta: StorageMeta,
    user: Mapping[str, Any],
    must_publish: bool = True,
) -> SlotRecord:
    """Check that all ranks wrote all of it, put down the documents, commit; return the record.

    `reports[i]` is rank i's, None if there is none; `user` as for `commit.commit`.
    Raises `IntegrityError`, `RankFailedError`, `StorageError`,
    `CommitConflictError` (all: not committed), `CommitUnknownError`, and unless `must_publish` is
    False `NotPublishedError` (committed). If superseded files cannot be deleted that is logged; the
    next save deletes them.
    """
    save_id = grant.save_id
    found = check_reports(reports, save_id=save_id, world_size=world_size)
    manifest = assemble(found, planned_of(metadata))
    check_files(store, manifest)
    entry_count = sum(report.item_count for report in found)
    stock_entries: int | None
    if all(report.places is not None for report in found):
        # 0 would say that it is a note.
        stock_entries = entry_count or None
        pickled = stock_metadata(metadata, found, manifest, storage_meta)
    else:
        stock_entries = 0
        pickled = stock_note(entry_count)
        log.info(
            "save %s to %s: .metadata for torch's own readers is left out; it would hold %d "
            "entries (stock_metadata='always' writes it)",
            save_id,
            store.url,
            entry_count,
        )
    stock_bytes = with_footer(pickled, slot=grant.last_slot + 1, save_id=save_id)
    stock = _reference(names.stock_copy_path(save_id), stock_bytes)
    manifest = dataclasses.replace(
        manifest,
        stock=stock,
        stock_entries=stock_entries,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=_versions(),
    )
    manifest_path = names.manifest_path(save_id)
    body = manifest.to_body()
    _check_readable(body, manifest_path)
    document = seal(body)
    # Nothing leads to them before the commit, which comes when both are durable.
    calls: list[Callable[[], None]] = [
        lambda: store.put(stock.path, stock_bytes),
        lambda: store.put(manifest_path, document),
    ]
    side_by_side(store, calls)
    record = commit.commit(
        store,
        grant,
        manifest=_reference(manifest_path, document),
        stock=stock,
        stock_entries=stock_entries,
        user=user,
    )
    log.info("save %s to %s committed in slot %d", grant.save_id, store.url, record.slot)
    try:
        publishing.publish(store, own=record, own_stock=stock_bytes)
    except Exception as error:
        if must_publish:
            raise publishing.not_published(store, record, error) from error
        log.warning("save %s is committed; its note in .metadata is not: %s", grant.save_id, error)
    else:
        _clean_up(store, grant, record)
    return record


def _clean_up(store: Store, grant: Grant, record: SlotRecord) -> None:
    try:
        if grant.previous is not None:
            cleaning.free_superseded(store, known=record)
        # Looking for what crashed savers left takes a listing: free on a local disk only.
        if grant.previous is not None or not store.capabilities.is_remote:
            cleaning.free_leftovers(store, known=record)
    except Exception as error:  # the save is committed, whatever this is
        log.warning(
            "save %s is committed; freeing what it superseded failed and will be repeated: %s",
            grant.save_id,
            error,
            exc_info=not isinstance(error, CheckpointError),
        )


def _check_readable(body: Mapping[str, Any], path: str) -> None:
    """Raise `IntegrityError` if readers would refuse the manifest, before it counts.

    Its `planner_data` was looked at when it was spelt, and takes most of a reader's time.
    """
    try:
        Manifest.from_body({**body, "planner_data": None}, where=path)
    except CheckpointError as error:
        raise IntegrityError(
            f"No reader would take the manifest of this save: {error}",
            path=path,
            phase="commit",
            next_step="Nothing was committed. Check the save planner and the names and sharding "
            "of all values; if they are sound, report this as a bug of ckpt_storage.",
        ) from error


def _reference(path: str, data: bytes) -> FileRef:
    return FileRef(path=path, size_bytes=len(data), crc32c=crc32c_of(data))


def _versions() -> dict[str, str]:
    return {
        "ckpt_storage": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }
