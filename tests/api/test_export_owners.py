"""An export into a folder that holds an earlier one deletes nothing of another program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from consolidate_cases import INDEX
from dcp_cases import seeded
from safetensors.torch import load_file, save_file

import ckpt_storage
from ckpt_storage import CheckpointExistsError


def _exported(root: Path, seed: int, *, max_file_bytes: int = 1 << 30) -> Path:
    state = {f"layer.{at}": seeded(seed + at, 64, 8) for at in range(4)}
    ckpt_storage.save(state, url := root / f"run-{seed}", sync_files=False)
    ckpt_storage.consolidate(url, root / "hf", max_file_bytes=max_file_bytes)
    return root / "hf"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors"])
def test_weights_of_another_program_are_not_deleted(tmp_path: Path, name: str) -> None:
    """After an export, a trainer saved there: the next export refuses, and names the file."""
    size = 3000 if name == "model.safetensors" else 1 << 30
    folder = _exported(tmp_path, 0, max_file_bytes=size)
    save_file({"theirs": torch.ones(3)}, folder / name)
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    with pytest.raises(CheckpointExistsError, match=name):
        _exported(tmp_path, 10, max_file_bytes=size)
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


def test_a_replaced_file_of_an_export_is_not_deleted(tmp_path: Path) -> None:
    """A file of the export's own name, saved over it with another size, is another program's."""
    folder = _exported(tmp_path, 0)
    save_file({"theirs": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointExistsError, match=r"model\.safetensors"):
        _exported(tmp_path, 10, max_file_bytes=3000)
    assert list(load_file(folder / "model.safetensors")) == ["theirs"]


def test_exports_of_ours_are_replaced(tmp_path: Path) -> None:
    """One file, several, and one again: what records of ours name gives way."""
    for seed, size in ((0, 1 << 30), (10, 3000), (20, 1 << 30), (30, 1 << 30)):
        folder = _exported(tmp_path, seed, max_file_bytes=size)
        weights: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            weights |= load_file(path)
        assert torch.equal(weights["layer.0"], seeded(seed, 64, 8))
        assert (folder / INDEX).exists()
