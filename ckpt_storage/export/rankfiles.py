"""Checkpoints of torch_checkpointing in its own layout, as sources of tensors and other values.

Each rank has a file of `torch.save` for each item of the state. `metadata.pkl` says which part of
each tensor a rank has, for the items that were saved with a `resharder`.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_storage.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    UnsafeContentError,
)
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES
from ckpt_storage.format.manifest import PlannerData, TensorRecord
from ckpt_storage.format.names import checked_path
from ckpt_storage.loads.layouts import LocalBox, local_boxes
from ckpt_storage.source.file_versions import FileVersion, FileVersions, changed, listed
from ckpt_storage.source.foreign import tiles_of
from ckpt_storage.source.model import Key
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

from .torchfile import TorchFileSource, UnpickledSource, open_torch_file

METADATA_NAME = "metadata.pkl"

_ITEM_FILE = re.compile(r"(.+)_([0-9]+)\.pt")
_INCOMPLETE = "The save was incomplete; convert another checkpoint."
_BY_THEM = "Load it with torch_checkpointing and save it with ckpt_storage.save."

_Path = tuple[str, ...]
_Part = tuple[TorchFileSource, Key]
"""A file of one rank, and a chunk in it."""


def has_items(names: Iterable[str]) -> bool:
    """Return whether a folder has a file of an item of a rank."""
    return any(map(_ITEM_FILE.fullmatch, names))


def is_rank_layout(names: Collection[str]) -> bool:
    """Return whether a folder with these files is a checkpoint of torch_checkpointing.

    Without `metadata.pkl` each file must be one of an item, and all items be those of all ranks.
    """
    if METADATA_NAME in names:
        return True
    matches = [_ITEM_FILE.fullmatch(name) for name in names]
    ranks: dict[str, set[int]] = {}
    for match in matches:
        if match is None:
            return False
        ranks.setdefault(match[1], set()).add(int(match[2]))
    counts = {max(of_item) + 1 for of_item in ranks.values()}
    return len(counts) == 1 and all({len(of_item)} == counts for of_item in ranks.values())


@dataclass(slots=True, kw_only=True)
class RankFilesSource(UnpickledSource):
    """The values of a checkpoint; `origins` has the file of each chunk, and the chunk in it."""

    records: dict[str, TensorRecord]
    nesting: PlannerData
    origins: dict[Key, _Part] = field(default_factory=dict)

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return the places of chunks; check each record of a file once, by torch's checksum."""
        places: list[ChunkPlace] = []
        for key in keys:
            if key in self.origins:
                file, part = self.origins[key]
                file.store = self.store
                places += file.places([part])
        return places

    def check_unchanged(self, store: Store, paths: Collection[str] | None = None) -> None:
        """Raise `CheckpointGoneError` if another writer changed files."""
        del paths
        now = _versions(store)
        for path, version in self.versions.of.items():
            if now.get(path) != version:
                raise changed(store.url, path, "was written again" if path in now else "is gone")

    def add_tensor(
        self, fqn: str, dtype: str, shape: tuple[int, ...], parts: Mapping[Box, _Part]
    ) -> None:
        """Add a tensor. Raises `FormatError` if its parts leave a gap, or its name is known."""
        self._check_new([fqn])
        boxes, flaw = tiles_of(list(parts), shape)
        if flaw is not None:
            what = f"the parts of {fqn} do not make up its shape {list(shape)}: {flaw}"
            raise _refused(self.store, what, _INCOMPLETE)
        self.records[fqn] = TensorRecord(dtype=dtype, shape=shape, boxes=boxes)
        self.origins |= {(fqn, box.offsets): parts[box] for box in boxes if not box.is_empty}

    def add_others(self, file: TorchFileSource) -> None:
        """Add the values of a file that are no tensors, and its ties."""
        self._check_new(file.values)
        self.values |= file.values
        self.ties |= file.ties

    def add_nesting(self, file: TorchFileSource) -> None:
        """Add the nesting of those values of a file that were added."""
        paths = file.planner_data
        assert isinstance(paths, PlannerData)  # noqa: S101  # as `open_torch_file` made it
        known = self.records.keys() | self.values.keys()
        self.nesting.update({fqn: path for fqn, path in paths.items() if fqn in known})
        self.nesting.int_keys |= paths.int_keys

    def _check_new(self, fqns: Iterable[str]) -> None:
        for fqn in fqns:
            if fqn in self.records or fqn in self.values:
                raise _refused(self.store, f"two items have values of the name {fqn}")


