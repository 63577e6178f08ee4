"""The load planner of the front doors: torch's default, at the cost of a rank's own chunks.

Knows DCP's planners and our lazy metadata; knows no storage. Called by `loading`. Torch's
`DefaultLoadPlanner` looks at every chunk that any rank saved of every tensor, on every rank; this
one finds those that a rank needs by bisection of the grid, and plans the same reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_read_items
from torch.distributed.tensor import DTensor

from .lazychunks import ChunkList
from .planmemory import Placements, placements_key
from .regions import Box

__all__ = ["OwnChunksLoadPlanner"]

_Cut = tuple[int, torch.Size, Placements]


class OwnChunksLoadPlanner(DefaultLoadPlanner):
    """Plans what `DefaultLoadPlanner` plans, in time that does not grow with the saving world.

    Takes the same arguments and raises the same errors. The order of items, and hints in their
    indices, may differ.
    """

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's values."""
        metadata = self.metadata
        if metadata is None:
            raise AssertionError("set_up_planner was not called")
        if self.flatten_state_dict:
            self._follow_old_names(metadata)
        items: list[ReadItem] = []
        cuts: dict[_Cut, list[ChunkStorageMetadata]] = {}
        saved_of = metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            saved = saved_of.get(fqn)
            if saved is None:
                if not self.allow_partial_load:
                    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
                continue
            if isinstance(saved, TensorStorageMetadata):
                _check_size(fqn, saved, value)
            if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                continue
            chunks = getattr(saved, "chunks", None)
            if isinstance(chunks, ChunkList) and isinstance(value, torch.Tensor):
                items += _reads_of(fqn, chunks, value, cuts)
            else:
                items += _create_read_items(fqn, saved, value)
        return LoadPlan(items)

    def _follow_old_names(self, metadata: Metadata) -> None:
        """Name values as torch 2.3 did, if that is how the checkpoint names some of them."""
        strange = metadata.state_dict_metadata.keys() - self.state_dict.keys()
        if not strange:
            return
        # Torch has no other way to ask its own function for the old names.
        _version._derived_version = "2_3"  # noqa: SLF001
        try:
            state, mappings = flatten_state_dict(self.original_state_dict)
        finally:
            _version._derived_version = None  # noqa: SLF001
        if strange & state.keys():
            self.state_dict, self.mappings = state, mappings


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _check_size(fqn: str, saved: TensorStorageMetadata, value: object) -> None:
    size = getattr(value, "size", None)
    if size is not None and saved.size != size():
        raise ValueError(
            f"Size mismatch between saved {saved.size} and current: {size()} for {fqn}"
        )


def _reads_of(
    fqn: str,
    chunks: ChunkList,
    value: torch.Tensor,
    cuts: dict[_Cut, list[ChunkStorageMetadata]],
) -> Iterable[ReadItem]:
    if type(value) in _PLAIN and len(chunks) == 1:
        return () if 0 in value.shape else (_whole(fqn, value.shape),)
    return _reads(fqn, chunks, _own_chunks(value, cuts))


def _own_chunks(
    value: torch.Tensor, cuts: dict[_Cut, list[ChunkStorageMetadata]]
) -> list[ChunkStorageMetadata]:
    """Return the chunks of a tensor that this rank holds.

    Where they follow from shape, mesh and placements alone they are worked out once for all
    tensors that have these in common.
    """
    if type(value) is not DTensor or hasattr(value._local_tensor, "__create_chunk_list__"):  # noqa: SLF001  # to_local() is differentiable, and slow
        return _create_chunk_list(value)
    key = (id(value.device_mesh), value.shape, placements_key(value.placements))
    found = cuts.get(key)
    if found is None:
        found = cuts[key] = _create_chunk_list(value)
    return found


def _whole(fqn: str, shape: torch.Size) -> ReadItem:
    zeros = torch.Size((0,) * len(shape))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, zeros, 0),
        dest_offsets=zeros,
        storage_index=MetadataIndex(fqn, zeros, 0),
        storage_offsets=zeros,
        lengths=shape,
    )


def _reads(fqn: str, chunks: ChunkList, own: list[ChunkStorageMetadata]) -> Iterator[ReadItem]:
    boxes = chunks.info.boxes
    for number, chunk in enumerate(own):
        target = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if target.is_empty:
            continue
        dest_index = MetadataIndex(fqn, chunk.offsets, number)
        for at in chunks.info.overlapping(target):
            saved = boxes[at]
            part = saved.intersect(target)
            if part is None:  # pragma: no cover  # `overlapping` says so
                continue
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=dest_index,
                dest_offsets=torch.Size(part.relative_to(target).offsets),
                storage_index=MetadataIndex(fqn, saved.offsets, at),
                storage_offsets=torch.Size(part.relative_to(saved).offsets),
                lengths=torch.Size(part.sizes),
            )
