"""Ranks agree before a byte is written, and say who differs where they do not."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, seeded, zeros_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import ckpt_storage
from ckpt_storage import (
    CheckpointError,
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
    RankMismatchError,
    list_checkpoints,
)
from ckpt_storage.store import Location
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.testing.ranks import RankPool


def state_of(step: int) -> dict[str, Any]:
    """Return a small state with values of single ranks and of all."""
    return {"w": seeded(step, 30, 20), "step": step}


def save_with(rank: int, places: list[str], options: list[dict[str, Any]]) -> None:
    """Save to this rank's place with this rank's options."""
    writer = CheckpointStorageWriter(places[rank], **options[rank])
    dcp.save(state_of(0), storage_writer=writer)


def mismatch_on_all_ranks(
    ranks: RankPool, places: list[str], options: list[dict[str, Any]]
) -> RankMismatchError:
    """Save on three ranks; assert that each is told by each of the mismatch; return that."""
    for outcome in ranks.outcomes(save_with, places, options, world_size=3, timeout_s=25):
        failures = failures_of(outcome.error)
        assert sorted(failures) == [0, 1, 2]
        for error in failures.values():
            assert isinstance(error, RankMismatchError)
            assert "Nothing was written." in str(error)
            assert (error.values, str(error)) == (failures[0].values, str(failures[0]))  # type: ignore[attr-defined]
    assert isinstance(error, RankMismatchError)
    return error


def test_regression_ranks_with_different_paths_all_raise(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks that were given different folders all raise, told who has which; none is created."""
    places = [str(tmp_path / name) for name in ("a", "a", "b")]
    error = mismatch_on_all_ranks(ranks, places, [{}] * 3)
    assert error.values == {f"file://{tmp_path}/a": [0, 1], f"file://{tmp_path}/b": [2]}
    assert f"'file://{tmp_path}/a': ranks 0-1; 'file://{tmp_path}/b': ranks 2" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_options_of_one_save_are_equal_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """All raise where they differ; threads, sizes, deadlines and spellings may."""
    unlike = {"overwrite": [False, True, False], "sync_files": [True, True, False]}
    for option, values in unlike.items():
        options: list[dict[str, Any]] = [{option: value} for value in values]
        error = mismatch_on_all_ranks(ranks, [str(tmp_path / "run")] * 3, options)
        assert f"Ranks disagree on {option}" in str(error)
        assert sorted(itertools.chain(*error.values.values())) == [0, 1, 2]
        assert list(tmp_path.iterdir()) == []
    options = [
        {"thread_count": 2},
        {"part_bytes": 1 << 20},
        {"timeout": 100, "memory_limit_bytes": 64 << 20},
    ]
    places = [f"{tmp_path}/run", f"file://{tmp_path}/run/", f"{tmp_path}/x/../run"]
    ranks.run(save_with, places, options, world_size=3)
    assert [info.name for info in list_checkpoints(str(tmp_path))] == ["run"]


OTHERS = {"shape": torch.ones(4), "dtype": torch.ones(3, dtype=torch.float16)}


def save_unlike(rank: int, path: Path) -> list[BaseException]:
    """Save a tensor on rank 0 and something else by its name on rank 1; return the errors."""
    told: list[BaseException] = []
    for other in OTHERS.values():
        state = {"same": torch.ones(2), "value": other if rank else torch.ones(3)}
        with pytest.raises(CheckpointException) as by_dcp:
            dcp.save(state, storage_writer=CheckpointStorageWriter(path))
        with pytest.raises(RankMismatchError) as by_ours:
            ckpt_storage.save(state, path)
        told += [*failures_of(by_dcp.value).values(), by_ours.value]
    return told


def test_unlike_values_by_one_name_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks raise, with the name and who holds what; no rank's tensor is dropped."""
    for errors in ranks.run(save_unlike, tmp_path, world_size=2):
        for error in errors:
            assert isinstance(error, RankMismatchError)
            assert "the name value: float32 [3]: ranks 0" in str(error)
            assert sorted(error.values.values()) == [[0], [1]]
    assert list_checkpoints(str(tmp_path)) == []


def save_with_other_version(rank: int, path: Path) -> None:
    """Save while rank 1 has another release of the package."""
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr("ckpt_storage.saves.options.__version__", "9.9")
        dcp_cases.save(state_of(0), path)


