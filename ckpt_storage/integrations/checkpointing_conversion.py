"""Conversion between the native layout of torch_checkpointing and checkpoints of this package.

In the native layout each rank has a file of `torch.save` for each item, which may hold DTensors,
and `metadata.pkl` says which part of each tensor a rank has. One process converts, and holds the
whole state in memory.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder, compute_local_shard_info
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata
from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.storage.base_storage import Storage, StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointNotFoundError, FormatError, UnsafeContentError
from ckpt_storage.export.convert import convert
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.save import save

__all__ = ["convert_from_native", "convert_to_native"]

_ITEM_FILE = re.compile(r"(.+)_([0-9]+)\.pt")


def convert_to_native(
    source_url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    storage_config: StorageConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of `ckpt_storage.save` in the native layout, as one rank would save it.

    Each key of the state becomes an item. Their `CheckpointManager` loads it on any number of
    ranks, with `DefaultResharder` for items that hold tensors.

    Args:
        source_url: a checkpoint of this package, or another that `convert` reads.
        target: the path for the checkpoint.
        storage_config: the storage of `target`; default: the local file system.
        storage_options: passed to the fsspec file system of `source_url`.

    Raises:
        CheckpointError: as `ckpt_storage.convert`.

    """
    with tempfile.TemporaryDirectory(prefix="ckpt-storage-convert-") as folder:
        file = Path(folder, "state.pt")
        convert(source_url, file, to="torch_save", storage_options=storage_options)
        state: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
        resharded = {
            key: ItemSpec(resharder=DefaultResharder())
            for key, value in state.items()
            if any(isinstance(leaf, torch.Tensor) for _, leaf in _leaves(value))
        }
        manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(),
                storage_config=storage_config or _local_files(),
                items=resharded,
            )
        )
        manager.save(os.fspath(target), state)
        manager.close()


def convert_from_native(
    source: str | os.PathLike[str],
    target_url: str | os.PathLike[str],
    *,
    storage_config: StorageConfig | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | Timeouts | None = None,
) -> CheckpointInfo:
    """Save a checkpoint of the native layout as `ckpt_storage.save` saves its state on one rank.

    Plain tensors and DTensors become whole tensors under the names of their items; other values
    are those of rank 0. Files are read by torch's `weights_only` rules, where their own loader
    unpickles everything.

    Args:
        source: the path of the checkpoint.
        target_url: the URL for the checkpoint.
        storage_config: the storage of `source`; default: the local file system.
        overwrite: replace a checkpoint at `target_url`.
        storage_options: passed to the fsspec file system of `target_url`.
        timeout: as for `ckpt_storage.save`.

    Raises:
        CheckpointNotFoundError: if there is no such checkpoint.
        FormatError: for safetensors and other files than those of `torch.save`, parts that do not
            cover a tensor, and an item without metadata whose files differ between ranks.
        UnsafeContentError: for objects of other classes than torch's and plain ones.
        CheckpointError: as `ckpt_storage.save`.

    """
    storage, folder = (storage_config or _local_files()).create_storage(), Path(source)
    if not storage.exists(folder):
        raise CheckpointNotFoundError(
            f"{folder} does not exist.", path=str(folder), next_step="Check the path."
        )
    described = _read_metadata(storage, folder)
    state = {key: _assemble(storage, folder, key, item) for key, item in described.items()}
    for key, paths in _undescribed_items(storage, folder, described).items():
        contents = {storage.read(path) for path in paths}
        if len(contents) > 1:
            raise FormatError(
                f"{folder}: the ranks saved different values of {key}, and no metadata of it.",
                path=paths[0].name,
                next_step="Load it with torch_checkpointing on as many ranks as saved it.",
            )
        state[key] = _read_item(storage, paths[0])
    return save(
        state, target_url, overwrite=overwrite, storage_options=storage_options, timeout=timeout
    )


def _local_files() -> StorageConfig:
    # Their direct I/O writes blocks that file systems refuse as not aligned.
    return LocalFileSystemStorageConfig(use_direct_io=False)


class _PlainUnpickler(pickle.Unpickler):
    """Reads `metadata.pkl`, which holds dictionaries, sequences, numbers and text."""

    def find_class(self, module: str, name: str) -> object:
        raise UnsafeContentError(
            f"{METADATA_FILE_NAME} holds a {module}.{name}.",
            path=METADATA_FILE_NAME,
            next_step="Convert a checkpoint that you trust.",
        )


