"""torch_checkpointing 0.1 on any storage, with the commits of this package.

`ckpt_storage.convert` reads its native layout, and `convert_to_native` writes it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterConfig
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.metadata_serialization import DistributedMetadataFormat
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import Storage, StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.convert import convert
from ckpt_storage.format.names import FILES_PREFIX

from .checkpointing_storage import CheckpointStorage, CheckpointStorageConfig

__all__ = [
    "CheckpointStorage",
    "CheckpointStorageConfig",
    "CheckpointStorageFormat",
    "CheckpointStorageResharder",
    "commit_on_every_rank",
    "convert_to_native",
    "manager_config",
]


def manager_config(
    url: str | os.PathLike[str],
    *,
    is_async: bool = True,
    save: CheckpointSaverConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    timeout: Any = None,
    **others: Any,
) -> CheckpointManager.Config:
    """Return a `CheckpointManager.Config` whose manager saves below `url`; on every rank.

    Its writers write in place and commit together (`commit_on_every_rank`), and need no barrier of
    their own: a rank that fails or dies is named on all others. `save` are the options of a saver,
    by default of the asynchronous one, or of the synchronous one with `is_async=False`; `others`
    are arguments of `Config`, such as `items`.
    """
    saver = save or (AsyncCheckpointSaverConfig() if is_async else SyncCheckpointSaverConfig())
    threads = saver.writer_config.file_write_max_threads
    saver.writer_config = CheckpointWriterConfig(
        barrier_config=None, write_to_temp_dir=False, file_write_max_threads=threads
    )
    storage = CheckpointStorageConfig(
        url=os.fspath(url),
        storage_options=storage_options,
        overwrite=overwrite,
        timeout=timeout,
    )
    return CheckpointManager.Config(
        save=saver, storage_config=storage, finalize_callback=commit_on_every_rank, **others
    )


def commit_on_every_rank(args: CallbackArgs) -> None:
    """Commit what all ranks wrote: the `finalize_callback`, with `write_to_temp_dir=False`.

    Raises the error of the rank that failed on every rank.
    """
    if not isinstance(args.storage, CheckpointStorage):
        raise InvalidInputError(
            f"commit_on_every_rank got a {type(args.storage).__name__}.",
            next_step="Pass CheckpointStorageConfig as storage_config, or use manager_config.",
        )
    args.storage.commit(Path(args.path))


@dataclass(frozen=True)
class _AnySharding(ShardingMetadata, type_name="ckpt_storage.any"):
    """Stands for the sharding of an item: `ckpt_storage.load` looks at the tensors themselves."""

    def to_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> _AnySharding:
        """Return what `to_dict` came from."""
        del d
        return cls()

    @property
    def equivalent_ranks(self) -> tuple[int, ...] | None:
        """Return None: it is not known."""
        return None


class CheckpointStorageFormat(DistributedMetadataFormat):
    """The `metadata_format` of a checkpoint that `ckpt_storage.save` or DCP wrote."""

    @classmethod
    def maybe_load(cls, checkpoint_dir: Path, storage: Storage) -> DistributedMetadata | None:
        """Return the items of a checkpoint; None if there is none, or it is theirs."""
        if not isinstance(storage, CheckpointStorage) or not storage.exists(checkpoint_dir):
            return None
        names = storage.value_names(checkpoint_dir)
        if not names or all(name.startswith(FILES_PREFIX) for name in names):
            return None
        group = GlobalObjectMetadata(sharding_metadata=_AnySharding(), ranks=())
        item = DistributedItemMetadata(
            nested_path_to_metadata={(): [group]}, rank_to_layout_info={}
        )
        keys = {name.partition(".")[0] for name in names}
        return DistributedMetadata(metadata=dict.fromkeys(keys, item), world_size=0)


class CheckpointStorageResharder(Resharder):
    """The `resharder` of items that are loaded from a checkpoint of `ckpt_storage.save`.

    All ranks load, each item by itself, on any sharding and any number of ranks.
    """

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Any, Any]:
        """Return one entry that stands for the item."""
        del item_key, item_value
        return {(): _AnySharding()}

    def should_reshard(self, source_metadata: Any, target_metadata: Any) -> bool:
        """Return whether the checkpoint has the item."""
        return source_metadata is not None and target_metadata is not None

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: Any,
        source_metadata: Any,
        target: Any,
        storage: Storage,
    ) -> list[Any]:
        """Fill the target, in place."""
        del target_metadata, source_metadata
        assert isinstance(storage, CheckpointStorage)  # noqa: S101  # its format described the item
        storage.load_values(source_path, {item_key: target})
        return []


def convert_to_native(
    source_url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    storage_config: StorageConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of `ckpt_storage.save` in the native layout, as one rank would save it.

    Each key of the state becomes an item. Their `CheckpointManager` loads it on any number of
    ranks, with `DefaultResharder` for items that hold tensors. One process converts, and holds the
    whole state in memory.

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
