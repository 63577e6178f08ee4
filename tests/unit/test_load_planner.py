"""The front doors' load planner plans what torch's does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_tools import Written, reports_of
from test_assemble import cuts, tilings
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
from ckpt_storage.commit.assembly import assemble
from ckpt_storage.commit.report import Planned
from ckpt_storage.format.boxes import GridBoxes
from ckpt_storage.loads.loadplanner import ChunkList, OwnChunksLoadPlanner, _Cuts
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.testing.ranks import RankPool

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


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
        boxes = [box for box, _ in record.boxes()]
        info = TensorInfo(
            fqn=fqn,
            dtype="float32",
            shape=record.shape,
            boxes=GridBoxes(record.grid, record.shape) if record.grid else boxes,
        )
        chunks = ChunkList(info)
        state[fqn] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(record.shape),
            chunks=chunks if lazy else list(chunks),  # type: ignore[arg-type]
        )
    return Metadata(state_dict_metadata=state, planner_data={})


def spelt(plan: LoadPlan) -> list[str]:
    """Return items in an order of their own, without hints."""
    return sorted(
        repr((
            item.type, item.dest_index.fqn, item.dest_index.offset, item.dest_offsets,
            item.storage_index.fqn, item.storage_index.offset, item.storage_offsets, item.lengths,
        ))
        for item in plan.items
        if 0 not in item.lengths or item.type.name == "BYTE_IO"
    )  # fmt: skip


def both(state: dict[str, Any], *tensors: Any, **options: Any) -> list[Any]:
    """Return what both planners plan, or the error that they raise."""
    found: list[Any] = []
    for kind in (OwnChunksLoadPlanner, DefaultLoadPlanner):
        planner = kind(**options)
        metadata = metadata_of(*tensors, lazy=kind is OwnChunksLoadPlanner)
        planner.set_up_planner(dict(state), metadata, is_coordinator=True)
        try:
            found.append(spelt(planner.create_local_plan()))
        except (RuntimeError, ValueError) as error:
            found.append((type(error), str(error)))
    return found


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
    tensors = [("whole", shape, chunks), ("part", shape, chunks)]
    ours, theirs = both(state, *tensors)
    assert ours == theirs
    assert sum("'whole'" in item for item in ours) == 2 * len(chunks) // 2


def own_chunks(_rank: int) -> tuple[list[Any], list[Any]]:
    """Return what we and torch say that this rank holds, if torch takes placements for equal."""
    mesh = init_device_mesh("cpu", (2,))
    ours: list[Any] = []
    theirs: list[Any] = []
    cuts = _Cuts()
    with pytest.MonkeyPatch.context() as patched:
        for kind in (TorchShard, _StridedShard):
            patched.setattr(kind, "__eq__", lambda a, b: a.dim == getattr(b, "dim", None))
            patched.setattr(kind, "__hash__", lambda a: a.dim)
        for placement in (TorchShard(0), _StridedShard(0, split_factor=2)):
            value = DTensor.from_local(torch.zeros(4, 2), mesh, [placement], run_check=False)
            ours.append(cuts.own(value)[0])
            theirs.append(_create_chunk_list(value))
    return ours, theirs


def test_what_a_rank_holds_does_not_depend_on_how_torch_compares_placements(
    ranks: RankPool,
) -> None:
    """A strided shard is not taken for the plain one that was looked at before it."""
    for ours, theirs in ranks.run(own_chunks, world_size=2):
        assert ours == theirs


def test_targets_without_elements_read_nothing() -> None:
    """Neither empty tensors nor empty shards."""
    state = {"e": torch.zeros(0, 3), "w": shard((4,), [((4,), (0,))])}
    ours, theirs = both(state, ("e", (0, 3), [((0, 0), (0, 3))]), ("w", (4,), [((0,), (4,))]))
    assert ours == theirs == []


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("flatten", [True, False])
def test_missing_keys_are_treated_alike(*, partial: bool, flatten: bool) -> None:
    """Left out in a partial load, else the same error."""
    state: dict[str, Any] = {"w": torch.zeros(4), "new": torch.zeros(2), "blob": 3}
    ours, theirs = both(
        state,
        ("w", (4,), [((0,), (4,))]),
        ("other", (1,), [((0,), (1,))]),
        allow_partial_load=partial,
        flatten_state_dict=flatten,
    )
    assert ours == theirs
    assert isinstance(ours, list) is partial


@pytest.mark.parametrize("target", [torch.zeros(5), torch.zeros(4, 1), shard((3,), [])])
def test_another_size_is_refused_alike(target: torch.Tensor) -> None:
    """With the same words."""
    ours, theirs = both({"w": target}, ("w", (4,), [((0,), (4,))]))
    assert ours == theirs
    assert ours[0] is ValueError


def test_a_value_that_was_a_tensor_is_refused_alike() -> None:
    """And so is a tensor that was a value."""
    ours, theirs = both({"w": 3}, ("w", (4,), [((0,), (4,))]))
    assert ours == theirs
    assert "expected BytesStorageMetadata" in ours[1]
    ours, theirs = both({"step": torch.zeros(2)}, ("w", (4,), [((0,), (4,))]))
    assert ours == theirs


def test_names_of_torch_2_3_are_followed() -> None:
    """A checkpoint that kept lists whole is loaded by the names it has."""
    state = {"opt": [{"a": torch.zeros(4)}, {"a": torch.zeros(4)}]}
    tensors = [(f"opt.{n}.a", (4,), [((0,), (4,))]) for n in range(2)]
    ours, theirs = both(state, *tensors)
    assert ours == theirs


class Noting(dict[str, Any]):
    """A state that notes which version torch's global names while it is looked through."""

    seen: ClassVar[set[str | None]] = set()

    def items(self) -> Any:
        """Note it."""
        self.seen.add(_version._derived_version)  # noqa: SLF001  # what loads of other threads read
        return super().items()


