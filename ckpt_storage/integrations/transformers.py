"""Checkpoints of the Hugging Face `Trainer` in this package's storage: a `TrainerCallback`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckpt_storage.background.saver import Mode
from ckpt_storage.errors import IntegrityError, InvalidInputError
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.policies import Keep
from ckpt_storage.manager.resume import Check
from ckpt_storage.options import Timeouts

from .packing import WholePlanner

__all__ = ["CheckpointStorageCallback"]

log = logging.getLogger("ckpt_storage")

_TRAINER, _RNG = "trainer", "rng"


class CheckpointStorageCallback(TrainerCallback):
    """Saves and resumes a `Trainer` below a URL; give it to `Trainer(callbacks=[...])`.

    Whenever the Trainer would save (`save_strategy` "steps" or "epoch"), the callback saves model,
    optimizer, scheduler, random states and `TrainerState` as `step-<number>` below `url`, and the
    Trainer writes nothing itself. To resume, pass `resume_folder()` to `Trainer.train`. Every rank
    makes one, after its process group is there (`TrainingArguments` sees to that).

    Not held: the scaler of fp16 training; a warning says so. Refused: `load_best_model_at_end`,
    `save_strategy="best"`, DeepSpeed, and resuming with the Trainer's own FSDP (it insists on
    reading the model from files of its own).

    `keep` is as for `CheckpointManager` (default: everything), `mode` ("thread" or "process") as
    for `AsyncSaver`. `timeout`: seconds, `timedelta` or `Timeouts`; default an hour a phase
    (`plan`: four minutes).
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: Keep | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | timedelta | Timeouts | None = None,
        mode: Mode = "thread",
    ) -> None:
        self._manager = CheckpointManager(
            url, keep=keep, storage_options=storage_options, timeout=timeout, mode=mode
        )
        self._saved_step = -1
        self._resumed_step: int | None = None
        self._replaced_above: int | None = None
        self._is_fsdp = False
        self._has_warned = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume_folder(self, *, check: Check = "deep") -> str | None:
        """Return what to pass as `resume_from_checkpoint`; all ranks call, None: a fresh start.

        A temporary folder with the few kilobytes from which the Trainer learns its step and its
        random states. Model, optimizer and scheduler are loaded when training begins, too late to
        go back to an older checkpoint. So every byte is checked here, by each rank a part, and a
        damaged checkpoint is passed over with a warning. `check="read"` leaves that out. Raises as
        `CheckpointManager.restore`, and `InvalidInputError` if the Trainer uses its own FSDP.
        """
        own = f"{_RNG}.{_rank()}"
        planner = WholePlanner(wanted=lambda fqn: fqn in {_TRAINER, own})
        restored = self._manager.restore({}, check=check, planner=planner)
        if restored is None:
            return None
        if self._is_fsdp:
            raise InvalidInputError(
                f"{restored.info.url} cannot be resumed from under the Trainer's FSDP, which reads "
                "the model from files of its own.",
                next_step="Load it with ckpt_storage.load in a loop of your own, or train without "
                "fsdp.",
            )
        self._resumed_step = self._replaced_above = restored.step
        self._drop_folder()
        self._folder = tempfile.TemporaryDirectory(prefix="ckpt-storage-resume-")
        folder = Path(self._folder.name)
        (folder / "trainer_state.json").write_text(planner.loaded[_TRAINER], encoding="utf-8")
        save_file({}, folder / "model.safetensors")
        if own in planner.loaded:
            is_one = not dist.is_initialized() or dist.get_world_size() == 1
            name = "rng_state.pth" if is_one else f"rng_state_{_rank()}.pth"
            torch.save(_as_trainer_keeps_it(planner.loaded[own]), folder / name)
        logging.getLogger("transformers.trainer").addFilter(_model_comes_later)
        return str(folder)

    def on_init_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
        """Refuse arguments with which a training would end otherwise than they say.

        Raises `InvalidInputError`; logs what is not kept.
        """
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        what = ""
        if args.load_best_model_at_end:
            what = "load_best_model_at_end: the Trainer would end with the last weights"
        elif strategy == "best":
            what = 'save_strategy="best": the Trainer would write those checkpoints itself'
        elif args.deepspeed or getattr(args, "deepspeed_plugin", None):
            what = "DeepSpeed, whose engine keeps the optimizer to itself"
        if what:
            raise InvalidInputError(
                f"CheckpointStorageCallback cannot serve {what}.",
                next_step="Leave it out: save by steps or epochs, and load the step that you want "
                "with ckpt_storage.load. For DeepSpeed, use its own checkpoints.",
            )
        if args.fp16 and not self._has_warned:
            log.warning(
                "The scaler of fp16 training is not saved: a resumed run begins with a new one. "
                "bf16 needs none."
            )
        self._has_warned = self._has_warned or bool(args.fp16)
        self._is_fsdp = bool(args.fsdp)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: Any
    ) -> None:
        """Load model, optimizer and scheduler where `resume_folder` said so.

        Raises as `CheckpointManager.restore`, and as `on_init_end`.
        """
        logging.getLogger("transformers.trainer").removeFilter(_model_comes_later)
        # A callback that was added to a Trainer later has not seen it made.
        self.on_init_end(args)
        if self._resumed_step is None:
            return
        target = _state_of(kwargs)
        try:
            self._manager.restore(target, step=self._resumed_step)
        except IntegrityError as error:
            error.add_note(
                "The Trainer has chosen its place in the data already. Start again with "
                "resume_folder(check='deep'), which passes over what is damaged."
            )
            raise
        set_state_dict(
            kwargs["model"],
            _bare(kwargs["optimizer"]),
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
        )
        kwargs["lr_scheduler"].load_state_dict(target["lr_scheduler"])
        self._saved_step = state.global_step
        self._resumed_step = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Begin a save if the Trainer is about to make one."""
        if not control.should_save:
            return control
        control.should_save = False
        if state.global_step != self._saved_step:
            self._saved_step = state.global_step
            self._manager.save_async(
                state.global_step,
                {
                    **_state_of(kwargs),
                    _TRAINER: json.dumps(dataclasses.asdict(state), sort_keys=True),
                    _RNG: {str(_rank()): _random_states()},
                },
                # A run that was resumed from an earlier step comes here again.
                overwrite=self._replaced_above is not None
                and state.global_step > self._replaced_above,
            )
        return control

    on_epoch_end = on_step_end

    def on_train_end(self, *_: object, **__: object) -> None:
        """Wait until every save has ended. Raises why one failed."""
        self._drop_folder()
        self._manager.wait()

    def close(self) -> None:
        """Wait for saves and free their memory; the callback is of no use afterwards."""
        self._drop_folder()
        logging.getLogger("transformers.trainer").removeFilter(_model_comes_later)
        self._manager.close()

    def _drop_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _model_comes_later(record: logging.LogRecord) -> bool:
    """Keep back the Trainer's warning that the folder it resumes from lacks the model."""
    return not record.getMessage().startswith("There were missing keys in the checkpoint")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _state_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(kwargs["model"], _bare(kwargs["optimizer"]))
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": kwargs["lr_scheduler"].state_dict(),
    }


def _random_states() -> tuple[object, ...]:
    # A tuple is one value to DCP, whatever is in it. Arrays would need trust to be loaded again.
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  # the generator that Trainer restores
    cuda: object = None
    if torch.cuda.is_available():
        is_one = not dist.is_initialized()
        cuda = torch.cuda.get_rng_state() if is_one else tuple(torch.cuda.get_rng_state_all())
    numpy = (kind, tuple(int(key) for key in keys), *rest)
    return (random.getstate(), numpy, torch.get_rng_state(), cuda)


def _as_trainer_keeps_it(states: tuple[Any, ...]) -> dict[str, Any]:
    python, (kind, keys, *rest), cpu, cuda = states
    numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
    found = {"python": python, "numpy": numpy, "cpu": cpu}
    return found if cuda is None else {**found, "cuda": cuda}
