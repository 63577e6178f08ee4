"""Lists of chunks that are made when asked for behave as torch's lists do."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path

import dcp_cases
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage import CheckpointStorageReader
from ckpt_storage.format.boxes import Box, Grid, GridBoxes
from ckpt_storage.loads.loadplanner import ChunkList
from ckpt_storage.source.model import TensorInfo


def chunk(*pairs: tuple[int, int]) -> ChunkStorageMetadata:
    """Return a chunk from (offset, size) of each dimension."""
    return ChunkStorageMetadata(torch.Size(a for a, _ in pairs), torch.Size(b for _, b in pairs))


EXPECTED = [chunk((a, s), (b, t)) for (a, s), (b, t) in itertools.product(
    [(0, 4), (4, 4), (8, 2)], [(0, 3), (3, 2)]
)]  # fmt: skip
GRID = GridBoxes(Grid((range(0, 12, 4), (0, 3)), range(6)), (10, 5))
LISTED = [Box(tuple(c.offsets), tuple(c.sizes)) for c in EXPECTED]


@pytest.fixture(params=["grid", "list"])
def chunks(request: pytest.FixtureRequest) -> ChunkList:
    """The same six chunks, as cells of a grid and as a list of boxes."""
    boxes = GRID if request.param == "grid" else LISTED
    return ChunkList(TensorInfo(fqn="w", dtype="float32", shape=(10, 5), boxes=boxes))


def test_it_reads_as_the_list_it_stands_for(chunks: ChunkList) -> None:
    """Length, order, positions from either end, slices, truth, search and sums."""
    assert len(chunks) == 6
    assert chunks
    assert list(chunks) == EXPECTED
    assert [chunks[at] for at in range(-6, 6)] == EXPECTED * 2
    assert chunks[1:5:2] == EXPECTED[1:5:2]
    assert chunks.index(EXPECTED[3]) == 3
    assert EXPECTED[5] in chunks
    assert list(reversed(chunks)) == EXPECTED[::-1]
    starts = [c.offsets[0] for c in sorted(chunks, key=lambda c: -c.offsets[0])]
    assert starts == [8, 8, 4, 4, 0, 0]
    assert chunks + EXPECTED == EXPECTED + chunks == EXPECTED * 2
    assert list(itertools.chain(chunks, EXPECTED)) == EXPECTED * 2
    assert chunks.copy() == EXPECTED
    assert repr(chunks) == repr(EXPECTED)
    with pytest.raises(IndexError):
        chunks[6]
    with pytest.raises(IndexError):
        chunks[-7]


def test_it_is_equal_to_lists_and_others_of_its_kind(chunks: ChunkList) -> None:
    """In both directions, inside torch's dataclasses too."""
    assert chunks == EXPECTED
    assert chunks == EXPECTED
    assert chunks != EXPECTED[:5]
    assert EXPECTED[:5] != chunks
    listed = ChunkList(TensorInfo(fqn="w", dtype="float32", shape=(10, 5), boxes=LISTED))
    assert chunks == listed
    assert listed == chunks
    properties = TensorProperties(dtype=torch.float32)
    assert TensorStorageMetadata(properties, torch.Size([10, 5]), EXPECTED) == (
        TensorStorageMetadata(properties, torch.Size([10, 5]), chunks)  # type: ignore[arg-type]
    )


def test_copies_hold_the_same(chunks: ChunkList) -> None:
    """Pickling, as DCP does with metadata, and deep copies keep what it holds."""
    assert pickle.loads(pickle.dumps(chunks)) == EXPECTED
    assert copy.deepcopy(chunks) == EXPECTED


def test_a_regular_sharding_travels_in_few_bytes() -> None:
    """A million chunks are not written out."""
    cuts = (range(0, 1 << 23, 8),)
    boxes = GridBoxes(Grid(cuts, range(1 << 20)), (1 << 23,))
    many = ChunkList(TensorInfo(fqn="w", dtype="float32", shape=(1 << 23,), boxes=boxes))
    assert len(many) == 1 << 20
    assert len(pickle.dumps(many)) < 1000
    assert many[-1] == chunk(((1 << 23) - 8, 8))


def test_our_reader_gives_what_stock_metadata_says(tmp_path: Path) -> None:
    """Sizes, dtypes and chunks are those of `.metadata`."""
    state = {"a": torch.arange(12.0).reshape(3, 4), "n": {"b": torch.tensor(3)}, "step": 1}
    dcp_cases.save(state, tmp_path / "run")
    ours = CheckpointStorageReader(tmp_path / "run").read_metadata()
    stock = torch.distributed.checkpoint.FileSystemReader(tmp_path / "run").read_metadata()
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for fqn, theirs in stock.state_dict_metadata.items():
        found = ours.state_dict_metadata[fqn]
        if isinstance(theirs, TensorStorageMetadata):
            assert isinstance(found, TensorStorageMetadata)
            assert (found.size, found.chunks) == (theirs.size, theirs.chunks)
            assert found.properties.dtype == theirs.properties.dtype
    assert ours.planner_data == stock.planner_data
