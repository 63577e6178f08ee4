"""The coordinator's last part of a save: is it complete, then commit it, publish it, clean up.

Knows reports, manifests and the order of the documents (`docs/invariants.md`, I1 and I8); knows no
planner and no thread. Called by `saveattempt` on the coordinator.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from . import cleaning, commit, integrity, layout, publishing, stockfooter
from ._version import __version__
from .assemble import assemble, check_files, check_reports, read_report
from .commit import Grant
from .deadline import Deadline
from .documents import FileRef
from .errors import CheckpointError, IntegrityError
from .manifest import Manifest
from .options import RetryPolicy
from .slots import SlotRecord
from .stockwrite import planned_of, stock_metadata, stock_note
from .store.base import Store
from .workers import side_by_side

__all__ = ["Prepared", "commit_prepared", "commit_save", "prepare_commit"]

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A save whose documents are on the storage; nothing leads to them yet."""

    reference: FileRef
    stock: FileRef
    stock_bytes: bytes
    stock_entries: int | None
    seen: publishing.Seen | None


def prepare_commit(
    store: Store,
    grant: Grant,
    *,
    world_size: int,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    storage_meta: StorageMeta,
    settled_ties: Mapping[str, str],
) -> Prepared:
    """Check that all ranks write all of it, and put down the documents of the save.

    `results[i]` is what rank i's `write_data` returns; `settled_ties` as for `assemble`. What they
    tell of need not be durable yet, unless looking at a file costs no request: then it must be
    there. Raises `IntegrityError`, `RankFailedError`, `StorageError`; nothing is committed.
    """
    save_id = grant.save_id
    reports = check_reports(
        [read_report(result) for result in results], save_id=save_id, world_size=world_size
    )
    manifest = assemble(reports, planned_of(metadata), settled_ties)
    check_files(store, manifest)
    entry_count = sum(report.item_count for report in reports)
    stock_entries: int | None
    if all(report.places is not None for report in reports):
        # 0 would say that it is a note.
        stock_entries = entry_count or None
        pickled = stock_metadata(metadata, reports, manifest, storage_meta)
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
    stock_bytes = stockfooter.with_footer(pickled, slot=grant.last_slot + 1, save_id=save_id)
    stock = _reference(layout.stock_copy_path(save_id), stock_bytes)
    manifest = dataclasses.replace(
        manifest,
        stock=stock,
        stock_entries=stock_entries,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=_versions(),
    )
    manifest_path = layout.manifest_path(save_id)
    body = manifest.to_body()
    _check_readable(body, manifest_path)
    document = integrity.seal(body)
    # Nothing leads to them before the commit, which comes when both are durable.
    calls: list[Callable[[], publishing.Seen | None]] = [
        lambda: store.write(stock.path, stock_bytes),
        lambda: store.write(manifest_path, document),
        lambda: publishing.look(store),
    ]
    return Prepared(
        reference=_reference(manifest_path, document),
        stock=stock,
        stock_bytes=stock_bytes,
        stock_entries=stock_entries,
        seen=side_by_side(store, calls)[-1],
    )


def commit_prepared(
    store: Store,
    grant: Grant,
    prepared: Prepared,
    *,
    user: Mapping[str, Any],
    deadline: Deadline,
    retry: RetryPolicy,
) -> SlotRecord:
    """Commit what all ranks have made durable, publish `.metadata`; return the record.

    `user` as for `commit.commit`. Raises `IntegrityError` (not committed), `CommitConflictError`
    (not committed), `CommitUnknownError`. What follows the commit cannot fail the save: it is
    logged, and repeated by the next save or load.
    """
    record = commit.commit(
        store,
        grant,
        manifest=prepared.reference,
        stock=prepared.stock,
        stock_entries=prepared.stock_entries,
        deadline=deadline,
        retry=retry,
        user=user,
    )
    log.info("save %s to %s committed in slot %d", grant.save_id, store.url, record.slot)
    _after_commit(store, grant, record, prepared.stock_bytes, prepared.seen, deadline, retry)
    return record


def commit_save(
    store: Store,
    grant: Grant,
    *,
    world_size: int,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    storage_meta: StorageMeta,
    settled_ties: Mapping[str, str],
    user: Mapping[str, Any],
    deadline: Deadline,
    retry: RetryPolicy,
) -> SlotRecord:
    """Do both once all ranks' files are durable: `prepare_commit`, then `commit_prepared`."""
    prepared = prepare_commit(
        store,
        grant,
        world_size=world_size,
        metadata=metadata,
        results=results,
        storage_meta=storage_meta,
        settled_ties=settled_ties,
    )
    return commit_prepared(store, grant, prepared, user=user, deadline=deadline, retry=retry)


def _after_commit(
    store: Store,
    grant: Grant,
    record: SlotRecord,
    stock_bytes: bytes,
    seen: publishing.Seen | None,
    deadline: Deadline,
    retry: RetryPolicy,
) -> None:
    try:
        publishing.publish(store, own=record, own_stock=stock_bytes, seen=seen)
        if grant.previous is not None:
            cleaning.free_superseded(store, known=record)
        # Looking for what crashed savers left takes a listing: free on a local disk only.
        if grant.previous is not None or store.capabilities.cheap_stat:
            cleaning.free_leftovers(
                store,
                exclusive=grant.exclusive,
                deadline=deadline,
                retry=retry,
                known=record,
            )
    except Exception as error:  # the save is committed, whatever this is
        log.warning(
            "save %s is committed; what follows the commit failed and will be repeated: %s",
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
    return FileRef(path=path, size_bytes=len(data), crc32c=integrity.crc32c_of(data))


def _versions() -> dict[str, str]:
    return {
        "ckpt_storage": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }
