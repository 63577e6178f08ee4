"""`convert` that is refused, interrupted or dies: what it leaves, and what the next call keeps."""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import files_below, flip, load_stock, save, saved_stock
from dcp_cases import same, seeded
from fault_tools import Faulty
from safetensors.torch import load_file

import ckpt_storage.export.output
from ckpt_storage import errors, open_checkpoint
from ckpt_storage.export.conversion import ConvertReport, TargetFormat
from ckpt_storage.export.convert import convert
from ckpt_storage.testing.faults import Rule, SimulatedCrash


@pytest.fixture
def source(tmp_path: Path) -> Path:
    saved_stock({"w": seeded(1, 3)}, tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("flaw", ["error", "drop", "a file is missing"])
def test_what_cannot_be_converted_leaves_the_target_alone(
    source: Path, tmp_path: Path, flaw: Any
) -> None:
    """What is to be replaced is deleted only once it is known where all values lie."""
    target, options = tmp_path / "target", dict[str, Any](overwrite=True)
    convert(source, target, to="safetensors")
    before = files_below(target)
    if flaw == "a file is missing":
        next(source.glob("*.distcp")).unlink()
    else:
        source, options["unsupported"] = tmp_path / "reserved", flaw
        saved_stock({"__metadata__": seeded(1, 3)}, source)
    told = r"missing|is gone|__metadata__|Nothing is left"
    with pytest.raises(errors.CheckpointError, match=told):
        convert(source, target, to="safetensors", **options)
    assert files_below(target) == before


@pytest.mark.parametrize(
    ("step", "failure", "is_left"),
    [
        ("commit.attempt.take_slot", errors.StorageError("refused", kind="permission"), False),
        ("commit.attempt.take_slot", errors.CommitUnknownError("", save_id="s", slot=1), True),
        ("commit.attempt.take_slot", KeyboardInterrupt(), True),
        ("commit.publishing.publish_head", KeyboardInterrupt(), True),
        ("export.conversion.ConvertReport", KeyboardInterrupt(), True),
    ],
)
def test_files_stay_if_and_only_if_a_commit_may_name_them(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    failure: BaseException,
    is_left: object,
) -> None:
    """Nobody converts to that folder again to free them; Ctrl-C behind the commit takes none."""
    target, name = tmp_path / "target", f"ckpt_storage.{step}"
    real: Callable[..., object] = pkgutil.resolve_name(name)

    def failing(*args: Any, **options: Any) -> None:
        if isinstance(failure, KeyboardInterrupt):
            real(*args, **options)
        raise failure

    monkeypatch.setattr(name, failing)
    with pytest.raises(type(failure)):
        convert(source, target, to="ckpt_storage")
    monkeypatch.undo()
    assert any(path.startswith("saves/") for path in files_below(target)) is is_left
    if isinstance(failure, KeyboardInterrupt):
        assert torch.equal(open_checkpoint(target)["w"].torch(), seeded(1, 3))


FORMATS: tuple[TargetFormat, ...] = ("dcp", "safetensors")


def state_of(seed: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": seeded(seed + number, 50_000) for number in range(4)}


@pytest.fixture
def cut(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Stores of the target `dst`, to which one file goes after the other."""
    monkeypatch.setattr(ckpt_storage.export.output, "_LEAST_THREADS", 1)
    return faulty


def call(folder: Path, to: TargetFormat, **options: Any) -> ConvertReport:
    (source,) = folder.glob("src*")
    return convert(source, folder / "dst", to=to, **{"max_file_bytes": 200_000, **options})


def die(cut: Faulty, folder: Path, to: TargetFormat, *, completed: int) -> dict[str, Path]:
    """Convert, and die when so many files are complete; return where they lie."""
    cut.play(Rule(action="crash_before", operation="complete_upload", skip_count=completed))
    with pytest.raises((SimulatedCrash, errors.CheckpointError)):
        call(folder, to)
    cut.play()
    target = folder / "dst"
    records = target.glob(".ckpt-storage/*/0*.json")
    names = [json.loads(record.read_bytes())["body"]["file"]["path"] for record in records]
    return {name: target / name for name in sorted(names)}


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
@pytest.mark.parametrize("completed", [0, 1, 3])
def test_complete_files_are_kept(
    tmp_path: Path, cut: Faulty, to: TargetFormat, completed: int
) -> None:
    """After a death at each file those before it are kept, though uploads may not be listed."""
    save(state_of(1), tmp_path / "src")
    died = die(cut, tmp_path, to, completed=completed)
    before = {name: path.stat().st_ino for name, path in died.items()}
    assert len(before) == completed
    refused = Rule(action="error", operation="list_uploads", kind="permission", hit_count=None)
    cut.play(refused)
    assert call(tmp_path, to).kept_count == completed
    # One that is written again gets another inode.
    assert {name: (tmp_path / "dst" / name).stat().st_ino for name in before} == before
    check(tmp_path, to, state_of(1))
    # What is whole is not replaced unasked.
    with pytest.raises(errors.CheckpointExistsError):
        call(tmp_path, to)
    cut.play()
    assert call(tmp_path, to, overwrite=True).kept_count == 0


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": lambda path: flip(path, -9),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "remove": Path.unlink,
}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_written_again(
    tmp_path: Path, cut: Faulty, to: TargetFormat, damage: str
) -> None:
    """A file that is not what its record says is not kept, whatever its length."""
    save(state_of(1), tmp_path / "src")
    _, path, _ = die(cut, tmp_path, to, completed=3).values()
    DAMAGE[damage](path)
    assert call(tmp_path, to).kept_count == 2
    check(tmp_path, to, state_of(1))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("change", ["source", "option", "selection", "torch file"])
def test_another_conversion_keeps_nothing(
    tmp_path: Path, cut: Faulty, to: TargetFormat, change: str
) -> None:
    """Files of another save, torch file, size or selection are not kept, and do not stay."""
    is_torch, state = change == "torch file", state_of(1)
    source = tmp_path / ("src.pt" if is_torch else "src")
    (torch.save if is_torch else save)(state, source)
    assert len(die(cut, tmp_path, to, completed=3)) == 3
    options: dict[str, Any] = {}
    if change in {"source", "torch file"}:
        state, size = state_of(9), source.stat().st_size
        torch.save(state, source) if is_torch else save(state, source, overwrite=True)
        os.utime(source, (1e9, 1e9))
        assert not is_torch or source.stat().st_size == size
    elif change == "option":
        options["max_file_bytes"] = 200_001
    else:
        state.pop("t0")
        options["exclude"] = ["t0"]
    assert call(tmp_path, to, **options).kept_count == 0
    check(tmp_path, to, state)
    # Nor does what it had begun, sealed or not.
    assert not list((tmp_path / "dst").rglob(".*.tmp-*"))
