"""What the tests of `copy` share: a checkpoint of several files, and an oracle of bytes.

The oracle reads files and slots with `json` alone; it never calls the package.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import zeros_like
from safetensors.torch import save_file

from ckpt_storage import CheckpointError, CheckpointStorageWriter, copy
from ckpt_storage.testing.faults import Action, SimulatedCrash

SIZES = ((300, 128), (64, 7), (), (0, 3))


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(SIZES)
    }
    state["nested"] = {"step": seed, "flags": torch.arange(9) > 4}
    return state


def save(state: dict[str, Any], url: str | Path, **options: Any) -> None:
    options = {"sync_files": False} | options
    writer = CheckpointStorageWriter(url, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)


def saved_stock(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


def make(kind: str, state: dict[str, Any], path: Path) -> None:
    if kind == "ckpt_storage":
        save(state, path)
    elif kind == "dcp":
        saved_stock(state, path)
    elif kind == "torch_save":
        torch.save(state, path)
    elif kind == "dcp_safetensors":
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # prints

        path.mkdir()
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:  # "safetensors", or "unindexed"
        path.mkdir(parents=True)
        files = {name: f"{at % 3}.safetensors" for at, name in enumerate(sorted(state))}
        for file in {*files.values()}:
            held = {name: state[name].clone() for name in state if files[name] == file}
            save_file(held, path / file)
        if kind == "safetensors":
            index = {"metadata": {}, "weight_map": files}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))


def load_stock(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    target: dict[str, Any] = zeros_like(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return target


def files_below(folder: Path) -> dict[str, bytes]:
    """Return content by path, temporary files left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".tmp-" not in path.name
    }


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def save_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what belongs to save attempts, but the marker that each root has of its own."""
    return {
        path: data
        for path, data in files.items()
        if path.startswith("saves/") and not path.endswith("begun.json")
    }


def head_of(files: Mapping[str, bytes]) -> str | None:
    slots = sorted(path for path in files if path.startswith("commits/"))
    if not slots:
        return None
    head = json.loads(files[slots[-1]])["body"]["head"]
    return str(head["save_id"]) if head else None


ACTIONS: tuple[Action, ...] = ("crash_before", "error", "lost_answer")
"""A crash after a change is a crash before the next change: the storage is the same."""


def attempt(source: str | Path, target: str | Path, **options: Any) -> BaseException | None:
    try:
        copy(source, target, **options)
    except (SimulatedCrash, CheckpointError) as error:
        is_crash = isinstance(error.__cause__, SimulatedCrash)
        return error.__cause__ if is_crash else error
    return None
