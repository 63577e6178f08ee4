"""What stock DCP readers need of a save of ours: torch's `Metadata`, pickled.

Knows torch's metadata classes; does no I/O. Called by `writer` on the coordinator.
"""

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

from .assemble import Planned, PlannerPath, stock_entries
from .errors import InvalidInputError
from .manifest import Manifest, RankManifest

log = logging.getLogger("ckpt_storage")

STOCK_VERSION = "1.0.0"
"""What torch 2.13 writes as `Metadata.version`; readers do not check it."""


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
    manifests: Sequence[RankManifest],
    manifest: Manifest,
    storage_meta: StorageMeta | None,
) -> bytes:
    """Return the pickle that `FileSystemReader` and `FsspecReader` load as `.metadata`.

    `metadata` is not changed: with plan caching it is shared with later saves. Its dtypes are
    corrected to what was written, because a cached plan may be out of date.
    """
    state = dict(metadata.state_dict_metadata)
    for fqn, tensor in manifest.tensors.items():
        entry = state[fqn]
        dtype = getattr(torch, tensor.dtype)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != dtype:
            properties = dataclasses.replace(entry.properties, dtype=dtype)
            state[fqn] = dataclasses.replace(entry, properties=properties)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for fqn, offsets, path, start, length in stock_entries(manifests):
        index = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
        places.setdefault(index, _StorageInfo(path, start, length))
    changed = dataclasses.replace(
        metadata,
        state_dict_metadata=state,
        storage_data=places,
        storage_meta=storage_meta,
        version=STOCK_VERSION,
    )
    return pickle.dumps(changed)
