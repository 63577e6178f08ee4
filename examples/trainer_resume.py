"""Hugging Face Trainer: training that is interrupted and resumes, bit for bit, from any storage.

python examples/trainer_resume.py [URL]
torchrun --nproc-per-node 2 examples/trainer_resume.py URL
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import ckpt_storage
from ckpt_storage.integrations.transformers import with_checkpoint_storage

STEPS = 8


class Observer(TrainerCallback):
    """Keeps the losses, and interrupts the training before a step."""

    def __init__(self, interrupt_at: int | None) -> None:
        self.losses: dict[int, float] = {}
        self.interrupt_at = interrupt_at

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002  # the Trainer's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Keep the loss of a step."""
        logs = kwargs["logs"]
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002  # the Trainer's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> None:
        """Interrupt, as Ctrl-C would."""
        if state.global_step == self.interrupt_at:
            raise KeyboardInterrupt


def examples() -> list[dict[str, torch.Tensor]]:
    """Return some texts of random tokens."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(64, (16,), generator=generator) for _ in range(24)]
    return [{"input_ids": text, "labels": text} for text in texts]


def train(url: str, output_dir: str, interrupt_at: int | None = None) -> dict[int, float]:
    """Train up to `STEPS`, from the newest checkpoint below `url` if there is one."""
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        seed=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            # Dropout draws random numbers, so a resumed run must restore their state.
            attention_dropout=0.1,
        )
    )
    observer = Observer(interrupt_at)
    # The one line that differs from a script with a plain Trainer.
    trainer_class = with_checkpoint_storage(Trainer, url)
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=examples(), callbacks=[observer]
    )
    try:
        trainer.train(resume_from_checkpoint=True)
    except KeyboardInterrupt:
        print(f"interrupted at step {interrupt_at}")
    return observer.losses


def main(url: str) -> None:
    """Train without and with an interruption, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{url}/whole", folder)
        train(f"{url}/run", folder, interrupt_at=5)
        resumed = train(f"{url}/run", folder)
        own = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print(f"resumed after step {min(resumed) - 1}")
    same = all(whole[step] == loss for step, loss in resumed.items())
    print("losses are", "bit-identical" if same else "different", "to those of the whole run")
    names = [info.name for info in ckpt_storage.list_checkpoints(f"{url}/run")]
    print("committed:", ", ".join(names))
    print("the Trainer's own checkpoints:", ", ".join(own) or "none")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as default:
        main(sys.argv[1] if len(sys.argv) > 1 else default)