def open_rank_files(store: Store, *, unsafe_pickle: bool) -> RankFilesSource:
    """Open a checkpoint of torch_checkpointing; reads the directory and the pickle of each file.

    Values that are no tensors are those of rank 0. Raises `FormatError`, `UnsafeContentError`,
    `IntegrityError`, `StorageError`.
    """
    versions = _versions(store)
    items = _read_items(store) if METADATA_NAME in versions else {}
    undescribed: dict[str, dict[int, str]] = {}
    for path in sorted(versions):
        match = _ITEM_FILE.fullmatch(path)
        if match is not None and match[1] not in items:
            undescribed.setdefault(match[1], {})[int(match[2])] = path
    items |= {name: _Item(files=files, shardings=None) for name, files in undescribed.items()}
    records, nesting = dict[str, TensorRecord](), PlannerData()
    source = RankFilesSource(
        store=store,
        format="torch_checkpointing",
        tensors=records,
        planner_data=nesting,
        records=records,
        nesting=nesting,
    )
    used = {path for item in items.values() for path in item.files.values()}
    if missing := sorted(used - versions.keys()):
        what = f"{store.url}: {missing[0]}, which {METADATA_NAME} names, is missing."
        raise IntegrityError(what, path=missing[0], offset=0, next_step=_INCOMPLETE)
    for name, item in items.items():
        files = {
            rank: open_torch_file(store, path, unsafe_pickle=unsafe_pickle, item=name)
            for rank, path in sorted(item.files.items())
        }
        if item.shardings is None:
            _add_equal(source, name, list(files.values()))
        else:
            with _refusing_damage(store):
                _add_sharded(source, item.shardings, files)
    source.blobs = frozenset(source.values)
    used |= {METADATA_NAME} & versions.keys()
    source.versions = FileVersions(of={path: versions[path] for path in used})
    return source


def _versions(store: Store) -> dict[str, FileVersion]:
    entries = listed(store, recursive=True)
    return {entry.path: (entry.size_bytes, entry.modified_s) for entry in entries}


def _refused(store: Store, what: str, next_step: str = _BY_THEM) -> FormatError:
    return FormatError(f"{store.url}: {what}.", path=store.url, next_step=next_step)


@contextmanager
def _refusing_damage(store: Store) -> Iterator[None]:
    """Raise `FormatError` for what fails in the block, which takes the metadata apart."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        what = f"{METADATA_NAME} cannot be read ({type(error).__name__})"
        raise _refused(store, what, "Restore the file from a copy.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """An item: its file on each rank, and the shardings at each path; None: it has no metadata."""

    files: Mapping[int, str]
    shardings: Mapping[_Path, Sequence[Mapping[str, Any]]] | None


class _PlainUnpickler(pickle.Unpickler):
    """Reads `metadata.pkl`, which holds dictionaries, sequences, numbers and text."""

    def find_class(self, module: str, name: str) -> object:
        raise UnsafeContentError(
            f"{METADATA_NAME} holds a {module}.{name}.",
            path=METADATA_NAME,
            next_step="Convert a checkpoint that you trust.",
        )


def _read_items(store: Store) -> dict[str, _Item]:
    """Return the items that the metadata describes."""
    data = store.get(METADATA_NAME, max_bytes=MAX_DOCUMENT_BYTES).data
    with _refusing_damage(store):
        content = _PlainUnpickler(io.BytesIO(data)).load()
        if content["version"] != "2.0":
            what = f"{METADATA_NAME} has version {content['version']!r:.80}; 2.0 is known"
            raise _refused(store, what)
        return {name: _item_of(store, name, item) for name, item in content["metadata"].items()}
    raise AssertionError  # unreachable: the block returns or raises


def _item_of(store: Store, name: str, item: Mapping[str, Any]) -> _Item:
    files: dict[int, str] = {}
    for rank, layout in item["rank_to_layout_info"].items():
        kind = "TorchSerialization" if layout is None else layout["serialization_format"]["type"]
        if kind != "TorchSerialization":
            raise _refused(store, f"rank {rank} saved {name} by {kind}")
        path = f"{name}_{rank}.pt" if layout is None else layout["file_path"]
        files[int(rank)] = checked_path(path, where=METADATA_NAME)
    shardings = {
        tuple(map(str, json.loads(path))): groups
        for path, groups in item["nested_path_to_metadata"].items()
    }
    return _Item(files=files, shardings=shardings)


def _add_equal(source: RankFilesSource, name: str, files: Sequence[TorchFileSource]) -> None:
    """Add an item without metadata, of which all ranks must have saved the same."""
    contents = [file.content for file in files]
    crcs = [crc for _, crc in contents[0].values()]
    if len(files) > 1 and (contents.count(contents[0]) < len(files) or None in crcs):
        raise _refused(
            source.store,
            f"the ranks saved different values of {name}, and no metadata of it",
            "Load it with torch_checkpointing on as many ranks as saved it.",
        )
    for fqn, info in files[0].tensors.items():
        parts = {box: (files[0], (fqn, box.offsets)) for box in info.boxes}
        source.add_tensor(fqn, info.dtype, info.shape, parts)
    source.add_others(files[0])
    source.add_nesting(files[0])


def _add_sharded(
    source: RankFilesSource,
    shardings: Mapping[_Path, Sequence[Mapping[str, Any]]],
    files: Mapping[int, TorchFileSource],
) -> None:
    """Add an item whose tensors are made up of the parts of ranks."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, dict[Box, _Part]] = {}
    for rank, file in files.items():
        nesting = file.planner_data or {}
        for fqn, info in list(file.tensors.items()):
            path = tuple(map(str, nesting[fqn][1:]))
            shape, boxes = _boxes_of(source, fqn, shardings.get(path, ()), rank)
            if kinds.setdefault(fqn, (info.dtype, shape)) != (info.dtype, shape):
                raise _refused(source.store, f"{fqn} has another dtype or shape on rank {rank}")
            keys = _cut(source, file, fqn, [box for box in boxes if all(box.sizes)])
            # Replicas are equal: the part of the lowest rank is read.
            known = parts.setdefault(fqn, {})
            known |= {box: (file, key) for box, key in keys.items() if box not in known}
    for fqn, (dtype, shape) in kinds.items():
        source.add_tensor(fqn, dtype, shape, parts[fqn])
    first = files[min(files)]
    for file in files.values():
        first.ties = {alias: t for alias, t in first.ties.items() if file.ties.get(alias) == t}
    source.add_others(first)
    for file in files.values():
        source.add_nesting(file)


