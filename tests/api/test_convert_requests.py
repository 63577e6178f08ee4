"""`convert` asks for many small chunks at a time, and refuses before it touches the target."""

from __future__ import annotations

import itertools
import pkgutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import files_below, load_stock, saved_stock
from dcp_cases import same, seeded
from safetensors.torch import load_file

from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    FormatError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.export.convert import TargetFormat, convert
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
        with pytest.raises(InvalidInputError):
            convert(
                tmp_path / "reserved", target, to="safetensors", unsupported=flaw, overwrite=True
            )
    else:
        next(source.glob("*.distcp")).unlink()
        with pytest.raises(CheckpointError, match=r"missing|is gone"):
            convert(source, target, to="safetensors", overwrite=True)
    assert files_below(target) == before


@pytest.mark.parametrize(
    ("failure", "stays"),
    [
        (StorageError("refused", kind="permission"), False),
        (CommitUnknownError("unknown", save_id="s", slot=1), True),
    ],
)
def test_an_attempt_stays_only_where_its_commit_may_be_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, stays: object
) -> None:
    """Nobody converts to that folder again to free it; but a slot that is there names its files."""

    def refuse(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("ckpt_storage.commit.attempt.take_slot", refuse)
    with pytest.raises(CheckpointError):
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
        with pytest.raises(FormatError, match="compressed record"):
            convert(tmp_path / "bomb.pt", tmp_path / "target", to="dcp")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000
