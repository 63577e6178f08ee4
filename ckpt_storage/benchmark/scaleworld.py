"""Synthetic worlds for `scale`: which rank holds which chunk of which tensor, and its documents.

Knows manifests and DCP's plans as values; does no I/O. Called by `scale`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckpt_storage import layout
from ckpt_storage.manifest import ItemTable, RankManifest, ShardFile
from ckpt_storage.regions import Box

__all__ = ["Sharding", "World"]

Sharding = Literal["rows", "mixed", "uneven", "hybrid"]
"""rows: every tensor cut along its first dimension. mixed: matrices so, one tensor in four whole on
one rank, as DCP leaves replicated ones. uneven: as rows, but no two tensors have one shape.
hybrid: eight replicas of a world cut by rows, one of which writes each chunk."""

_REPLICAS = 8
_BLOCK_BYTES = 64 << 10
_COLUMNS = (4096, 14336, 1024, 128)


class World:
    """Tensors as of a language model, cut as FSDP cuts them."""

    def __init__(self, rank_count: int, tensor_count: int, sharding: Sharding) -> None:
        self.rank_count = rank_count
        self._sharding = sharding
        self.shapes = {
            f"model.layers.{at // 9}.block{at % 9}.weight": self._shape(at)
            for at in range(tensor_count)
        }

    def _shape(self, at: int) -> tuple[int, ...]:
        if self._sharding == "mixed" and at % 4 == 3:  # noqa: PLR2004  # one in four
            return (4096,)
        rows = 8 * self.rank_count if at % 3 else 3 * self.rank_count + 5
        return (rows + (at if self._sharding == "uneven" else 0), _COLUMNS[at % 4])

    def _is_whole(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 1

    def chunks(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Yield what a rank holds, by the rule of `torch.chunk`."""
        for at, (fqn, shape) in enumerate(self.shapes.items()):
            if self._is_whole(shape):
                if at % self.rank_count == rank:
                    yield fqn, Box((0,), shape)
                continue
            shards = self.rank_count
            part = rank
            if self._sharding == "hybrid":
                shards = max(1, self.rank_count // _REPLICAS)
                replica, part = divmod(rank, shards)
                if (31 * part + 17 * at) % _REPLICAS != replica:
                    continue
            step = -(-shape[0] // shards)
            start = min(part * step, shape[0])
            stop = min(start + step, shape[0])
            yield fqn, Box((start, 0), (stop - start, shape[1]))

    def manifest(self, rank: int, save_id: str) -> RankManifest:
        """Return what a rank would have written."""
        fqns, offsets, sizes, lengths = [], [], [], []
        for fqn, box in self.chunks(rank):
            fqns.append(fqn)
            offsets.append(box.offsets)
            sizes.append(box.sizes)
            lengths.append(2 * box.volume)
        starts, at = [], 0
        for length in lengths:
            starts.append(at)
            at += -(-(length + 1600) // 64) * 64
        count = len(fqns)
        blocks = sum(-(-length // _BLOCK_BYTES) for length in lengths)
        # As those of real bytes, which do not shrink when a document is deflated.
        random = np.random.default_rng(rank)

        def crcs(count: int) -> array[int]:
            return array("I", random.integers(1 << 32, size=count, dtype=np.uint32).tobytes())

        table = ItemTable(
            fqn=range(count),
            dtype=[0] * count,
            offsets=offsets,
            sizes=sizes,
            item_start=starts,
            item_bytes=[length + 1536 for length in lengths],
            payload_start=[start + 704 for start in starts],
            payload_bytes=lengths,
            chunk_crcs=crcs(count),
            block_crcs=crcs(blocks),
            frame_crcs=crcs(count + 1),
        )
        file = ShardFile(
            path=layout.shard_path(save_id, rank, 0),
            size_bytes=at,
            crc32c=rank,
            block_bytes=_BLOCK_BYTES,
            items=table,
        )
        return RankManifest(
            save_id=save_id,
            rank=rank,
            world_size=self.rank_count,
            fqns=fqns,
            dtypes=["bfloat16"],
            files=[file],
        )

    def items(self, rank: int) -> list[WriteItem]:
        """Return the write items of a rank's final plan."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=TensorProperties(dtype=torch.bfloat16),
                    size=torch.Size(self.shapes[fqn]),
                ),
            )
            for fqn, box in self.chunks(rank)
        ]

    def metadata(self, *, with_chunks: bool) -> Metadata:
        """Return what DCP's global plan hands to the writer."""
        state = {
            fqn: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.bfloat16),
                size=torch.Size(shape),
                chunks=[],
            )
            for fqn, shape in self.shapes.items()
        }
        if with_chunks:
            for rank in range(self.rank_count):
                for fqn, box in self.chunks(rank):
                    state[fqn].chunks.append(
                        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    )
        paths = {fqn: tuple(fqn.split(".", 1)) for fqn in self.shapes}
        return Metadata(state_dict_metadata=dict(state), planner_data=paths)
