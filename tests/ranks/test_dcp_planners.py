"""Planners of a user's own: what they may do, and what happens when they do it wrong."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, planner, raised, raw_bytes, resolving, same, seeded, zeros_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
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

Planned = tuple[list[SavePlan], Metadata]


def losing(fqn: str, first_rank: int = 0) -> Any:
    """Return a planner that plans everything and then leaves a value out, from a rank on."""

    def lose(plan: Callable[..., Planned], all_plans: list[SavePlan]) -> Planned:
        plans, metadata = plan(all_plans)
        kept = [[item for item in each.items if item.index.fqn != fqn] for each in plans]
        less = [replace(each, items=items) for each, items in zip(plans, kept, strict=True)]
        return [*plans[:first_rank], *less[first_rank:]], metadata

    return planner(create_global_plan=lose)


def save_error(own: Any, path: Path) -> BaseException:
    """Save with a planner; return what one rank raised, and assert that nothing committed."""
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.save(dict(STATE), path, planner=own)
    (error,) = failures_of(caught.value).values()
    assert list_checkpoints(str(path.parent)) == []
    return error


def to_bfloat16(item: WriteItem, value: Any) -> Any:
    """Convert tensors, as a planner does that saves memory."""
    return value if item.type is WriteItemType.BYTE_IO else value.to(torch.bfloat16)


def turned(item: WriteItem, value: Any) -> Any:
    """Turn tensors and give them history; leave streams somewhere in the middle."""
    if item.type is WriteItemType.BYTE_IO:
        value.seek(5)
        return value
    return value.t().contiguous().t().requires_grad_() if value.ndim == 2 else value


def test_a_planner_may_convert_and_give_views_and_streams_at_any_position(tmp_path: Path) -> None:
    """What is stored, and what the metadata tells every reader, is what the planner gave."""
    cast, views = tmp_path / "cast", tmp_path / "views"
    dcp_cases.save(dict(STATE), cast, planner=resolving(to_bfloat16))
    expected = {"w": seeded(1, 40, 30).bfloat16(), "v": seeded(2, 7).bfloat16(), "step": 3}
    dcp_cases.assert_holds(cast, expected)
    entry: Any = dcp.FileSystemReader(cast).read_metadata().state_dict_metadata["w"]
    assert entry.properties.dtype is torch.bfloat16
    dcp_cases.save(dict(STATE), views, planner=resolving(turned))
    dcp_cases.assert_holds(views, STATE)


def test_a_planner_that_gives_the_wrong_thing_is_told_what(tmp_path: Path) -> None:
    """The error names the value and what it should have been; nothing commits."""
    wrong: list[tuple[str, Callable[[Any], Any], str]] = [
        ("w", lambda value: value[1:], "w has shape [39, 30]; the plan says [40, 30]."),
        ("w", lambda value: value.tolist(), "The planner gave list for the tensor w."),
        ("step", lambda value: value.getvalue(), "The planner gave bytes for the blob step."),
    ]
    for fqn, change, text in wrong:

        def resolve(item: WriteItem, value: Any, fqn: str = fqn, change: Any = change) -> Any:
            return change(value) if item.index.fqn == fqn else value

        error = save_error(resolving(resolve), tmp_path / "run")
        assert isinstance(error, InvalidInputError)
        assert text in str(error)
        assert error.rank == 0
        assert not list(tmp_path.rglob("*.distcp"))


def test_a_value_that_no_rank_wrote_is_found_before_the_commit(tmp_path: Path) -> None:
    """What the plan promises and nobody writes is an error that names it; nothing commits."""
    for fqn in ("w", "step"):
        error = save_error(losing(fqn), tmp_path / "run")
        assert isinstance(error, IntegrityError)
        assert error.fqn == fqn
        assert "Nothing was committed." in str(error)


def save_replicas(_rank: int, path: Path) -> None:
    """Save replicated values twice on every rank, without deduplication."""

    def replicate(plan: Callable[..., Planned], plans: list[SavePlan]) -> Planned:
        return [replace(each, items=each.items * 2) for each in plans], plan(plans)[1]

    dcp_cases.save(dict(STATE), path, planner=planner(create_global_plan=replicate))


def test_replicas_count_once(ranks: RankPool, tmp_path: Path) -> None:
    """A value that lies twice in the files of three ranks loads from one of them."""
    ranks.run(save_replicas, tmp_path, world_size=3)
    files = list(tmp_path.rglob("*.distcp"))
    assert sum(file.read_bytes().count(raw_bytes(seeded(1, 40, 30))) for file in files) == 6
    dcp_cases.assert_holds(tmp_path, STATE)
    assert verify(str(tmp_path)).problems == []


def save_flawed(rank: int, path: Path, flaw: str) -> None:
    """Save rows of which one rank's are not written, or are converted by one rank alone."""
    mesh = init_device_mesh("cpu", (3,))
    own = losing("rows", 2) if flaw == "gap" else resolving(to_bfloat16) if rank == 1 else None
    state = {"rows": distribute_tensor(seeded(1, 9, 4), mesh, [Shard(0)])}
    dcp_cases.save(state, path, planner=own)


