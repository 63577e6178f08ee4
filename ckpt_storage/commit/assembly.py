"""The coordinator's part at the end of a save: check completeness (I8), commit, and clean up.

Python runs once for each report, tensor and layout. Work for each item is done on arrays, except
for torch's pickled `Metadata`, which stock DCP readers need. Documents are written in the order of
I1 in `docs/guarantees.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pickle
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from ckpt_storage._version import __version__
from ckpt_storage.errors import (
    CheckpointError,
    CommitConflictError,
    IntegrityError,
    InvalidInputError,
    RankFailedError,
    StorageError,
)
from ckpt_storage.format import names
from ckpt_storage.format.boxes import Box, find_flaw, grid_of_rows
from ckpt_storage.format.columns import Counts
from ckpt_storage.format.commit_record import SlotRecord, with_footer
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.manifest import Manifest, PlannerData, TensorRecord, int_keys_of
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.store.probe import create_new
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import stat_or_none
from ckpt_storage.transfer.workers import side_by_side

from . import cleaning, publishing
from .attempt import SaveTicket, commit
from .report import Planned, RankReport, ReportTable, incomplete, outside, unpacked

log = logging.getLogger("ckpt_storage")

STOCK_VERSION = "1.0.0"
"""`Metadata.version` of torch 2.13; readers do not check it."""

_FOOTER_ROOM_BYTES = 4096
"""An upper bound of the length of the footer."""


def commit_save(
    store: Store,
    ticket: SaveTicket,
    *,
    metadata: Metadata,
    reports: Sequence[RankReport | None],
    user: Mapping[str, Any],
    part: Mapping[str, Any] = MappingProxyType({}),
    stats: OperationStats | None = None,
    must_publish: bool = True,
) -> SlotRecord:
    """Check that the save is complete, write its documents, commit it, and return the record.

    `reports[i]` is that of rank i, None if it is missing; `user` and `part` as for `commit`.
    `stats` are recorded with the bytes of all files of the reports. Raises `IntegrityError`,
    `RankFailedError`, `StorageError`, `CommitConflictError` (all: not committed),
    `CommitUnknownError`, and unless `must_publish` is False `NotPublishedError` (committed). The
    next save deletes superseded files that cannot be deleted now.
    """
    save_id = ticket.save_id
    checked = check_reports(reports, ticket)
    manifest = assemble(checked, planned_of(metadata))
    check_files(store, manifest)
    entry_count = sum(report.item_count for report in checked)
    if all(report.places is not None for report in checked):
        # 0 means that `.metadata` is a note.
        stock_entries = entry_count or None
        meta = StorageMeta(checkpoint_id=store.url, save_id=save_id)
        pickled = stock_metadata(metadata, checked, manifest, meta)
    else:
        stock_entries, pickled = 0, stock_note(entry_count)
        log.info(
            "save %s to %s: .metadata for torch's own readers is omitted; it would have %d "
            "entries (stock_metadata='always' writes it)",
            save_id,
            store.url,
            entry_count,
        )
    stock_bytes = with_footer(pickled, slot=ticket.last_slot + 1, save_id=save_id)
    stock = FileRef.of(names.stock_copy_path(save_id), stock_bytes)
    body = dataclasses.replace(
        manifest,
        stock=stock,
        stock_entries=stock_entries,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        writer={
            "ckpt_storage": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": socket.gethostname(),
        },
    ).to_body()
    path = names.manifest_path(save_id)
    _check_readable(body, path)
    document = seal(body)
    # No reader sees them before the commit, which waits until both are durable.
    documents = {stock.path: stock_bytes, path: document}
    if part:
        # Others may copy this part at the same time, under the same save id (I2).
        _create_manifest(store, save_id, documents.pop(path))
    side_by_side(store, [partial(store.put, *each) for each in documents.items()])
    ref = FileRef.of(path, document)
    if stats is not None:
        file_bytes = sum(file.size_bytes for report in checked for file in report.files)
        reused_bytes = sum(report.reused_bytes for report in checked)
        stats = dataclasses.replace(stats, total_bytes=file_bytes, reused_bytes=reused_bytes)
    record = commit(
        store,
        ticket,
        manifest=ref,
        stock=stock,
        stock_entries=stock_entries,
        user=user,
        part=part,
        stats={} if stats is None else stats.as_json(),
    )
    log.debug("save %s to %s committed in slot %d", save_id, store.url, record.slot)
    publish = partial(publishing.publish_head, store, own=record, own_stock=stock_bytes)
    if not publishing.publish_commit(store, record, publish, is_needed=must_publish):
        return record
    try:
        # Finding leftovers takes a listing, which is cheap on local disks only.
        if ticket.previous is not None or not store.capabilities.is_remote:
            cleaning.free_leftovers(store, known=record)
    except Exception as error:  # the save is committed all the same
        log.warning(
            "save %s is committed; freeing superseded saves failed and will be repeated: %s",
            save_id,
            error,
            exc_info=not isinstance(error, CheckpointError),
        )
    return record


def _check_readable(body: Mapping[str, Any], path: str) -> None:
    """Raise `IntegrityError` before the commit if readers would refuse the manifest."""
    try:
        Manifest.from_body({**body, "planner_data": None}, where=path)
    except CheckpointError as error:
        raise IntegrityError(
            f"Every reader would refuse the manifest of this save: {error}",
            path=path,
            phase="commit",
            next_step="Nothing was committed. Check the save planner and the names and sharding "
            "of all values; if they are sound, report this as a bug of ckpt_storage.",
        ) from error


def _create_manifest(store: Store, save_id: str, document: bytes) -> None:
    """Write the manifest of a part, unless another copy of that part has written its own."""
    path = names.manifest_path(save_id)
    try:
        create_new(store, path, document)
    except StorageError as error:
        if error.kind != "exists":
            raise
        raise CommitConflictError(
            f"Another process writes the same part, {save_id}, to {store.url}; the part of this "
            "process is not committed.",
            winner={"save_id": save_id},
            path=path,
            phase="commit",
            next_step="Call again: it uses what the other process commits, or replaces it.",
        ) from error


def check_reports(reports: Sequence[RankReport | None], ticket: SaveTicket) -> list[RankReport]:
    """Return the reports. Raises if one is missing or belongs to another save."""
    save_id, world_size = ticket.save_id, ticket.world_size
    missing = [rank for rank, report in enumerate(reports) if report is None]
    missing += range(len(reports), world_size)
    if missing or len(reports) != world_size:
        raise RankFailedError(
            f"The reports of ranks {missing} of {world_size} are missing.",
            failures=dict.fromkeys(missing, "no report"),
            phase="commit",
            next_step="Nothing was committed. Read the logs of these ranks, and save again.",
        )
    present = [report for report in reports if report is not None]
    for rank, report in enumerate(present):
        if (report.save_id, report.rank, report.world_size) != (save_id, rank, world_size):
            raise CheckpointError(
                f"Rank {rank} reports rank {report.rank} of {report.world_size} and save "
                f"{report.save_id}; this is save {save_id} of {world_size} ranks.",
                rank=rank,
                phase="commit",
                next_step="Nothing was committed; make sure one job saves to this id.",
            )
    return present


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise `IntegrityError` if the coordinator does not see a file of a rank with its length.

    Checked on disks only, where it costs no request: a rank may have written to its own disk.
    """
    documents = zip(manifest.ranks, itertools.count(), strict=False)
    for ref, rank in () if store.capabilities.is_remote else [*manifest.files, *documents]:
        info = stat_or_none(store, ref.path)
        if info is None or info.size_bytes != ref.size_bytes:
            # A mount may have kept an older length.
            store.drop_caches(ref.path)
            info = stat_or_none(store, ref.path)
        if info is None or info.size_bytes != ref.size_bytes:
            actual = "does not see it" if info is None else f"sees {info.size_bytes} bytes"
            raise IntegrityError(
                f"Rank {rank} wrote {ref.path} with {ref.size_bytes} bytes; the coordinator "
                f"{actual}.",
                rank=rank,
                path=ref.path,
                phase="commit",
                next_step=f"Nothing was committed. {store.url} must be on a file system that all "
                "ranks share.",
            )


