"""The storage of torch_checkpointing: its files as values of one checkpoint, with one commit.

Every file that its writer writes becomes a value `files.<name>`, with checksums, so that all tools
for checkpoints know these, too.
"""

from __future__ import annotations

import io
import itertools
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

import ckpt_storage
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, StoreAddress, StoreClient
from ckpt_storage.coordination.lane import Lane
from ckpt_storage.errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    InvalidInputError,
    UnsupportedByStoreError,
)
from ckpt_storage.format.names import FILES_PREFIX
from ckpt_storage.inspect.checkpoint import Checkpoint
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.file_streams import FilesSave
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.store import Location

from .checkpointing_streams import ReadStream, WriteStream

__all__ = ["CheckpointStorage", "CheckpointStorageConfig"]

log = logging.getLogger("ckpt_storage")

_generation = itertools.count()
"""Counts the configurations of this process: ranks make theirs in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The ranks of a job, as the writer process of one of them reaches them."""

    rank: int = 0
    world_size: int = 1
    address: StoreAddress | None = None

    @classmethod
    def own(cls) -> _Ranks:
        """Return this rank of the default process group; without a group, this process alone."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        group = dist.group.WORLD
        assert group is not None  # noqa: S101  # it is initialized
        address = StoreClient.of_group(group).address
        if address is None:
            raise InvalidInputError(
                "The ranks share a store that only this process reaches.",
                next_step="Initialize torch.distributed over TCP or a file, as torchrun does.",
            )
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), address=address)

    def group(self, name: str) -> RankGroup:
        """Return the ranks on a lane of their own."""
        if self.address is None:
            return RankGroup.alone()
        keys = KeyValues(
            StoreClient(self.address.connect, self.address), f"ckpt_storage/{name}", is_root=True
        )
        return RankGroup(Lane(keys, rank=self.rank, global_ranks=range(self.world_size)))


@dataclass
class CheckpointStorageConfig(StorageConfig):
    """Where torch_checkpointing keeps the checkpoints of a run; for its `storage_config`.

    Every rank makes a configuration for each manager, after `init_process_group`. The ids of
    checkpoints are URLs, or paths, directly below `url`. Saves need `commit_on_every_rank` as
    `finalize_callback`, which `manager_config` sees to.

    Args:
        url: URL or local path of the root of the run.
        storage_options: passed to the fsspec file system.
        overwrite: replace committed checkpoints.
        timeout: seconds, `timedelta` or `Timeouts`, as for `ckpt_storage.save`.

    """

    url: str
    storage_options: Mapping[str, Any] | None = None
    overwrite: bool = False
    timeout: Any = None

    def __post_init__(self) -> None:
        """Check the URL, and count. Raises `InvalidInputError`."""
        Location.of(self.url, self.storage_options)
        Timeouts.of(self.timeout)
        self._name = f"torch_checkpointing/{next(_generation)}"
        self._ranks: _Ranks | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The writer process has no process group: the ranks are those of the process that sends it.
        return {**vars(self), "_ranks": self._ranks or _Ranks.own()}

    def create_storage(self) -> CheckpointStorage:
        """Return a storage for one writer or one reader."""
        return CheckpointStorage(self)

    def make_save(self, url: str) -> FilesSave:
        """Begin a save of all ranks."""
        options = {
            "storage_options": self.storage_options,
            "overwrite": self.overwrite,
            # Two threads of a local disk: one file is hashed while another part is written.
            "thread_count": 2 if Location.of(url).is_local else None,
        }
        ranks = (self._ranks or _Ranks.own()).group(self._name)
        return FilesSave(ranks, url, SaveOptions.of(options, timeouts=Timeouts.of(self.timeout)))


class CheckpointStorage(Storage):
    """The storage of one writer or reader: files of checkpoints, as `Storage` has them."""

    def __init__(self, config: CheckpointStorageConfig) -> None:
        self._config = config
        self._root = Location.of(config.url, config.storage_options)
        self._lock = threading.RLock()
        self._saves: dict[str, FilesSave] = {}
        self._opened: dict[str, Checkpoint] = {}
        self._metadata: bytes | None = None

    def __del__(self) -> None:
        for name, save in self._saves.items():
            if not save.is_over:
                log.warning(
                    "%s is not committed: pass commit_on_every_rank as finalize_callback.", name
                )

    @property
    def mmap_fill_workers(self) -> int | None:
        """One call reads a whole file: the reads have threads of their own."""
        return 1

    # Paths.

    def _split(self, path: Path) -> tuple[str, str]:
        """Return the names of a checkpoint, and of a file in it; "" where a path is above them.

        Raises `InvalidInputError` for a path that is not below the root.
        """
        roots = [Path(self._config.url), Path(self._root.url), Path(self._root.target)]
        for root in roots:
            for base, below in ((root, path), (root.absolute(), path.absolute())):
                if below.is_relative_to(base):
                    parts = below.relative_to(base).parts
                    return parts[0] if parts else "", "/".join(parts[1:])
        raise InvalidInputError(
            f"{path} is not below {self._root.url}, the root of this storage.",
            next_step="Name checkpoints by URLs directly below the root.",
        )

    def _url_of(self, name: str) -> str:
        return self._root.child(name).target

    # Writing.

    def stream_write(self, path: Path) -> io.IOBase:
        """Return a stream for a new file of the save."""
        return self.get_write_stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        """Return a stream for a new file that will hold about as many bytes as `data`."""
        leaves = tree_leaves(data) if data is not None else []
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        planned = sum(tensor.nbytes for tensor in tensors) or None
        name, file = self._split(path)
        if not name or not file:
            raise InvalidInputError(f"{path} is no file of a checkpoint below {self._root.url}.")
        return WriteStream(self._save_of(name).open(file, planned_bytes=planned))

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file."""
        _, file = self._split(path)
        if file == METADATA_FILE_NAME:
            self._metadata = bytes(data)
        with self.get_write_stream(path, None) as stream:
            stream.write(data)

    def _save_of(self, name: str) -> FilesSave:
        with self._lock:
            save = self._saves.get(name)
            if save is None or save.is_over:
                self._saves[name] = save = self._config.make_save(self._url_of(name))
            return save

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Begin the save, before its first file. Raises `CheckpointExistsError`, say."""
        name, _ = self._split(path)
        if name:
            self._save_of(name)

    def commit(self, path: Path) -> None:
        """Commit the save to a checkpoint; all ranks call."""
        name, below = self._split(path)
        if not name or below:
            raise InvalidInputError(
                f"{path} is not directly below {self._root.url}.",
                next_step="Make the root of the storage the folder above the checkpoint.",
            )
        with self._lock:
            open_names = [other for other, save in self._saves.items() if not save.is_over]
            if strange := [other for other in open_names if other != name]:
                error = InvalidInputError(
                    f"{name} is to be committed, and files were written to {strange[0]}.",
                    next_step="Use manager_config, or set write_to_temp_dir=False.",
                )
                self._saves[strange[0]].fail(error)
                raise error
            save = self._saves.get(name) or self._save_of(name)
        is_lacking = self._metadata is not None and not save.has(METADATA_FILE_NAME)
        if is_lacking and not save.is_over:
            # Their synchronous saver writes it with its first save alone.
            with WriteStream(save.open(METADATA_FILE_NAME)) as stream:
                stream.write(self._metadata)
        save.finish()

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Refuse: a rename by one rank is no commit of all."""
        raise UnsupportedByStoreError(
            f"{src_path} is not renamed to {dst_path}: ranks commit together.",
            next_step="Use manager_config, or write_to_temp_dir=False with commit_on_every_rank.",
        )

    def _refuse(self, *_: object, **__: object) -> Never:
        """Refuse what their savers and loaders do not need."""
        raise UnsupportedByStoreError(
            f"Nothing below {self._root.url} can be listed or deleted through this storage.",
            next_step="Use ckpt_storage.delete and ckpt_storage.list_checkpoints.",
        )

    delete = rmdir = ls = isdir = glob = _refuse

    # Reading.

    def _checkpoint(self, name: str, *, fresh: bool = False) -> Checkpoint:
        with self._lock:
            checkpoint = self._opened.get(name)
            if checkpoint is None or fresh:
                self._opened[name] = checkpoint = ckpt_storage.open_checkpoint(
                    self._url_of(name),
                    storage_options=self._config.storage_options,
                    timeout=self._config.timeout,
                )
            return checkpoint

    def exists(self, path: Path) -> bool:
        """Return whether a committed checkpoint, or a file or a folder in it, is there."""
        name, file = self._split(path)
        if not name:
            return True
        try:
            # A reader begins with this call: another save may have replaced the checkpoint.
            checkpoint = self._checkpoint(name, fresh=not file)
        except (CheckpointNotFoundError, CheckpointInProgressError, CheckpointGoneError):
            return False
        files = self._files(checkpoint)
        return not file or file in files or any(name.startswith(f"{file}/") for name in files)

    @staticmethod
    def _files(checkpoint: Checkpoint) -> dict[str, int]:
        """Return the length of each file."""
        return {
            entry.fqn.removeprefix(FILES_PREFIX): entry.size_bytes
            for entry in checkpoint.entries()
            if entry.fqn.startswith(FILES_PREFIX) and entry.dtype == "uint8"
        }

    def getsize(self, path: Path) -> int:
        """Return the length of a file. Raises `FileNotFoundError`."""
        name, file = self._split(path)
        try:
            return self._files(self._checkpoint(name))[file]
        except KeyError:
            raise FileNotFoundError(f"{path} is not in the checkpoint.") from None

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Return a stream that verifies what it reads."""
        size_bytes = self.getsize(path)
        name, file = self._split(path)
        stream = ReadStream(self._checkpoint(name), file, size_bytes)
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(stream.readall() or b"")  # type: ignore[return-value]  # as theirs
        return stream

    def value_names(self, path: Path) -> list[str]:
        """Return the names of all values of a checkpoint."""
        name, _ = self._split(path)
        return [entry.fqn for entry in self._checkpoint(name).entries()]

    def load_values(self, path: Path, state: dict[str, Any]) -> None:
        """Load values of a checkpoint of `ckpt_storage.save`, in place; all ranks call."""
        name, _ = self._split(path)
        options = self._config.storage_options
        timeout = self._config.timeout
        ckpt_storage.load(state, self._url_of(name), storage_options=options, timeout=timeout)

    def remap_path(self, path: Path) -> str:
        """Return the URL of a path."""
        name, file = self._split(path)
        return "/".join(part for part in (self._root.url, name, file) if part)
