"""Lightning's checkpoints in this package's storage: a `CheckpointIO`, and a sharded strategy.

`Trainer(plugins=[CheckpointStorageIO()])` serves every strategy that saves through a
`CheckpointIO`: rank 0 holds the whole checkpoint and saves it, all ranks load.
`CheckpointStorageStrategy` is for FSDP2 and tensor parallelism: Lightning's own
`ModelParallelStrategy` asks no `CheckpointIO`; here each rank saves and loads its own shards.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt_storage.commit.cleaning import delete_checkpoint
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.commit.stockfooter import is_foreign
from ckpt_storage.coordination.coordinator import solo
from ckpt_storage.errors import FormatError, InvalidInputError, StorageError
from ckpt_storage.export.consolidation.removal import remove_exports
from ckpt_storage.format import layout
from ckpt_storage.loads.loading import load
from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.saves.saving import SaveOptions, run_save, save
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.base import Store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.transfer.workers import bounded

from .whole import WholePlanner

__all__ = [
    "OUTLINE",
    "CheckpointStorageIO",
    "CheckpointStorageStrategy",
    "pack",
    "remove",
    "unpack",
]

log = logging.getLogger("ckpt_storage")


def remove(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None, timeouts: Timeouts
) -> None:
    """Delete the checkpoint at `url`: its commit first, then its files and exports; idempotent.

    A tombstone of a few hundred bytes stays, and what another tool left there, be it a folder or a
    file. Of a symbolic link the link alone goes: it means a checkpoint that has its own name.
    Where nothing is, nothing is made. Raises `StorageError`, `PhaseTimeoutError`.
    """
    location = Location.of(url, storage_options)
    if location.is_local and not _is_folder(Path(location.path)):
        return
    retry = RetryPolicy()
    deadline = Deadline("commit", timeouts.commit)
    store = bounded(open_store(location, timeouts=timeouts, retry=retry), deadline)
    found = read_log(store)
    if is_foreign(store, found) or (found.last is None and not _has_attempts(store)):
        return
    exclusive = probe_exclusive_create(store, key=location.scope()).exclusive
    if delete_checkpoint(store, exclusive=exclusive, deadline=deadline, retry=retry):
        remove_exports(store)


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder of its own; unlink a link to one."""
    if path.is_symlink():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"The link {path} cannot be removed: {error.strerror}.",
                kind="permission" if isinstance(error, PermissionError) else "other",
                path=str(path),
                next_step="Remove it by hand; what it means is left alone.",
            ) from error
        log.info("%s was a link, and what it means stays", path)
        return False
    if path.exists() and not path.is_dir():
        log.warning("%s is a file, which this package did not write; it stays", path)
        return False
    return path.is_dir()


def _has_attempts(store: Store) -> bool:
    """Return whether a save lies there that never was committed."""
    try:
        return bool(store.list(layout.SAVES, recursive=False))
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return False


OUTLINE = "outline"
"""The key of what is no tensor. Everything else in a packed state is."""

_CONTAINERS: tuple[tuple[str, type], ...] = (
    ("dict", dict),
    ("ordered", OrderedDict),
    ("list", list),
    ("tuple", tuple),
)


