"""Torch's `Metadata` of a source, whose lists of chunks are made when they are asked for.

A checkpoint of 2,048 ranks and 2,000 tensors has four million chunks, of which a rank needs its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
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

from ckpt_storage.format.regions import Box
from ckpt_storage.source.model import Source, TensorInfo

__all__ = ["ChunkList", "lazy_metadata_of", "metadata_of"]

_Entry = TensorStorageMetadata | BytesStorageMetadata


def metadata_of(source: Source, *, url: str) -> Metadata:
    """Return what planners are told of a checkpoint."""
    state: dict[str, _Entry] = {}
    sizes: dict[tuple[int, ...], torch.Size] = {}
    # By identity: who made the boxes of tensors that are cut alike made them once.
    made: dict[int, list[_Extent]] = {}
    for fqn, info in source.tensors.items():
        size = sizes.get(info.shape)
        if size is None:
            size = sizes[info.shape] = torch.Size(info.shape)
        state[fqn] = _tensor_metadata(info, size, made.setdefault(id(info.boxes), []))
    state.update((fqn, BytesStorageMetadata()) for fqn in source.blobs)
    return _metadata(source, state, url=url)


def lazy_metadata_of(source: Source, *, url: str) -> Metadata:
    """Return the same for a planner of ours: no entry is kept, each is made when asked for."""
    return _metadata(source, _Entries(source), url=url)


def _metadata(source: Source, state: Mapping[str, _Entry], *, url: str) -> Metadata:
    planner_data = source.planner_data
    return Metadata(
        state_dict_metadata=state,  # type: ignore[arg-type]  # read only, as a dict is read
        # Planners that build a state dict from metadata alone need a path for every entry.
        planner_data={fqn: (fqn,) for fqn in state} if planner_data is None else dict(planner_data),
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=url, save_id=source.save_id, modules=[]),
    )


class _Entries(Mapping[str, _Entry]):
    def __init__(self, source: Source) -> None:
        self._tensors, self._blobs = source.tensors, source.blobs

    def __getitem__(self, fqn: str) -> _Entry:
        if fqn in self._blobs:
            return BytesStorageMetadata()
        info = self._tensors[fqn]
        return _tensor_metadata(info, torch.Size(info.shape))

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._blobs

    def __len__(self) -> int:
        return len(self._tensors) + len(self._blobs)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._tensors or fqn in self._blobs


def _tensor_metadata(
    info: TensorInfo, size: torch.Size, made: list[_Extent] | None = None
) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, info.dtype)),
        size=size,
        chunks=ChunkList(info, made),  # type: ignore[arg-type]  # a list in all but its type
    )


_MOST_KEPT = 256
"""Chunks of one layout whose extents are kept, once made, for all tensors that are cut alike."""

_Extent = tuple[torch.Size, torch.Size]
"""Offsets and sizes."""


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor as planners see them; behaves as a list that nobody changes.

    Not a subclass of `list`: C code would take that for an empty one.
    """

    __slots__ = ("_made", "info")

    def __init__(self, info: TensorInfo, made: list[_Extent] | None = None) -> None:
        self.info = info
        self._made = [] if made is None else made

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
        if not self._made:
            if len(self) > _MOST_KEPT:
                return map(_chunk, self.info.boxes)
            # Torch's planner asks for them of each tensor. Put there in one step, since another
            # thread may do the same.
            self._made[:] = [_extent(box) for box in self.info.boxes]
        # Anew each time: unlike what they are made of, they can be changed.
        return starmap(ChunkStorageMetadata, self._made)

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
    return ChunkStorageMetadata(*_extent(box))


def _extent(box: Box) -> _Extent:
    return torch.Size(box.offsets), torch.Size(box.sizes)
