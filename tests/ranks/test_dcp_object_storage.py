"""Several ranks save to and load from an object storage, in every mode; options travel."""

from __future__ import annotations

from typing import Any

import dcp_cases
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded, zeros_like
from test_dcp_modes import Mode, end_process_mode, save_once
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, list_checkpoints, verify
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.testing.s3_server import S3Server

ROOT = "s3://bucket/run"
MODES: tuple[Mode, ...] = ("sync", "thread", "process")


def whole(step: int) -> dict[str, Any]:
    """Return the whole state of a step; the weights need several parts."""
    return {"w": seeded(step, 3_000, 1_000), "v": seeded(50 + step, 7), "step": step}


def local(step: int) -> dict[str, Any]:
    """Return what this rank has of it."""
    state = whole(step)
    state["w"] = distribute_tensor(state["w"], init_device_mesh("cpu", (2,)), [Shard(0)])
    return state


def save_in_all_modes(_rank: int, options: dict[str, Any]) -> str:
    """Save one step in each mode with one writer; return how the writer is shown."""
    writer = CheckpointStorageWriter(ROOT, storage_options=options, part_bytes=5 << 20)
    try:
        for step, mode in enumerate(MODES):
            planner: SavePlanner = dcp.DefaultSavePlanner()
            save_once(mode, local(step), writer, planner, f"step-{step}")
    finally:
        end_process_mode()
    return repr(writer)


def load_turned(_rank: int, options: dict[str, Any], count: int) -> None:
    """Load each step with one reader, cut along the other dimension."""
    reader = CheckpointStorageReader(ROOT, storage_options=options)
    mesh = init_device_mesh("cpu", (3,))
    for step in range(count):
        target = zeros_like(whole(step))
        target["w"] = distribute_tensor(target["w"], mesh, [Shard(1)])
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=reader)
        expected = distribute_tensor(whole(step)["w"], mesh, [Shard(1)])
        assert same(target["w"].to_local(), expected.to_local())
        assert target["step"] == step


def test_ranks_save_and_load_on_object_storage(ranks: RankPool, server: S3Server) -> None:
    """Two ranks save in all modes, three load; options reach every process and show nowhere."""
    options = server.storage_options | {"secret": "very-secret"}
    shown = ranks.run(save_in_all_modes, options, world_size=2, timeout_s=120)
    assert shown == [f"CheckpointStorageWriter('{ROOT}')"] * 2
    assert server.open_upload_count == 0
    infos = list_checkpoints(ROOT, storage_options=options)
    assert sorted(info.name for info in infos) == [f"step-{step}" for step in range(len(MODES))]
    ranks.run(load_turned, options, len(MODES), world_size=3)
    for step in range(len(MODES)):
        report = verify(f"{ROOT}/step-{step}", storage_options=options)
        assert (report.ok, report.problems) == (True, [])
    assert not any(b"very-secret" in data for data in server.dump("bucket").values())


def test_stock_torch_loads_what_lies_on_object_storage(server: S3Server, tmp_path: Any) -> None:
    """The objects, copied to a disk as they are, are a checkpoint for torch's own reader."""
    dcp_cases.save(whole(4), ROOT, storage_options=server.storage_options)
    for key, data in server.dump("bucket").items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for load in (dcp_cases.load, dcp_cases.load_stock):
        target = zeros_like(whole(4))
        load(target, tmp_path / "run")
        assert same(target, whole(4))