def test_ranks_with_different_releases_all_raise(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that runs another release of the package is named."""
    for outcome in ranks.outcomes(save_with_other_version, tmp_path / "run", world_size=2):
        for error in failures_of(outcome.error).values():
            assert isinstance(error, RankMismatchError)
            assert error.values == {ckpt_storage.__version__: [0], "9.9": [1]}


def save_with_stock_writer_on(rank: int, path: Path, stock_rank: int) -> None:
    """Save with torch's own writer, to a folder of its own, on one rank."""
    writer: Any = CheckpointStorageWriter(path / "ours")
    if rank == stock_rank:
        writer = dcp.FileSystemWriter(path / "stock")
    dcp.save(state_of(rank) | {f"own {rank}": rank}, storage_writer=writer)


@pytest.mark.parametrize(
    ("stock_rank", "who", "text"),
    [(1, 0, "Ranks [1] of 3 sent no word"), (0, 1, "got no save id")],
)
def test_another_writer_on_one_rank_is_refused_by_all(
    ranks: RankPool, tmp_path: Path, stock_rank: int, who: int, text: str
) -> None:
    """If a rank has no writer of ours nothing commits, and nothing of ours is created."""
    job = save_with_stock_writer_on
    for outcome in ranks.outcomes(job, tmp_path, stock_rank, world_size=3, timeout_s=25):
        failure = failures_of(outcome.error)[who]
        assert isinstance(failure, InvalidInputError)
        assert text in str(failure)
    assert not (tmp_path / "ours").exists()
    assert not (tmp_path / "stock" / ".metadata").exists()


class ForgetfulPlanner(dcp.DefaultSavePlanner):
    """A planner that makes new plans at each step and keeps nothing of what a writer put in."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan without the writer's data."""
        bare = [SavePlan(plan.items, planner_data=plan.planner_data) for plan in all_plans]
        return super().create_global_plan(bare)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(SavePlan(new_plan.items, planner_data=new_plan.planner_data))


def save_forgetfully(_rank: int, path: Path) -> None:
    """Save with a planner that drops the writer's messages."""
    dcp_cases.save(state_of(1), path, planner=ForgetfulPlanner())


def test_a_planner_that_drops_the_writers_messages_does_no_harm(
    ranks: RankPool, tmp_path: Path
) -> None:
    """What ranks say to one another arrives although the planner drops the plans' content."""
    ranks.run(save_forgetfully, tmp_path / "run", world_size=3)
    target = zeros_like(state_of(1))
    dcp_cases.load(target, tmp_path / "run")
    assert same(target, state_of(1))


class OverwritingPlanner(dcp.DefaultLoadPlanner):
    """A planner in whose first step another job overwrites what was opened."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def set_up_planner(self, *args: Any, **options: Any) -> None:
        """Overwrite, tell the other rank, and go on with what was read before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = CheckpointStorageWriter(self.path, overwrite=True)
            dcp.save(state_of(1), storage_writer=writer, no_dist=True)
        dist.barrier()
        super().set_up_planner(*args, **options)


def load_while_it_is_overwritten(rank: int, path: Path) -> None:
    """Open the old save on rank 0 and the new one on rank 1."""
    if rank == 1:
        dist.barrier()
    planner = OverwritingPlanner(path) if rank == 0 else None
    dcp_cases.load(zeros_like(state_of(0)), path, planner=planner)


def test_ranks_never_load_two_saves_of_one_id(ranks: RankPool, tmp_path: Path) -> None:
    """If an id is overwritten between the ranks' looks at it, all raise and say what to do."""
    dcp_cases.save(state_of(0), tmp_path / "run")
    job = load_while_it_is_overwritten
    for outcome in ranks.outcomes(job, tmp_path / "run", world_size=2, timeout_s=30):
        for error in failures_of(outcome.error).values():
            assert isinstance(error, RankMismatchError)
            assert "Ranks disagree on the save to read" in str(error)
            assert "Load again" in str(error)


def save_to_memory(_rank: int, url: str) -> None:
    """Save to a storage that other processes do not see."""
    dcp_cases.save(state_of(0), url)


def test_storage_that_ranks_do_not_share_is_refused(ranks: RankPool) -> None:
    """A save of several ranks into each one's own memory is an error on all, not half a success."""
    for outcome in ranks.outcomes(save_to_memory, "memory://run/step", world_size=2, timeout_s=25):
        failures = failures_of(outcome.error)
        assert sorted(failures) == [0, 1]
        for error in failures.values():
            assert isinstance(error, InvalidInputError)
            assert "memory://" in str(error)


def save_to_own_disk(rank: int, path: Path, *, is_made: bool) -> None:
    """Save where the same path is another folder for rank 1, as on a disk of its own."""
    original = LocalBackend.__init__

    def init(backend: LocalBackend, place: str | Location, settings: Any = None) -> None:
        root = place if isinstance(place, str) else place.target
        original(backend, f"{root}-of-{rank}" if rank else root, settings)

    planner = FolderMakingPlanner(Path(f"{path}-of-1"), path) if is_made and rank == 1 else None
    state = state_of(0) | {f"own {rank}": seeded(rank, 5)}
    with patch.object(LocalBackend, "__init__", init):
        dcp_cases.save(state, path, planner=planner)


class FolderMakingPlanner(dcp.DefaultSavePlanner):
    """A planner that makes on one disk the folders that the coordinator made on another."""

    def __init__(self, mine: Path, theirs: Path) -> None:
        super().__init__()
        self.mine = mine
        self.theirs = theirs

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy the folders before anything is written."""
        for folder in self.theirs.rglob("*/"):
            (self.mine / folder.relative_to(self.theirs)).mkdir(parents=True, exist_ok=True)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("is_made", [False, True], ids=["no folder", "folder"])
def test_a_rank_with_a_disk_of_its_own_is_found_out(
    ranks: RankPool, tmp_path: Path, *, is_made: bool
) -> None:
    """Where a path means another disk on one rank, the error says so and nothing commits."""
    job = partial(save_to_own_disk, is_made=is_made)
    for outcome in ranks.outcomes(job, tmp_path / "run", world_size=2, timeout_s=25):
        for error in failures_of(outcome.error).values():
            assert isinstance(error, CheckpointError)
            assert error.rank == 1
            assert "share" in str(error)
    assert list_checkpoints(str(tmp_path)) == []


class Within(CheckpointStorageReader):
    """A reader of somebody else's around ours, with the parameters that torch documents."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: FBT001  # torch's
        super().set_up_storage_reader(metadata, is_coordinator)


def load_within(_rank: int, path: Path) -> None:
    """Load by such a reader."""
    target = {"w": zeros_like(seeded(0, 30, 20)), "step": 7}
    dcp.load(target, storage_reader=Within(path))
    assert same(target["w"], seeded(0, 30, 20))
    assert target["step"] == 0


def test_a_reader_that_is_not_told_its_rank_asks_for_it(ranks: RankPool, tmp_path: Path) -> None:
    """Torch tells it only those that take any keyword."""
    dcp.save(state_of(0), storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    ranks.run(load_within, tmp_path / "c", world_size=2)
