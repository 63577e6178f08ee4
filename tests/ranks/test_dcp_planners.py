"""Planners of a user's own: what they may do, and what happens when they do it wrong."""

# ruff: noqa: ARG002  # planners override methods of torch and need not all they are given

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, raw_bytes, same, seeded, zeros_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    list_checkpoints,
    verify,
)
from ckpt_storage.testing.ranks import RankPool

STATE = {"w": seeded(1, 40, 30), "v": seeded(2, 7), "step": 3}


class Resolving(dcp.DefaultSavePlanner):
    """A planner that passes what it resolved through a function."""

    def __init__(self, change: Callable[[WriteItem, Any], Any]) -> None:
        super().__init__()
        self.change = change

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Resolve, and change."""
        return self.change(write_item, super().resolve_data(write_item))


def save_error(planner: SavePlanner, path: Path) -> BaseException:
    """Save with a planner; return what one rank raised, and assert that nothing committed."""
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.save(dict(STATE), path, planner=planner)
    (error,) = failures_of(caught.value).values()
    assert list_checkpoints(str(path.parent)) == []
    return error


def to_bfloat16(item: WriteItem, value: Any) -> Any:
    """Convert tensors, as a planner does that saves memory."""
    return value if item.type is WriteItemType.BYTE_IO else value.to(torch.bfloat16)


def test_a_planner_may_convert_while_data_are_written(tmp_path: Path) -> None:
    """What is stored, and what the metadata tells every reader, is what the planner gave."""
    dcp_cases.save(dict(STATE), tmp_path, planner=Resolving(to_bfloat16))
    expected = {"w": seeded(1, 40, 30).bfloat16(), "v": seeded(2, 7).bfloat16(), "step": 3}
    for load in (dcp_cases.load, dcp_cases.load_stock):
        target = zeros_like(expected)
        load(target, tmp_path)
        assert same(target, expected)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    entry: Any = metadata.state_dict_metadata["w"]
    assert entry.properties.dtype is torch.bfloat16


def test_a_planner_may_give_views_and_streams_at_any_position(tmp_path: Path) -> None:
    """Turned tensors with history, and streams that were read or written before, are stored."""

    def change(item: WriteItem, value: Any) -> Any:
        if item.type is WriteItemType.BYTE_IO:
            value.seek(5)
            return value
        return value.t().contiguous().t().requires_grad_() if value.ndim == 2 else value

    dcp_cases.save(dict(STATE), tmp_path, planner=Resolving(change))
    target = zeros_like(STATE)
    dcp_cases.load(target, tmp_path)
    assert same(target, STATE)


WRONG: list[tuple[Callable[[WriteItem, Any], Any], str]] = [
    (
        lambda item, value: value[1:] if item.index.fqn == "w" else value,
        "w has shape [39, 30]; the plan says [40, 30].",
    ),
    (
        lambda item, value: value.tolist() if item.index.fqn == "w" else value,
        "The planner gave list for the tensor w.",
    ),
    (
        lambda item, value: value.getvalue() if item.index.fqn == "step" else value,
        "The planner gave bytes for the blob step.",
    ),
]


def test_a_planner_that_gives_the_wrong_thing_is_told_what(tmp_path: Path) -> None:
    """The error names the value and what it should have been; nothing commits."""
    for change, text in WRONG:
        error = save_error(Resolving(change), tmp_path / "run")
        assert isinstance(error, InvalidInputError)
        assert text in str(error)
        assert error.rank == 0
        assert not list(tmp_path.rglob("*.distcp"))


class Losing(dcp.DefaultSavePlanner):
    """A planner that plans everything and then leaves one value out of the ranks' plans."""

    def __init__(self, fqn: str) -> None:
        super().__init__()
        self.fqn = fqn

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan, and leave out."""
        plans, metadata = super().create_global_plan(all_plans)
        kept = [[item for item in plan.items if item.index.fqn != self.fqn] for plan in plans]
        return [
            dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)
        ], metadata


def test_a_value_that_no_rank_wrote_is_found_before_the_commit(tmp_path: Path) -> None:
    """What the plan promises and nobody writes is an error that names it; nothing commits."""
    for fqn in ("w", "step"):
        error = save_error(Losing(fqn), tmp_path / "run")
        assert isinstance(error, IntegrityError)
        assert error.fqn == fqn
        assert "Nothing was committed." in str(error)


class Replicating(dcp.DefaultSavePlanner):
    """A planner that lets every rank write its replica, twice."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan, and give every rank back what it planned itself."""
        _, metadata = super().create_global_plan(all_plans)
        return [dataclasses.replace(plan, items=plan.items * 2) for plan in all_plans], metadata


