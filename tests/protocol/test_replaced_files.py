"""Another writer saves over its files while they are read: no door gives values of two saves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_storage import consolidate, load, open_checkpoint, save
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    IntegrityError,
)
from ckpt_storage.export.convert import TargetFormat, convert
from ckpt_storage.export.copy import copy
from ckpt_storage.format.stock_metadata import decode_stock_metadata
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.transfer import ranges


def quiet(call: Callable[[], Any]) -> Any:
    """Call torch without what it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def stock(folder: Path, values: Mapping[str, int]) -> None:
    """Save as torch does: one file with the tensors in this order, over what is there."""
    state = {name: torch.full((1000,), value, dtype=torch.int32) for name, value in values.items()}
    quiet(lambda: dcp.save(state, checkpoint_id=folder, no_dist=True))


def many_files(folder: Path, value: int) -> None:
    """Save eight tensors, each in a file of its own, over what is there."""
    state = {f"t{number}": torch.full((300_000,), float(value)) for number in range(8)}
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    quiet(lambda: dcp.save(state, storage_writer=writer, no_dist=True))


def weights(folder: Path, value: int) -> None:
    """Write the same tensors as a Hugging Face folder of one file."""
    folder.mkdir(exist_ok=True)
    state = {f"t{number}": torch.full((300_000,), float(value)) for number in range(8)}
    save_file(state, folder / "model.safetensors")


def torch_file(path: Path, value: int) -> None:
    """Write the same tensors by `torch.save`, without checksums, to the same name."""
    state = {f"t{number}": torch.full((300_000,), float(value)) for number in range(8)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.fixture
def swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stock checkpoint that is saved again, tensors swapped, once its metadata was decoded."""
    folder = tmp_path / "run"
    stock(folder, {"a": 1, "b": 7})
    decode = decode_stock_metadata
    saves: Iterator[dict[str, int]] = iter([{"b": 9, "a": 5}])

    def decode_then_save(data: bytes) -> Any:
        found = decode(data)
        for values in saves:
            stock(folder, values)
        return found

    monkeypatch.setattr("ckpt_storage.source.foreign.decode_stock_metadata", decode_then_save)
    return folder


def once(call: Callable[[], None]) -> Callable[[object], None]:
    """Return a taker of progress that calls at its first event only."""
    calls = iter([call])

    def on_progress(event: object) -> None:
        del event
        for one in calls:
            one()

    return on_progress


def holds_no_checkpoint(folder: Path) -> bool:
    """Return whether nothing can be opened there."""
    try:
        open_checkpoint(folder).close()
    except (CheckpointNotFoundError, CheckpointInProgressError, IntegrityError):
        return True
    return False


def blank() -> dict[str, torch.Tensor]:
    """Return targets for what `stock` saves."""
    return {name: torch.zeros(1000, dtype=torch.int32) for name in ("a", "b")}


def test_an_open_checkpoint_notices_a_save_that_ended_while_it_was_opened(swapped: Path) -> None:
    """The marks are older than the metadata, so offsets of one save never cut another's file."""
    with open_checkpoint(swapped) as opened, pytest.raises(CheckpointGoneError):
        opened["a"][:]


def test_a_load_looks_again_after_a_save_that_ended_behind_its_metadata(swapped: Path) -> None:
    """`load` gives the newer save's values, and never b's as a's."""
    state: dict[str, Any] = blank()
    load(state, swapped)
    assert {name: int(value[0]) for name, value in state.items()} == {"a": 5, "b": 9}


def test_an_export_of_two_saves_is_not_published(swapped: Path) -> None:
    """`consolidate` raises before the index makes the files an export; again, it is whole."""
    output = swapped.parent / "hf"
    with pytest.raises(CheckpointGoneError, match="written again"):
        consolidate(swapped, output)
    assert not (output / "model.safetensors.index.json").exists()
    consolidate(swapped, output)
    with open_checkpoint(output) as opened:
        assert {name: int(opened[name][0]) for name in opened} == {"a": 5, "b": 9}


def test_an_export_made_while_its_source_is_saved_again_is_not_published(tmp_path: Path) -> None:
    """`consolidate` looks again once all was read: some files may be of the one save, some not."""
    many_files(tmp_path / "run", 1)
    output = tmp_path / "hf"
    on_progress = once(lambda: many_files(tmp_path / "run", 2))
    with pytest.raises(CheckpointGoneError, match="written again"):
        consolidate(tmp_path / "run", output, progress=on_progress)
    assert holds_no_checkpoint(output)
    consolidate(tmp_path / "run", output)
    with open_checkpoint(output) as opened:
        assert {float(opened[name][-1]) for name in opened} == {2.0}


def test_what_looks_like_damage_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that got shorter meanwhile belongs to another save: it is not called damaged."""
    folder = tmp_path / "run"
    stock(folder, {"a": 1, "b": 7})
    decode = decode_stock_metadata

    def decode_then_cut(data: bytes) -> Any:
        file = folder / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:500])
        return decode(data)

    monkeypatch.setattr("ckpt_storage.source.foreign.decode_stock_metadata", decode_then_cut)
    with pytest.raises(CheckpointGoneError, match="written again"):
        load(blank(), folder)


@pytest.mark.parametrize("write", [many_files, weights])
def test_a_copy_notices_a_save_over_its_source(
    tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    """`copy` raises, and its target looks like no checkpoint."""
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, 1)
    again = once(lambda: write(source, 2))
    with pytest.raises(CheckpointGoneError, match="written again"):
        copy(source, target, progress=again, thread_count=1)
    assert holds_no_checkpoint(target)
    copy(source, target)
    with open_checkpoint(target) as opened:
        assert {float(opened[name][0]) for name in opened} == {2.0}


@pytest.mark.parametrize(
    ("write", "to"),
    [(many_files, "ckpt_storage"), (weights, "dcp"), (torch_file, "safetensors")],
)
def test_a_conversion_notices_a_save_over_its_source(
    tmp_path: Path,
    write: Callable[[Path, int], None],
    to: TargetFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`convert` raises before its target is shown, whatever format it has."""
    source, target = tmp_path / "source.pt", tmp_path / "target"
    write(source, 1)
    again = once(lambda: write(source, 2))
    run = ranges.RangeReader.run

    def read_then_save(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        again(None)

    monkeypatch.setattr(ranges.RangeReader, "run", read_then_save)
    with pytest.raises(CheckpointGoneError, match="written again"):
        convert(source, target, to=to)
    assert holds_no_checkpoint(target)
    convert(source, target, to=to)
    with open_checkpoint(target) as opened:
        assert {float(opened[name][0]) for name in opened} == {2.0}


def test_ours_costs_no_look_at_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of a checkpoint of ours lists nothing: its files are written once."""
    save(blank(), tmp_path / "run")

    def refuse(*arguments: object, **options: object) -> None:
        raise CheckpointError(f"listed {arguments} {options}")

    monkeypatch.setattr(LocalBackend, "list", refuse)
    load(blank(), tmp_path / "run")
