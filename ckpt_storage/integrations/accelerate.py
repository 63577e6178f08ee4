"""accelerate: what `Accelerator.save_state` saves, in this package's storage.

Each rank saves and loads its shards of models and optimizers. Everything else is written and read
by accelerate in a temporary folder, whose files are entries of the checkpoint.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.checkpointing import (
    load_accelerator_state,
    save_accelerator_state,
    save_custom_state,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import InvalidInputError, UnsafeContentError
from ckpt_storage.loads.load import load
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.resume import Restored
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.save import save

from .file_entries import FileEntries, write_files
from .packing import WholePlanner

__all__ = ["collect_state", "load_state", "restore_state", "save_state"]

_ENGINES = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
"""What keeps models or optimizers to itself."""


def save_state(
    accelerator: Accelerator,
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
) -> CheckpointInfo:
    """Save at `url` what `accelerator.save_state` saves in a folder; all processes call.

    Arguments and errors as for `ckpt_storage.save`, and those of `collect_state`.
    """
    return save(
        collect_state(accelerator),
        url,
        overwrite=overwrite,
        storage_options=storage_options,
        timeout=timeout,
    )


def collect_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return what `accelerator.save_state` saves as a state dict; all processes call.

    For `AsyncSaver.save` and `CheckpointManager.save_async`. Tensors are those of the training: a
    save in the background copies them.

    Raises:
        InvalidInputError: with DeepSpeed, Megatron-LM and XLA; for hooks of
            `register_save_state_pre_hook` or `register_load_state_pre_hook`, which get weights; for
            an optimizer with parameters of several models.

    """
    tensors = _collect_tensors(accelerator)
    with tempfile.TemporaryDirectory(prefix="ckpt-storage-accelerate-") as folder:
        save_accelerator_state(
            folder,
            [],
            [],
            accelerator._schedulers,  # noqa: SLF001  # as its save_state does
            accelerator._dataloaders,  # noqa: SLF001  # as above
            accelerator.process_index,
            accelerator.step,
            accelerator.scaler,
        )
        for index, value in enumerate(accelerator._custom_objects):  # noqa: SLF001  # as above
            save_custom_state(value, folder, index)
        files = _files(accelerator)
        return {**tensors, files.key: files.read(Path(folder))}


def load_state(
    accelerator: Accelerator,
    url: str | os.PathLike[str],
    *,
    unsafe_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
) -> None:
    """Load the checkpoint at `url` into all that was prepared or registered; all processes call.

    On another number of processes, those without a stored random state keep theirs.
    `unsafe_pickle` unpickles registered objects, as `Accelerator.load_state` does: that runs code
    of the author of the checkpoint. Without it, their states may hold plain values and tensors.

    Raises as `ckpt_storage.load` and `collect_state`, and `InvalidInputError` for a checkpoint that
    lacks the state of a prepared or registered object.
    """
    planner = _files(accelerator).make_planner()
    tensors = _collect_tensors(accelerator)
    load(tensors, url, planner=planner, storage_options=storage_options, timeout=timeout)
    _apply(accelerator, tensors, planner, unsafe_pickle=unsafe_pickle)


def restore_state(
    accelerator: Accelerator, manager: CheckpointManager, *, unsafe_pickle: bool = False
) -> Restored | None:
    """Load the newest sound checkpoint of `manager`, as `load_state`; None if there is none."""
    planner = _files(accelerator).make_planner()
    tensors = _collect_tensors(accelerator)
    restored = manager.restore(tensors, planner=planner)
    if restored is not None:
        _apply(accelerator, tensors, planner, unsafe_pickle=unsafe_pickle)
    return restored


def _files(accelerator: Accelerator) -> FileEntries:
    return FileEntries(
        key="accelerate_files",
        random_states="random_states_",
        own_random_states=f"random_states_{accelerator.process_index}.pkl",
        rank=accelerator.process_index,
    )


def _collect_tensors(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state dicts of models and optimizers, by the names of accelerate's files."""
    _check(accelerator)
    state: dict[str, Any] = {}
    for index, model in enumerate(accelerator._models):  # noqa: SLF001  # as its save_state does
        state[_numbered("model", index)] = get_model_state_dict(model)
    for index, (model, optimizer) in enumerate(_optimizers(accelerator)):
        state[_numbered("optimizer", index)] = get_optimizer_state_dict(model, optimizer)
    return state


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def _optimizers(accelerator: Accelerator) -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """Return each optimizer with the model whose parameters it has."""
    pairs = []
    for wrapper in accelerator._optimizers:  # noqa: SLF001  # as its save_state does
        optimizer = wrapper.optimizer
        wanted = {id(value) for group in optimizer.param_groups for value in group["params"]}
        models = [
            model
            for model in accelerator._models  # noqa: SLF001  # as above
            if wanted <= {id(value) for value in model.parameters()}
        ]
        if not models:
            raise InvalidInputError(
                f"A {type(optimizer).__name__} has parameters of several models, or of none that "
                "was prepared.",
                next_step="Make an optimizer for each model, and prepare them together.",
            )
        pairs.append((models[0], optimizer))
    return pairs


def _check(accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` for what cannot be saved or loaded."""
    if accelerator.distributed_type in _ENGINES:
        raise InvalidInputError(
            f"{accelerator.distributed_type.value} keeps models and optimizers to itself.",
            next_step="Use Accelerator.save_state with a folder, or FSDP.",
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:  # noqa: SLF001  # as its save_state does
        raise InvalidInputError(
            "The accelerator has hooks that take the weights of save_state or load_state.",
            next_step="Remove them, and save what they write by ckpt_storage.save.",
        )


def _apply(
    accelerator: Accelerator,
    tensors: Mapping[str, Any],
    planner: WholePlanner,
    *,
    unsafe_pickle: bool,
) -> None:
    """Set the states of all that was prepared or registered."""
    for index, model in enumerate(accelerator._models):  # noqa: SLF001  # as its load_state does
        set_model_state_dict(model, tensors[_numbered("model", index)])
    for index, (model, optimizer) in enumerate(_optimizers(accelerator)):
        state = tensors[_numbered("optimizer", index)]
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state)
    with tempfile.TemporaryDirectory(prefix="ckpt-storage-accelerate-") as folder:
        write_files(Path(folder), _files(accelerator).loaded(planner))
        try:
            attributes = load_accelerator_state(
                folder,
                [],
                [],
                accelerator._schedulers,  # noqa: SLF001  # as its load_state does
                accelerator._dataloaders,  # noqa: SLF001  # as above
                accelerator.process_index,
                accelerator.scaler,
            )
            for index, value in enumerate(accelerator._custom_objects):  # noqa: SLF001  # as above
                path = Path(folder, f"custom_checkpoint_{index}.pkl")
                value.load_state_dict(_read_object(path, unsafe_pickle=unsafe_pickle))
        except FileNotFoundError as error:
            raise InvalidInputError(
                f"The checkpoint has no {Path(error.filename or str(error)).name}.",
                next_step="Prepare and register the same objects as the run that saved it.",
            ) from error
    accelerator.step = attributes.get("step", accelerator.step)


def _read_object(path: Path, *, unsafe_pickle: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=not unsafe_pickle)
    except pickle.UnpicklingError as error:
        raise UnsafeContentError(
            f"The state of a registered object, {path.name}, holds more than plain values and "
            "tensors.",
            path=path.name,
            phase="load",
            next_step="If you trust who saved it, pass unsafe_pickle=True.",
        ) from error
