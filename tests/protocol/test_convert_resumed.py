"""`convert` called again after it died: what was complete and sound is kept, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import files_below, flip, load_stock, save
from dcp_cases import same, seeded
from fault_tools import Faulty
from safetensors.torch import load_file

import ckpt_storage.export.write
from ckpt_storage.errors import CheckpointError, CheckpointExistsError
from ckpt_storage.export.convert import ConvertReport, TargetFormat, convert
from ckpt_storage.testing.faults import Rule, SimulatedCrash

FORMATS: tuple[TargetFormat, ...] = ("dcp", "safetensors")


def state_of(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of which each fills a file."""
    return {f"t{number}": seeded(seed + number, 50_000) for number in range(4)}


@pytest.fixture
def cut(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Stores of the target `dst`, to which one file goes after the other."""
    monkeypatch.setattr(ckpt_storage.export.write, "_LEAST_THREADS", 1)
    return faulty


def call(folder: Path, to: TargetFormat, **options: Any) -> ConvertReport:
    """Convert `src` to `dst`, a file for each tensor."""
    return convert(folder / "src", folder / "dst", to=to, max_file_bytes=200_000, **options)


def die(cut: Faulty, folder: Path, to: TargetFormat, *, completed: int) -> dict[str, Path]:
    """Convert, and die when so many files are sealed; return where they lie."""
    step = "complete_upload" if to == "dcp" else "put"
    path = "" if to == "dcp" else ".ckpt-storage/.*/0"
    cut.rules = [Rule(action="crash_before", operation=step, path=path, skip_count=completed)]
    with pytest.raises((SimulatedCrash, CheckpointError)):
        call(folder, to)
    cut.rules = ()
    target = folder / "dst"
    records = target.glob(".ckpt-storage/*/0*.json")
    names = [json.loads(record.read_bytes())["body"]["file"]["path"] for record in records]
    # One that lacks its name has a temporary one.
    return {name: next(target.glob(f"*{name}*")) for name in sorted(names)}


def check(folder: Path, to: TargetFormat, state: dict[str, torch.Tensor]) -> None:
    """Read the target by the tool whose format it is; nothing of the work is left beside it."""
    target = folder / "dst"
    if to == "dcp":
        assert same(load_stock(state, target), state)
    else:
        files = sorted(target.glob("*.safetensors"))
        found = {name: value for path in files for name, value in load_file(path).items()}
        assert same(found, state)
    assert not [path for path in files_below(target) if path.startswith(".ckpt")]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("completed", "refusal"),
    [(0, None), (1, None), (3, None), (2, "permission"), (2, "unsupported")],
)
def test_complete_files_are_kept(
    tmp_path: Path, cut: Faulty, to: TargetFormat, completed: int, refusal: str | None
) -> None:
    """After a death at each file, exactly those before it are not written again.

    Of who may not list open uploads those that lack their names are made again.
    """
    save(state_of(1), tmp_path / "src")
    died = die(cut, tmp_path, to, completed=completed)
    before = {name: path.stat().st_ino for name, path in died.items()}
    assert len(before) == completed
    if refusal is not None:
        cut.rules = [Rule(action="error", operation="list_uploads", kind=refusal, hit_count=None)]
        before = before if to == "dcp" else {}
    assert call(tmp_path, to).kept_count == len(before)
    # One that is written again gets another inode.
    assert {name: (tmp_path / "dst" / name).stat().st_ino for name in before} == before
    check(tmp_path, to, state_of(1))
    # What is whole is not replaced unasked.
    with pytest.raises(CheckpointExistsError):
        call(tmp_path, to)
    cut.rules = ()
    assert call(tmp_path, to, overwrite=True).kept_count == 0


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_what_is_damaged_is_written_again(
    tmp_path: Path, cut: Faulty, to: TargetFormat, damage: str
) -> None:
    """A file that is not what its record says is not kept, whatever its length."""
    save(state_of(1), tmp_path / "src")
    _, path, _ = die(cut, tmp_path, to, completed=3).values()
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip(path, -9)
    if to == "dcp" or damage == "remove":
        assert call(tmp_path, to).kept_count == 2
    else:
        # What lacks its name is looked at when it gets that.
        with pytest.raises(CheckpointError):
            call(tmp_path, to)
        assert call(tmp_path, to).kept_count >= 2
    check(tmp_path, to, state_of(1))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("change", ["source", "option", "selection"])
def test_another_conversion_keeps_nothing(
    tmp_path: Path, cut: Faulty, to: TargetFormat, change: str
) -> None:
    """Files of another save, sizes or names are none of this conversion's, and do not stay."""
    state = state_of(1)
    save(state, tmp_path / "src")
    died = die(cut, tmp_path, to, completed=3).values()
    assert [".tmp-" in path.name for path in died] == 3 * [to != "dcp"]
    if change == "source":
        state = state_of(9)
        save(state, tmp_path / "src", overwrite=True)
        report = call(tmp_path, to)
    elif change == "option":
        report = convert(tmp_path / "src", tmp_path / "dst", to=to, max_file_bytes=200_001)
    else:
        state.pop("t0")
        report = call(tmp_path, to, exclude=["t0"])
    assert report.kept_count == 0
    check(tmp_path, to, state)
    # Nor does what it had begun, sealed or not.
    assert not list((tmp_path / "dst").rglob(".*.tmp-*"))


def test_a_torch_file_that_was_written_again_is_another_source(tmp_path: Path, cut: Faulty) -> None:
    """Its length may be the same: then its time tells."""
    source = tmp_path / "src.pt"
    torch.save(state_of(1), source)
    cut.rules = [Rule(action="crash_before", operation="complete_upload", skip_count=2)]
    with pytest.raises((SimulatedCrash, CheckpointError)):
        convert(source, tmp_path / "dst", to="safetensors", max_file_bytes=200_000)
    cut.rules = ()
    size = source.stat().st_size
    torch.save(state_of(9), source)
    os.utime(source, (1e9, 1e9))
    assert source.stat().st_size == size
    report = convert(source, tmp_path / "dst", to="safetensors", max_file_bytes=200_000)
    assert report.kept_count == 0
    check(tmp_path, "safetensors", state_of(9))
