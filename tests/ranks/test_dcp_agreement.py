"""Ranks agree before a byte is written, and say who differs where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, planner, raised, seeded, zeros_like
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


def save_as(rank: int, folder: Path, what: str, values: list[Any]) -> None:
    """Save with this rank's value of an option, to its folder, or as its release."""
    value, place, options = values[rank], folder / "run", dict[str, Any]()
    with pytest.MonkeyPatch.context() as patched:
        if what == "the version of ckpt_storage":
            patched.setattr("ckpt_storage.saves.options.__version__", value)
        elif what == "the checkpoint's URL":
            place = value
        else:
            options = {what: value} if what else value
        dcp.save(state_of(0), storage_writer=CheckpointStorageWriter(place, **options))


def test_what_is_of_one_save_is_equal_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """All raise where it differs, told who has what; threads, sizes, deadlines, spellings may."""
    a, b = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    unlike: dict[str, list[Any]] = {
        "the checkpoint's URL": [a, a, b],
        "overwrite": [False, True, False],
        "sync_files": [True, True, False],
        "the version of ckpt_storage": [ckpt_storage.__version__, "9.9", "9.9"],
    }
    for what, values in unlike.items():
        expected: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            expected.setdefault(str(value), []).append(rank)
        for outcome in ranks.outcomes(save_as, tmp_path, what, values, world_size=3, timeout_s=25):
            failures = failures_of(outcome.error)
            assert sorted(failures) == [0, 1, 2]
            for error in failures.values():
                assert isinstance(error, RankMismatchError)
                assert error.values == expected
                assert f"Ranks disagree on {what}" in str(error)
                assert "Nothing was written." in str(error)
                assert what != "the checkpoint's URL" or f"'{a}': ranks 0-1; '{b}': ranks 2" in str(
                    error
                )
        assert list(tmp_path.iterdir()) == []
    may: list[dict[str, Any]] = [
        {"thread_count": 2},
        {"part_bytes": 1 << 20},
        {"timeout": 100, "memory_limit_bytes": 64 << 20},
    ]
    ranks.run(save_as, tmp_path, "", may, world_size=3)
    places = [f"{tmp_path}/two", f"file://{tmp_path}/two/", f"{tmp_path}/x/../two"]
    ranks.run(save_as, tmp_path, "the checkpoint's URL", places, world_size=3)
    assert [info.name for info in list_checkpoints(str(tmp_path))] == ["run", "two"]


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


def save_forgetfully(_rank: int, path: Path) -> None:
    """Save with a planner that makes new plans at each step, without what a writer put in."""

    def bare(plan: SavePlan) -> SavePlan:
        return SavePlan(plan.items, planner_data=plan.planner_data)

    forgetful = planner(
        create_global_plan=lambda create, plans: create(list(map(bare, plans))),
        finish_plan=lambda finish, plan: finish(bare(plan)),
    )
    dcp_cases.save(state_of(1), path, planner=forgetful)


def test_a_planner_that_drops_the_writers_messages_does_no_harm(
    ranks: RankPool, tmp_path: Path
) -> None:
    """What ranks say to one another arrives although the planner drops the plans' content."""
    ranks.run(save_forgetfully, tmp_path / "run", world_size=3)
    dcp_cases.assert_holds(tmp_path / "run", state_of(1))


def load_while_it_is_overwritten(rank: int, path: Path) -> None:
    """Open the old save on rank 0, which another job then overwrites, and the new one on rank 1."""

    def overwrite(set_up: Callable[..., None], *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_cases.save_alone(state_of(1), path, overwrite=True)
        dist.barrier()
        set_up(*args, **options)

    if rank == 1:
        dist.barrier()
    own = None if rank else planner(dcp.DefaultLoadPlanner, set_up_planner=overwrite)
    dcp_cases.load(zeros_like(state_of(0)), path, planner=own)


def test_ranks_never_load_two_saves_of_one_id(ranks: RankPool, tmp_path: Path) -> None:
    """If an id is overwritten between the ranks' looks at it, all raise and say what to do."""
    dcp_cases.save(state_of(0), tmp_path / "run")
    for error in raised(ranks, load_while_it_is_overwritten, tmp_path / "run", world_size=2):
        assert isinstance(error, RankMismatchError)
        assert "Ranks disagree on the save to read" in str(error)
        assert "Load again" in str(error)


def test_storage_that_ranks_do_not_share_is_refused(ranks: RankPool) -> None:
    """A save of several ranks into each one's own memory is an error on all, not half a success."""
    given = dcp_cases.save, state_of(0), "memory://run/step"
    errors = raised(ranks, dcp_cases.do, *given, world_size=2)
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, InvalidInputError)
        assert "memory://" in str(error)


def save_to_own_disk(rank: int, path: Path, *, is_made: bool) -> None:
    """Save where the same path is another folder for rank 1, as on a disk of its own."""
    original = LocalBackend.__init__

    def init(backend: LocalBackend, place: str | Location, settings: Any = None) -> None:
        root = place if isinstance(place, str) else place.target
        original(backend, f"{root}-of-{rank}" if rank else root, settings)

    def make_folders(finish: Callable[[SavePlan], SavePlan], plan: SavePlan) -> SavePlan:
        # Those that the coordinator made on its disk.
        for folder in path.rglob("*/"):
            mine = Path(f"{path}-of-1") / folder.relative_to(path)
            mine.mkdir(parents=True, exist_ok=True)
        return finish(plan)

    own = planner(finish_plan=make_folders) if is_made and rank else None
    state = state_of(0) | {f"own {rank}": seeded(rank, 5)}
    with patch.object(LocalBackend, "__init__", init):
        dcp_cases.save(state, path, planner=own)


@pytest.mark.parametrize("is_made", [False, True], ids=["no folder", "folder"])
def test_a_rank_with_a_disk_of_its_own_is_found_out(
    ranks: RankPool, tmp_path: Path, *, is_made: bool
) -> None:
    """Where a path means another disk on one rank, the error says so and nothing commits."""
    job = partial(save_to_own_disk, is_made=is_made)
    for error in raised(ranks, job, tmp_path / "run", world_size=2):
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
    by = [lambda state, at: dcp.load(state, storage_reader=Within(at))]
    dcp_cases.assert_holds(path, state_of(0), by)


def test_a_reader_that_is_not_told_its_rank_asks_for_it(ranks: RankPool, tmp_path: Path) -> None:
    """Torch tells it only those that take any keyword."""
    dcp.save(state_of(0), storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    ranks.run(load_within, tmp_path / "c", world_size=2)
