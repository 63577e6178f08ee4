"""Checkpoints of this package in the native layout of torch_checkpointing.

`ckpt_storage.convert` reads that layout. One process converts, and holds the whole state in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.base_storage import StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ckpt_storage.export.convert import convert

__all__ = ["convert_to_native"]


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
        ValueError: torch_checkpointing takes a key of the state for no name of an item.

    """
    with tempfile.TemporaryDirectory(prefix="ckpt-storage-convert-") as folder:
        file = Path(folder, "state.pt")
        convert(source_url, file, to="torch_save", storage_options=storage_options)
        state: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
        resharded = {
            key: ItemSpec(resharder=DefaultResharder())
            for key, value in state.items()
            if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
        }
        # Their direct I/O writes blocks that file systems refuse as not aligned.
        storage = storage_config or LocalFileSystemStorageConfig(use_direct_io=False)
        saver = SyncCheckpointSaverConfig()
        manager = CheckpointManager(
            CheckpointManager.Config(save=saver, storage_config=storage, items=resharded)
        )
        manager.save(os.fspath(target), state)
        manager.close()