def _read_metadata(storage: Storage, folder: Path) -> dict[str, Any]:
    """Return the description of each item; none if no item was saved with a resharder."""
    path = folder / METADATA_FILE_NAME
    if not storage.exists(path):
        return {}
    content = _PlainUnpickler(io.BytesIO(storage.read(path))).load()
    if content.get("version") != "2.0":
        raise FormatError(
            f"{path} has version {content.get('version')!r}; 2.0 is known.",
            path=METADATA_FILE_NAME,
            next_step="Load it with torch_checkpointing and save it again.",
        )
    items: dict[str, Any] = content["metadata"]
    return items


def _undescribed_items(
    storage: Storage, folder: Path, described: Mapping[str, Any]
) -> dict[str, list[Path]]:
    """Return the files of each item that the metadata lacks."""
    files: dict[str, list[Path]] = {}
    for name in sorted(Path(name).name for name in storage.ls(folder)):
        match = _ITEM_FILE.fullmatch(name)
        if match is not None and match[1] not in described:
            files.setdefault(match[1], []).append(folder / name)
    return files


def _read_item(storage: Storage, path: Path) -> Any:
    try:
        return torch.load(io.BytesIO(storage.read(path)), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeContentError(
            f"{path} is not a file that torch loads with weights_only=True.",
            path=path.name,
            next_step="If you trust who wrote it, load it with torch_checkpointing and save it.",
        ) from error


def _assemble(storage: Storage, folder: Path, key: str, item: Mapping[str, Any]) -> Any:
    """Return the value of an item, with whole tensors for the parts of the ranks."""
    value: Any = None
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, set[tuple[int, ...]]] = {}
    for rank, layout in sorted(item["rank_to_layout_info"].items()):
        kind = "TorchSerialization" if layout is None else layout["serialization_format"]["type"]
        if kind != "TorchSerialization":
            raise FormatError(
                f"{folder}: rank {rank} saved {key} by {kind}.",
                path=str(folder),
                next_step="Load it with torch_checkpointing and save it with ckpt_storage.save.",
            )
        name = f"{key}_{rank}.pt" if layout is None else layout["file_path"]
        content = _read_item(storage, folder / name)
        value = content if value is None else value
        leaves = {json.dumps(list(path)): leaf for path, leaf in _leaves(content)}
        for path, groups in item["nested_path_to_metadata"].items():
            sharding = _sharding_of(groups, int(rank))
            part = leaves.get(json.dumps(json.loads(path)))
            if sharding is None or not isinstance(part, torch.Tensor):
                continue
            part = part._local_tensor if isinstance(part, DTensor) else part  # noqa: SLF001  # no mesh is needed
            shape, offsets = compute_local_shard_info(sharding, int(rank))
            if path not in whole:
                whole[path] = torch.empty(sharding.global_shape, dtype=part.dtype)
            box = tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
            whole[path][box] = part
            filled.setdefault(path, set()).add((*offsets, *shape))
    for path, tensor in whole.items():
        count = sum(torch.Size(box[len(box) // 2 :]).numel() if box else 1 for box in filled[path])
        if count != tensor.numel():
            raise FormatError(
                f"{folder}: {key} has {count} of {tensor.numel()} elements of {path}.",
                path=str(folder),
                next_step="The save was incomplete; convert another checkpoint.",
            )
    return _replaced(value, (), {tuple(json.loads(path)): part for path, part in whole.items()})


def _sharding_of(groups: list[dict[str, Any]], rank: int) -> DTensorShardingMetadata | None:
    for group in groups:
        packed = group["sharding_metadata"]
        if rank in group["ranks"] and packed["type"] == "DTensorShardingMetadata":
            return DTensorShardingMetadata.from_dict(packed["data"])
    return None


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of a nest of dictionaries and sequences, with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _replaced(value: Any, path: tuple[Any, ...], tensors: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a copy of a nest in which the leaves at the paths of `tensors` are these."""
    if isinstance(value, Mapping):
        return {key: _replaced(item, (*path, key), tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replaced(item, (*path, at), tensors) for at, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return tensors.get(path, value)
