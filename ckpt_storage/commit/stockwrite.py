"""What stock DCP readers need of a save of ours: torch's `Metadata`, pickled."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.documents import Counts
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES

from .reporttable import Planned, PlannerPath, boxes_of
from .stockpickle import EntryTable, pickled

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
        entry = state[fqn]
        dtype = getattr(torch, tensor.dtype)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != dtype:
            properties = dataclasses.replace(entry.properties, dtype=dtype)
            state[fqn] = dataclasses.replace(entry, properties=properties)
    changed = dataclasses.replace(
        metadata,
        state_dict_metadata=state,
        storage_meta=storage_meta,
        version=STOCK_VERSION,
    )
    found = pickled(changed, entries_of(reports))
    if len(found) > MOST_STOCK_BYTES - _FOOTER_ROOM_BYTES:
        raise InvalidInputError(
            f".metadata for torch's own readers would have {len(found)} bytes; readers take "
            f"{MOST_STOCK_BYTES}, and storages little more in one piece.",
            phase="commit",
            next_step="Nothing was committed. Save with stock_metadata='auto' or 'never': "
            "ckpt_storage loads it all the same.",
        )
    return found


def entries_of(reports: Sequence[RankReport]) -> EntryTable:
    """Return an entry an item of all ranks; those without elements last.

    Of two at one place the first counts, and an empty one may stand where another begins.
    """
    fqns: dict[str, int] = {}
    places: dict[tuple[int, ...] | None, int] = {None: 0}
    paths: dict[str, int] = {}
    numbers: dict[bytes, Counts] = {}
    columns: list[Counts] = []
    for report in reports:
        lies = report.read_places()
        if lies is None:  # pragma: no cover  # the caller made sure
            raise InvalidInputError(f"Rank {report.rank} did not say where its items lie.")
        names = numbers.get(report.vocabulary)
        if names is None:
            found = [fqns.setdefault(fqn, len(fqns)) for fqn in report.read_vocabulary()[0]]
            names = numbers[report.vocabulary] = np.array(found, dtype=np.int64)
        files = [paths.setdefault(ref.path, len(paths)) for ref in report.files]
        boxes = boxes_of(report)
        # The last is for blobs, whose box is -1.
        place_of = [*(places.setdefault(box.offsets, len(places)) for box in boxes), 0]
        empty = np.array([*(0 in box.sizes for box in boxes), False], dtype=np.int64)
        fqn, _, box = report.read_pattern()
        columns.append(
            np.stack(
                (
                    empty[box],
                    names[fqn],
                    np.array(place_of, dtype=np.int64)[box],
                    np.array(files, dtype=np.int64)[lies[0]],
                    lies[1],
                    lies[2],
                )
            )
        )
    rows = np.concatenate([np.empty((6, 0), dtype=np.int64), *columns], axis=1)
    rows = rows[1:, np.argsort(rows[0], kind="stable")]
    return EntryTable(
        fqns=list(fqns),
        places=list(places),
        paths=list(paths),
        fqn=rows[0],
        place=rows[1],
        path=rows[2],
        start=rows[3],
        length=rows[4],
    )


def stock_note(entry_count: int) -> bytes:
    """Return what takes the place of the pickle: `pickle.load` raises `ValueError` with its text.

    The letter is pickle's opcode for a number in decimal, so that nothing is looked up or run.
    """
    text = (
        f"this checkpoint has no .metadata for torch's own readers, because it would hold "
        f"{entry_count} entries; load it with ckpt_storage.CheckpointStorageReader"
    )
    return b"F" + text.encode() + b"\n"
