r"""Plain torchrun on two nodes: every rank saves and loads its own part of one checkpoint.

On each of two nodes, with its own --node-rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr FIRST_NODE \
        --master-port 29400 examples/torchrun_nodes.py URL

All nodes must reach the URL: a bucket, or a mount that all have. A folder on a disk of
each node's own is refused before anything is written, with an error that names the ranks.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_storage import CheckpointManager

STEPS = 4


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return what the run must remember."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def main(url: str) -> None:
    """Train `STEPS` steps more than the newest committed checkpoint has, and save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())

    with CheckpointManager(url) as manager:
        state = state_of(model, optimizer, step=0)
        restored = manager.restore(state)
        if restored is not None:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            print(f"rank {dist.get_rank()} on {socket.gethostname()} resumed {restored.info.name}")

        step = state["step"]
        for _ in range(STEPS):
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        info = manager.save(step, state_of(model, optimizer, step))
        print(f"rank {dist.get_rank()} on {socket.gethostname()} saved {info.name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
