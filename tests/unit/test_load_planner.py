"""The front doors' load planner plans what torch's does; lists and plans are as torch's own."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from test_assemble import cuts, tilings
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

import ckpt_storage
from ckpt_storage.format.boxes import Box, Grid, find_grid
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.loads.loadplanner import ChunkList, OwnChunksLoadPlanner

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
W = ("w", (4,), [((0,), (4,))])


def shard(shape: tuple[int, ...], held: Sequence[Chunk]) -> torch.Tensor:
    return dcp_cases.tiled(torch.zeros(shape), [Box(*one) for one in held])


def metadata_of(*tensors: tuple[str, tuple[int, ...], Sequence[Chunk]], lazy: bool) -> Metadata:
    """Return metadata with these tensors and a blob, as lists of ours or of torch's."""
    state: dict[str, Any] = {"step": BytesStorageMetadata()}
    for fqn, shape, held in tensors:
        boxes = [Box(*one) for one in held]
        record = TensorRecord(dtype="float32", shape=shape, boxes=find_grid(shape, boxes) or boxes)
        chunks = ChunkList(record)
        state[fqn] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(record.shape),
            chunks=chunks if lazy else list(chunks),  # type: ignore[arg-type]
        )
    return Metadata(state_dict_metadata=state, planner_data={})


def spelt(plan: LoadPlan) -> list[str]:
    return sorted(
        repr((item.type, *places, item.dest_offsets, item.storage_offsets, item.lengths))
        for item in plan.items
        if 0 not in item.lengths or item.type.name == "BYTE_IO"
        for places in [[(i.fqn, i.offset) for i in (item.dest_index, item.storage_index)]]
    )


def planned(state: dict[str, Any], *tensors: Any, **options: Any) -> Any:
    """Return what both planners plan, or the error that they raise: the same."""
    found: list[Any] = []
    for kind in (OwnChunksLoadPlanner, DefaultLoadPlanner):
        planner = kind(**options)
        metadata = metadata_of(*tensors, lazy=kind is OwnChunksLoadPlanner)
        planner.set_up_planner(dict(state), metadata, is_coordinator=True)
        try:
            found.append(spelt(planner.create_local_plan()))
        except (RuntimeError, ValueError) as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]
    return found[0]


