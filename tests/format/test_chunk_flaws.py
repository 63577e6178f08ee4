"""Chunks that do not make up their tensor are refused: nobody gets values that nobody saved."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckpt_storage
from ckpt_storage import FormatError


def with_gap(folder: Path, *, second: int) -> Path:
    """Save a stock checkpoint of a tensor of 12 elements in chunks of 4: at 0, `second` and 8."""
    path = folder / "stock"
    parts = {name: torch.arange(4.0) for name in "abc"}
    dcp.save(parts, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # torch's own
    described = metadata.state_dict_metadata
    offsets = [torch.Size([at]) for at in dict.fromkeys((0, second, 8))]
    chunks = [ChunkStorageMetadata(at, torch.Size([4])) for at in offsets]
    whole = dataclasses.replace(described["a"], size=torch.Size([12]), chunks=chunks)
    items = {index.fqn: item for index, item in metadata.storage_data.items()}
    metadata.state_dict_metadata = {"w": whole}
    metadata.storage_data = {
        MetadataIndex("w", at): items[name] for at, name in zip(offsets, "abc", strict=False)
    }
    metadata.planner_data = {"w": ("w",)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def loaded(path: Path) -> torch.Tensor:
    """Load the tensor."""
    target = {"w": torch.full((12,), -1.0)}
    ckpt_storage.load(target, path)
    return target["w"]


DOORS: dict[str, Callable[[Path], object]] = {
    "load": loaded,
    "open_checkpoint": lambda path: ckpt_storage.open_checkpoint(path)["w"][:],
    "convert": lambda path: ckpt_storage.convert(path, path / "out", to="safetensors"),
    "consolidate": lambda path: ckpt_storage.consolidate(path, path / "out"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_stock_checkpoint_with_a_gap_is_refused(tmp_path: Path, door: str) -> None:
    """No front door invents what no chunk holds; the error names tensor and region."""
    path = with_gap(tmp_path, second=8)
    with pytest.raises(FormatError, match=r"chunks of w .*none holds the element \[4\]"):
        DOORS[door](path)
    assert not (path / "out").exists()


def test_chunks_that_meet_are_loaded_and_those_that_overlap_are_not(tmp_path: Path) -> None:
    """The same checkpoint without the gap is sound; two values for one element are not."""
    assert loaded(with_gap(tmp_path / "a", second=4)).tolist() == [0.0, 1.0, 2.0, 3.0] * 3
    with pytest.raises(FormatError, match=r"2 different ones hold the element \[2\]"):
        loaded(with_gap(tmp_path / "b", second=2))
