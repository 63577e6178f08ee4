"""`convert` that is refused, interrupted or dies: what it leaves, and what the next call keeps."""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import tracemalloc
import zipfile
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
from ckpt_storage import errors
from ckpt_storage.export.convert import ConvertReport, TargetFormat, convert
from ckpt_storage.testing.faults import Rule, SimulatedCrash
from ckpt_storage.transfer import ranges


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of stock torch with one tensor."""
    saved_stock({"w": seeded(1, 3)}, tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("to", ["dcp", "torch_save"])
def test_small_chunks_are_read_together(
    tmp_path: Path, to: TargetFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tensors of 40 bytes take a handful of batches, not one each, whatever the target."""
    state = {f"w{number}": seeded(number, 10) for number in range(300)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "source", to="ckpt_storage")
    batches = itertools.count()
    run = ranges.RangeReader.run

    def counted(*arguments: Any, **options: Any) -> None:
        next(batches)
        run(*arguments, **options)

    monkeypatch.setattr(ranges.RangeReader, "run", counted)
    target = tmp_path / "target"
    convert(tmp_path / "source", target, to=to)
    assert next(batches) <= 4
    assert same(torch.load(target) if to == "torch_save" else load_stock(state, target), state)


@pytest.mark.parametrize("flaw", ["error", "drop", "a file is missing"])
def test_what_cannot_be_converted_leaves_the_target_alone(
    source: Path, tmp_path: Path, flaw: Any
) -> None:
    """What is to be replaced is deleted only once it is known where all values lie.

    A tensor named `__metadata__` is among what safetensors cannot hold.
    """
    target = tmp_path / "target"
    convert(source, target, to="safetensors")
    before = files_below(target)
    if flaw in {"error", "drop"}:
        saved_stock({"__metadata__": seeded(1, 3)}, tmp_path / "reserved")
        with pytest.raises(errors.InvalidInputError):
            convert(
                tmp_path / "reserved", target, to="safetensors", unsupported=flaw, overwrite=True
            )
    else:
        next(source.glob("*.distcp")).unlink()
        with pytest.raises(errors.CheckpointError, match=r"missing|is gone"):
            convert(source, target, to="safetensors", overwrite=True)
    assert files_below(target) == before


@pytest.mark.parametrize(
    ("failure", "stays"),
    [
        (errors.StorageError("refused", kind="permission"), False),
        (errors.CommitUnknownError("unknown", save_id="s", slot=1), True),
    ],
)
def test_an_attempt_stays_only_where_its_commit_may_be_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, stays: object
) -> None:
    """Nobody converts to that folder again to free it; but a slot that is there names its files."""

    def refuse(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("ckpt_storage.commit.attempt.take_slot", refuse)
    with pytest.raises(errors.CheckpointError):
        convert(source, tmp_path / "target", to="ckpt_storage")
    left = [path for path in files_below(tmp_path / "target") if path.startswith("saves/")]
    assert bool(left) is stays


@pytest.mark.parametrize(
    "step",
    ["commit.attempt.take_slot", "commit.publishing.publish_head", "export.convert.ConvertReport"],
)
def test_an_interrupt_once_the_slot_is_taken_leaves_the_checkpoint_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl-C in or after the commit deletes nothing that is committed."""
    name = f"ckpt_storage.{step}"
    real: Callable[..., object] = pkgutil.resolve_name(name)

    def interrupted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "target", to="ckpt_storage")
    monkeypatch.undo()
    convert(tmp_path / "target", tmp_path / "st", to="safetensors")
    assert torch.equal(load_file(tmp_path / "st/model.safetensors")["w"], seeded(1, 3))


def test_a_compressed_record_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """torch.save compresses nothing; a few bytes that become gigabytes are no checkpoint."""
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
        bomb.writestr("bomb/big", b"0" * 200_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(errors.FormatError, match="compressed record"):
            convert(tmp_path / "bomb.pt", tmp_path / "target", to="dcp")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000


FORMATS: tuple[TargetFormat, ...] = ("dcp", "safetensors")


def state_of(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of which each fills a file."""
    return {f"t{number}": seeded(seed + number, 50_000) for number in range(4)}


@pytest.fixture
def cut(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """Stores of the target `dst`, to which one file goes after the other."""
    monkeypatch.setattr(ckpt_storage.export.output, "_LEAST_THREADS", 1)
    return faulty


def call(folder: Path, to: TargetFormat, **options: Any) -> ConvertReport:
    """Convert `src` to `dst`, a file for each tensor."""
    return convert(folder / "src", folder / "dst", to=to, max_file_bytes=200_000, **options)


def die(cut: Faulty, folder: Path, to: TargetFormat, *, completed: int) -> dict[str, Path]:
    """Convert, and die when so many files are sealed; return where they lie."""
    step = "complete_upload" if to == "dcp" else "put"
    path = "" if to == "dcp" else ".ckpt-storage/.*/0"
    cut.play(Rule(action="crash_before", operation=step, path=path, skip_count=completed))
    with pytest.raises((SimulatedCrash, errors.CheckpointError)):
        call(folder, to)
    cut.play()
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
        cut.play(Rule(action="error", operation="list_uploads", kind=refusal, hit_count=None))
        before = before if to == "dcp" else {}
    assert call(tmp_path, to).kept_count == len(before)
    # One that is written again gets another inode.
    assert {name: (tmp_path / "dst" / name).stat().st_ino for name in before} == before
    check(tmp_path, to, state_of(1))
    # What is whole is not replaced unasked.
    with pytest.raises(errors.CheckpointExistsError):
        call(tmp_path, to)
    cut.play()
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
        with pytest.raises(errors.CheckpointError):
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
    cut.play(Rule(action="crash_before", operation="complete_upload", skip_count=2))
    with pytest.raises((SimulatedCrash, errors.CheckpointError)):
        convert(source, tmp_path / "dst", to="safetensors", max_file_bytes=200_000)
    cut.play()
    size = source.stat().st_size
    torch.save(state_of(9), source)
    os.utime(source, (1e9, 1e9))
    assert source.stat().st_size == size
    report = convert(source, tmp_path / "dst", to="safetensors", max_file_bytes=200_000)
    assert report.kept_count == 0
    check(tmp_path, "safetensors", state_of(9))
