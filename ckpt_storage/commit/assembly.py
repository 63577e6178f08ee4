"""The coordinator's last part of a save: is it complete (I8), then commit it and clean up.

Work grows with reports, tensors and different ways of cutting them; what grows with items is done
on arrays, but for what stock DCP readers need: torch's `Metadata`, pickled. The order of the
documents is that of `docs/guarantees.md`, I1.
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
from ckpt_storage.format.commit_record import SlotRecord, with_footer
from ckpt_storage.format.documents import Counts, FileRef, seal
from ckpt_storage.format.manifest import Manifest, TensorRecord
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.store.probe import create_new
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import side_by_side

from . import cleaning, publishing
from .attempt import SaveTicket, commit
from .report import Planned, RankReport, ReportTable, incomplete, outside, unpacked
from .slotlog import stat_or_none

log = logging.getLogger("ckpt_storage")

STOCK_VERSION = "1.0.0"
"""What torch 2.13 writes as `Metadata.version`; readers do not check it."""

_FOOTER_ROOM_BYTES = 4096
"""More than the footer takes that makes a `.metadata` of the pickle."""


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
    """Check that all ranks wrote all of it, put down the documents, commit; return the record.

    `reports[i]` is rank i's, None if there is none; `user` and `part` as for `commit`. `stats` are
    recorded with the bytes of the files that the reports name. Raises `IntegrityError`,
    `RankFailedError`, `StorageError`, `CommitConflictError` (all: not committed),
    `CommitUnknownError`, and unless `must_publish` is False `NotPublishedError` (committed).
    Superseded files that cannot be deleted are left to the next save.
    """
    save_id = ticket.save_id
    checked = check_reports(reports, ticket)
    manifest = assemble(checked, planned_of(metadata))
    check_files(store, manifest)
    entry_count = sum(report.item_count for report in checked)
    if all(report.places is not None for report in checked):
        # 0 would say that it is a note.
        stock_entries = entry_count or None
        meta = StorageMeta(checkpoint_id=store.url, save_id=save_id)
        pickled = stock_metadata(metadata, checked, manifest, meta)
    else:
        stock_entries, pickled = 0, stock_note(entry_count)
        log.info(
            "save %s to %s: .metadata for torch's own readers is left out; it would hold %d "
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
    # Nothing leads to them before the commit, which comes when both are durable.
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
        # Looking for what nobody needs takes a listing: free on a local disk only.
        if ticket.previous is not None or not store.capabilities.is_remote:
            cleaning.free_leftovers(store, known=record)
    except Exception as error:  # the save is committed, whatever this is
        log.warning(
            "save %s is committed; freeing what it superseded failed and will be repeated: %s",
            save_id,
            error,
            exc_info=not isinstance(error, CheckpointError),
        )
    return record


def _check_readable(body: Mapping[str, Any], path: str) -> None:
    """Raise `IntegrityError` if readers would refuse the manifest, before it counts."""
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
    """Return the reports; raise unless they are of all ranks and of this save."""
    save_id, world_size = ticket.save_id, ticket.world_size
    missing = [rank for rank, report in enumerate(reports) if report is None]
    missing += range(len(reports), world_size)
    if missing or len(reports) != world_size:
        raise RankFailedError(
            f"Ranks {missing} of {world_size} did not report what they wrote.",
            failures=dict.fromkeys(missing, "no report"),
            phase="commit",
            next_step="Look at those ranks' logs; nothing was committed; save again.",
        )
    whole = [report for report in reports if report is not None]
    for rank, report in enumerate(whole):
        if (report.save_id, report.rank, report.world_size) != (save_id, rank, world_size):
            raise CheckpointError(
                f"Rank {rank} reports rank {report.rank} of {report.world_size} and save "
                f"{report.save_id}; this is save {save_id} of {world_size} ranks.",
                rank=rank,
                phase="commit",
                next_step="Nothing was committed; make sure one job saves to this id.",
            )
    return whole


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise `IntegrityError` naming rank and file if the coordinator does not see what was written.

    Asked only where a look costs no request: it finds ranks that wrote to a disk of their own.
    """
    documents = zip(manifest.ranks, itertools.count(), strict=False)
    for ref, rank in () if store.capabilities.is_remote else [*manifest.files, *documents]:
        info = stat_or_none(store, ref.path)
        if info is None or info.size_bytes != ref.size_bytes:
            # A mount may have kept an older length.
            store.drop_caches(ref.path)
            info = stat_or_none(store, ref.path)
        if info is None or info.size_bytes != ref.size_bytes:
            seen = "does not see it" if info is None else f"sees {info.size_bytes} bytes"
            raise IntegrityError(
                f"Rank {rank} wrote {ref.path} with {ref.size_bytes} bytes; the coordinator "
                f"{seen}.",
                rank=rank,
                path=ref.path,
                phase="commit",
                next_step=f"Nothing was committed. {store.url} must be on a file system that all "
                "ranks share.",
            )