def test_old_names_are_looked_for_without_torchs_global(tmp_path: Path) -> None:
    """A partial load, which may be one of an old checkpoint, disturbs no other thread's."""
    ckpt_storage.save({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, tmp_path / "model")
    target = {"n": Noting(b=torch.zeros(2))}
    ckpt_storage.load(target, tmp_path / "model")
    assert target["n"]["b"].tolist() == [1.0, 1.0]
    assert Noting.seen == {None}


def test_nested_state_is_flattened_alike() -> None:
    """Paths become names as torch makes them."""
    state = {"model": {"a": torch.zeros(4), "deep": {"b": torch.zeros(2, 2)}}, "step": 1}
    ours, theirs = both(
        state, ("model.a", (4,), [((0,), (4,))]), ("model.deep.b", (2, 2), [((0, 0), (2, 2))])
    )
    assert ours == theirs
    assert len(ours) == 3


class Looking(DefaultLoadPlanner):
    """Notes what the ranks want."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[set[str]] = []

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Note them."""
        self.names = [{item.dest_index.fqn for item in plan.items} for plan in global_plan]
        return super().create_global_plan(global_plan)


def load_with(rank: int, path: str, givers: Sequence[int]) -> tuple[bool, list[set[str]] | None]:
    """Load on ranks of which some give a planner; tell whether all came, and what it saw."""
    target: dict[str, Any] = {"w": torch.zeros(6, 4), "step": 0, f"own.{rank}": torch.zeros(3)}
    planner = Looking() if rank in givers else None
    ckpt_storage.load(target, path, planner=planner)
    is_right = (
        torch.equal(target["w"], torch.arange(24.0).reshape(6, 4))
        and target["step"] == 7
        and torch.equal(target[f"own.{rank}"], torch.full((3,), float(rank)))
    )
    return is_right, None if planner is None else planner.names


@pytest.mark.parametrize("givers", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_some_ranks_give_a_planner(
    ranks: RankPool, tmp_path: Path, givers: tuple[int, ...]
) -> None:
    """All ranks are filled, and a planner of the coordinator sees what all of them want."""
    state = {"w": torch.arange(24.0).reshape(6, 4), "step": 7}
    state |= {f"own.{rank}": torch.full((3,), float(rank)) for rank in range(3)}
    ckpt_storage.save(state, tmp_path / "model")
    told = ranks.run(load_with, str(tmp_path / "model"), givers, world_size=3)
    assert [is_right for is_right, _ in told] == [True] * 3
    seen = [{"w", "step", f"own.{rank}"} for rank in range(3)]
    wanted = [None if rank not in givers else [] if rank else seen for rank in range(3)]
    assert [names for _, names in told] == wanted


def load_without_memory(rank: int, path: str) -> tuple[str, int | None]:
    """Load on ranks of which the second has a target without memory; return the error."""
    target = torch.zeros(6, 4)
    if rank == 1:
        target.untyped_storage().resize_(0)
    with pytest.raises(ckpt_storage.CheckpointError) as caught:
        ckpt_storage.load({"w": target}, path)
    return type(caught.value).__name__, caught.value.rank


def test_a_rank_whose_reads_cannot_be_planned_is_named_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The rank that cannot be filled ends the load of all."""
    ckpt_storage.save({"w": torch.arange(24.0).reshape(6, 4)}, tmp_path / "model")
    told = ranks.run(load_without_memory, str(tmp_path / "model"), world_size=2)
    assert told == [("RankFailedError", 1), ("InvalidInputError", 1)]


class Dropping(DefaultLoadPlanner):
    """Keeps the last rank from reading what is its own."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Drop the item from its plan."""
        last = global_plan[-1]
        last.items = [item for item in last.items if not item.dest_index.fqn.startswith("own.")]
        return global_plan


def load_dropping(rank: int, path: str) -> list[float]:
    """Load; the coordinator's planner is told of nothing before all plans are there."""
    target = {"w": torch.zeros(4), f"own.{rank}": torch.zeros(3)}
    ckpt_storage.load(target, path, planner=None if rank else Dropping())
    assert torch.equal(target["w"], torch.arange(4.0))
    return target[f"own.{rank}"].tolist()


def test_a_planner_of_the_coordinator_decides_what_others_read(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It may take items away from ranks that gave no planner."""
    state = {"w": torch.arange(4.0), "own.0": torch.ones(3), "own.1": torch.ones(3)}
    ckpt_storage.save(state, tmp_path / "model")
    told = ranks.run(load_dropping, str(tmp_path / "model"), world_size=2)
    assert told == [[1.0] * 3, [0.0] * 3]
