"""Every way in which torch drives the writer: sync, thread, process; ids; plan caching; S3."""

# ruff: noqa: SLF001  # torch's caches and processes have no public handle

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import dcp_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from torch.distributed.checkpoint import _async_process_executor as process_mode
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, list_checkpoints, verify
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
    saved = sharded(full_state(step), "sharded")
    target = sharded(zeros_like(full_state(step)), "sharded")
    dcp_cases.load(target, path)
    target["sharded"] = target["sharded"].to_local()
    saved["sharded"] = saved["sharded"].to_local()
    assert same(target, saved), f"{path} is not what step {step} saved"


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
        target = sharded(zeros_like(large_state(step)), "w", 1)
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=reader)
        expected = sharded(large_state(step), "w", 1)
        assert same(target["w"].to_local(), expected["w"].to_local())
        assert target["step"] == step


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
        target = zeros_like(full_state(last))
        dcp_cases.load_stock(target, case / f"step-{last}" if "id1" in case.name else case)
        assert same(target, full_state(last)), case
    assert shown == [f"CheckpointStorageWriter('{ROOT}')"] * 2
    assert server.open_upload_count == 0
    infos = list_checkpoints(ROOT, storage_options=options)
    assert sorted(info.name for info in infos) == [f"step-{step}" for step in range(len(MODES))]
    ranks.run(load_turned, options, world_size=3)
    for step in range(len(MODES)):
        assert verify(f"{ROOT}/step-{step}", storage_options=options).ok
    assert not any(b"very-secret" in data for data in server.dump("bucket").values())
