"""What stock DCP readers need of a save of ours: torch's `Metadata`, pickled."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES

from .reporttable import Planned, PlannerPath, boxes_of

log = logging.getLogger("ckpt_storage")

STOCK_VERSION = "1.0.0"
"""What torch 2.13 writes as `Metadata.version`; readers do not check it."""


_FOOTER_ROOM_BYTES = 4096
"""More than the footer takes that makes a `.metadata` of the pickle."""


def planned_of(metadata: Metadata) -> Planned:
    """Return what DCP's global plan promises.

    Raises `InvalidInputError` for an unknown kind of entry.
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
    return Planned(
        tensors=tensors,
        blobs=frozenset(blobs),
        planner_data=_planner_paths(metadata.planner_data),
    )


def _planner_paths(data: object) -> dict[str, PlannerPath] | None:
    """Return the flattening map where it is one; other planners' data stays in `.metadata` only."""
    if isinstance(data, dict) and all(
        isinstance(fqn, str)
        and isinstance(path, tuple)
        and all(type(key) in {str, int} for key in path)
        for fqn, path in data.items()
    ):
        return dict(data)
    if data is not None:
        log.warning("planner_data of this save is not a flattening map; only .metadata keeps it")
    return None


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
    found = pickle.dumps(changed)
    if len(found) > MOST_STOCK_BYTES - _FOOTER_ROOM_BYTES:
        raise InvalidInputError(
            f".metadata for torch's own readers would have {len(found)} bytes; readers take "
            f"{MOST_STOCK_BYTES}, and storages little more in one piece.",
            phase="commit",
            next_step="Nothing was committed. Save with stock_metadata='auto' or 'never': "
            "ckpt_storage loads it all the same.",
        )
    return found


def entries_of(reports: Sequence[RankReport]) -> dict[MetadataIndex, _StorageInfo]:
    """Return an entry an item of all ranks; those without elements last.

    Of two at one place the first counts, and an empty one may stand where another begins. Equal
    names and sizes are one object: pickled once, they take a quarter of the time.
    """
    sizes: dict[tuple[int, ...], torch.Size] = {}
    names: dict[str, str] = {}
    entries: dict[MetadataIndex, _StorageInfo] = {}
    empty: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        lies = report.read_places()
        if lies is None:  # pragma: no cover  # the caller made sure
            raise InvalidInputError(f"Rank {report.rank} did not say where its items lie.")
        fqns = [names.setdefault(fqn, fqn) for fqn in report.read_vocabulary()[0]]
        paths = [ref.path for ref in report.files]
        boxes = boxes_of(report)
        # The last is for blobs, whose box is -1.
        places = [
            *(sizes.setdefault(box.offsets, torch.Size(box.offsets)) for box in boxes),
            None,
        ]
        is_empty = [*(0 in box.sizes for box in boxes), False]
        fqn, _, box = report.read_pattern()
        for name, at, file, start, length in zip(
            fqn.tolist(), box.tolist(), *lies.tolist(), strict=True
        ):
            index = MetadataIndex(fqns[name])
            # Its constructor copies the size.
            object.__setattr__(index, "offset", places[at])
            table = empty if is_empty[at] else entries
            table.setdefault(index, _StorageInfo(paths[file], start, length))
    return {**entries, **{index: lie for index, lie in empty.items() if index not in entries}}


def stock_note(entry_count: int) -> bytes:
    """Return what takes the place of the pickle: `pickle.load` raises `ValueError` with its text.

    The letter is pickle's opcode for a number in decimal, so that nothing is looked up or run.
    """
    text = (
        f"this checkpoint has no .metadata for torch's own readers, because it would hold "
        f"{entry_count} entries; load it with ckpt_storage.CheckpointStorageReader"
    )
    return b"F" + text.encode() + b"\n"
