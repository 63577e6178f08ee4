"""A loop of accelerate: `python accelerate_job.py '{"url": ..., ...}'`, or under torchrun.

Rank 0 prints one line of JSON: its losses by step, and the sum of all weights. `fsdp` shards on
CPUs, which accelerate does on accelerators only.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from torch.distributed.tensor import DTensor
from trainer_job import use_fsdp_on_cpu

from ckpt_storage.integrations.accelerate import load_state, save_state


def run(
    url: str, *, steps: int, fsdp: bool = False, resume_at: int | None = None
) -> dict[str, Any]:
    """Train in steps on all data; save after each step; return what rank 0 prints."""
    options: dict[str, Any] = {"cpu": True}
    if fsdp:
        use_fsdp_on_cpu()
        PartialState(cpu=True)
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(**options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume_at is not None:
        load_state(accelerator, f"{url}/step-{resume_at}")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 8, generator=generator)
    losses = {}
    for step in range((resume_at or 0) + 1, steps + 1):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        save_state(accelerator, f"{url}/step-{step}")
    parts = [value.detach() for value in model.parameters()]
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return {"losses": losses, "sum": sum(value.sum().item() for value in whole)}


def main() -> None:
    report = run(**json.loads(sys.argv[1]))
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"report {json.dumps(report)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
