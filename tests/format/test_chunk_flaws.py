"""Chunks that do not make up their tensor are refused: nobody gets values that nobody saved."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckpt_storage
from ckpt_storage import FormatError
from ckpt_storage.format.boxes import Box, find_flaw


def pieces_of(shape: tuple[int, ...], cut_count: int, seed: int) -> list[Box]:
    """Return boxes that a box of `shape` falls into if a piece is cut in two again and again."""
    draw = random.Random(seed)  # for tests
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(cut_count):
        at = draw.randrange(len(boxes))
        offsets, sizes = boxes[at].offsets, boxes[at].sizes
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw.choice(dims)
            cut = draw.randrange(1, sizes[dim])
            left = Box(offsets, (*sizes[:dim], cut, *sizes[dim + 1 :]))
            there = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
            right = Box(there, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :]))
            boxes[at : at + 1] = [left, right]
    draw.shuffle(boxes)
    return boxes


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    cut_count=st.integers(0, 300),
    seed=st.integers(0, 1 << 30),
    change=st.sampled_from(["none", "drop", "double", "replace"]),
)
def test_a_flaw_is_found_if_and_only_if_counting_finds_one(
    shape: tuple[int, ...], cut_count: int, seed: int, change: str
) -> None:
    """Whatever form the chunks have, however many there are, and whatever became of one."""
    boxes = pieces_of(shape, cut_count, seed)
    if change == "drop":
        boxes.pop()
    elif change == "double":
        boxes.append(boxes[seed % len(boxes)])
    elif change == "replace":
        boxes[0] = boxes[seed % len(boxes)]
    empty = Box((0,) * len(shape), (0,) * len(shape))
    found = find_flaw(shape, [*boxes, empty] if shape else boxes)
    held = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        held[tuple(map(slice, box.offsets, box.stops))] += 1
    assert (found is None) == bool((held == 1).all())
    if found is not None:
        assert found.at is not None
        assert held[found.at] == len(found.holders) != 1


@pytest.mark.parametrize(
    "box", [Box((0,), (4,)), Box((0, 0, 0), (2, 2, 1)), Box((0, 0), (2, -1)), Box((2, 0), (1, 2))]
)
def test_a_box_that_cannot_be_of_the_tensor_is_named(box: Box) -> None:
    """Another number of dimensions, a negative size and a place outside are told by position."""
    found = find_flaw((2, 2), [Box((0, 0), (0, 2)), Box((0, 0), (2, 2)), box, box])
    assert found is not None
    assert found.outside == 2


def test_a_tensor_without_elements_is_held_by_empty_boxes_or_none() -> None:
    """Nothing is missing where nothing is; a box with elements cannot belong there."""
    assert find_flaw((0, 4), []) is None
    assert find_flaw((0, 4), [Box((0, 0), (0, 4)), Box((0, 4), (0, 0))]) is None
    found = find_flaw((0, 4), [Box((0, 0), (1, 4))])
    assert found is not None
    assert found.outside == 0


def test_chunks_that_all_lie_side_by_side_are_refused_at_once() -> None:
    """Too many that begin at one place and overlap nowhere are not held each against each."""
    cut = [Box((n, at), (1, 1)) for n in range(2) for at in range(20_000)]
    assert find_flaw((2, 20_000), cut) is None
    nested = [Box((0, 0), (n + 1, 1)) for n in range(20_000)]
    found = find_flaw((20_000, 2), nested)
    assert found is not None


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
    with pytest.raises(FormatError, match=r"2 different ones hold the element \[8\]"):
        loaded(with_gap(tmp_path / "b", second=6))
