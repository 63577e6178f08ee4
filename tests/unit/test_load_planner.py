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
from report_tools import Written, reports_of
from test_assemble import cuts, tilings
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import ckpt_storage
from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.dcp.border import FoldedPlan
from ckpt_storage.format.boxes import Box, Grid
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.loads.loadplanner import ChunkList, OwnChunksLoadPlanner
from ckpt_storage.testing.ranks import RankPool

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
W = ("w", (4,), [((0,), (4,))])


class Shard(torch.Tensor):
    """A tensor of which this rank holds some chunks, as torch's protocol for such has it."""

    held: Sequence[Chunk] = ()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # torch's
        return [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in self.held]


def shard(shape: tuple[int, ...], held: Sequence[Chunk]) -> Shard:
    """Return a target of `shape` that holds these chunks."""
    target = torch.zeros(shape).as_subclass(Shard)
    target.held = held
    return target


def metadata_of(*tensors: tuple[str, tuple[int, ...], Sequence[Chunk]], lazy: bool) -> Metadata:
    """Return metadata with these tensors and a blob, as lists of ours or of torch's."""
    ranks = [[Written(fqn, *chunk) for fqn, _, chunks in tensors for chunk in chunks]]
    shapes = {fqn: shape for fqn, shape, _ in tensors}
    plan = Planned(tensors=shapes, blobs=frozenset(), planner_data=None)
    state: dict[str, Any] = {"step": BytesStorageMetadata()}
    for fqn, record in assemble(reports_of(ranks), plan).tensors.items():
        chunks = ChunkList(record)
        state[fqn] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(record.shape),
            chunks=chunks if lazy else list(chunks),  # type: ignore[arg-type]
        )
    return Metadata(state_dict_metadata=state, planner_data={})


def spelt(plan: LoadPlan) -> list[str]:
    """Return items in an order of their own, without hints."""
    return sorted(
        repr(
            (
                item.type,
                item.dest_index.fqn,
                item.dest_index.offset,
                item.dest_offsets,
                item.storage_index.fqn,
                item.storage_index.offset,
                item.storage_offsets,
                item.lengths,
            )
        )
        for item in plan.items
        if 0 not in item.lengths or item.type.name == "BYTE_IO"
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


def load_in_many_ways(rank: int, path: str) -> list[tuple[str, str, int | None]]:
    """Load with planners on both ranks; then with one, and with a target that has no memory."""
    dropping = dcp_cases.planner(DefaultLoadPlanner, create_global_plan=drop)
    doors: list[Any] = [ckpt_storage.load, dcp_cases.load]
    for load in doors:
        target = {"w": torch.zeros(4), f"own.{rank}": torch.zeros(3)}
        load(target, path, planner=DefaultLoadPlanner() if rank else dropping)
        assert torch.equal(target["w"], torch.arange(4.0))
        assert target[f"own.{rank}"].tolist() == [1.0 - rank] * 3
    told = []
    freed = torch.zeros(4)
    if rank == 1:
        freed.untyped_storage().resize_(0)
    for value, planner in ((torch.zeros(4), DefaultLoadPlanner() if rank else None), (freed, None)):
        with pytest.raises(ckpt_storage.CheckpointError) as caught:
            ckpt_storage.load({"w": value}, path, planner=planner)
        told.append((type(caught.value).__name__, str(caught.value), caught.value.rank))
    return told


def test_ranks_load_by_their_planners(ranks: RankPool, tmp_path: Path) -> None:
    """The coordinator's decides for all; a planner of one rank alone, or a failure, all hear of."""
    state = {"w": torch.arange(4.0), "own.0": torch.ones(3), "own.1": torch.ones(3)}
    ckpt_storage.save(state, tmp_path / "model")
    told = ranks.run(load_in_many_ways, str(tmp_path / "model"), world_size=2)
    for (unlike, text, _), _ in told:
        assert unlike == "RankMismatchError"
        assert "the default one" in text
    failed = [(kind, rank) for _, (kind, _, rank) in told]
    assert failed == [("RankFailedError", 1), ("InvalidInputError", 1)]


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
    return ChunkList(TensorRecord(dtype="float32", shape=(10, 5), boxes=boxes))


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
    """In both directions, inside torch's dataclasses too, and after a pickle, as DCP makes it."""
    assert chunks == EXPECTED == pickle.loads(pickle.dumps(chunks))
    assert chunks != EXPECTED[:5]
    properties = TensorProperties(dtype=torch.float32)
    assert TensorStorageMetadata(properties, torch.Size([10, 5]), EXPECTED) == (
        TensorStorageMetadata(properties, torch.Size([10, 5]), chunks)  # type: ignore[arg-type]
    )


def test_a_regular_sharding_travels_in_few_bytes() -> None:
    """A million chunks are not written out."""
    cuts = (range(0, 1 << 23, 8),)
    boxes = Grid(cuts, (1 << 23,))
    many = ChunkList(TensorRecord(dtype="float32", shape=(1 << 23,), boxes=boxes))
    assert len(many) == 1 << 20
    assert len(pickle.dumps(many)) < 1000
    assert many[-1] == chunk(((1 << 23) - 8, 8))


def _item(fqn: str) -> ReadItem:
    index, zeros = MetadataIndex(fqn, [0]), torch.Size([0])
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size([4]))


def _travelled(plan: LoadPlan) -> Any:
    return pickle.loads(pickle.dumps(plan))


def test_a_plan_that_is_passed_on_comes_back_unread() -> None:
    """A coordinator that only passes it on unpickles no item; nothing is lost on the way."""
    sent = FoldedPlan([_item("a"), _item("b")], "hello", {"of": "planner"})
    arrived = _travelled(sent)
    assert "items" not in vars(arrived)
    back = sent.unless_changed(_travelled(arrived))
    assert back.items is sent.items
    assert (back.storage_data, back.planner_data) == ("hello", {"of": "planner"})
    assert arrived.items == sent.items
    with pytest.raises(AttributeError):
        _ = arrived.other
