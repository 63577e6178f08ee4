"""Small files of a framework as entries of a checkpoint: tensors of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.format.names import path_flaw

from .packing import WholePlanner

__all__ = ["FileEntries", "read_files", "write_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntries:
    """The files that a training resumes from, as entries `<key>.<name>`.

    Each rank has a file of random states, whose name begins with `random_states`; rank 0 stores
    all other files.
    """

    key: str
    random_states: str
    own_random_states: str
    rank: int

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return the entries that this rank stores of a folder that it alone writes."""
        return read_files(folder, lambda name: self.rank == 0 or name == self.own_random_states)

    def make_planner(self) -> WholePlanner:
        """Return a planner that loads what this rank needs: no random states of other ranks."""

        def is_wanted(name: str) -> bool:
            file = name.removeprefix(f"{self.key}.")
            is_others = file.startswith(self.random_states) and file != self.own_random_states
            return file != name and not is_others

        return WholePlanner(wanted=is_wanted)

    def loaded(self, planner: WholePlanner) -> dict[str, torch.Tensor]:
        """Return the files that a planner loaded, by name."""
        prefix = f"{self.key}."
        return {
            name.removeprefix(prefix): value
            for name, value in planner.loaded.items()
            if name.startswith(prefix)
        }


def read_files(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the bytes of the files below a folder, by their relative names; no empty ones."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for name, path in sorted(paths.items())
        if path.is_file() and path.stat().st_size and is_wanted(name)
    }


def write_files(folder: Path, files: Mapping[str, torch.Tensor]) -> None:
    """Write files below a folder. Raises `UnsafeContentError` for a name that leads out of it."""
    for name, value in files.items():
        if (flaw := path_flaw(name)) is not None:
            raise UnsafeContentError(
                f"The checkpoint holds a file whose name {name!r} {flaw}.",
                next_step="Resume from a checkpoint that you trust.",
            )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.numpy().tobytes())
