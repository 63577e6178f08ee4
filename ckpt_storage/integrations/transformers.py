"""Checkpoints of the Hugging Face `Trainer` in this package's storage.

`with_checkpoint_storage` derives a class from a Trainer. `Trainer._save_checkpoint` and
`Trainer.train` stay the Trainer's: only the methods that they call to write or read a folder are
overridden. Small files (configuration, tokenizer, random states, scheduler, scaler, state of the
Trainer and its callbacks) are written by the Trainer into a temporary folder, and travel as entries
of the checkpoint. Model and optimizer never touch that folder: each rank saves and loads its
shards.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckpt_storage.background.saver import Mode
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loads.load import load
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.policies import Candidate, Keep, KeepLatest, RetentionPolicy
from ckpt_storage.manager.resume import Check
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location

from .file_entries import read_files, write_files
from .trainer_checks import check_arguments, check_methods
from .trainer_entries import StoredNames, resume_files

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

    _Base = Trainer
else:
    _Base = object

__all__ = ["with_checkpoint_storage"]

log = logging.getLogger("ckpt_storage")

_MODEL, _OPTIMIZER, _FILES = "model", "optimizer", "files"
_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"


def with_checkpoint_storage(
    trainer_class: type[Trainer],
    url: str | os.PathLike[str],
    *,
    keep: Keep | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    mode: Mode = "thread",
    check: Check = "deep",
    frozen_of_adapters: bool = False,
) -> type[Trainer]:
    """Return a class like `trainer_class` whose checkpoints are below `url`.

    `Trainer = with_checkpoint_storage(Trainer, "s3://bucket/run")` is all that a script changes.
    Whatever decides when a Trainer saves decides here: `save_strategy` and its steps, "best",
    `control.should_save`. Each checkpoint is the folder `step-<number>` of `url`; saves run in the
    background, and `train` returns when all have ended. Make the Trainer on every rank.

    `train(resume_from_checkpoint=True)` resumes from the newest sound checkpoint below `url`, or
    begins at 0 with a warning; the URL of a checkpoint resumes from that; a folder that a plain
    Trainer wrote resumes as it would there. `load_best_model_at_end`, `metric_for_best_model`,
    `save_only_model` and `enable_jit_checkpoint` (all ranks save at one step, then stop) work, and
    so does FSDP, on any number of ranks. `save_total_limit=n` keeps the `n` newest and the best.
    Configuration and tokenizer are stored as entries `files.*`, which `consolidate` writes beside
    the weights. Of a PEFT model only what the adapter saves, and what is trained, is stored.

    Args:
        trainer_class: `transformers.Trainer` or a class derived from it.
        url: folder or URL that holds the checkpoints; the same on every rank.
        keep: policies as for `CheckpointManager`, in place of `save_total_limit`.
        storage_options: passed to the fsspec file system.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase (`plan`: four minutes).
        mode: "thread" or "process", as for `AsyncSaver`.
        check: how a checkpoint is checked before `True` resumes from it. "deep": every byte, each
            rank a part, so that a damaged checkpoint is passed over. "read" checks what it loads,
            and damage ends the training with `IntegrityError`.
        frozen_of_adapters: store the frozen weights of PEFT models, too, with every step.

    Raises:
        InvalidInputError: if a method of this release of transformers has other parameters than
            those that are overridden here; names it. From the Trainer that is made: for DeepSpeed,
            `hub_strategy` other than "end", `save_total_limit` beside `keep`, and callbacks that
            upload the Trainer's folders. From `hyperparameter_search`.

    """
    check_methods(trainer_class)
    options = _Options(
        url=url,
        keep=keep,
        storage_options=storage_options,
        timeout=timeout,
        mode=mode,
        check=check,
        frozen_of_adapters=frozen_of_adapters,
    )
    name = f"{trainer_class.__name__}WithCheckpointStorage"
    attributes = {"_checkpoint_options": options, "__module__": trainer_class.__module__}
    return type(name, (_StorageMixin, trainer_class), attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    url: str | os.PathLike[str]
    keep: Keep | None
    storage_options: Mapping[str, Any] | None
    timeout: float | timedelta | Timeouts | None
    mode: Mode
    check: Check
    frozen_of_adapters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resume:
    """The checkpoint that a training resumes from, and the folder with its small files."""

    folder: str
    target: str
    step: int
    has_optimizer: bool


@dataclass(slots=True, kw_only=True)
class _Training:
    """One call of `train`: its manager and temporary folder, and what it resumed from and saved.

    Steps above `replaced_above` may be there already: the run was resumed from an earlier step.
    """

    manager: CheckpointManager
    folder: str
    resume: _Resume | None = None
    replaced_above: int | None = None
    saved_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class _TrainerKeep(RetentionPolicy):
    """Keep the newest `limit`, and the step that the Trainer calls the best.

    Not `KeepBest`: of equal metrics the Trainer means the earlier step.
    """

    __slots__ = ("_best_step", "_latest")

    def __init__(self, limit: int, best_step: Callable[[], int | None]) -> None:
        self._latest = KeepLatest(limit)
        self._best_step = best_step

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return names with the reason."""
        best = self._best_step()
        names = {each.name: "the Trainer's best" for each in candidates if each.step == best}
        return names | self._latest.kept(candidates)

    def __str__(self) -> str:
        return f"{self._latest} | the Trainer's best"


