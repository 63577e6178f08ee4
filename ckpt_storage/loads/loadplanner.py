"""The load planner of `load`: torch's default, at the cost of a rank's own chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
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
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_read_items,
    _init_state_dict,
)
from torch.distributed.tensor import DTensor

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.columns import LazyList
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.names import parse_per_rank_key
from ckpt_storage.source.model import Source

from .layouts import box_at, boxes_of, unwrap
from .tensors import PLAIN, declared_chunks, placements_key

_Entry = TensorStorageMetadata | BytesStorageMetadata


def metadata_of(
    source: Source, *, url: str, lazy: bool, stored_names: Mapping[str, str] | None = None
) -> Metadata:
    """Return the metadata for planners; with `lazy` each entry is made when it is asked for.

    `stored_names` maps each name that planners see to the stored name; None: they are equal.
    """
    state: Mapping[str, _Entry] = _Entries(source, stored_names)
    if not lazy:
        state = dict(state)
    planner_data = source.planner_data
    if stored_names is not None and planner_data is not None:
        paths = planner_data
        planner_data = {
            name: _path_of(name, stored, paths.get(stored, (stored,)))
            for name, stored in stored_names.items()
        }
    return Metadata(
        state_dict_metadata=state,  # type: ignore[arg-type]  # read only, as a dict is read
        # Planners that build a state dict from metadata alone need a path for every entry.
        planner_data={fqn: (fqn,) for fqn in state} if planner_data is None else dict(planner_data),
        storage_data={},
        storage_meta=StorageMeta(checkpoint_id=url, save_id=source.save_id, modules=[]),
    )


def _path_of(name: str, stored: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the path of a value that is stored as `stored` at `path`, and is loaded as `name`.

    Below a `PerRank` the structure stays, unless the new name ends otherwise.
    """
    if name == stored:
        return path
    for at, key in enumerate(path):
        if parse_per_rank_key(str(key)) is not None:
            end = "." + ".".join(map(str, path[at:]))
            if name.endswith(end):
                return (name.removesuffix(end), *path[at:])
    return (name,)


class _Entries(Mapping[str, _Entry]):
    """Entries that are made on access; tensors with equal sharding share their chunks."""

    def __init__(self, source: Source, stored_names: Mapping[str, str] | None) -> None:
        self._tensors, self._blobs = source.tensors, source.blobs
        self._stored_names = stored_names
        # By id() of the boxes, which tensors with equal sharding share.
        self._chunks: dict[int, ChunkList] = {}

    def __getitem__(self, fqn: str) -> _Entry:
        if self._stored_names is not None:
            fqn = self._stored_names[fqn]
        if fqn in self._blobs:
            return BytesStorageMetadata()
        info = self._tensors[fqn]
        chunks = self._chunks.get(id(info.boxes))
        if chunks is None:
            chunks = self._chunks[id(info.boxes)] = ChunkList(info)
        return TensorStorageMetadata(
            properties=_properties(info.dtype),
            size=_size(info.shape),
            chunks=chunks,  # type: ignore[arg-type]  # a list in all but its type
        )

    def __iter__(self) -> Iterator[str]:
        if self._stored_names is not None:
            yield from self._stored_names
            return
        yield from self._tensors
        yield from self._blobs

    def __len__(self) -> int:
        return len(self._tensors) + len(self._blobs)


@functools.cache
def _properties(dtype: str) -> TensorProperties:
    # Shared: the garbage collector has fewer objects to traverse.
    return TensorProperties(dtype=getattr(torch, dtype))


@functools.lru_cache(1024)
def _size(shape: tuple[int, ...]) -> torch.Size:
    return torch.Size(shape)


class ChunkList(LazyList[ChunkStorageMetadata]):
    """The chunks of a tensor as a read-only lazy list; C code sees an empty list."""

    def __init__(self, info: TensorRecord) -> None:
        self.info = info
        # A new object on each access: chunks are mutable.
        super().__init__(len(info.boxes), lambda at: _chunk(info.boxes[at]))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ChunkList, (self.info,)

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return map(_chunk, self.info.boxes)

    def __repr__(self) -> str:
        return repr(list(self))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


_Overlap = tuple[torch.Size, int, torch.Size, torch.Size, int, torch.Size, torch.Size]
"""A read without its FQN, of what a stored chunk and one of a target share: offsets and number of
the target's chunk, and the offsets in it; the same of the stored chunk; the sizes."""


