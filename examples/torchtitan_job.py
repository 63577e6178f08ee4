"""torchtitan with its checkpoints in this package's storage: one line of its configuration.

    torchrun --nproc-per-node 8 examples/torchtitan_job.py s3://bucket/run 1000

The checkpoint manager is a setting like any other. In a project of your own put `config` into a
configuration registry and start it with torchtitan's own `train.py`.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from ckpt_storage.integrations.torchtitan import CheckpointStorageManager


def config(url: str, steps: int) -> Trainer.Config:
    """Return torchtitan's debug model, checkpointed below `url`."""
    job = llama3_debugmodel()
    job.training.steps = steps
    job.checkpoint = CheckpointStorageManager.Config(
        enable=True,
        folder=url,
        interval=2,
        keep_latest_k=2,
        last_save_model_only=False,
        async_mode="async",
    )
    return job


def main(job: Trainer.Config) -> None:
    """Train, from the newest committed checkpoint if any exists."""
    trainer = job.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(config(sys.argv[1], int(sys.argv[2])))
