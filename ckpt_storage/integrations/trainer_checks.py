"""What of a Hugging Face Trainer can be served, and what is refused by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping

import transformers
from transformers import Trainer, TrainerCallback

from ckpt_storage.errors import InvalidInputError

__all__ = ["check_arguments", "check_methods"]

_OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "save_model": ("output_dir", "_internal_call"),
    "hyperparameter_search": (),
    "_determine_best_metric": ("metrics", "trial"),
    "_get_output_dir": ("trial",),
    "_init_training_state": (
        *("max_steps", "num_update_steps_per_epoch", "num_train_epochs"),
        *("resume_from_checkpoint", "trial"),
    ),
    "_load_best_model": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
}
"""The methods of the Trainer that are overridden, with the parameters that they must have."""

_UPLOADERS: Mapping[str, Callable[[TrainerCallback], object]] = {
    "ClearMLCallback": lambda _: _is_set("CLEARML_LOG_MODEL"),
    "DVCLiveCallback": lambda callback: getattr(callback, "_log_model", None) == "all",
    "FlyteCallback": lambda callback: getattr(callback, "sync_checkpoints", False),
    "MLflowCallback": lambda _: _is_set("HF_MLFLOW_LOG_ARTIFACTS"),
    "NeptuneCallback": lambda callback: getattr(callback, "_log_checkpoints", None),
    "WandbCallback": lambda _: os.environ.get("WANDB_LOG_MODEL") == "checkpoint",
}
"""Callbacks that upload the Trainer's own folders, and when they do."""


def check_methods(trainer_class: type[Trainer]) -> None:
    """Raise `InvalidInputError` if a method that is overridden has other parameters here."""
    for name, wanted in _OVERRIDDEN.items():
        method = getattr(trainer_class, name, None)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)
        if method is None or any(parameter not in parameters for parameter in wanted):
            raise InvalidInputError(
                f"{trainer_class.__name__}.{name}{parameters} of transformers "
                f"{transformers.__version__} lacks what is overridden: {wanted}.",
                next_step="Use a release of transformers that docs/frameworks.md lists.",
            )


def check_arguments(trainer: Trainer, *, has_keep: bool) -> None:
    """Raise `InvalidInputError` for arguments of a Trainer that cannot be served."""
    problem, step = "", ""
    uploaders = [
        type(callback).__name__
        for callback in trainer.callback_handler.callbacks
        for base in type(callback).__mro__
        if base.__name__ in _UPLOADERS and _UPLOADERS[base.__name__](callback)
    ]
    strategy = str(getattr(trainer.args.hub_strategy, "value", trainer.args.hub_strategy))
    if trainer.is_deepspeed_enabled:
        problem = "DeepSpeed, whose engine keeps the optimizer to itself"
        step = "Use DeepSpeed's own checkpoints, or FSDP."
    elif trainer.args.push_to_hub and strategy != "end":
        problem = f'hub_strategy="{strategy}", which pushes the Trainer\'s own folders'
        step = 'Use hub_strategy="end", or push what ckpt_storage.consolidate writes.'
    elif has_keep and trainer.args.save_total_limit is not None:
        problem = "save_total_limit beside keep="
        step = "Leave one of them out: save_total_limit=n is KeepLatest(n) and the best."
    elif uploaders:
        problem = f"{uploaders[0]}, which uploads the Trainer's own folders"
        step = "Turn off the upload of checkpoints in its settings."
    if problem:
        raise InvalidInputError(f"with_checkpoint_storage cannot serve {problem}.", next_step=step)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "TRUE", "YES", "ON"}