def assemble(reports: Sequence[RankReport], planned: Planned) -> Manifest:
    """Return the manifest of the whole checkpoint, without `stock`.

    Raises `IntegrityError` naming tensor, region and ranks if the chunks do not cover every planned
    tensor exactly, if a planned blob is missing, or if a rank wrote a value that was not planned. A
    box that several ranks wrote (the planner does not deduplicate replicas) counts once, for the
    lowest rank.
    """
    table = ReportTable(reports, planned)
    for fqn in planned.blobs - table.blobs.keys():
        raise incomplete(f"No rank wrote {fqn}, which is in the plan.", fqn)
    layouts: dict[tuple[tuple[int, ...], bytes], tuple[Sequence[Box], Sequence[int]]] = {}
    records: dict[tuple[str, tuple[int, ...], bytes], TensorRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, (fqn, shape) in enumerate(planned.tensors.items()):
        dtype = table.dtype(number)
        if dtype is None:
            raise incomplete(f"No rank wrote any chunk of {fqn}, which is in the plan.", fqn)
        key = (shape, table.key(number))
        if key not in layouts:
            owners, rows = table.chunks(number)
            layouts[key] = grid_of_rows(shape, rows, owners) or _boxes(fqn, shape, owners, rows)
        if (dtype, *key) not in records:
            boxes, ranks = layouts[key]
            record = TensorRecord(dtype=dtype, shape=shape, boxes=boxes, owners=ranks)
            records[dtype, *key] = record
        tensors[fqn] = records[dtype, *key]
    first = reports[0]
    return Manifest(
        save_id=first.save_id,
        world_size=first.world_size,
        tensors=tensors,
        blobs=table.blobs,
        planner_data=planned.planner_data,
        files=[(ref, report.rank) for report in reports for ref in report.files],
        groups=[group for report in reports for group in report.groups],
        ranks=[report.ref for report in reports],
        stock=None,
        hosts=[report.host for report in reports],
        ties=_agreed_ties(reports, tensors),
    )


def _boxes(
    fqn: str, shape: tuple[int, ...], owners: Counts, rows: Counts
) -> tuple[list[Box], list[int]]:
    """Return the chunks of a tensor that form no grid, and owners. Raises `IntegrityError`."""
    first: dict[Box, int] = {}
    for owner, row in zip(owners.tolist(), rows.tolist(), strict=True):
        box = Box(tuple(row[: len(shape)]), tuple(row[len(shape) :]))
        if 0 in shape or not box.is_empty:
            first.setdefault(box, owner)
    boxes = list(first)
    flaw = find_flaw(shape, boxes)
    if flaw is None:
        return boxes, list(first.values())
    if flaw.outside is not None:
        box = boxes[flaw.outside]
        raise outside(fqn, shape, box, first[box])
    if flaw.holders:
        overlap = " and ".join(f"{boxes[at]} of rank {first[boxes[at]]}" for at in flaw.holders[:2])
        what = f"Chunks of {fqn} overlap: {overlap}."
    else:
        ranks = sorted(set(first.values()))
        what = f"The chunks of {fqn} leave a gap at {flaw.at}; ranks {ranks} wrote chunks of it."
    raise incomplete(f"{what} Its shape is {list(shape)}.", fqn)


def _agreed_ties(
    reports: Iterable[RankReport], tensors: Mapping[str, TensorRecord]
) -> dict[str, str]:
    """Return alias -> target of tensors that share memory on all ranks; no target is an alias."""
    joined: dict[str, list[str]] = {}  # the group of each name; a group has names in their order
    chunks: dict[str, dict[Box, int]] = {}
    for report in reports:
        for alias, target in report.ties.items():
            group, other = (joined.setdefault(name, [name]) for name in (target, alias))
            if group is not other:
                group += other
                joined.update(dict.fromkeys(other, group))
        for name, box, crc in report.tied:
            chunks.setdefault(name, {}).setdefault(box, crc)
    groups: dict[object, list[str]] = {}
    for name, group in joined.items():
        tensor, stored = tensors.get(name), chunks.get(name, {})
        if tensor is not None and stored and len(stored) == len(tensor.boxes):
            same = (id(group), tensor.dtype, tensor.shape, frozenset(stored.items()))
            groups.setdefault(same, []).append(name)
    return {alias: group[0] for group in groups.values() for alias in group[1:]}


def planned_of(metadata: Metadata) -> Planned:
    """Return the values in DCP's global plan.

    Planner data of another form than a flattening map is kept in `.metadata` only. Raises
    `InvalidInputError` for an unknown kind of entry.
    """
    tensors: dict[str, tuple[int, ...]] = {}
    blobs: set[str] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = tuple(entry.size)
        elif isinstance(entry, BytesStorageMetadata):
            blobs.add(fqn)
        else:
            raise InvalidInputError(
                f"{fqn} is planned as {type(entry).__name__}, which cannot be stored.",
                phase="commit",
                next_step="Use a planner that makes tensor and bytes entries.",
            )
    data: object = metadata.planner_data
    is_map = isinstance(data, dict) and all(
        isinstance(fqn, str) and isinstance(path, tuple) and {*map(type, path)} <= {str, int}
        for fqn, path in data.items()
    )
    if data is not None and not is_map:
        log.warning("planner_data of this save is not a flattening map; only .metadata keeps it")
    paths = None
    if isinstance(data, dict) and is_map:
        paths = PlannerData(data, int_keys=int_keys_of(data))
    return Planned(tensors=tensors, blobs=frozenset(blobs), planner_data=paths)


def stock_metadata(
    metadata: Metadata,
    reports: Sequence[RankReport],
    manifest: Manifest,
    storage_meta: StorageMeta | None,
) -> bytes:
    """Return the pickle that `FileSystemReader` and `FsspecReader` load as `.metadata`.

    All `reports` must have the places of items. `metadata` is not changed, because cached plans
    share it. Dtypes are those of the manifest, because a cached plan may be out of date. Raises
    `InvalidInputError` for a pickle that is too long for readers.
    """
    state = dict(metadata.state_dict_metadata)
    for fqn, tensor in manifest.tensors.items():
        entry, dtype = state[fqn], getattr(torch, tensor.dtype)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != dtype:
            properties = dataclasses.replace(entry.properties, dtype=dtype)
            state[fqn] = dataclasses.replace(entry, properties=properties)
    changed = dataclasses.replace(
        metadata,
        state_dict_metadata=state,
        storage_data=entries_of(reports),
        storage_meta=storage_meta,
        version=STOCK_VERSION,
    )
    if isinstance(changed.planner_data, PlannerData):
        # Torch's own readers know no class of this package.
        changed = dataclasses.replace(changed, planner_data=dict(changed.planner_data))
    pickled = pickle.dumps(changed)
    if len(pickled) > MAX_STOCK_BYTES - _FOOTER_ROOM_BYTES:
        raise InvalidInputError(
            f".metadata for torch's own readers would have {len(pickled)} bytes; readers accept "
            f"{MAX_STOCK_BYTES}, and storages accept little more in one request.",
            phase="commit",
            next_step="Nothing was committed. Save with stock_metadata='auto' or 'never': "
            "ckpt_storage loads it all the same.",
        )
    return pickled


def entries_of(reports: Sequence[RankReport]) -> dict[MetadataIndex, _StorageInfo]:
    """Return the entry of each item of all ranks, items without elements last.

    The first of equal indices counts; an empty chunk may have the offsets of another chunk. Equal
    names and sizes are the same object, which makes pickling four times as fast.
    """
    known_sizes: dict[tuple[int, ...], torch.Size] = {}
    names: dict[str, str] = {}
    entries: dict[MetadataIndex, _StorageInfo] = {}
    empty: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        assert report.places is not None  # noqa: S101  # the caller has checked it
        fqns, (name_column, _, box_column) = unpacked(report.pattern)
        fqns = [names.setdefault(fqn, fqn) for fqn in fqns]
        paths = [ref.path for ref in report.files]
        ndims, flat = unpacked(report.boxes)
        numbers = iter(flat.tolist())
        # The last entry is that of blobs, whose box is -1.
        places: list[tuple[torch.Size | None, bool]] = []
        for ndim in ndims.tolist():
            at, sizes = (tuple(itertools.islice(numbers, ndim)) for _ in range(2))
            places.append((known_sizes.setdefault(at, torch.Size(at)), 0 in sizes))
        places.append((None, False))
        columns = (name_column, box_column, *unpacked(report.places))
        for name, number, file, start, length in zip(*(c.tolist() for c in columns), strict=True):
            index = MetadataIndex(fqns[name])
            offset, is_empty = places[number]
            # Its constructor copies the size.
            object.__setattr__(index, "offset", offset)
            table = empty if is_empty else entries
            table.setdefault(index, _StorageInfo(paths[file], start, length))
    return entries | {index: info for index, info in empty.items() if index not in entries}


def stock_note(entry_count: int) -> bytes:
    """Return a note in place of the pickle: unpickling it raises `ValueError` with its text."""
    text = (
        f"this checkpoint has no .metadata for torch's own readers, because it would hold "
        f"{entry_count} entries; load it with ckpt_storage.CheckpointStorageReader"
    )
    # F is pickle's opcode of a decimal number: it imports and calls nothing.
    return b"F" + text.encode() + b"\n"
