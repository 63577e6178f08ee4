"""Sources that are saved anew, and exports that are overtaken, while somebody works on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from consolidate_cases import small_model
from copy_cases import saved_stock
from dcp_cases import same
from safetensors.torch import load_file, save_file

from ckpt_storage import consolidate, convert, copy, errors, load, open_checkpoint, save
from ckpt_storage.export.folder import ExportFolder
from ckpt_storage.format.stock_metadata import decode_stock_metadata
from ckpt_storage.transfer import ranges


def stock(folder: Path, values: Mapping[str, int]) -> None:
    """Save as torch does: one file with the tensors in this order, over what is there."""
    state = {name: torch.full((1000,), value, dtype=torch.int32) for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _eight(value: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((300_000,), float(value)) for number in range(8)}


def many_files(folder: Path, value: int) -> None:
    """Save eight tensors, each in a file of its own, over what is there."""
    saved_stock(_eight(value), folder)


def weights(folder: Path, value: int) -> None:
    """Write the same tensors as a Hugging Face folder of one file."""
    folder.mkdir(exist_ok=True)
    save_file(_eight(value), folder / "model.safetensors")


def torch_file(path: Path, value: int) -> None:
    """Write the same tensors by `torch.save`, without checksums, to the same name."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(_eight(value), path)
    finally:
        torch.serialization.set_crc32_options(before)


def _once(call: Callable[[], object]) -> Callable[..., None]:
    calls = iter([call])

    def again(*_: object) -> None:
        for one in calls:
            one()

    return again


def after_decoding(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call whenever stock metadata were decoded."""
    decode = decode_stock_metadata

    def decode_then_call(data: bytes) -> Any:
        found = decode(data)
        call()
        return found

    monkeypatch.setattr("ckpt_storage.source.foreign.decode_stock_metadata", decode_then_call)


@pytest.fixture
def swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stock checkpoint that is saved again, tensors swapped, once its metadata was decoded."""
    stock(tmp_path, {"a": 1, "b": 7})
    after_decoding(monkeypatch, _once(lambda: stock(tmp_path, {"b": 9, "a": 5})))
    return tmp_path


def holds_no_checkpoint(folder: Path) -> bool:
    """Return whether nothing can be opened there."""
    try:
        open_checkpoint(folder).close()
    except (
        errors.CheckpointNotFoundError,
        errors.CheckpointInProgressError,
        errors.IntegrityError,
    ):
        return True
    return False


def _blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1000, dtype=torch.int32) for name in ("a", "b")}


def test_an_open_checkpoint_notices_a_save_that_ended_while_it_was_opened(swapped: Path) -> None:
    """The marks are older than the metadata, so offsets of one save never cut another's file."""
    with open_checkpoint(swapped) as opened, pytest.raises(errors.CheckpointGoneError):
        opened["a"][:]


def test_a_load_looks_again_after_a_save_that_ended_behind_its_metadata(swapped: Path) -> None:
    """`load` gives the newer save's values, and never b's as a's."""
    state: dict[str, Any] = _blank()
    load(state, swapped)
    assert {name: int(value[0]) for name, value in state.items()} == {"a": 5, "b": 9}


def test_what_looks_like_damage_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that got shorter meanwhile belongs to another save: it is not called damaged."""
    folder = tmp_path / "run"
    stock(folder, {"a": 1, "b": 7})
    file = folder / "__0_0.distcp"
    after_decoding(monkeypatch, lambda: file.write_bytes(file.read_bytes()[:500]))
    with pytest.raises(errors.CheckpointGoneError, match="written again"):
        load(_blank(), folder)


copy_in_turn = partial(copy, thread_count=1)


@pytest.mark.parametrize(
    ("write", "export", "tells"),
    [
        (many_files, consolidate, True),
        (many_files, copy_in_turn, True),
        (weights, copy_in_turn, True),
        (many_files, partial(convert, to="ckpt_storage"), False),
        (weights, partial(convert, to="dcp"), False),
        (torch_file, partial(convert, to="safetensors"), False),
    ],
)
def test_an_export_made_while_its_source_is_saved_again_is_not_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, int], None],
    export: Callable[..., object],
    *,
    tells: bool,
) -> None:
    """It raises, and its target looks like no checkpoint: some files may be of the one save."""
    source, target = tmp_path / "source.pt", tmp_path / "target"
    write(source, 1)
    again = _once(lambda: write(source, 2))
    run = ranges.RangeReader.run

    def read_then_save(*arguments: Any, **options: Any) -> None:
        run(*arguments, **options)
        again()

    if not tells:  # of its progress only at the end
        monkeypatch.setattr(ranges.RangeReader, "run", read_then_save)
    with pytest.raises(errors.CheckpointGoneError, match="written again"):
        export(source, target, **({"progress": again} if tells else {}))
    assert holds_no_checkpoint(target)
    export(source, target)
    with open_checkpoint(target) as opened:
        assert {float(opened[name][-1]) for name in opened} == {2.0}


def test_a_torch_file_of_two_saves_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is looked at once more when all is read; the file is not there before that."""
    source, target = tmp_path / "source", tmp_path / "model.pt"
    weights(source, 1)
    again = _once(lambda: weights(source, 2))
    run = ranges.RangeReader.run

    def read_then_save(reader: Any, reads: Sequence[Any], **options: Any) -> None:
        run(reader, reads, **options)
        # Not after headers: they are read while the source is opened, which looks again itself.
        if any(read.stop - read.start >= 1_000_000 for read in reads):
            again()

    monkeypatch.setattr(ranges.RangeReader, "run", read_then_save)
    with pytest.raises(errors.CheckpointGoneError, match="written again"):
        convert(source, target, to="torch_save")
    assert not target.exists()


SEVERAL, ONE = 60_000, 10_000_000
"""`max_file_bytes` that make several weight files of a model, and one."""


@pytest.mark.parametrize("step", ["collect", "_put_index"])
@pytest.mark.parametrize(("mine", "theirs"), [(SEVERAL, SEVERAL), (SEVERAL, ONE), (ONE, SEVERAL)])
def test_who_was_overtaken_after_publishing_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, mine: int, theirs: int
) -> None:
    """An export that came while the last steps of another one slept is whole afterwards."""
    for version in (1, 2, 3):
        save(small_model(version), tmp_path / f"run{version}")

    def export(version: int, file_bytes: int) -> None:
        consolidate(tmp_path / f"run{version}", tmp_path / "out", max_file_bytes=file_bytes)

    inner: Callable[..., Any] = getattr(ExportFolder, step)

    def overtaken(folder: ExportFolder[object], *arguments: Any) -> Any:
        monkeypatch.setattr(ExportFolder, step, inner)
        answer = inner(folder, *arguments) if step == "_put_index" else None
        export(3, theirs)
        return answer if step == "_put_index" else inner(folder, *arguments)

    export(1, SEVERAL)
    monkeypatch.setattr(ExportFolder, step, overtaken)
    export(2, mine)
    files = (tmp_path / "out").glob("*.safetensors")
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert same(found, small_model(3))
