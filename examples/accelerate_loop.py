"""accelerate with a training loop of your own: killed and started again, it continues bit for bit.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py s3://bucket/run 9
    accelerate launch --num_processes 2 examples/accelerate_loop.py s3://bucket/run 9

On another number of processes it continues from the same weights, with other random numbers.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from ckpt_storage import CheckpointManager, KeepLatest
from ckpt_storage.integrations.accelerate import collect_state, restore_state

SAVE_EVERY = 3


class Progress:
    """Where the training is in the data; saved because it is registered."""

    step = epoch = batch = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the counts."""
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a regression's data, shuffled in each epoch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 8, generator=generator)
    # With a generator of its own, starting the loader again draws no number from the model's.
    return DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        batch_size=4,
        shuffle=True,
        generator=generator,
    )


def train(url: str, steps: int) -> None:
    """Train up to `steps`, from the newest checkpoint below `url` if any exists."""
    # A seeded sampler shuffles epoch 3 the same way whether or not epochs 0 to 2 ran before.
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(dataloader_config=loading)
    set_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, data())
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(0, device_specific=True)

    with CheckpointManager(url, keep=KeepLatest(2), mode="thread") as manager:
        restored = restore_state(accelerator, manager)
        if restored is not None:
            print(f"resumed from {restored.info.name}", flush=True)
        while progress.step < steps:
            batches.set_epoch(progress.epoch)
            for inputs, targets in accelerator.skip_first_batches(batches, progress.batch):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.step += 1
                progress.batch += 1
                rank = accelerator.process_index
                print(f"rank {rank} step {progress.step} loss {loss.item()!r}", flush=True)
                if progress.step % SAVE_EVERY == 0 or progress.step == steps:
                    # After a restart this step may have been saved before.
                    state = collect_state(accelerator)
                    manager.save_async(progress.step, state, overwrite=True)
                if progress.step == steps:
                    break
            else:
                progress.epoch, progress.batch = progress.epoch + 1, 0
    accelerator.end_training()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