class OwnChunksLoadPlanner(DefaultLoadPlanner):
    """As `DefaultLoadPlanner`, in time that does not grow with the number of ranks that saved."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Flatten the state as save planners do; tensors that wrap others are replaced by these."""
        if not (dist.is_available() and dist.is_initialized()):
            _materialize(state_dict)
        _init_state_dict(state_dict)
        self.original_state_dict = state_dict
        # In the order of save planners: the other order loses empty containers in lists.
        flat, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = _flatten_sharded_tensors(flat)
        stored = () if metadata is None else metadata.state_dict_metadata
        # In a partial load, names may be missing.
        is_partial = self.allow_partial_load
        unwrap(self.state_dict, self.mappings, stored=stored, is_partial=is_partial)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the target of a read; for a tensor of several boxes, a view of the box."""
        value = self.state_dict.get(index.fqn)
        boxed = box_at(value, index) if type(value) is DTensor else None
        return super().lookup_tensor(index) if boxed is None else boxed

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's values."""
        metadata = self.metadata
        if metadata is None:
            raise AssertionError("set_up_planner was not called")
        items: list[ReadItem] = []
        shardings = _ShardingCache()
        saved_of = metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            saved = saved_of.get(fqn)
            if saved is None:
                if not self.allow_partial_load:
                    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
                continue
            own = declared_chunks(value) if isinstance(value, torch.Tensor) else None
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
                items += _items(fqn, shardings.overlaps(chunks, value))
            else:
                items += _create_read_items(fqn, saved, value)
        return LoadPlan(items)


def _materialize(state: Any) -> None:  # noqa: ANN401  # a container, or a value
    """Allocate the meta tensors of a state, as torch does if there is a process group."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in list(items):
        if type(value) in PLAIN and value.is_meta:
            state[key] = torch.empty_like(value, device=torch.get_default_device())
        elif isinstance(value, dict | list):
            _materialize(value)


class _ShardingCache:
    """Chunks and reads, computed once for all tensors with equal sharding."""

    def __init__(self) -> None:
        self._own: dict[object, list[ChunkStorageMetadata]] = {}
        self._overlaps: dict[tuple[int, int], tuple[list[ChunkStorageMetadata], list[_Overlap]]]
        self._overlaps = {}

    def own(self, value: torch.Tensor) -> list[ChunkStorageMetadata]:
        """Return the chunks that this rank holds; tensors with equal sharding share the list."""
        key = _sharding_key(value)
        if key is None:
            return _create_chunk_list(value)
        if key not in self._own:
            boxes = boxes_of(value)
            chunks = _create_chunk_list(value) if boxes is None else [box.chunk for box in boxes]
            self._own[key] = chunks
        return self._own[key]

    def overlaps(self, chunks: ChunkList, value: torch.Tensor) -> list[_Overlap]:
        """Return the reads of this rank for a tensor."""
        own = self.own(value)
        # The ids stay valid: the metadata keeps the boxes alive, and `self._own` the chunks.
        key = (id(chunks.info.boxes), id(own))
        if key not in self._overlaps:
            self._overlaps[key] = own, list(_overlaps(chunks, own))
        return self._overlaps[key][1]


def _sharding_key(value: torch.Tensor) -> object:
    """Return a key that is equal for tensors with equal sharding; None if only torch can tell."""
    local = value._local_tensor if type(value) is DTensor else value  # noqa: SLF001  # to_local() is differentiable, and slow
    if hasattr(local, "__create_chunk_list__"):
        return None
    if type(value) is DTensor:
        spec = value._spec  # noqa: SLF001  # its properties are slow
        return id(spec.mesh), value.shape, placements_key(spec.placements)
    return value.shape if type(value) in PLAIN else None


def _index(fqn: str, offset: torch.Size, number: int) -> MetadataIndex:
    # The constructor would copy the offset: half as many objects more to collect.
    index = MetadataIndex(fqn, index=number)
    object.__setattr__(index, "offset", offset)
    return index


def _items(fqn: str, overlaps: Iterable[_Overlap]) -> list[ReadItem]:
    kind = LoadItemType.TENSOR
    items = []
    for dest, number, dest_offsets, saved, at, saved_offsets, sizes in overlaps:
        index = _index(fqn, dest, number)
        # A chunk that is loaded as it was saved needs a single index, which is immutable.
        source = index if number == at and dest == saved else _index(fqn, saved, at)
        items.append(ReadItem(kind, index, dest_offsets, source, saved_offsets, sizes))
    return items


def _overlaps(chunks: ChunkList, own: list[ChunkStorageMetadata]) -> Iterator[_Overlap]:
    boxes = chunks.info.boxes
    for number, chunk in enumerate(own):
        target = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if target.is_empty:
            continue
        for at in chunks.info.overlapping(target):
            saved = boxes[at]
            shared = saved.intersect(target)
            assert shared is not None  # noqa: S101  # they overlap
            yield (
                *(_size(target.offsets), number, _size(shared.relative_to(target).offsets)),
                *(_size(saved.offsets), at, _size(shared.relative_to(saved).offsets)),
                _size(shared.sizes),
            )