@settings(deadline=None)
@given(tilings(), st.data())
def test_the_same_reads_are_planned(
    tiling: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    """For every saved cover and every target sharding: whole, by rows, by columns, by boxes."""
    shape, chunks = tiling
    held: list[Chunk] = []
    for _ in range(data.draw(st.integers(0, 3))):
        pieces = [data.draw(cuts(size)) for size in shape]
        picks = [data.draw(st.sampled_from(piece)) for piece in pieces]
        held.append((tuple(a for a, _ in picks), tuple(b for _, b in picks)))
    state = {"whole": torch.zeros(shape), "part": shard(shape, held), "step": 3}
    items = planned(state, ("whole", shape, chunks), ("part", shape, chunks))
    assert sum("'whole'" in item for item in items) == len(chunks)


def test_odd_targets_are_planned_or_refused_as_torch_does() -> None:
    """Empty ones, nested ones, other sizes, other kinds of values, and names that are missing."""
    state: dict[str, Any] = {"e": torch.zeros(0, 3), "w": shard((4,), [((4,), (0,))])}
    assert planned(state, ("e", (0, 3), [((0, 0), (0, 3))]), W) == []
    state = {"model": {"a": torch.zeros(4), "deep": {"b": torch.zeros(2, 2)}}, "step": 1}
    a, b = ("model.a", *W[1:]), ("model.deep.b", (2, 2), [((0, 0), (2, 2))])
    assert len(planned(state, a, b)) == 3
    for target in (torch.zeros(5), torch.zeros(4, 1), shard((3,), [])):
        assert planned({"w": target}, W)[0] is ValueError
    assert "expected BytesStorageMetadata" in planned({"w": 3}, W)[1]
    planned({"step": torch.zeros(2)}, W)
    state = {"w": torch.zeros(4), "new": torch.zeros(2), "blob": 3}
    for flatten in (True, False):
        for partial in (True, False):
            options = {"allow_partial_load": partial, "flatten_state_dict": flatten}
            assert isinstance(planned(state, W, **options), list) is partial


def drop(create: Callable[..., list[LoadPlan]], plans: list[LoadPlan]) -> list[LoadPlan]:
    """Keep the last rank from reading what is its own."""
    last = plans[-1]
    last.items = [item for item in last.items if not item.dest_index.fqn.startswith("own.")]
    return create(plans)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    state = {"w": torch.arange(4.0), "own.0": torch.ones(3), "own.1": torch.ones(3)}
    ckpt_storage.save(state, tmp_path / "model")
    return tmp_path / "model"


@on_ranks()
def test_ranks_load_by_their_planners(rank: int, model: Path) -> None:
    """The coordinator's decides for all; a planner of one rank alone, or a failure, all hear of."""
    dropping = dcp_cases.planner(DefaultLoadPlanner, create_global_plan=drop)
    doors: list[Any] = [ckpt_storage.load, dcp_cases.load]
    for load in doors:
        target = {"w": torch.zeros(4), f"own.{rank}": torch.zeros(3)}
        load(target, model, planner=DefaultLoadPlanner() if rank else dropping)
        assert torch.equal(target["w"], torch.arange(4.0))
        assert target[f"own.{rank}"].tolist() == [1.0 - rank] * 3
    planner = DefaultLoadPlanner() if rank else None
    with pytest.raises(ckpt_storage.RankMismatchError, match="the default"):
        ckpt_storage.load({"w": torch.zeros(4)}, model, planner=planner)
    # One has no memory.
    value = dcp_cases.freed(4) if rank else torch.zeros(4)
    own = ckpt_storage.InvalidInputError if rank else ckpt_storage.RankFailedError
    with pytest.raises(own) as caught:
        ckpt_storage.load({"w": value}, model)
    assert caught.value.rank == 1


def chunk(*pairs: tuple[int, int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(a for a, _ in pairs), torch.Size(b for _, b in pairs))


GRID = Grid((range(0, 12, 4), (0, 3)), (10, 5))


@pytest.mark.parametrize("boxes", [GRID, list(GRID)], ids=["grid", "list"])
def test_chunks_read_as_the_list_that_they_stand_for(boxes: Sequence[Box]) -> None:
    """In all that lists do, equal to lists in both directions, and after a pickle, as DCP makes."""
    chunks: Any = ChunkList(TensorRecord(dtype="float32", shape=(10, 5), boxes=boxes))
    cells = itertools.product([(0, 4), (4, 4), (8, 2)], [(0, 3), (3, 2)])
    expected = list(itertools.starmap(chunk, cells))
    assert len(chunks) == 6
    assert [chunks[at] for at in range(-6, 6)] == expected * 2
    assert (chunks[1:5:2], list(reversed(chunks))) == (expected[1:5:2], expected[::-1])
    assert chunks.index(expected[3]) == 3
    assert expected[5] in chunks
    with pytest.raises(IndexError):
        chunks[6]
    assert chunks == expected == pickle.loads(pickle.dumps(chunks))
    assert chunks != expected[:5]
    kind, size = TensorProperties(dtype=torch.float32), torch.Size([10, 5])
    plain = TensorStorageMetadata(kind, size, expected)
    assert plain == TensorStorageMetadata(kind, size, chunks)


def test_a_regular_sharding_travels_in_few_bytes() -> None:
    """A million chunks are not written out."""
    boxes = Grid((range(0, 1 << 23, 8),), (1 << 23,))
    many = ChunkList(TensorRecord(dtype="float32", shape=(1 << 23,), boxes=boxes))
    assert len(many) == 1 << 20
    assert len(pickle.dumps(many)) < 1000
    assert many[-1] == chunk(((1 << 23) - 8, 8))
