"""A Trainer's run as a script: `python trainer_job.py '{"url": ..., ...}'`, or under torchrun.

Rank 0 prints one line of JSON at the end: losses by step, and the state of the Trainer. `fsdp`
makes accelerate shard on CPUs, which it does on accelerators only.
"""

# ruff: noqa: ARG002  # the signatures of callbacks are the Trainer's

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
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
from transformers.trainer_callback import ExportableState

import ckpt_storage
from ckpt_storage.integrations.transformers import with_checkpoint_storage

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 1,
    "seed": 3,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}


class CountingCallback(TrainerCallback, ExportableState):
    """Counts steps, and has the Trainer keep the count."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


class Recorder(TrainerCallback):
    """Keeps losses; may end the process once a save is committed, or signal the last rank."""

    def __init__(self, url: str, interrupt_at: int | None, signal_at: int | None) -> None:
        self.losses: dict[int, float] = {}
        self._url = url
        self._interrupt_at = interrupt_at
        self._signal_at = signal_at

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if "loss" in kwargs["logs"]:
            self.losses[state.global_step] = kwargs["logs"]["loss"]

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step == self._interrupt_at:
            while not ckpt_storage.list_checkpoints(self._url):
                time.sleep(0.05)
            os._exit(7)
        is_last_rank = args.process_index == args.world_size - 1
        if state.global_step == self._signal_at and is_last_rank:
            os.kill(os.getpid(), signal.SIGTERM)


def use_fsdp_on_cpu() -> None:
    """Have accelerate take a group of CPUs for a group of accelerators."""
    from accelerate.state import (  # noqa: PLC0415  # costs time
        AcceleratorState,
        DistributedType,
        PartialState,
    )

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        shared = PartialState._shared_state  # noqa: SLF001  # there is no public way
        if shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = init


def model_of(*, lora: bool) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # costs time

    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return get_peft_model(model, adapter)


def texts(seed: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(64, (16,), generator=generator) for _ in range(24)]
    return [{"input_ids": text, "labels": text} for text in tokens]


def run(
    url: str,
    *,
    steps: int = 8,
    lora: bool = False,
    fsdp: bool = False,
    interrupt_at: int | None = None,
    signal_at: int | None = None,
    resume: str | bool | None = None,
    storage: dict[str, Any] | None = None,
    tokenizer: Any = None,
    callbacks: list[TrainerCallback] | None = None,
    prepare: Callable[[Trainer], None] = lambda _: None,
    scaler: Any = None,
    **arguments: Any,
) -> tuple[Trainer, dict[int, float]]:
    """Train; return the Trainer and the losses by step."""
    if fsdp:
        use_fsdp_on_cpu()
        arguments |= {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    defaults: dict[str, Any] = {
        **DEFAULTS,
        "output_dir": tempfile.mkdtemp(prefix="trainer-output-"),
        "max_steps": steps,
    }
    recorder = Recorder(url, interrupt_at, signal_at)
    trainer = with_checkpoint_storage(Trainer, url, **(storage or {}))(
        model=model_of(lora=lora),
        args=TrainingArguments(**defaults | arguments),
        train_dataset=texts(),
        eval_dataset=texts(2),
        processing_class=tokenizer,
        callbacks=[recorder, *(callbacks or [])],
    )
    prepare(trainer)
    if scaler is not None:
        trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder.losses


def plain_trainer(folder: Path, **arguments: Any) -> Trainer:
    """Return a Trainer without our storage."""
    settings = TrainingArguments(**DEFAULTS | arguments, output_dir=str(folder))
    return Trainer(model=model_of(lora=False), args=settings, train_dataset=texts())


def main() -> None:
    job = json.loads(sys.argv[1])
    trainer, losses = run(**job)
    if trainer.is_world_process_zero():
        report = {"losses": losses, "step": trainer.state.global_step}
        sys.stdout.write(f"report {json.dumps(report)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
