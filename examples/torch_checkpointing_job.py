"""A loop that saves with torch_checkpointing on any storage, and resumes.

python examples/torch_checkpointing_job.py s3://bucket/run 10
torchrun --nproc-per-node 2 examples/torch_checkpointing_job.py /mnt/run 10
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager

import ckpt_storage
from ckpt_storage.integrations.torch_checkpointing import manager_config


def main() -> None:
    """Train a little model; save every second step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("steps", type=int)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    # Asynchronous saves are theirs on CUDA; on CPUs they need options of their own.
    config = manager_config(arguments.url, is_async=torch.cuda.is_available())
    manager = CheckpointManager(config)

    first = 1
    infos = ckpt_storage.list_checkpoints(arguments.url)
    if infos:
        loaded = manager.load(infos[-1].url, into=dict.fromkeys(("model", "optimizer", "step")))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["step"] + 1
        print(f"resumed after step {loaded['step']}")

    for step in range(first, arguments.steps + 1):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}")
        if step % 2 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            manager.save(f"{arguments.url}/step-{step}", {**state, "step": step})
    manager.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
