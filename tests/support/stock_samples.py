"""Metadata objects as stock torch has them, for tests of what reads their pickles."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


def made_metadata(rank_count: int = 3, **changes: Any) -> Metadata:
    """Return metadata as of a run on several ranks, with the changes applied."""
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "model.w": TensorStorageMetadata(
                TensorProperties(torch.bfloat16),
                torch.Size([4 * rank_count, 1 << 40]),
                [
                    ChunkStorageMetadata(torch.Size([4 * rank, 0]), torch.Size([4, 1 << 40]))
                    for rank in range(rank_count)
                ],
            ),
            "scalar": TensorStorageMetadata(
                TensorProperties(torch.float32),
                torch.Size([]),
                [ChunkStorageMetadata(torch.Size([]), torch.Size([]))],
            ),
            "step": BytesStorageMetadata(),
        },
        "planner_data": {"model.w": ("model", "w"), "scalar": ("scalar",), "step": ("o", 0, "s")},
        "storage_data": {
            **{
                MetadataIndex("model.w", [4 * rank, 0], rank): _StorageInfo(
                    f"__{rank}_0.distcp", 1 << 33, 1 << 43
                )
                for rank in range(rank_count)
            },
            MetadataIndex("scalar", []): _StorageInfo("__0_0.distcp", 7, 1577),
            MetadataIndex("step"): _StorageInfo("sub/__0_1.distcp", 0, 5, ["zstd", "own"]),
        },
        "storage_meta": StorageMeta(pathlib.Path("/data/run"), "save-1", "load-1"),
        "version": "1.0.0",
    }
    return Metadata(**(fields | changes))
