"""Accelerate with a training loop of your own: killed, it resumes bit for bit, from any storage.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py URL STEPS
    accelerate launch --num_processes 2 examples/accelerate_loop.py URL STEPS

Start it again with the same URL, and it goes on from the newest committed checkpoint: on as many
processes bit for bit, on another number from the same weights and the same place in the data, with
random numbers drawn anew.
`Accelerator.save_state` writes files of its own into a local folder, and its hooks hand over the
model only; so this loop saves the state dicts of what `prepare` returned.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

from ckpt_storage import CheckpointManager, KeepLatest

SAVE_EVERY = 3
BATCH_SIZE = 4


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a regression's data, shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 8, generator=generator)
    return DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        batch_size=BATCH_SIZE,
        shuffle=True,
        # Of its own: a loader that starts draws a number, which would be one too many on resuming.
        generator=generator,
    )


class Run:
    """Everything that `prepare` returned, and how far training has come."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # A seeded sampler gives epoch 3 the same order whether epochs 0 to 2 were run or not.
        loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        self.accelerator = Accelerator(dataloader_config=loading)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        self.model, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            model, optimizer, scheduler, data()
        )
        self.rank = self.accelerator.process_index
        self.batch = BATCH_SIZE * self.accelerator.num_processes
        self.step = self.epoch = self.samples = 0
        # Each rank draws its own numbers for dropout.
        torch.manual_seed(self.rank)

    def state(self) -> dict[str, Any]:
        """Return what the run must remember; all ranks call, as each has a random state."""
        # The optimizer inside: accelerate's wrapper is one by inheritance only.
        weights, moments = get_state_dict(self.model, self.optimizer.optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            # One text, so that another number of ranks finds it, too.
            "rng": " ".join(gather_object([torch.get_rng_state().numpy().tobytes().hex()])),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` was filled with."""
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.epoch, self.samples = state["step"], state["epoch"], state["samples"]
        drawn = state["rng"].split()
        if len(drawn) == self.accelerator.num_processes:
            found = bytearray.fromhex(drawn[self.rank])
            torch.set_rng_state(torch.frombuffer(found, dtype=torch.uint8))
        else:
            torch.manual_seed(1000 * self.step + self.rank)

    def learn(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Make one step and return this rank's loss."""
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.samples += self.batch
        return loss.item()


def train(url: str, steps: int, kill_at: int | None = None) -> None:
    """Train up to `steps`; `kill_at` ends the last rank as the out-of-memory killer would."""
    run = Run()
    with CheckpointManager(url, keep=KeepLatest(2), mode="thread") as manager:
        state = run.state()
        restored = manager.restore(state)
        if restored is not None:
            run.load(state)
            print(f"rank {run.rank} resumed from {restored.info.name}", flush=True)
        while run.step < steps:
            done = run.samples // run.batch
            batches = run.accelerator.skip_first_batches(run.batches, done)
            batches.set_epoch(run.epoch)
            for inputs, targets in batches:
                loss = run.learn(inputs, targets)
                print(f"rank {run.rank} step {run.step} loss {loss.hex()}", flush=True)
                if run.step % SAVE_EVERY == 0 or run.step == steps:
                    # After a restart this step may have been saved before.
                    manager.save_async(run.step, run.state(), overwrite=True)
                if run.step == kill_at and run.rank == run.accelerator.num_processes - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.step == steps:
                    break
            else:
                run.epoch, run.samples = run.epoch + 1, 0
    run.accelerator.end_training()


if __name__ == "__main__":
    train(sys.argv[1], *(int(number) for number in sys.argv[2:]))
