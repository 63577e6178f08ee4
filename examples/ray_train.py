"""Ray Train: two workers train, one dies, Ray starts both again, and they resume.

    python examples/ray_train.py [URL]

The workers save straight to the URL, each its own part. Ray keeps a pointer to the checkpoint, a
small file with its URL, and moves no other byte. Every worker must reach the URL: a
folder does for one machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt_storage
from ckpt_storage import CheckpointManager, KeepLatest
from ckpt_storage.integrations.ray import report, reported_url

STEPS, SAVE_EVERY = 8, 3


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return what the run must remember."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def train(config: dict[str, Any]) -> None:
    """Train up to `STEPS`, from the newest committed checkpoint; Ray runs this on each worker."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())

    manager = CheckpointManager(config["url"], keep=KeepLatest(2))
    state = state_of(model, optimizer, step=0)
    if manager.restore(state) is not None:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    begun_at = step = state["step"]

    while step < STEPS:
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        metrics = {"step": step, "begun_at": begun_at, "loss": loss.item()}
        if step % SAVE_EVERY == 0 or step == STEPS:
            report(metrics, manager.save(step, state_of(model, optimizer, step)))
        else:
            ray.train.report(metrics)
        if config["die_at"] == step and begun_at == 0 and dist.get_rank() == 1:
            os._exit(1)
    manager.close()


def main(url: str, die_at: int | None = 5) -> dict[str, Any]:
    """Run the job and return the last metrics that the workers reported."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"url": url, "die_at": die_at},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="example",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=1),
                # Of the pointers; the manager keeps checkpoints.
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        )
        result = trainer.fit()
        if result.checkpoint is not None:
            print(f"Ray points to {reported_url(result.checkpoint)}")
            print(f"Ray keeps {len(result.best_checkpoints or [])} pointer.")
    return dict(result.metrics or {})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as default:
        place = sys.argv[1] if len(sys.argv) > 1 else Path(default).as_uri()
        metrics = main(place)
        print(f"Trained to step {metrics['step']}, resumed at step {metrics['begun_at']}.")
        print("Committed:", ", ".join(info.name for info in ckpt_storage.list_checkpoints(place)))
