"""Lightning's checkpoints in this package's storage: a `CheckpointIO`, and a sharded strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.names import STOCK_METADATA
from ckpt_storage.loads.load import load
from ckpt_storage.manager.delete import delete
from ckpt_storage.manager.listing import list_checkpoints
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import save, save_on

from .packing import OUTLINE, WholePlanner, pack, unpack

__all__ = [
    "CheckpointStorageIO",
    "CheckpointStorageStrategy",
    "StorageModelCheckpoint",
    "last_checkpoint",
]

_Path = str | os.PathLike[str]
_Timeout = float | timedelta | Timeouts | None

_SHARDED = ("state_dict.", "optimizer_")


def last_checkpoint(
    dirpath: _Path, *, storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return the URL of the checkpoint below `dirpath` that was committed last; None without any.

    For `fit(ckpt_path=last_checkpoint(url))`. Raises as `ckpt_storage.list_checkpoints`.
    """
    infos = list_checkpoints(dirpath, storage_options=storage_options)
    # The times are in seconds; of equal ones, the list has the highest step last.
    infos.sort(key=lambda info: info.created_at or "")
    return infos[-1].url if infos else None


class StorageModelCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` at a URL, with which `fit(ckpt_path="last")` resumes the newest commit.

    The search of `ModelCheckpoint` drops the scheme of a URL, so that training begins at step 0.
    """

    def _find_last_checkpoints(self, trainer: lightning.Trainer) -> set[str]:
        if self.dirpath is None:
            return super()._find_last_checkpoints(trainer)
        last = last_checkpoint(self.dirpath)
        # The trainer asks for the time of a file, which folders of object stores lack.
        return {f"{last}/{STOCK_METADATA}"} if last else set()


class CheckpointStorageIO(CheckpointIO):
    """Saves and loads Lightning's checkpoints; give it to `Trainer(plugins=[...])`.

    Tensors go into the checkpoint under their own names (`state_dict.layer.weight`), so that
    `consolidate`, `verify` and stock DCP work on it. A path that holds a checkpoint is replaced in
    one step. For strategies where rank 0 saves for all: one device, DDP.

    `storage_options` go to the fsspec file system; those of a call win. `timeout`: seconds,
    `timedelta` or `Timeouts`; default an hour a phase (`plan`: four minutes).
    """

    def __init__(
        self, *, storage_options: Mapping[str, Any] | None = None, timeout: _Timeout = None
    ) -> None:
        super().__init__()
        self.storage_options, self.timeouts = storage_options, Timeouts.of(timeout)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: object = None
    ) -> None:
        """Save `checkpoint` at `path`; Lightning calls this on rank 0 only.

        Raises as `ckpt_storage.save`.
        """
        options = SaveOptions(
            timeouts=self.timeouts,
            overwrite=True,
            storage_options=_merged(self.storage_options, storage_options),
        )
        save_on(RankGroup.alone(), lambda: pack(checkpoint), path, options)

    def load_checkpoint(
        self, path: _Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on the CPU; Lightning calls all ranks.

        `weights_only=False` trusts the author with objects of any class. Raises as
        `ckpt_storage.load`, and `InvalidInputError` for a `map_location` that is not the CPU.
        """
        if map_location is not None and str(map_location) != "cpu":
            what = f"map_location is {map_location!r}."
            step = "Leave it out: Lightning moves what it loads to its devices."
            raise InvalidInputError(what, next_step=step)
        return _load(self, {}, os.fspath(path), WholePlanner(), weights_only)

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete the checkpoint at `path`, its commit first; nothing there is no error.

        Raises `StorageError`, `PhaseTimeoutError`.
        """
        delete(path, storage_options=self.storage_options, timeout=self.timeouts, missing_ok=True)


class CheckpointStorageStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose ranks save and load their own shards; `Trainer(strategy=...)`.

    For FSDP2 and tensor parallelism, for which Lightning asks no `CheckpointIO`. Loads on another
    number of ranks and with another sharding. Arguments as for `ModelParallelStrategy`;
    `storage_options` and `timeout` as for `CheckpointStorageIO`.
    """

    def __init__(
        self,
        *args: Any,
        storage_options: Mapping[str, Any] | None = None,
        timeout: _Timeout = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{**kwargs, "save_distributed_checkpoint": True})
        self._io = CheckpointStorageIO(storage_options=storage_options, timeout=timeout)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _Path, storage_options: object = None
    ) -> None:
        """Save at rank 0's `filepath`; all ranks call. Raises as `ckpt_storage.save`."""
        rest = {k: v for k, v in checkpoint.items() if k not in {"state_dict", "optimizer_states"}}
        state = pack(rest, is_taken=lambda head: f"{head}.".startswith(_SHARDED))
        state["state_dict"] = checkpoint["state_dict"]
        for number, values in enumerate(checkpoint.get("optimizer_states", [])):
            state[f"optimizer_{number}"] = values
        save(
            state,
            self.broadcast(os.fspath(filepath)),
            overwrite=True,
            step=checkpoint.get("global_step"),
            storage_options=_merged(self._io.storage_options, storage_options),
            timeout=self._io.timeouts,
        )

    def load_checkpoint(
        self, checkpoint_path: _Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load model and optimizers in place and return the rest; all ranks call.

        Optimizers are left alone where there are none yet (`validate`, `predict`). Raises as
        `ckpt_storage.load`.
        """
        module = self.lightning_module
        assert self.model is not None  # noqa: S101  # Lightning sets both before
        assert module is not None  # noqa: S101  # as above
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        planner = WholePlanner(wanted=lambda fqn: not fqn.startswith(_SHARDED))
        path = self.broadcast(os.fspath(checkpoint_path))
        rest = _load(self._io, state, path, planner, weights_only)
        options = StateDictOptions(strict=module.strict_loading)
        set_model_state_dict(self.model, state["state_dict"], options=options)
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        return rest

    def remove_checkpoint(self, filepath: _Path) -> None:
        """Delete the checkpoint at `filepath`, its commit first, on rank 0.

        Raises `StorageError`, `PhaseTimeoutError`.
        """
        if self.is_global_zero:
            self._io.remove_checkpoint(filepath)


def _merged(options: Mapping[str, Any] | None, call_options: Any) -> dict[str, Any] | None:
    """Return storage options; those of one call win."""
    return {**(options or {}), **(call_options or {})} or None


def _load(
    io: CheckpointStorageIO,
    state: dict[str, Any],
    path: str,
    planner: WholePlanner,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load `state` in place; return what was packed beside it."""
    load(
        state,
        path.removesuffix(f"/{STOCK_METADATA}"),
        planner=planner,
        storage_options=io.storage_options,
        timeout=io.timeouts,
        unsafe_pickle=weights_only is False,
    )
    return unpack(planner.loaded, planner.loaded.get(OUTLINE))