class _PreemptionCallback(TrainerCallback):
    """Has all ranks save and stop at one step once any of them was asked to end."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        """Ask the other ranks."""
        if self._manager.should_save(state.global_step) and self._manager.preempted:
            control.should_save = control.should_training_stop = True
        return control


class _StorageMixin(_Base):
    """The methods that a Trainer's checkpoints go through; the outermost class."""

    _checkpoint_options: _Options

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_save_checkpoint" in vars(cls):
            raise InvalidInputError(
                f"{cls.__name__}._save_checkpoint would write its files after they are collected.",
                next_step="Derive from the Trainer first, and apply with_checkpoint_storage last.",
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_arguments(self, has_keep=self._checkpoint_options.keep is not None)
        self._signals = self._take_preemption_signals()
        self._training: _Training | None = None
        self._exported_files: dict[str, torch.Tensor] | None = None
        self._names: StoredNames | None = None

    def _new_manager(self) -> CheckpointManager:
        options, limit = self._checkpoint_options, self.args.save_total_limit
        keep = options.keep
        if keep is None and limit is not None and limit > 0:
            keep = _TrainerKeep(limit, lambda: self.state.best_global_step)
        return CheckpointManager(
            options.url,
            keep=keep,
            storage_options=options.storage_options,
            timeout=options.timeout,
            mode=options.mode,
            signals=self._signals,
        )

    def _take_preemption_signals(self) -> list[int]:
        """Take SIGTERM from the Trainer's callback, which would save on one rank alone."""
        if not getattr(self.args, "enable_jit_checkpoint", False):
            return []
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback  # noqa: PLC0415  # newer releases have it

        callback = self.pop_callback(JITCheckpointCallback)
        if callback is not None:
            callback.on_train_end(self.args, self.state, self.control)
        return [signal.SIGTERM]

    # Training, and what it resumes from.

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train as the Trainer does; return once every save has ended.

        Raises why a save failed; if the training fails itself, that is a note on its error.
        """
        folders = tempfile.TemporaryDirectory(prefix="ckpt-storage-trainer-")
        with folders as folder, self._new_manager() as manager:
            training = self._training = _Training(manager=manager, folder=folder)
            callback = _PreemptionCallback(manager) if self._signals else None
            if callback is not None:
                self.add_callback(callback)
            try:
                training.resume = self._find_resume(training, resume_from_checkpoint)
                path = resume_from_checkpoint if training.resume is None else training.resume.folder
                if path is True:
                    log.warning(
                        "There is no checkpoint below %s: training begins at step 0.", manager.url
                    )
                    path = None
                output = super().train(path, trial, ignore_keys_for_eval, **kwargs)
                manager.wait()
                return output
            finally:
                self._training = None
                if callback is not None:
                    self.remove_callback(callback)

    def _find_resume(self, training: _Training, wanted: str | bool | None) -> _Resume | None:
        """Read the small files of the checkpoint to resume from, None for none; all ranks call."""
        if not wanted or (wanted is not True and Path(wanted, _STATE).is_file()):
            return None  # a plain Trainer wrote that folder, and this Trainer reads it as well
        entries = resume_files()
        planner = entries.make_planner()
        manager, options = training.manager, self._checkpoint_options
        if wanted is True:
            restored = manager.restore({}, check=options.check, planner=planner)
            if restored is None:
                return None
            step = restored.info.step
            target = restored.info.url if step is None else manager.target_of(step)
        else:
            target = os.fspath(wanted)
            load({}, target, planner=planner, **self._load_options())
        url = Location.of(target, options.storage_options).url
        files = entries.loaded(planner)
        if _STATE not in files:
            raise InvalidInputError(
                f"{url} is no checkpoint of a Trainer.",
                next_step="Load it with ckpt_storage.load in a script of your own.",
            )
        folder = Path(training.folder, "resume")
        write_files(folder, files)
        step = int(json.loads(bytes(files[_STATE].numpy()))["global_step"])
        if url == manager.url_of(step):
            training.replaced_above = step
        training.saved_step = step
        return _Resume(
            folder=str(folder), target=target, step=step, has_optimizer=_SCHEDULER in files
        )

    def _load_options(self) -> dict[str, Any]:
        options = self._checkpoint_options
        return {"storage_options": options.storage_options, "timeout": options.timeout}

    def _resume_at(self, folder: str | None) -> _Resume | None:
        """Return what the training resumes from, if `folder` is that of its small files."""
        resume = None if self._training is None else self._training.resume
        return resume if resume is not None and resume.folder == folder else None

    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        progress: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._resume_at(resume_from_checkpoint) is not None:
            self._set_best()
        return progress

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The weights are loaded with the optimizer, once both are sharded.
        if self._resume_at(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        resume = self._resume_at(checkpoint)
        if resume is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._load_weights(resume.target, with_optimizer=resume.has_optimizer)
        if not resume.has_optimizer:
            log.warning(
                "Step %d was saved with save_only_model: optimizer and schedule begin anew.",
                resume.step,
            )
            return
        scheduler: Any = self.lr_scheduler
        path = Path(resume.folder, _SCHEDULER)
        scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _load_weights(self, target: str, *, with_optimizer: bool = False) -> None:
        """Load the model, and the optimizer, of a checkpoint in place; all ranks call."""
        model: Any = self.model
        names = self._stored_names()
        state: dict[str, Any] = {_MODEL: names.stored(get_model_state_dict(model))}
        optimizer = _bare(self.optimizer) if with_optimizer else None
        if optimizer is not None:
            state[_OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
        load(state, target, **self._load_options())
        # Partial: of an adapter the base stays as it is.
        options = StateDictOptions(strict=False)
        set_model_state_dict(model, names.own(state[_MODEL]), options=options)
        if optimizer is not None:
            set_optimizer_state_dict(
                model, optimizer, optim_state_dict=state[_OPTIMIZER], options=options
            )

    def _load_best_model(self) -> None:
        training = self._training
        if training is None:
            super()._load_best_model()
            return
        # Its save may still be in flight.
        training.manager.wait()
        self._load_weights(training.manager.target_of(self.state.best_global_step or 0))

    # Saving.

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: its runs would all save below one URL."""
        del args, kwargs
        raise InvalidInputError(
            "with_checkpoint_storage cannot serve hyperparameter_search.",
            next_step="Search with a plain Trainer, then train with this Trainer.",
        )

    def _get_output_dir(self, trial: Any) -> str:
        training = self._training
        return super()._get_output_dir(trial) if training is None else training.folder

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        if self._training is not None:
            values: Mapping[str, Any] = metrics
            self._training.metrics = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, int | float)
            }
        return super()._determine_best_metric(metrics, trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        training, step = self._training, self.state.global_step
        if training is None:
            super()._save_checkpoint(model, trial)
            return
        if step == training.saved_step:
            return
        # A path would mean nothing to a process that resumes elsewhere.
        self.state.best_model_checkpoint = None
        super()._save_checkpoint(model, trial)
        training.saved_step = step
        self._set_best()
        folder, entries = Path(training.folder, f"checkpoint-{step}"), resume_files()
        trained: Any = self.model
        state: dict[str, Any] = {
            _MODEL: self._stored_names().stored(get_model_state_dict(trained)),
            entries.key: entries.read(folder),
            _FILES: (self._exported_files or {}) if entries.rank == 0 else {},
        }
        shutil.rmtree(folder, ignore_errors=True)
        if not self.args.save_only_model:
            state[_OPTIMIZER] = get_optimizer_state_dict(trained, _bare(self.optimizer))
        metrics, training.metrics = training.metrics, {}
        first_new = training.replaced_above
        training.manager.save_async(
            step,
            state,
            metrics=metrics or None,
            overwrite=first_new is not None and step > first_new,
        )

    def _set_best(self) -> None:
        """Say where the best checkpoint is, on every rank."""
        step = self.state.best_global_step
        if step and self._training is not None:
            self.state.best_model_checkpoint = self._training.manager.url_of(step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the Trainer does; in a checkpoint, its small files only."""
        if not _internal_call or self._training is None or output_dir is None:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            folder = Path(output_dir)
            if self._exported_files is None:
                # They do not change in a training, and a tokenizer takes a second.
                folder.mkdir(parents=True)
                self._save_small_files(output_dir)
                self._exported_files = read_files(folder, lambda _: True)
                shutil.rmtree(folder)
            folder.mkdir(parents=True)

    def _save_small_files(self, folder: str) -> None:
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        adapters: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
        for name, adapter in adapters.items():
            adapter.save_pretrained(folder if name == "default" else str(Path(folder, name)))
        if not adapters:
            for name in ("config", "generation_config"):
                config: Any = getattr(model, name, None)
                if hasattr(config, "save_pretrained"):
                    config.save_pretrained(folder)
        candidates: list[Any] = [
            self.processing_class,
            getattr(self.data_collator, "tokenizer", None),
        ]
        tokenizer = next(filter(None, candidates), None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _stored_names(self) -> StoredNames:
        if self._names is None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            is_whole = self._checkpoint_options.frozen_of_adapters
            self._names = StoredNames.of(model, is_whole=is_whole)
        return self._names


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
