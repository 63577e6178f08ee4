"""Small files as entries of a checkpoint: tensors of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ckpt_storage.errors import UnsafeContentError
from ckpt_storage.format.names import path_flaw

__all__ = ["read_files", "write_files"]


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
