"""Checkpoints of `ckpt_storage.save`, for the loader of torch_checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
    ShardingMetadata,
)
from torch_checkpointing.metadata_serialization import DistributedMetadataFormat
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import Storage

from ckpt_storage.format.names import FILES_PREFIX

from .checkpointing_storage import CheckpointStorage

__all__ = ["CheckpointStorageFormat", "CheckpointStorageResharder"]


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