def save_replicas(_rank: int, path: Path) -> None:
    """Save replicated values without deduplication."""
    dcp_cases.save(dict(STATE), path, planner=Replicating())


def test_replicas_count_once(ranks: RankPool, tmp_path: Path) -> None:
    """A value that lies twice in the files of three ranks loads from one of them."""
    ranks.run(save_replicas, tmp_path, world_size=3)
    files = list(tmp_path.rglob("*.distcp"))
    assert sum(file.read_bytes().count(raw_bytes(seeded(1, 40, 30))) for file in files) == 6
    for load in (dcp_cases.load, dcp_cases.load_stock):
        target = zeros_like(STATE)
        load(target, tmp_path)
        assert same(target, STATE)
    assert verify(str(tmp_path)).problems == []


class RankLosing(Losing):
    """A planner that leaves out what one rank would write."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan, and leave the last rank's part of the value out."""
        plans, metadata = dcp.DefaultSavePlanner.create_global_plan(self, all_plans)
        kept = [item for item in plans[-1].items if item.index.fqn != self.fqn]
        return [*plans[:-1], dataclasses.replace(plans[-1], items=kept)], metadata


def sharded() -> dict[str, Any]:
    """Return a tensor cut into rows over all ranks."""
    return {"rows": distribute_tensor(seeded(1, 9, 4), init_device_mesh("cpu", (3,)), [Shard(0)])}


def save_with_a_gap(_rank: int, path: Path) -> None:
    """Save a sharded tensor of which one shard is not written."""
    dcp_cases.save(sharded(), path, planner=RankLosing("rows"))


def save_in_two_dtypes(rank: int, path: Path) -> None:
    """Save a sharded tensor that one rank converts and the others do not."""
    planner = Resolving(to_bfloat16) if rank == 1 else None
    dcp_cases.save(sharded(), path, planner=planner)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (save_with_a_gap, "leave a gap at"),
        (save_in_two_dtypes, "Rank 1 wrote rows as bfloat16; others as float32."),
    ],
)
def test_shards_that_make_no_whole_tensor_are_found_before_the_commit(
    ranks: RankPool, tmp_path: Path, job: Callable[[int, Path], None], text: str
) -> None:
    """A missing shard, or one of another dtype, is an error on all ranks; nothing commits."""
    for outcome in ranks.outcomes(job, tmp_path / "run", world_size=3, timeout_s=25):
        (error,) = failures_of(outcome.error).values()
        assert isinstance(error, IntegrityError)
        assert text in str(error)
        assert error.fqn == "rows"
    assert list_checkpoints(str(tmp_path)) == []


