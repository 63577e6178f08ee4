"""Torch's `Metadata` of a source, whose lists of chunks are made when they are asked for.

Knows torch's metadata classes and sources; reads nothing. Called by `reader`. A checkpoint of
2,048 ranks and 2,000 tensors has four million chunks, of which a rank needs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .regions import Box
from .source import Source, TensorInfo

__all__ = ["ChunkList", "metadata_of"]


def metadata_of(source: Source, *, url: str) -> Metadata:
    """Return what planners are told of a checkpoint."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        fqn: _tensor_metadata(info) for fqn, info in source.tensors.items()
    }
    state.update((fqn, BytesStorageMetadata()) for fqn in source.blobs)
    planner_data = source.planner_data
    return Metadata(
        state_dict_metadata=state,
        # Planners that build a state dict from metadata alone need a path for every entry.
        planner_data={fqn: (fqn,) for fqn in state} if planner_data is None else dict(planner_data),
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=url, save_id=source.save_id, modules=[]),
    )


def _tensor_metadata(info: TensorInfo) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, info.dtype)),
        size=torch.Size(info.shape),
        chunks=ChunkList(info),  # type: ignore[arg-type]  # a list in all but its type
    )


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor as planners see them; behaves as a list that nobody changes.

    Not a subclass of `list`: C code would take that for an empty one.
    """

    __slots__ = ("info",)

    def __init__(self, info: TensorInfo) -> None:
        self.info = info

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ChunkList, (self.info,)

    def __len__(self) -> int:
        return len(self.info.boxes)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(index, slice):
            return list(map(_chunk, self.info.boxes[index]))
        return _chunk(self.info.boxes[index])

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return map(_chunk, self.info.boxes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return self.info.boxes == other.info.boxes
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __add__(self, other: Sequence[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
        return [*self, *other]

    def __radd__(self, other: Sequence[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
        return [*other, *self]

    def copy(self) -> list[ChunkStorageMetadata]:
        """Return a list that may be changed."""
        return list(self)

    def __repr__(self) -> str:
        return repr(list(self))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
