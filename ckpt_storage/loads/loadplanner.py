"""The front doors' load planner: torch's default, at the cost of a rank's own chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_read_items
from torch.distributed.tensor import DTensor

from ckpt_storage.format.boxes import Box, Grid
from ckpt_storage.source.model import Source, TensorInfo

from .resolving import Placements, parts_of, placements_key

_Entry = TensorStorageMetadata | BytesStorageMetadata


def metadata_of(source: Source, *, url: str, lazy: bool) -> Metadata:
    """Return what planners are told; with `lazy` each entry is made when it is asked for."""
    state: Mapping[str, _Entry] = _Entries(source)
    if not lazy:
        state = dict(state)
    planner_data = source.planner_data
    return Metadata(
        state_dict_metadata=state,  # type: ignore[arg-type]  # read only, as a dict is read
        # Planners that build a state dict from metadata alone need a path for every entry.
        planner_data={fqn: (fqn,) for fqn in state} if planner_data is None else dict(planner_data),
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=url, save_id=source.save_id, modules=[]),
    )


class _Entries(Mapping[str, _Entry]):
    """Entries made as they are asked for; tensors that are cut alike share their chunks."""

    def __init__(self, source: Source) -> None:
        self._tensors, self._blobs = source.tensors, source.blobs
        # By identity: who made the boxes of tensors that are cut alike made them once.
        self._made: dict[int, ChunkList] = {}

    def __getitem__(self, fqn: str) -> _Entry:
        if fqn in self._blobs:
            return BytesStorageMetadata()
        info = self._tensors[fqn]
        chunks = self._made.get(id(info.boxes))
        if chunks is None:
            chunks = self._made[id(info.boxes)] = ChunkList(info)
        return TensorStorageMetadata(
            properties=_properties(info.dtype),
            size=_size(info.shape),
            chunks=chunks,  # type: ignore[arg-type]  # a list in all but its type
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._blobs

    def __len__(self) -> int:
        return len(self._tensors) + len(self._blobs)


@functools.cache
def _properties(dtype: str) -> TensorProperties:
    # One for all: fewer objects are fewer for the collector to look at.
    return TensorProperties(dtype=getattr(torch, dtype))


@functools.lru_cache(256)
def _size(shape: tuple[int, ...]) -> torch.Size:
    return torch.Size(shape)


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor, as a list that nobody changes; C code takes a real one for empty."""

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
        # Anew each time: they can be changed.
        return map(_chunk, self.info.boxes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkList):
            return self.info.boxes == other.info.boxes
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


_Cut = tuple[int, torch.Size, Placements]

_Part = tuple[torch.Size, int, torch.Size, torch.Size, int, torch.Size, torch.Size]
"""A read but for the name: target's chunk, its number, the part's place there; then the chunk that
is stored, its number, the part's place there; and the part's sizes."""


class OwnChunksLoadPlanner(DefaultLoadPlanner):
    """Plans what `DefaultLoadPlanner` plans, in time that does not grow with the saving world."""

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's values."""
        metadata = self.metadata
        if metadata is None:
            raise AssertionError("set_up_planner was not called")
        items: list[ReadItem] = []
        cuts = _Cuts()
        saved_of = metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            saved = saved_of.get(fqn)
            if saved is None:
                if not self.allow_partial_load:
                    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
                continue
            own = parts_of(value) if isinstance(value, torch.Tensor) else None
            if isinstance(saved, TensorStorageMetadata) and hasattr(value, "size"):
                current = value.size() if own is None else torch.Size(own[0])
                if saved.size != current:
                    raise ValueError(
                        f"Size mismatch between saved {saved.size} and current: {current} for {fqn}"
                    )
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                continue
            chunks = getattr(saved, "chunks", None)
            if own is None and isinstance(chunks, ChunkList) and isinstance(value, torch.Tensor):
                items += _items(fqn, cuts.parts(chunks, value))
            else:
                items += _create_read_items(fqn, saved, value)
        return LoadPlan(items)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _Cuts:
    """What tensors that are cut alike have in common, worked out once for all of them."""

    def __init__(self) -> None:
        self._own: dict[_Cut, list[ChunkStorageMetadata]] = {}
        self._wholes: dict[torch.Size, list[_Part]] = {}
        self._parts: dict[tuple[int, int], list[_Part]] = {}

    def own(self, value: torch.Tensor) -> tuple[list[ChunkStorageMetadata], bool]:
        """Return what this rank holds, and whether tensors that are cut alike share the list."""
        if type(value) is not DTensor or hasattr(value._local_tensor, "__create_chunk_list__"):  # noqa: SLF001  # to_local() is differentiable, and slow
            return _create_chunk_list(value), False
        spec = value._spec  # noqa: SLF001  # its properties are slow
        key = (id(spec.mesh), value.shape, placements_key(spec.placements))
        found = self._own.get(key)
        if found is None:
            found = self._own[key] = _create_chunk_list(value)
        return found, True

    def parts(self, chunks: ChunkList, value: torch.Tensor) -> list[_Part]:
        """Return what this rank has to read of a tensor."""
        shape = value.shape
        if type(value) in _PLAIN and len(chunks) == 1:
            if shape not in self._wholes:
                zeros = torch.Size((0,) * len(shape))
                part = (zeros, 0, zeros, zeros, 0, zeros, shape)
                self._wholes[shape] = [] if 0 in shape else [part]
            return self._wholes[shape]
        own, is_shared = self.own(value)
        boxes = chunks.info.boxes
        if not is_shared or not isinstance(boxes, Grid):
            return list(_parts(chunks, own))
        # Grids and lists live as long as the metadata and this object.
        key = (id(boxes), id(own))
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = list(_parts(chunks, own))
        return found


def _index(fqn: str, offset: torch.Size, number: int) -> MetadataIndex:
    # With an offset of its own for each there would be half as many objects more to collect.
    index = MetadataIndex(fqn, index=number)
    object.__setattr__(index, "offset", offset)
    return index


def _items(fqn: str, parts: Iterable[_Part]) -> list[ReadItem]:
    kind = LoadItemType.TENSOR
    items = []
    for dest, number, dest_offsets, saved, at, saved_offsets, sizes in parts:
        index = _index(fqn, dest, number)
        # Of what is cut as it was saved one index does: nobody can change it.
        source = index if number == at and dest == saved else _index(fqn, saved, at)
        items.append(ReadItem(kind, index, dest_offsets, source, saved_offsets, sizes))
    return items


def _parts(chunks: ChunkList, own: list[ChunkStorageMetadata]) -> Iterator[_Part]:
    boxes = chunks.info.boxes
    for number, chunk in enumerate(own):
        target = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if target.is_empty:
            continue
        for at in chunks.info.overlapping(target):
            saved = boxes[at]
            part = saved.intersect(target)
            assert part is not None  # noqa: S101  # they overlap
            yield (
                *(torch.Size(chunk.offsets), number, torch.Size(part.relative_to(target).offsets)),
                *(torch.Size(saved.offsets), at, torch.Size(part.relative_to(saved).offsets)),
                torch.Size(part.sizes),
            )