def test_a_state_that_is_not_flattened_survives(tmp_path: Path) -> None:
    """With `flatten_state_dict=False` nested values are blobs, tensors inside included."""
    state: dict[str, Any] = {"w": seeded(1, 4), "nested": {"v": seeded(2, 3), "n": 1}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp_cases.save(dict(state), tmp_path, planner=planner)
    target: dict[str, Any] = {"w": torch.zeros(4), "nested": None}
    dcp_cases.load(target, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert same(target["w"], state["w"])


class Scratch(dcp.DefaultLoadPlanner):
    """A load planner that has tensors read into scratch memory, and takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, torch.Tensor] = {}

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Give scratch memory of another dtype."""
        return torch.empty(read_item.lengths, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take the values."""
        self.taken[read_item.dest_index.fqn] = tensor.clone()


def test_a_load_planner_gets_its_own_tensor_back_filled(tmp_path: Path) -> None:
    """What `resolve_tensor` gave is what `commit_tensor` gets, with the values in it."""
    dcp_cases.save(dict(STATE), tmp_path)
    planner = Scratch()
    dcp_cases.load(zeros_like(STATE), tmp_path, planner=planner)
    assert same(planner.taken["w"], seeded(1, 40, 30).double())
    assert same(planner.taken["v"], seeded(2, 7).double())


class WrongTarget(dcp.DefaultLoadPlanner):
    """A load planner that gives targets of another shape."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Give one element more."""
        return torch.empty(read_item.lengths[0] + 1, *read_item.lengths[1:])


class UnpicklableError(Exception):
    """An exception that another process cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class FailingCommit(dcp.DefaultLoadPlanner):
    """A load planner that fails when it is handed a tensor."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Fail."""
        raise UnpicklableError("cannot take ", read_item.dest_index.fqn)


@pytest.mark.parametrize(
    ("planner", "kind", "text"),
    [
        (WrongTarget(), InvalidInputError, "The planner gave a target of shape [8] for [7]"),
        (FailingCommit(), CheckpointError, "UnpicklableError: cannot take "),
    ],
    ids=["shape", "commit"],
)
def test_a_load_planner_that_errs_is_told_what(
    tmp_path: Path, planner: LoadPlanner, kind: type[CheckpointError], text: str
) -> None:
    """Errors of load planners reach all ranks as what they are, or as text where they cannot."""
    dcp_cases.save({"v": STATE["v"]}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load({"v": torch.zeros(7)}, tmp_path, planner=planner)
    (error,) = failures_of(caught.value).values()
    assert type(error) is kind
    assert text in str(error)


class Blob(dcp.DefaultSavePlanner):
    """A planner that writes a stream of its own for every blob."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        """Give bytes that torch.save did not write."""
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(b"own format")
        return object


class OwnBlob(dcp.DefaultLoadPlanner):
    """A load planner that reads them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the bytes as they are."""
        self.state_dict[read_item.dest_index.fqn] = value.read()
        self.original_state_dict[read_item.dest_index.fqn] = self.state_dict["step"]


def test_blobs_in_a_format_of_ones_own_need_trust(tmp_path: Path) -> None:
    """Streams that are no torch.save file reach their planner with `unsafe_pickle=True`."""
    dcp_cases.save(dict(STATE), tmp_path, planner=Blob())
    target = zeros_like(STATE)
    with pytest.raises(CheckpointException, match="unsafe_pickle=True"):
        dcp_cases.load(dict(target), tmp_path, planner=OwnBlob())
    dcp_cases.load(target, tmp_path, planner=OwnBlob(), unsafe_pickle=True)
    assert target["step"] == b"own format"


class Halving(dcp.DefaultSavePlanner):
    """Gives other data than the state's by the one step that it overrides."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        """Return half of it."""
        return super().transform_object(write_item, object) / 2


class Elsewhere(dcp.DefaultLoadPlanner):
    """Loads into other memory than the state's."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return a tensor of its own."""
        return super().lookup_tensor(index).clone()


def test_planners_that_change_one_step_are_asked(tmp_path: Path) -> None:
    """Whether a class overrides it or an object does, for a save and for a load."""
    target = {"w": torch.zeros(2)}
    dcp_cases.save({"w": torch.full((2,), 4.0)}, tmp_path / "half", planner=Halving())
    dcp_cases.load(target, tmp_path / "half", planner=Elsewhere())
    assert target["w"].tolist() == [0, 0]
    dcp_cases.load(target, tmp_path / "half")
    assert target["w"].tolist() == [2, 2]
    patched = dcp.DefaultSavePlanner()
    patched.lookup_object = lambda _: torch.full((2,), 7.0)  # type: ignore[method-assign,assignment]
    dcp_cases.save({"w": torch.ones(2)}, tmp_path / "patched", planner=patched)
    dcp_cases.load(target, tmp_path / "patched")
    assert target["w"].tolist() == [7, 7]
