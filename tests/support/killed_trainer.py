"""Runs an example with a Trainer: `python killed_trainer.py '{"script": ..., ...}'`.

Before step `kill_at` the process is killed, once a checkpoint is committed. A training that ends
writes its losses by step to `losses`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import ckpt_storage

JOB = json.loads(sys.argv[1])


class Observer(TrainerCallback):
    """Kills the process, and writes the losses."""

    def on_step_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002  # the Trainer's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        if state.global_step == JOB["kill_at"]:
            while not ckpt_storage.list_checkpoints(JOB["url"]):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        losses = {log["step"]: log["loss"] for log in state.log_history if "loss" in log}
        Path(JOB["losses"]).write_text(json.dumps(losses), encoding="utf-8")


transformers.trainer.DEFAULT_CALLBACKS.append(Observer)  # type: ignore[arg-type]  # inferred from its first class
sys.argv = [JOB["script"], JOB["url"], JOB["adapter"]]
runpy.run_path(JOB["script"], run_name="__main__")