def assemble(reports: Sequence[RankReport], planned: Planned) -> Manifest:
    """Return the manifest of the whole checkpoint, without `stock`.

    Raises `IntegrityError` naming tensor, region and ranks if the chunks do not cover every
    planned tensor exactly, a planned blob is not there, or something is that was not planned. A
    box that several ranks wrote (a planner that does not deduplicate replicas) counts once, for
    the lowest rank.
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
    """Return chunks of any form that make up a tensor; says exactly what is wrong if not."""
    first: dict[Box, int] = {}
    for owner, row in zip(owners.tolist(), rows.tolist(), strict=True):
        box = Box(tuple(row[: len(shape)]), tuple(row[len(shape) :]))
        if 0 in shape or not box.is_empty:
            first.setdefault(box, owner)
    held = list(first)
    flaw = find_flaw(shape, held)
    if flaw is None:
        return held, list(first.values())
    if flaw.outside is not None:
        box = held[flaw.outside]
        raise outside(fqn, shape, box, first[box])
    if flaw.holders:
        overlap = " and ".join(f"{held[at]} of rank {first[held[at]]}" for at in flaw.holders[:2])
        what = f"Chunks of {fqn} overlap: {overlap}."
    else:
        ranks = f"ranks {sorted(set(first.values()))} wrote chunks of it"
        what = f"The chunks of {fqn} leave a gap at {flaw.at}; {ranks}."
    raise incomplete(f"{what} Its shape is {list(shape)}.", fqn)


def _agreed_ties(
    reports: Iterable[RankReport], tensors: Mapping[str, TensorRecord]
) -> dict[str, str]:
    """Return alias -> target of what is the same memory on all ranks; no target is an alias."""
    joined: dict[str, list[str]] = {}  # each name's group, in the order in which names came
    chunks: dict[str, dict[Box, int]] = {}
    for report in reports:
        for alias, target in report.ties.items():
            kept, gone = (joined.setdefault(name, [name]) for name in (target, alias))
            if kept is not gone:
                kept += gone
                joined.update(dict.fromkeys(gone, kept))
        for name, box, crc in report.tied:
            chunks.setdefault(name, {}).setdefault(box, crc)
    groups: dict[object, list[str]] = {}
    for name, group in joined.items():
        tensor, held = tensors.get(name), chunks.get(name, {})
        if tensor is not None and held and len(held) == len(tensor.boxes):
            same = (id(group), tensor.dtype, tensor.shape, frozenset(held.items()))
            groups.setdefault(same, []).append(name)
    return {alias: group[0] for group in groups.values() for alias in group[1:]}


def planned_of(metadata: Metadata) -> Planned:
    """Return what DCP's global plan promises.

    A flattening map is kept where it is one; other planners' data stays in `.metadata` only. Raises
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
    paths = dict(data) if isinstance(data, dict) and is_map else None
    return Planned(tensors=tensors, blobs=frozenset(blobs), planner_data=paths)


def stock_metadata(
    metadata: Metadata,
    reports: Sequence[RankReport],
    manifest: Manifest,
    storage_meta: StorageMeta | None,
) -> bytes:
    """Return the pickle that `FileSystemReader` and `FsspecReader` load as `.metadata`.

    Needs the places of all items in `reports`. `metadata` is not changed: with plan caching it is
    shared with later saves. Its dtypes are corrected to what was written, because a cached plan
    may be out of date. Raises `InvalidInputError` for a pickle that no reader would take.
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
    pickled = pickle.dumps(changed)
    if len(pickled) > MAX_STOCK_BYTES - _FOOTER_ROOM_BYTES:
        raise InvalidInputError(
            f".metadata for torch's own readers would have {len(pickled)} bytes; readers take "
            f"{MAX_STOCK_BYTES}, and storages little more in one piece.",
            phase="commit",
            next_step="Nothing was committed. Save with stock_metadata='auto' or 'never': "
            "ckpt_storage loads it all the same.",
        )
    return pickled


def entries_of(reports: Sequence[RankReport]) -> dict[MetadataIndex, _StorageInfo]:
    """Return an entry an item of all ranks; those without elements last.

    Of two at one place the first counts, and an empty chunk may stand where another begins. Equal
    names and sizes are one object: pickled once, they take a quarter of the time.
    """
    known_sizes: dict[tuple[int, ...], torch.Size] = {}
    names: dict[str, str] = {}
    entries: dict[MetadataIndex, _StorageInfo] = {}
    empty: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        assert report.places is not None  # noqa: S101  # the caller made sure
        fqns, (name_column, _, box_column) = unpacked(report.pattern)
        fqns = [names.setdefault(fqn, fqn) for fqn in fqns]
        paths = [ref.path for ref in report.files]
        ndims, flat = unpacked(report.boxes)
        numbers = iter(flat.tolist())
        # The last is for blobs, whose box is -1.
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
    return entries | {index: lie for index, lie in empty.items() if index not in entries}


def stock_note(entry_count: int) -> bytes:
    """Return what takes the place of the pickle: loading it raises `ValueError` with its text."""
    text = (
        f"this checkpoint has no .metadata for torch's own readers, because it would hold "
        f"{entry_count} entries; load it with ckpt_storage.CheckpointStorageReader"
    )
    # F is pickle's opcode for a number in decimal: nothing is looked up or run.
    return b"F" + text.encode() + b"\n"
