"""What a stranger's documents may not do: reach another checkpoint, other files, or all memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage_cases import Checkpoint

import ckpt_storage
from ckpt_storage import FormatError, InvalidInputError

Change = Callable[[Any], object]


def change(root: Path, to_manifest: Change, to_slot: Change = lambda _: None) -> None:
    """Change a checkpoint's manifest and commit record, as who made them could."""
    checkpoint = Checkpoint(root)
    checkpoint.change(checkpoint.manifest, to_manifest)
    checkpoint.change(checkpoint.slot, to_slot)


@pytest.mark.parametrize("in_record", [False, True])
@pytest.mark.parametrize("place", ["hf/model.safetensors", "commits/notes.json", ".metadata"])
def test_a_copy_writes_nowhere_but_in_its_own_attempt(
    tmp_path: Path, place: str, *, in_record: bool
) -> None:
    """A source that names a file of the target as its own `stock.metadata` is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    ckpt_storage.save({"a": torch.ones(2)}, source)
    ckpt_storage.save({"a": torch.zeros(3)}, target)
    (target / place).parent.mkdir(exist_ok=True)
    if not (target / place).exists():
        (target / place).write_bytes(b"precious")
    before = (target / place).read_bytes()
    (stock,) = source.glob("saves/*/stock.metadata")
    (source / place).parent.mkdir(exist_ok=True)
    shutil.copy(stock, source / place)

    def rename(body: dict[str, Any]) -> None:
        body["stock"]["path"] = place

    change(source, rename, rename if in_record else lambda _: None)
    with pytest.raises(FormatError, match="no document of this save"):
        ckpt_storage.copy(source, target, overwrite=True)
    assert (target / place).read_bytes() == before


@pytest.mark.parametrize("place", ["manifest.json", "saves/{}/begun.json"])
def test_a_record_that_names_another_manifest_is_refused(tmp_path: Path, place: str) -> None:
    """The manifest of a save lies in one place."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    place = place.format(checkpoint.manifest.parent.name)
    shutil.copy(checkpoint.manifest, tmp_path / place)
    checkpoint.change(checkpoint.slot, lambda body: body["manifest"].update(path=place))
    with pytest.raises(FormatError, match="no document of this save"):
        ckpt_storage.open_checkpoint(tmp_path)


@pytest.mark.parametrize("path", [["a", 400_000_000], ["a", -1], ["a", 10**12, "b"]])
def test_one_number_of_a_path_takes_no_memory(tmp_path: Path, path: list[str | int]) -> None:
    """I10: a list is about as long as what is in it, whatever its highest index says."""
    ckpt_storage.save({"a": [torch.ones(2)]}, tmp_path / "c")
    change(tmp_path / "c", lambda body: body.update(planner_data=[json.dumps(["a.0", path])]))
    with pytest.raises(InvalidInputError, match="far longer"):
        ckpt_storage.convert(tmp_path / "c", tmp_path / "out.pt", to="torch_save")
    assert not (tmp_path / "out.pt").exists()


def many(count: int) -> dict[str, Any]:
    """Return what declares so many entries, and holds none."""
    return {"count": count, "bytes": 2, "zlib": ""}


@pytest.mark.parametrize(
    "hostile",
    [
        {"world_size": (1 << 20) + 1},
        {"blobs": {"fqns": many((1 << 24) + 1), "rank": []}},
        {"files": {"rank": many((1 << 25) + 1)}},
    ],
    ids=["ranks", "names", "bytes"],
)
def test_no_document_makes_a_reader_allocate_much(tmp_path: Path, hostile: dict[str, Any]) -> None:
    """I10: at most 2^20 ranks, 2^24 names, and 256 MiB of all columns of a document."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path)
    change(tmp_path, lambda body: body.update(hostile))
    with pytest.raises(FormatError, match="declares more than"):
        ckpt_storage.open_checkpoint(tmp_path)


def test_a_shape_of_very_many_dimensions_is_told(tmp_path: Path) -> None:
    """It is an error of the document, and not of Python's stack."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path)
    none: dict[str, list[int]] = {"ndim": [], "offsets": [], "sizes": [], "ranks": []}
    change(tmp_path, lambda body: body.update(shapes=[[1] * 3000], layouts=[none]))
    with pytest.raises(FormatError, match="each of its elements once"):
        ckpt_storage.open_checkpoint(tmp_path)
