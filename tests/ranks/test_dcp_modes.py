"""Every way in which torch drives the writer; saves that overlap, are refused, or fail."""

# ruff: noqa: SLF001  # torch's caches, their keys and processes have no public handle

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, seeded, zeros_like
from torch.distributed.checkpoint import _async_process_executor as process_mode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import (
    CheckpointExistsError,
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
    list_checkpoints,
    verify,
)
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import S3Server

Mode = Literal["sync", "thread", "process"]
MODES: tuple[Mode, ...] = ("sync", "thread", "process")

STEP_COUNT = 5
"""Of them torch takes the plans of 1, 3 and 4 for unchanged."""


def full_state(step: int) -> dict[str, Any]:
    """Return the whole state of one step, as every rank knows it."""
    dtype = torch.bfloat16 if step >= 3 else torch.float32
    state: dict[str, Any] = {
        "sharded": seeded(step, 10, 6, dtype=dtype),
        "replicated": seeded(100 + step, 7, dtype=dtype),
        "nested": {"step": step, "words": ["a", f"b{step}"]},
    }
    if step >= 2:
        state["more"] = seeded(200 + step, 3)
    return state


def sharded(state: dict[str, Any], name: str, dim: int = 0) -> dict[str, Any]:
    """Return the state with one tensor cut over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return state | {name: distribute_tensor(state[name], mesh, [Shard(dim)])}


def save_once(
    mode: Mode,
    state: dict[str, Any],
    writer: CheckpointStorageWriter,
    checkpoint_id: str | None,
    planner: dcp.SavePlanner | None = None,
) -> None:
    """Save in one mode and wait until it is committed."""
    arguments: dict[str, Any] = {
        "storage_writer": writer,
        "planner": planner or dcp.DefaultSavePlanner(),
        "checkpoint_id": checkpoint_id,
    }
    if mode == "sync":
        dcp.save(state, **arguments)
        return
    kind = AsyncCheckpointerType.THREAD if mode == "thread" else AsyncCheckpointerType.PROCESS
    response = dcp.async_save(state, async_checkpointer_type=kind, **arguments)
    response.result(timeout=60)  # type: ignore[union-attr]  # no stager, so a plain future


def end_process_mode() -> None:
    """End the process that torch keeps for process mode, which serves one world only."""
    daemon, process_mode._CHECKPOINT_PROCESS = process_mode._CHECKPOINT_PROCESS, None
    if daemon is not None:
        daemon._send(process_mode._CheckpointSaveProcessControlOpts.TERMINATE)
        daemon._save_process.join(20)


def assert_loads(path: Path, step: int) -> None:
    """Load on all ranks and compare with what was saved."""
    dcp_cases.assert_holds(path, sharded(full_state(step), "sharded"), [dcp_cases.load])


def save_steps(folder: Path, case: str, mode: Mode, *, with_id: bool, caching: bool) -> None:
    """Save all steps with one writer; each is loaded back after it, or all at the end."""
    root = folder / case
    writer = CheckpointStorageWriter(root, overwrite=True, sync_files=False)
    for step in range(STEP_COUNT):
        # A planner is made for each save, as by a training loop; what it caches is global.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=caching)
        planner._cached_plans_key = case
        name = f"step-{step}" if with_id else None
        save_once(mode, sharded(full_state(step), "sharded"), writer, name, planner)
        if not with_id:
            assert_loads(root, step)
    if with_id:
        for step in range(STEP_COUNT):
            assert_loads(root / f"step-{step}", step)


ROOT = "s3://bucket/run"


def large_state(step: int) -> dict[str, Any]:
    """Return a state whose weights need several parts."""
    return {"w": seeded(step, 3_000, 1_000), "v": seeded(50 + step, 7), "step": step}


def save_all(_rank: int, folder: Path, options: dict[str, Any]) -> str:
    """Save in all modes, on disk and to a server; return how the server's writer is shown."""
    writer = CheckpointStorageWriter(ROOT, storage_options=options, part_bytes=5 << 20)
    try:
        for step, mode in enumerate(MODES):
            for with_id, caching in itertools.product([True, False], [True, False]):
                case = f"{mode}-id{with_id:d}-caching{caching:d}"
                save_steps(folder, case, mode, with_id=with_id, caching=caching)
            save_once(mode, sharded(large_state(step), "w"), writer, f"step-{step}")
    finally:
        end_process_mode()
    return repr(writer)


def load_turned(_rank: int, options: dict[str, Any]) -> None:
    """Load each step with one reader, cut along the other dimension."""
    reader = CheckpointStorageReader(ROOT, storage_options=options)
    for step in range(len(MODES)):
        expected = sharded(large_state(step), "w", 1)
        target = zeros_like(expected)
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=reader)
        assert same(target, expected)


def test_every_save_of_one_writer_lands_where_it_belongs(
    ranks: RankPool, tmp_path: Path, server: S3Server
) -> None:
    """In each mode, with and without ids and plan caching, on disk and on object storage.

    Two ranks save, three load; options reach every process and show nowhere.
    """
    options = server.storage_options | {"secret": "very-secret"}
    shown = ranks.run(save_all, tmp_path, options, world_size=2, timeout_s=240)
    last = STEP_COUNT - 1
    for case in tmp_path.iterdir():
        path = case / f"step-{last}" if "id1" in case.name else case
        dcp_cases.assert_holds(path, full_state(last), [dcp_cases.load_stock])
    assert shown == [f"CheckpointStorageWriter('{ROOT}')"] * 2
    assert server.open_upload_count == 0
    infos = list_checkpoints(ROOT, storage_options=options)
    assert sorted(info.name for info in infos) == [f"step-{step}" for step in range(len(MODES))]
    ranks.run(load_turned, options, world_size=3)
    for step in range(len(MODES)):
        assert verify(f"{ROOT}/step-{step}", storage_options=options).ok
    assert not any(b"very-secret" in data for data in server.dump("bucket").values())


def state_of(step: int) -> dict[str, Any]:
    """Return a small state that belongs to one step."""
    return {"w": seeded(step, 40, 30), "step": step}


def overlapping_saves(_rank: int, folder: Path) -> None:
    """Save two steps at once in two threads and groups with one writer; each to its own id."""
    writer = CheckpointStorageWriter(folder, sync_files=False)
    begun: list[Future[None]] = [Future(), Future()]

    def waiting(step: int, resolve: Callable[[WriteItem], Any], item: WriteItem) -> Any:
        if not begun[step].done():
            begun[step].set_result(None)
        begun[1 - step].result(timeout=30)
        return resolve(item)

    saves = [
        dcp.async_save(
            state_of(step),
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            planner=dcp_cases.planner(resolve_data=partial(waiting, step)),
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
        dcp_cases.assert_holds(path, state_of(step), [dcp_cases.load], process_group=group)
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


@pytest.mark.parametrize("kind", [CheckpointStorageReader, CheckpointStorageWriter])
def test_plugins_pickle_with_their_options(tmp_path: Path, kind: type) -> None:
    """A writer or reader works after a pickle and shows no storage option."""
    secret = {"key": "very-secret", "auto_mkdir": False}
    plugin = kind(tmp_path, storage_options=secret)
    again = pickle.loads(pickle.dumps(plugin))
    assert repr(again) == repr(plugin)
    assert "very-secret" not in repr(again)
    assert b"very-secret" in pickle.dumps(again)
