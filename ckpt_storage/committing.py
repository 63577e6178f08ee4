"""The coordinator's last part of a save: is it complete, then commit it, publish it, clean up.

Knows reports, manifests and the order of the documents (`docs/invariants.md`, I1 and I8); knows no
planner and no thread. Called by `writer` on the coordinator.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from . import cleaning, commit, integrity, layout, publishing
from .assemble import assemble, check_files, check_reports, read_report
from .commit import Grant
from .deadline import Deadline
from .documents import FileRef
from .errors import CheckpointError
from .options import RetryPolicy
from .slots import SlotRecord
from .stockwrite import planned_of, stock_metadata
from .store.base import Store

__all__ = ["commit_save"]

log = logging.getLogger("ckpt_storage")


def commit_save(
    store: Store,
    grant: Grant,
    *,
    world_size: int,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    storage_meta: StorageMeta,
    settled_ties: Mapping[str, str],
    deadline: Deadline,
    retry: RetryPolicy,
) -> SlotRecord:
    """Check that all ranks wrote all of it, commit, publish `.metadata`; return the record.

    `results[i]` is what rank i's `write_data` returned; `settled_ties` as for `assemble`. Raises
    `IntegrityError`, `RankFailedError` (not committed), `CommitConflictError` (not committed),
    `CommitUnknownError`. What follows the commit cannot fail the save: it is logged, and repeated
    by the next save or load.
    """
    save_id = grant.save_id
    reports = [read_report(result) for result in results]
    manifests = check_reports(reports, save_id=save_id, world_size=world_size)
    whole = [report for report in reports if report is not None]
    manifest = assemble(manifests, whole, planned_of(metadata), settled_ties)
    check_files(store, manifest)
    stock_bytes = publishing.with_footer(
        stock_metadata(metadata, manifests, manifest, storage_meta),
        slot=grant.last_slot + 1,
        save_id=save_id,
    )
    stock = _put(store, layout.stock_copy_path(save_id), stock_bytes)
    manifest = dataclasses.replace(
        manifest,
        stock=stock,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=_versions(),
    )
    reference = _put(store, layout.manifest_path(save_id), integrity.seal(manifest.to_body()))
    record = commit.commit(
        store, grant, manifest=reference, stock=stock, deadline=deadline, retry=retry
    )
    log.info("save %s to %s committed in slot %d", save_id, store.url, record.slot)
    _after_commit(store, grant, record, stock_bytes, deadline, retry)
    return record


def _after_commit(
    store: Store,
    grant: Grant,
    record: SlotRecord,
    stock_bytes: bytes,
    deadline: Deadline,
    retry: RetryPolicy,
) -> None:
    try:
        publishing.publish(store, own=record, own_stock=stock_bytes)
        if grant.previous is not None:
            cleaning.free_superseded(store)
        # Looking for what crashed savers left takes a listing: free on a local disk only.
        if grant.previous is not None or store.capabilities.cheap_stat:
            cleaning.free_leftovers(
                store, exclusive=grant.exclusive, deadline=deadline, retry=retry
            )
    except Exception as error:  # the save is committed, whatever this is
        log.warning(
            "save %s is committed; what follows the commit failed and will be repeated: %s",
            grant.save_id,
            error,
            exc_info=not isinstance(error, CheckpointError),
        )


def _put(store: Store, path: str, data: bytes) -> FileRef:
    store.write(path, data)
    return FileRef(path=path, size_bytes=len(data), crc32c=integrity.crc32c_of(data))


def _versions() -> dict[str, str]:
    from . import __version__  # noqa: PLC0415  # the package is complete only by now

    return {
        "ckpt_storage": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }
