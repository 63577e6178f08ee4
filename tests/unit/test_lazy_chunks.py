"""Lists of chunks that are made when asked for behave as torch's lists do."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage.format.boxes import Box, Grid
from ckpt_storage.loads.loadplanner import ChunkList
from ckpt_storage.source.model import TensorInfo


def chunk(*pairs: tuple[int, int]) -> ChunkStorageMetadata:
    """Return a chunk from (offset, size) of each dimension."""
    return ChunkStorageMetadata(torch.Size(a for a, _ in pairs), torch.Size(b for _, b in pairs))


EXPECTED = [
    chunk((a, s), (b, t))
    for (a, s), (b, t) in itertools.product([(0, 4), (4, 4), (8, 2)], [(0, 3), (3, 2)])
]
GRID = Grid((range(0, 12, 4), (0, 3)), (10, 5))
LISTED = [Box(tuple(c.offsets), tuple(c.sizes)) for c in EXPECTED]


@pytest.fixture(params=["grid", "list"])
def chunks(request: pytest.FixtureRequest) -> ChunkList:
    """The same six chunks, as cells of a grid and as a list of boxes."""
    boxes = GRID if request.param == "grid" else LISTED
    return ChunkList(TensorInfo(fqn="w", dtype="float32", shape=(10, 5), boxes=boxes))


def test_it_reads_as_the_list_it_stands_for(chunks: ChunkList) -> None:
    """Length, order, positions from either end, slices, truth and search."""
    assert len(chunks) == 6
    assert chunks
    assert list(chunks) == EXPECTED
    assert [chunks[at] for at in range(-6, 6)] == EXPECTED * 2
    assert chunks[1:5:2] == EXPECTED[1:5:2]
    assert chunks.index(EXPECTED[3]) == 3
    assert EXPECTED[5] in chunks
    assert list(reversed(chunks)) == EXPECTED[::-1]
    with pytest.raises(IndexError):
        chunks[6]


def test_it_is_equal_to_lists_and_others_of_its_kind(chunks: ChunkList) -> None:
    """In both directions, inside torch's dataclasses too."""
    assert chunks == EXPECTED
    assert chunks != EXPECTED[:5]
    properties = TensorProperties(dtype=torch.float32)
    assert TensorStorageMetadata(properties, torch.Size([10, 5]), EXPECTED) == (
        TensorStorageMetadata(properties, torch.Size([10, 5]), chunks)  # type: ignore[arg-type]
    )


def test_copies_hold_the_same(chunks: ChunkList) -> None:
    """Pickling, as DCP does with metadata, keeps what it holds."""
    assert pickle.loads(pickle.dumps(chunks)) == EXPECTED


def test_a_regular_sharding_travels_in_few_bytes() -> None:
    """A million chunks are not written out."""
    cuts = (range(0, 1 << 23, 8),)
    boxes = Grid(cuts, (1 << 23,))
    many = ChunkList(TensorInfo(fqn="w", dtype="float32", shape=(1 << 23,), boxes=boxes))
    assert len(many) == 1 << 20
    assert len(pickle.dumps(many)) < 1000
    assert many[-1] == chunk(((1 << 23) - 8, 8))
