"""Lightning: killed and started again, `Trainer.fit` continues bit for bit, on any storage.

    python examples/lightning_fit.py s3://bucket/run

One device, or DDP: a plug-in. For FSDP2 see `sharded_trainer` below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ckpt_storage.integrations.lightning import (
    CheckpointStorageIO,
    CheckpointStorageStrategy,
    last_checkpoint,
)


class Regression(lightning.LightningModule):
    """A small model that learns a fixed linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 1)
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        """Shard the model where the strategy has a mesh."""
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Sequence[torch.Tensor], _index: int) -> torch.Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.head(self.net(inputs)), targets)
        self.losses[self.global_step] = loss.item()
        print(f"step {self.global_step} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return one batch an epoch, so that a resumed run sees the same data again."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)


def keep(url: str) -> ModelCheckpoint:
    """Return Lightning's own callback, which decides when to save and what to keep."""
    return ModelCheckpoint(
        dirpath=url,
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=2,
        monitor="step",
        mode="max",
    )


def trainer(url: str, max_steps: int) -> lightning.Trainer:
    """Return a trainer for one device."""
    return lightning.Trainer(
        plugins=[CheckpointStorageIO()],
        callbacks=[keep(url)],
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def sharded_trainer(url: str, max_steps: int, ranks: int) -> lightning.Trainer:
    """Return a trainer whose ranks each save and load their own shards."""
    return lightning.Trainer(
        strategy=CheckpointStorageStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        devices=ranks,
        callbacks=[keep(url)],
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(url: str) -> None:
    """Train to step 8, from the newest checkpoint below `url` if any exists."""
    torch.manual_seed(0)
    trainer(url, 8).fit(Regression(), data(), ckpt_path=last_checkpoint(url))


if __name__ == "__main__":
    main(sys.argv[1])