def pack(
    values: Mapping[str, Any], *, is_taken: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """Return a state dict for `save` that `unpack` makes `values` of again; copies no tensor.

    A tensor is named after the keys that lead to it, joined by dots. Where its first part is
    `OUTLINE`, or `is_taken` says that the caller has that key for something else, a name in
    brackets replaces it. Tensors inside objects of other classes stay in them, and travel in the
    pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    outline = _outline(
        dict(values), (), _Names(tensors, lambda head: head == OUTLINE or is_taken(head))
    )
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # The first key stays a level of its own: consolidation takes it off a model's weights.
        head, _, rest = name.partition(".")
        state.setdefault(head, {})[rest] = tensor
    return {**state, OUTLINE: outline}


def unpack(tensors: Mapping[str, torch.Tensor], outline: object) -> dict[str, Any]:
    """Return what was packed, of `tensors` by name and the outline.

    Raises `FormatError` if the outline is none.
    """
    try:
        values = _restored(outline, tensors)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"The outline of the checkpoint is not one of ours: {error!r}.",
            next_step="Load it with what it was saved with.",
        ) from error
    if not isinstance(values, dict):
        raise FormatError(
            f"The checkpoint holds a {type(values).__name__}, not a dict.",
            next_step="Load it with what it was saved with.",
        )
    return values


class _Names:
    """Gives tensors names of their own."""

    def __init__(self, tensors: dict[str, torch.Tensor], is_taken: Callable[[str], bool]) -> None:
        self._tensors = tensors
        self._is_taken = is_taken

    def add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        """Note a tensor that was found at `path`; return its name."""
        head, _, rest = ".".join(path).partition(".")
        wish = f"[{head}]" if self._is_taken(head) else head
        wish += f".{rest or 'value'}"
        # "a.b" and "a" with "b" in it spell one name.
        name, count = wish, 1
        while name in self._tensors:
            count += 1
            name = f"{wish}#{count}"
        self._tensors[name] = tensor
        return name


def _outline(value: object, path: tuple[str, ...], names: _Names) -> object:
    if isinstance(value, torch.Tensor):
        return ("tensor", names.add(value, path))
    kind = next((name for name, cls in _CONTAINERS if type(value) is cls), None)
    if kind is None:
        return ("value", value)
    parts = tuple((key, _outline(item, (*path, str(key)), names)) for key, item in _items_of(value))
    return (kind, parts)


def _items_of(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  # one of _CONTAINERS
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)


def _restored(outline: Any, tensors: Mapping[str, torch.Tensor]) -> object:  # noqa: ANN401  # data
    kind, content = outline
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    pairs = [(key, _restored(part, tensors)) for key, part in content]
    if kind in {"dict", "ordered"}:
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    items = [item for _, item in pairs]
    return items if kind == "list" else tuple(items)


_Path = str | os.PathLike[str]
_Timeout = float | timedelta | Timeouts | None

_SHARDED = ("state_dict.", "optimizer_")


class CheckpointStorageIO(CheckpointIO):
    """Saves and loads Lightning's checkpoints; give it to `Trainer(plugins=[...])`.

    Tensors go into the checkpoint under their own names (`state_dict.layer.weight`), so that
    `consolidate`, `verify` and stock DCP work on it. A path that holds a checkpoint is replaced in
    one step. For strategies where rank 0 saves for all: one device, DDP.

    Args:
        storage_options: passed to the fsspec file system; those of a call win.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: ten minutes).

    """

    def __init__(
        self, *, storage_options: Mapping[str, Any] | None = None, timeout: _Timeout = None
    ) -> None:
        super().__init__()
        self._storage_options = dict(storage_options or {})
        self._timeouts = Timeouts.of(timeout)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: object = None
    ) -> None:
        """Save `checkpoint` at `path`; Lightning calls this on rank 0 only.

        Raises as `ckpt_storage.save`.
        """
        options = SaveOptions(
            timeouts=self._timeouts,
            overwrite=True,
            storage_options=_merged(self._storage_options, storage_options) or None,
        )
        run_save(solo(), lambda: pack(checkpoint), path, lambda: options)

    def load_checkpoint(
        self,
        path: _Path,
        map_location: object = None,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning's signature
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on the CPU; Lightning calls all ranks.

        `weights_only=False` trusts whoever wrote it with objects of any class. Raises as
        `ckpt_storage.load`, and `InvalidInputError` for a `map_location` that is not the CPU.
        """
        if map_location is not None and str(map_location) != "cpu":
            raise InvalidInputError(
                f"map_location is {map_location!r}.",
                next_step="Leave it out: Lightning moves what it loads to its devices.",
            )
        planner = WholePlanner()
        load(
            {},
            path,
            planner=planner,
            storage_options=self._storage_options or None,
            timeout=self._timeouts,
            unsafe_pickle=weights_only is False,
        )
        return unpack(planner.loaded, planner.loaded.get(OUTLINE))

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete the checkpoint at `path`, its commit first; nothing there is no error.

        Raises `StorageError`, `PhaseTimeoutError`.
        """
        remove(path, storage_options=self._storage_options or None, timeouts=self._timeouts)


class CheckpointStorageStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose ranks save and load their own shards; `Trainer(strategy=...)`.

    Loads on another number of ranks and with another sharding. Arguments as for
    `ModelParallelStrategy`, and

    Args:
        storage_options: passed to the fsspec file system.
        timeout: seconds, `timedelta` or `Timeouts`; default an hour a phase
            (`plan`: ten minutes).

    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401  # ModelParallelStrategy's
        storage_options: Mapping[str, Any] | None = None,
        timeout: _Timeout = None,
        **kwargs: Any,  # noqa: ANN401  # as above
    ) -> None:
        super().__init__(*args, **{**kwargs, "save_distributed_checkpoint": True})
        self._storage_options = dict(storage_options or {})
        self._timeouts = Timeouts.of(timeout)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _Path, storage_options: object = None
    ) -> None:
        """Save at rank 0's `filepath`; all ranks call. Raises as `ckpt_storage.save`."""
        rest = {k: v for k, v in checkpoint.items() if k not in {"state_dict", "optimizer_states"}}
        state = pack(rest, is_taken=lambda head: f"{head}.".startswith(_SHARDED))
        state["state_dict"] = checkpoint["state_dict"]
        for number, values in enumerate(checkpoint.get("optimizer_states", [])):
            state[_optimizer(number)] = values
        save(
            state,
            self.broadcast(os.fspath(filepath)),
            overwrite=True,
            storage_options=_merged(self._storage_options, storage_options) or None,
            timeout=self._timeouts,
        )

    def load_checkpoint(
        self,
        checkpoint_path: _Path,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning's signature
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
            state[_optimizer(number)] = get_optimizer_state_dict(self.model, optimizer)
        planner = WholePlanner(wanted=lambda fqn: not fqn.startswith(_SHARDED))
        load(
            state,
            self.broadcast(os.fspath(checkpoint_path)),
            planner=planner,
            storage_options=self._storage_options or None,
            timeout=self._timeouts,
            unsafe_pickle=weights_only is False,
        )
        options = StateDictOptions(strict=module.strict_loading)
        set_model_state_dict(self.model, state["state_dict"], options=options)
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[_optimizer(number)])
        return unpack(planner.loaded, planner.loaded.get(OUTLINE))

    def remove_checkpoint(self, filepath: _Path) -> None:
        """Delete the checkpoint at `filepath`, its commit first, on rank 0.

        Raises `StorageError`, `PhaseTimeoutError`.
        """
        if self.is_global_zero:
            remove(filepath, storage_options=self._storage_options or None, timeouts=self._timeouts)


def _optimizer(number: int) -> str:
    return f"optimizer_{number}"


def _merged(own: Mapping[str, Any], given: object) -> dict[str, Any]:
    if given is None:
        return dict(own)
    if not isinstance(given, Mapping):
        raise InvalidInputError(
            f"storage_options is a {type(given).__name__}.", next_step="Give a mapping."
        )
    return {**own, **given}
