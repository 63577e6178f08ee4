"""Trained models and optimizers come back through our plug-ins, sharded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckpt_storage
from ckpt_storage.testing.ranks import RankPool

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def whole(value: Any) -> Any:
    """Return a tensor, gathered if it is a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(left: Any, right: Any) -> None:
    """Fail unless two states hold equal values, whatever their sharding."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert_same(value, right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for mine, theirs in zip(left, right, strict=True):
            assert_same(mine, theirs)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(whole(left), whole(right))
    else:
        assert left == right


class Net(nn.Module):
    """Three layers, the middle one narrower than four ranks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        found: torch.Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(data)))))
        return found


def trained(
    shard: Callable[[nn.Module], object], *, seed: int = 0, steps: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_fsdp(model: nn.Module) -> None:
    """Shard a model over all ranks."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def by_hsdp(model: nn.Module) -> None:
    """Shard a model over two ranks, twice."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))


def by_tp(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Cut a model's layers over all ranks, or over those of `mesh`."""
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    parallelize_module(model, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def by_fsdp_and_tp(model: nn.Module) -> None:
    """Cut a model's layers over two ranks and shard what that leaves over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    by_tp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def by_ddp(model: nn.Module) -> None:
    """Leave a model whole on every rank."""


SHARDINGS: dict[str, Callable[[nn.Module], object]] = {
    "fsdp": by_fsdp,
    "hsdp": by_hsdp,
    "tp": by_tp,
    "2d": by_fsdp_and_tp,
    "replicated": by_ddp,
}


def model_and_optimizer(_rank: int, path: Path, of: str, to: str) -> None:
    """Save a trained model and its optimizer, and load them into others, sharded otherwise."""
    model, optimizer = trained(SHARDINGS[of])
    states = get_state_dict(model, optimizer)
    writer = ckpt_storage.CheckpointStorageWriter(path, sync_files=False)
    dcp.save({"model": states[0], "optimizer": states[1]}, storage_writer=writer)
    other, other_optimizer = trained(SHARDINGS[to], seed=1, steps=2)
    found = get_state_dict(other, other_optimizer)
    reader = ckpt_storage.CheckpointStorageReader(path)
    dcp.load({"model": found[0], "optimizer": found[1]}, storage_reader=reader)
    set_state_dict(other, other_optimizer, model_state_dict=found[0], optim_state_dict=found[1])
    full = StateDictOptions(full_state_dict=True)
    for mine, theirs in zip(
        get_state_dict(other, other_optimizer, options=full),
        get_state_dict(model, optimizer, options=full),
        strict=True,
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ("fsdp", "tp"),
        ("tp", "fsdp"),
        ("hsdp", "fsdp"),
        ("2d", "fsdp"),
        ("fsdp", "2d"),
        ("replicated", "fsdp"),
    ],
)
def test_models_and_optimizers(ranks: RankPool, tmp_path: Path, of: str, to: str) -> None:
    """FSDP, HSDP, TP and both together: a trained model and AdamW's state come back whole."""
    ranks.run(model_and_optimizer, tmp_path, of, to)
