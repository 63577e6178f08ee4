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
from ckpt_storage.export.convert import ConvertReport, TargetFormat, convert
from ckpt_storage.export.copy import CopyReport, copy
from ckpt_storage.testing.ranks import RankPool

STATE: dict[str, Any] = {f"t{number}": seeded(number, 40_000) for number in range(5)} | {
    "step": {"count": 4}
}


def convert_together(rank: int, source: Path, target: Path, options: dict[str, Any]) -> Any:
    """Convert; return the report, or the error's text."""
    try:
        return convert(source, target, process_group=dist.group.WORLD, **options)
    except CheckpointError as error:
        return f"{rank}: {type(error).__name__}"


def copy_together(rank: int, source: Path, target: Path) -> CopyReport:
    """Copy; return the report."""
    del rank
    return copy(source, target, process_group=dist.group.WORLD)


@pytest.mark.parametrize(
    "to", ["dcp", "safetensors", "dcp_safetensors", "ckpt_storage", "torch_save"]
)
def test_ranks_convert_as_one_process_does(
    ranks: RankPool, tmp_path: Path, to: TargetFormat
) -> None:
    """Three ranks make the values that one makes, and all get the report."""
    source = tmp_path / "src"
    if to == "ckpt_storage":
        torch.save(STATE, tmp_path / "state.pt")
        source = tmp_path / "state.pt"
    else:
        save(STATE, source)
    options: dict[str, Any] = {"to": to, "unsupported": "drop", "max_file_bytes": 200_000}
    one, three = tmp_path / "one.pt", tmp_path / "three.pt"
    reports: list[ConvertReport] = ranks.run(convert_together, source, three, options, world_size=3)
    convert(source, one, **options)
    assert all(report == reports[0] for report in reports), reports
    if to == "ckpt_storage":
        assert ckpt_storage.verify(three).ok
        found = ckpt_storage.open_checkpoint(three)
        assert all(torch.equal(found[name].torch(), STATE[name]) for name in ("t0", "t4"))
    elif to == "torch_save":
        assert one.read_bytes() == three.read_bytes()
    else:
        made, expected = files_below(three), files_below(one)
        made.pop(".metadata", None), expected.pop(".metadata", None)
        assert made == expected


def test_ranks_copy_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks copy all files of a save, and commit it once."""
    source, target = tmp_path / "src", tmp_path / "dst"
    save(STATE, source)
    reports: list[CopyReport] = ranks.run(copy_together, source, target, world_size=2)
    assert reports[0] == reports[1]
    there, here = files_below(target), files_below(source)
    assert head_of(there) == head_of(here)
    assert save_files(there) == save_files(here)
    assert ckpt_storage.verify(target).ok


def test_ranks_hear_of_the_refusal_of_one(ranks: RankPool, tmp_path: Path) -> None:
    """What the coordinator refuses, all raise."""
    save(STATE, tmp_path / "src")
    options = {"to": "safetensors"}
    found = ranks.run(convert_together, tmp_path / "src", tmp_path / "dst", options, world_size=2)
    assert found == ["0: InvalidInputError", "1: InvalidInputError"] or all(
        isinstance(one, str) for one in found
    )
    assert not list((tmp_path / "dst").glob("*.safetensors"))
