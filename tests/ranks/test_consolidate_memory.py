"""What a consolidation costs in memory, as the kernel counts it, whatever the size of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_dcp_memory import Peak

import ckpt_storage
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.testing.ranks import RankPool

MIB = 1 << 20
TENSOR_MIB = 300
LIMIT_MIB = 64
SLACK_MIB = 64


def save_big(_rank: int, path: Path, *, columns: bool) -> None:
    """Save one tensor of 300 MiB, in row or column shards."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # rank only
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  # rank only

    rows = TENSOR_MIB * MIB // 2 // 8192
    world_size = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    shape = (rows, 8192 // world_size) if columns else (rows // world_size, 8192)
    local = torch.full(shape, rank + 0.5, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = DTensor.from_local(local, mesh, [Shard(1 if columns else 0)], run_check=False)
    ckpt_storage.save({"w": tensor}, path, sync_files=False)


def save_rows(rank: int, path: Path) -> None:
    """Save in row shards."""
    save_big(rank, path, columns=False)


def save_columns(rank: int, path: Path) -> None:
    """Save in column shards."""
    save_big(rank, path, columns=True)


def peak_of_a_consolidation(_rank: int, path: Path) -> float:
    """Consolidate after a small one that starts what the first one starts."""
    ckpt_storage.save({"x": torch.ones(8)}, path / "warm")
    consolidate(path / "warm")
    with Peak() as peak:
        consolidate(path / "run", memory_limit_bytes=LIMIT_MIB * MIB)
    return peak.mib


@pytest.mark.parametrize("save", [save_rows, save_columns])
def test_one_large_tensor_is_never_in_memory(ranks: RankPool, tmp_path: Path, save: object) -> None:
    """300 MiB in two shards are exported within 64 MiB of buffers and what a process needs."""
    ranks.run(save, tmp_path / "run", world_size=2)  # type: ignore[arg-type]  # a job
    (peak_mib,) = ranks.run(peak_of_a_consolidation, tmp_path, world_size=1)
    assert peak_mib < LIMIT_MIB + SLACK_MIB
    file = tmp_path / "run" / "hf" / "model.safetensors"
    with safe_open(file, framework="pt") as found:
        part = found.get_slice("w")
        assert part.get_shape() == [TENSOR_MIB * MIB // 2 // 8192, 8192]
        corners = torch.stack([part[:1, :1], part[:1, -1:], part[-1:, :1], part[-1:, -1:]])
    is_rows = save is save_rows
    expected = [0.5, 0.5, 1.5, 1.5] if is_rows else [0.5, 1.5, 0.5, 1.5]
    assert corners.flatten().tolist() == expected
