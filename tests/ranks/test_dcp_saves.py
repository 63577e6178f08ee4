"""Saves that overlap, run without a group or on a part of it, are refused, or fail."""

# ruff: noqa: SLF001  # the planner's cache key and the plug-ins' options are not public

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, files_below, same, seeded, zeros_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_storage import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
    list_checkpoints,
)
from ckpt_storage.testing.ranks import RankPool


def state_of(step: int) -> dict[str, Any]:
    """Return a small state that belongs to one step."""
    return {"w": seeded(step, 40, 30), "step": step}


class WaitingPlanner(dcp.DefaultSavePlanner):
    """A planner that lets a save go on only after another one began to write."""

    def __init__(self, mine: Future[None], others: Future[None]) -> None:
        super().__init__()
        self.mine = mine
        self.others = others

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Tell that this save is writing, wait for the other one, and resolve."""
        if not self.mine.done():
            self.mine.set_result(None)
        self.others.result(timeout=30)
        return super().resolve_data(write_item)


def overlapping_saves(_rank: int, folder: Path) -> None:
    """Save two steps at once in two threads and groups with one writer; each to its own id."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    begun: list[Future[None]] = [Future(), Future()]
    saves = [
        dcp.async_save(
            state_of(step),
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            planner=WaitingPlanner(begun[step], begun[1 - step]),
            process_group=dist.new_group(),
        )
        for step in (0, 1)
    ]
    for save in saves:
        save.result(timeout=60)  # type: ignore[union-attr]  # no stager, so a plain future


def test_overlapping_saves_do_not_mix(ranks: RankPool, tmp_path: Path) -> None:
    """Two saves with one writer, both writing at the same time, go to their own folders."""
    ranks.run(overlapping_saves, tmp_path, world_size=2)
    assert {info.name for info in list_checkpoints(str(tmp_path))} == {"step-0", "step-1"}
    for step in (0, 1):
        dcp_cases.assert_holds(tmp_path / f"step-{step}", state_of(step))


def save_alone(rank: int, folder: Path) -> str:
    """Save on each rank for itself; then without collectives; return what the writer says."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    arguments: dict[str, Any] = {"checkpoint_id": f"alone-{rank}", "storage_writer": writer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(rank), no_dist=True, **arguments)
    meta = writer.storage_meta()
    assert meta is not None
    with pytest.raises(InvalidInputError, match="Leave use_collectives at True"):
        dcp.save(state_of(0), checkpoint_id="run", storage_writer=writer, use_collectives=False)
    return str(meta.checkpoint_id)


def test_a_rank_saves_for_itself_only_if_it_is_told_so(ranks: RankPool, tmp_path: Path) -> None:
    """With `no_dist`, which leaves no place for the next save; not with `use_collectives=False`."""
    assert ranks.run(save_alone, tmp_path, world_size=2) == [str(tmp_path)] * 2
    for rank in (0, 1):
        dcp_cases.assert_holds(tmp_path / f"alone-{rank}", state_of(rank))
    assert not (tmp_path / "run").exists()


def save_on_two_of_three(rank: int, folder: Path) -> str:
    """Save and load on ranks 1 and 2; rank 0 takes no part. Return what a wrong group gives."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    for step, given in enumerate((None, group)):
        path = folder / f"step-{step}"
        dcp_cases.save(state_of(step), path, process_group=group)
        writer = CheckpointStorageWriter(path, overwrite=True, process_group=given)
        dcp.save(state_of(step), storage_writer=writer, process_group=group)
        target = zeros_like(state_of(step))
        dcp_cases.load(target, path, process_group=group)
        assert same(target, state_of(step))
    wrong = CheckpointStorageWriter(folder / "wrong", process_group=dist.group.WORLD)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(0), storage_writer=wrong, process_group=group)
    return "; ".join(sorted(str(error) for error in failures_of(caught.value).values()))


def test_a_sub_group_saves_and_loads_without_the_others(ranks: RankPool, tmp_path: Path) -> None:
    """Two of three ranks save; a writer that was given another group refuses on both."""
    outcomes = ranks.run(save_on_two_of_three, tmp_path, world_size=3)
    for step in (0, 1):
        dcp_cases.assert_holds(tmp_path / f"step-{step}", state_of(step))
    for said in outcomes[1:]:
        assert said.count("The save runs on 2 ranks; the writer's process_group has 3.") == 2
    assert not (tmp_path / "wrong").exists()


def refused_then_accepted(_rank: int, folder: Path) -> None:
    """Save to an id that is taken, then elsewhere, with plan caching."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    for number, (name, is_taken) in enumerate(
        [("a", False), ("a", True), ("b", False), ("b", True), ("c", False)]
    ):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        # The first refused plan is a new one, the second a cached one.
        planner._cached_plans_key = f"refused-{number > 0}"
        arguments = {"checkpoint_id": name, "storage_writer": writer, "planner": planner}
        if is_taken:
            with pytest.raises(CheckpointException) as caught:
                dcp.save(state_of(number), **arguments)
            errors = failures_of(caught.value)
            assert sorted(errors) == [0, 1]
            assert {type(error) for error in errors.values()} == {CheckpointExistsError}
        else:
            dcp.save(state_of(number), **arguments)


def test_regression_a_refused_save_does_not_spoil_later_cached_plans(
    ranks: RankPool, tmp_path: Path
) -> None:
    """After a refusal, saves with plan caching go on, be the refused plan cached or new."""
    ranks.run(refused_then_accepted, tmp_path, world_size=2)
    for name, step in (("a", 0), ("b", 2), ("c", 4)):
        dcp_cases.assert_holds(tmp_path / name, state_of(step))


class UnpicklableError(Exception):
    """An exception that cannot be unpickled, as aiohttp's and botocore's are."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")


class FailingPlanner(dcp.DefaultSavePlanner):
    """A planner that fails on one rank while the data are being written."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Raise, or resolve."""
        if self.error is not None:
            raise self.error
        return super().resolve_data(write_item)


def one_rank_fails(rank: int, folder: Path) -> dict[int, BaseException]:
    """Fail on rank 1 with an exception that cannot travel; return what this rank was told."""
    planner = FailingPlanner(UnpicklableError(503, "Slow Down") if rank == 1 else None)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.save(state_of(0) | {f"own-{rank}": rank}, folder / "run", planner=planner)
    return failures_of(caught.value)


def test_an_exception_that_does_not_pickle_reaches_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It is replaced by one of ours with its type and text; no rank hangs, nothing commits."""
    for told in ranks.run(one_rank_fails, tmp_path, world_size=2, timeout_s=25):
        assert list(told) == [1]
        assert isinstance(told[1], CheckpointError)
        assert "UnpicklableError: 503 Slow Down" in str(told[1])
    assert list_checkpoints(str(tmp_path)) == []
    assert not any(name.endswith("__1_0.distcp") for name in files_below(tmp_path))


@pytest.mark.parametrize("kind", [CheckpointStorageReader, CheckpointStorageWriter])
def test_plugins_pickle_with_their_options(tmp_path: Path, kind: type) -> None:
    """A writer or reader works after a pickle and shows no storage option."""
    secret = {"key": "very-secret", "auto_mkdir": False}
    plugin = kind(tmp_path, storage_options=secret)
    again = pickle.loads(pickle.dumps(plugin))
    assert repr(again) == repr(plugin)
    assert "very-secret" not in repr(again)
    assert b"very-secret" in pickle.dumps(again)
