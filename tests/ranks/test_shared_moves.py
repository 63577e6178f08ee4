"""`convert` and `copy` by all ranks of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from copy_cases import files_below, head_of, save, save_files
from dcp_cases import seeded

import ckpt_storage
from ckpt_storage.errors import CheckpointError
from ckpt_storage.export.convert import TargetFormat, convert
from ckpt_storage.export.copy import copy
from ckpt_storage.testing.ranks import RankPool

STATE: dict[str, Any] = {f"t{number}": seeded(number, 40_000) for number in range(5)} | {
    "step": {"count": 4}
}
OPTIONS: dict[str, Any] = {"unsupported": "drop", "max_file_bytes": 200_000}


def move_together(_rank: int, folder: Path, formats: list[TargetFormat]) -> list[Any]:
    """Convert to each format, copy, and be refused; return the reports."""
    world = dist.group.WORLD
    told: list[Any] = []
    for to in formats:
        source = folder / ("state.pt" if to == "ckpt_storage" else "src")
        told.append(convert(source, folder / f"three-{to}", process_group=world, to=to, **OPTIONS))
    told.append(copy(folder / "src", folder / "copy", process_group=world))
    with pytest.raises(CheckpointError):
        convert(folder / "src", folder / "refused", process_group=world, to="safetensors")
    return told


def test_ranks_move_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """Three ranks make the files that one makes, commit once, and all get the report."""
    save(STATE, tmp_path / "src")
    torch.save(STATE, tmp_path / "state.pt")
    formats: list[TargetFormat] = ["dcp", "safetensors", "torch_save", "ckpt_storage"]
    told = ranks.run(move_together, tmp_path, formats, world_size=3)
    assert all(one == told[0] for one in told), told
    assert not list((tmp_path / "refused").glob("*.safetensors"))
    for to in formats[:-1]:
        convert(tmp_path / "src", tmp_path / f"one-{to}", to=to, **OPTIONS)
    assert (tmp_path / "one-torch_save").read_bytes() == (
        tmp_path / "three-torch_save"
    ).read_bytes()
    for to in formats[:2]:
        made, expected = files_below(tmp_path / f"three-{to}"), files_below(tmp_path / f"one-{to}")
        made.pop(".metadata", None), expected.pop(".metadata", None)
        assert made == expected
    found = ckpt_storage.open_checkpoint(tmp_path / "three-ckpt_storage")
    assert all(torch.equal(found[name].torch(), STATE[name]) for name in ("t0", "t4"))
    there, here = files_below(tmp_path / "copy"), files_below(tmp_path / "src")
    assert head_of(there) == head_of(here)
    assert save_files(there) == save_files(here)
    for name in ("three-ckpt_storage", "copy"):
        assert ckpt_storage.verify(tmp_path / name).ok