def _boxes_of(
    source: RankFilesSource, fqn: str, groups: Sequence[Mapping[str, Any]], rank: int
) -> tuple[tuple[int, ...], list[LocalBox]]:
    """Return the shape of a tensor, and the boxes of it that a rank has."""
    packed = [group["sharding_metadata"] for group in groups if rank in group["ranks"]]
    if not packed or packed[0]["type"] != "DTensorShardingMetadata":
        kind = packed[0]["type"] if packed else "no sharding"
        raise _refused(source.store, f"{METADATA_NAME} has {kind} for {fqn} on rank {rank}")
    data = packed[0]["data"]
    mesh, shape = data["mesh_spec"], tuple(map(index, data["global_shape"]))
    ranks = np.array(mesh["mesh_data"]).reshape(mesh["mesh_shape"])
    coordinate = np.argwhere(ranks == rank)[0].tolist()
    placements = [_placement_of(source, fqn, placement) for placement in data["placements"]]
    return shape, local_boxes(shape, placements, mesh["mesh_shape"], coordinate)


def _placement_of(source: RankFilesSource, fqn: str, placement: Mapping[str, Any]) -> Placement:
    match placement["type"]:
        case "Replicate":
            return Replicate()
        case "Shard":
            return Shard(placement["dim"])
        case "StridedShard":
            return _StridedShard(placement["dim"], split_factor=placement["split_factor"])
        case kind:
            raise _refused(source.store, f"{METADATA_NAME} has the placement {kind} for {fqn}")


def _cut(
    source: RankFilesSource, file: TorchFileSource, fqn: str, boxes: Sequence[LocalBox]
) -> dict[Box, Key]:
    """Return where each box is in the file of a rank."""
    info = file.tensors[fqn]
    whole = (fqn, (0,) * len(info.shape))
    if len(boxes) == 1 and boxes[0].sizes == info.shape:
        return {Box(boxes[0].offsets, boxes[0].sizes): whole}
    held = Box(whole[1], info.shape)
    if not boxes and held.is_empty:
        return {}
    rows = [(box.local_offsets[:1], box.sizes[:1]) for box in boxes]
    are_rows = all(box.sizes[1:] == info.shape[1:] for box in boxes)
    if not are_rows or sum(count for _, (count,) in rows) != info.shape[0]:
        what = f"the part of {fqn} in a file of a rank has the shape {list(info.shape)}, where "
        what += f"{METADATA_NAME} has {[list(box.sizes) for box in boxes]}"
        raise _refused(source.store, what)
    keys = file.cut(fqn, [(first, count) for (first,), (count,) in rows])
    return {Box(box.offsets, box.sizes): key for box, key in zip(boxes, keys, strict=True)}
