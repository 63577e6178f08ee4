"""torch_checkpointing 0.1 on any storage, with the commits of this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterConfig
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)

from ckpt_storage.errors import InvalidInputError

from .checkpointing_conversion import convert_to_native
from .checkpointing_loader import CheckpointStorageFormat, CheckpointStorageResharder
from .checkpointing_storage import CheckpointStorage, CheckpointStorageConfig

__all__ = [
    "CheckpointStorage",
    "CheckpointStorageConfig",
    "CheckpointStorageFormat",
    "CheckpointStorageResharder",
    "commit_on_every_rank",
    "convert_to_native",
    "manager_config",
]


def manager_config(
    url: str | os.PathLike[str],
    *,
    is_async: bool = True,
    save: CheckpointSaverConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    timeout: Any = None,
    save_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> CheckpointManager.Config:
    """Return a `CheckpointManager.Config` whose manager saves below `url`; on every rank.

    Its writers write in place and commit together (`commit_on_every_rank`), and need no barrier of
    their own: a rank that fails or dies is named on all others. `save` are the options of a saver,
    by default of the asynchronous one, or of the synchronous one with `is_async=False`; `others`
    are arguments of `Config`, such as `items`.
    """
    saver = save or (AsyncCheckpointSaverConfig() if is_async else SyncCheckpointSaverConfig())
    threads = saver.writer_config.file_write_max_threads
    saver.writer_config = CheckpointWriterConfig(
        barrier_config=None, write_to_temp_dir=False, file_write_max_threads=threads
    )
    storage = CheckpointStorageConfig(
        url=os.fspath(url),
        storage_options=storage_options,
        overwrite=overwrite,
        timeout=timeout,
        save_options=save_options or {},
    )
    return CheckpointManager.Config(
        save=saver, storage_config=storage, finalize_callback=commit_on_every_rank, **others
    )


def commit_on_every_rank(args: CallbackArgs) -> None:
    """Commit what all ranks wrote: the `finalize_callback`, with `write_to_temp_dir=False`.

    Raises the error of the rank that failed on every rank.
    """
    if not isinstance(args.storage, CheckpointStorage):
        raise InvalidInputError(
            f"commit_on_every_rank got a {type(args.storage).__name__}.",
            next_step="Pass CheckpointStorageConfig as storage_config, or use manager_config.",
        )
    args.storage.commit(Path(args.path))
