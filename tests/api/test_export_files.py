"""Files beside the weights of an export: entries of the checkpoint, and those of the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from consolidate_cases import check, files_in

import ckpt_storage
from ckpt_storage.errors import CheckpointError, InvalidInputError, UnsafeContentError
from ckpt_storage.export.consolidate import consolidate

W = {"a": torch.arange(4.0)}
CONFIG = b'{"model_type": "llama"}'


def as_entry(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def beside(folder: Path) -> dict[str, bytes]:
    """Return what lies beside the weights of an export."""
    files = files_in(folder)
    is_own = ("model.safetensors", ".ckpt-storage/")
    return {name: data for name, data in files.items() if not name.startswith(is_own)}


@pytest.mark.parametrize("is_flat", [True, False])
def test_entries_that_are_files_are_written_without_asking(
    tmp_path: Path, *, is_flat: bool
) -> None:
    """`files.<name>` is no weight; the report says what was written."""
    files = {"config.json": as_entry(CONFIG), "empty": as_entry(b""), "sub/x": as_entry(b"x")}
    state: dict[str, Any] = {"model": W, "files": files}
    if is_flat:
        state = W | {f"files.{name}": one for name, one in files.items()}
    ckpt_storage.save(state, tmp_path)
    report = consolidate(tmp_path)
    assert beside(tmp_path / "hf") == {"config.json": CONFIG, "empty": b"", "sub/x": b"x"}
    assert report.extra_files == ("config.json", "empty", "sub/x")
    assert {one.reason for one in report.skipped} == {"file"}
    check(files_in(tmp_path / "hf"), W)
    assert ckpt_storage.verify(tmp_path).ok


def test_excluded_entries_are_not_written(tmp_path: Path) -> None:
    """`exclude` counts for files, too."""
    ckpt_storage.save({"model": W, "files": {"config.json": as_entry(CONFIG)}}, tmp_path)
    report = consolidate(tmp_path, exclude="files.*")
    assert beside(tmp_path / "hf") == {}
    assert report.extra_files == ()


def test_files_of_the_caller_come_before_entries(tmp_path: Path) -> None:
    """Paths keep their names; a mapping gives names to paths and bytes."""
    ckpt_storage.save({"model": W, "files": {"config.json": as_entry(b"old")}}, tmp_path / "run")
    given = tmp_path / "config.json"
    given.write_bytes(CONFIG)
    consolidate(tmp_path / "run", extra_files=[given])
    assert beside(tmp_path / "run" / "hf") == {"config.json": CONFIG}
    consolidate(tmp_path / "run", extra_files={"a/b.json": given, "config.json": b"new"})
    assert beside(tmp_path / "run" / "hf") == {"a/b.json": CONFIG, "config.json": b"new"}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a\\b", "x.safetensors", "s3://b/x"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Of an entry and of the caller; nothing is written anywhere."""
    ckpt_storage.save(W | {f"files.{name}": as_entry(b"x")}, tmp_path / "run")
    before = files_in(tmp_path)
    with pytest.raises(UnsafeContentError, match=r"exclude|find out who"):
        consolidate(tmp_path / "run")
    with pytest.raises(InvalidInputError, match="extra_files"):
        consolidate(tmp_path / "run", exclude="files.*", extra_files={name: b"x"})
    assert files_in(tmp_path) == before


def test_a_file_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    """The export is as it was."""
    ckpt_storage.save({"model": W}, tmp_path / "run")
    consolidate(tmp_path / "run")
    before = files_in(tmp_path)
    with pytest.raises(CheckpointError, match="nothing-here"):
        consolidate(tmp_path / "run", extra_files=tmp_path / "nothing-here", dtype=torch.float16)
    assert files_in(tmp_path) == before


ADAPTER = "adapter_model{suffix}.safetensors"
DIFFUSERS = "diffusion_pytorch_model{suffix}.safetensors"


def weights_in(folder: Path) -> list[str]:
    """Return the names of the weight files and indexes of an export."""
    return sorted(path.name for path in folder.glob("*.safetensors*"))


@pytest.mark.parametrize("is_entry", [True, False])
def test_weights_beside_the_configuration_of_an_adapter_have_its_names(
    tmp_path: Path, *, is_entry: bool
) -> None:
    """An entry of the checkpoint and a file of the caller both make an export of one file."""
    name = "adapter_config.json"
    state: dict[str, Any] = {"model": {f"{at}": torch.ones(999) * at for at in range(3)}}
    state |= {"files": {name: as_entry(CONFIG)}} if is_entry else {}
    ckpt_storage.save(state, tmp_path)
    consolidate(tmp_path, extra_files={} if is_entry else {name: CONFIG}, max_file_bytes=5000)
    names = ["adapter_model.safetensors", "model.safetensors.index.json"]
    assert weights_in(tmp_path / "hf") == names
    assert beside(tmp_path / "hf").keys() == {name, names[0]}


def test_several_files_have_the_index_where_their_library_looks(tmp_path: Path) -> None:
    """Another export takes their place, whatever its names; nothing of the first stays."""
    state = {str(at): torch.ones(999) * at for at in range(2)}
    ckpt_storage.save({"model": state}, tmp_path)
    consolidate(tmp_path, filename_pattern=DIFFUSERS, max_file_bytes=5000)
    pair = [f"diffusion_pytorch_model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    indexes = [f"{name}.safetensors.index.json" for name in ("diffusion_pytorch_model", "model")]
    assert weights_in(tmp_path / "hf") == [*pair, *indexes]
    assert len({(tmp_path / "hf" / name).read_bytes() for name in indexes}) == 1
    assert ckpt_storage.verify(tmp_path).ok
    consolidate(tmp_path, filename_pattern=ADAPTER)
    assert weights_in(tmp_path / "hf") == ["adapter_model.safetensors", indexes[1]]
    consolidate(tmp_path)
    assert weights_in(tmp_path / "hf") == ["model.safetensors", indexes[1]]
    assert ckpt_storage.verify(tmp_path).ok


def test_a_deletion_takes_the_files_of_every_library(tmp_path: Path) -> None:
    """Nothing of an export with names of diffusers stays."""
    ckpt_storage.save({str(at): torch.ones(999) * at for at in range(2)}, tmp_path / "run")
    consolidate(tmp_path / "run", filename_pattern=DIFFUSERS, max_file_bytes=5000)
    assert ckpt_storage.delete(tmp_path / "run")
    assert not (tmp_path / "run/hf").exists()


def test_an_adapter_of_several_files_is_refused(tmp_path: Path) -> None:
    """PEFT reads one file."""
    ckpt_storage.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path)
    with pytest.raises(InvalidInputError, match="one file"):
        consolidate(tmp_path, filename_pattern=ADAPTER, fqn_to_index_mapping={"a": 1, "b": 2})
    with pytest.raises(InvalidInputError, match="filename_pattern"):
        consolidate(tmp_path, filename_pattern="weights{suffix}.safetensors")