@pytest.mark.parametrize(
    ("flaw", "text"),
    [
        ("gap", "leave a gap at"),
        ("dtypes", "Rank 1 wrote rows as bfloat16; others as float32."),
    ],
)
def test_shards_that_make_no_whole_tensor_are_found_before_the_commit(
    ranks: RankPool, tmp_path: Path, flaw: str, text: str
) -> None:
    """A missing shard, or one of another dtype, is an error on all ranks; nothing commits."""
    errors = raised(ranks, save_flawed, tmp_path / "run", flaw, world_size=3)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, IntegrityError)
        assert text in str(error)
        assert error.fqn == "rows"
    assert list_checkpoints(str(tmp_path)) == []


def test_a_state_that_is_not_flattened_survives(tmp_path: Path) -> None:
    """With `flatten_state_dict=False` nested values are blobs, tensors inside included."""
    state: dict[str, Any] = {"w": seeded(1, 4), "nested": {"v": seeded(2, 3), "n": 1}}
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp_cases.save(dict(state), tmp_path, planner=flat)
    target: dict[str, Any] = {"w": torch.zeros(4), "nested": None}
    dcp_cases.load(target, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert same(target["w"], state["w"])


def test_a_load_planner_gets_its_own_tensor_back_filled(tmp_path: Path) -> None:
    """What `resolve_tensor` gave is what `commit_tensor` gets, with the values in it."""
    taken: dict[str, torch.Tensor] = {}

    def scratch(_own: Any, item: ReadItem, _tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(item.lengths, dtype=torch.float64)

    def take(_own: Any, item: ReadItem, tensor: torch.Tensor) -> None:
        taken[item.dest_index.fqn] = tensor.clone()

    dcp_cases.save(dict(STATE), tmp_path)
    own = planner(dcp.DefaultLoadPlanner, transform_tensor=scratch, commit_tensor=take)
    dcp_cases.load(zeros_like(STATE), tmp_path, planner=own)
    assert same(taken["w"], seeded(1, 40, 30).double())
    assert same(taken["v"], seeded(2, 7).double())


class UnpicklableError(Exception):
    """An exception that another process cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def failing(*_: Any) -> NoReturn:
    """Fail."""
    raise UnpicklableError("503 ", "Slow Down")


def save_failing_on_rank_1(rank: int, path: Path) -> dict[int, BaseException]:
    """Save with a planner that fails on rank 1 while it writes; return what this rank is told."""
    own = resolving(failing) if rank else None
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.save(STATE | {f"own-{rank}": rank}, path, planner=own)
    return failures_of(caught.value)


def test_an_exception_that_does_not_pickle_reaches_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It is replaced by one of ours with its type and text; no rank hangs, nothing commits."""
    for told in ranks.run(save_failing_on_rank_1, tmp_path / "run", world_size=2, timeout_s=25):
        assert list(told) == [1]
        assert isinstance(told[1], CheckpointError)
        assert "UnpicklableError: 503 Slow Down" in str(told[1])
    assert list_checkpoints(str(tmp_path)) == []
    assert not list(tmp_path.rglob("__1_0.distcp"))


@pytest.mark.parametrize(
    ("steps", "kind", "text"),
    [
        (
            {"transform_tensor": lambda _, item, __: torch.empty(item.lengths[0] + 1)},
            InvalidInputError,
            "The planner gave a target of shape [8] for [7]",
        ),
        ({"commit_tensor": failing}, CheckpointError, "UnpicklableError: 503 Slow Down"),
    ],
    ids=["shape", "commit"],
)
def test_a_load_planner_that_errs_is_told_what(
    tmp_path: Path, steps: dict[str, Any], kind: type[CheckpointError], text: str
) -> None:
    """Errors of load planners reach all ranks as what they are, or as text where they cannot."""
    dcp_cases.save({"v": STATE["v"]}, tmp_path)
    own = planner(dcp.DefaultLoadPlanner, **steps)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load({"v": torch.zeros(7)}, tmp_path, planner=own)
    (error,) = failures_of(caught.value).values()
    assert type(error) is kind
    assert text in str(error)


class OwnBlob(dcp.DefaultLoadPlanner):
    """A load planner that reads blobs in a format of its own."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the bytes as they are."""
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_blobs_in_a_format_of_ones_own_need_trust(tmp_path: Path) -> None:
    """Streams that are no torch.save file reach their planner with `unsafe_pickle=True`."""

    def blob(_own: Any, item: WriteItem, value: Any) -> Any:
        return io.BytesIO(b"own format") if item.type is WriteItemType.BYTE_IO else value

    dcp_cases.save(dict(STATE), tmp_path, planner=planner(transform_object=blob))
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
    elsewhere = planner(dcp.DefaultLoadPlanner, lookup_tensor=lambda own, index: own(index).clone())
    dcp_cases.save({"w": torch.full((2,), 4.0)}, tmp_path / "half", planner=Halving())
    for own in (elsewhere, Elsewhere()):
        dcp_cases.load(target, tmp_path / "half", planner=own)
        assert target["w"].tolist() == [0, 0]
    dcp_cases.load(target, tmp_path / "half")
    assert target["w"].tolist() == [2, 2]
    patched = planner(lookup_object=lambda _, __: torch.full((2,), 7.0))
    dcp_cases.save({"w": torch.ones(2)}, tmp_path / "patched", planner=patched)
    dcp_cases.load(target, tmp_path / "patched")
    assert target["w"].tolist() == [7, 7]
