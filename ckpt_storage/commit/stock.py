"""What stock DCP readers need of a save of ours: torch's `Metadata`, pickled."""

from __future__ import annotations

import dataclasses
import itertools
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

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES

from .report import Planned, RankReport

log = logging.getLogger("ckpt_storage")

STOCK_VERSION = "1.0.0"
"""What torch 2.13 writes as `Metadata.version`; readers do not check it."""

_FOOTER_ROOM_BYTES = 4096
"""More than the footer takes that makes a `.metadata` of the pickle."""


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
    known_sizes: dict[tuple[int, ...], torch.Size] = {}
    names: dict[str, str] = {}
    entries: dict[MetadataIndex, _StorageInfo] = {}
    empty: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        lies = report.read_places()
        assert lies is not None  # noqa: S101  # the caller made sure
        fqns = [names.setdefault(fqn, fqn) for fqn in report.read_vocabulary()[0]]
        paths = [ref.path for ref in report.files]
        ndims, flat = report.read_boxes()
        words = iter(flat.tolist())
        # The last is for blobs, whose box is -1.
        places: list[tuple[torch.Size | None, bool]] = []
        for ndim in ndims.tolist():
            at, sizes = (tuple(itertools.islice(words, ndim)) for _ in range(2))
            places.append((known_sizes.setdefault(at, torch.Size(at)), 0 in sizes))
        places.append((None, False))
        fqn, _, box = report.read_pattern()
        for name, number, file, start, length in zip(
            fqn.tolist(), box.tolist(), *lies.tolist(), strict=True
        ):
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
