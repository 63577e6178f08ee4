"""No checkpoint, of whatever format, runs code when it is loaded."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage_cases import load_failure
from dcp_cases import same, seeded
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, FormatError, UnsafeContentError, verify
from ckpt_storage.inspect.torchload import blob_value, scan_blob
from ckpt_storage.transfer.chunks import ChunkPlace


class Attack:
    """Unpickles by making a folder, which shows that code ran."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.sign),))


@dataclass(frozen=True)
class Benign:
    """A class of a program's own, in its state."""

    value: int


def save_by(kind: str, state: dict[str, Any], path: Path) -> None:
    """Save with our writer or with torch's."""
    if kind == "ours":
        dcp_cases.save(state, path)
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def refused(path: Path, target: dict[str, Any]) -> UnsafeContentError:
    """Load; assert that it is refused before the planner gets anything; return the error."""
    error = load_failure(path, target)
    assert isinstance(error, UnsafeContentError)
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_malicious_blob_is_refused_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    """A blob that calls a function is refused by name before anything reaches the planner."""
    sign = tmp_path / "ran"
    save_by(kind, {"a": torch.ones(3), "evil": Attack(sign), "z": 1}, tmp_path / "run")
    target = {"a": torch.zeros(3), "evil": None, "z": None}
    error = refused(tmp_path / "run", target)
    assert not sign.exists()
    assert "evil in" in str(error)
    assert f"{os.name}.mkdir" in str(error)
    assert "unsafe_pickle=True" in str(error)
    assert "\x1b" not in str(error)
    assert target["z"] is None


def test_a_pickle_with_an_archive_of_numbers_behind_it_runs_nothing(tmp_path: Path) -> None:
    """Readers of archives see the numbers at the end, torch.load the pickle at the start."""
    sign = tmp_path / "ran"
    numbers = io.BytesIO()
    torch.save(np.arange(4), numbers)
    both = io.BytesIO()
    both.write(pickle.dumps(Attack(sign), protocol=2))
    with zipfile.ZipFile(numbers) as source, zipfile.ZipFile(both, "a") as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(both.getvalue()))  # noqa: SLF001
    assert reader.has_record("data.pkl")
    place = ChunkPlace(path="f", fqn="evil", start=0, size_bytes=len(both.getvalue()))
    with pytest.raises(UnsafeContentError):
        scan_blob(bytearray(both.getvalue()), place)
    with pytest.raises(UnsafeContentError):
        blob_value(bytearray(both.getvalue()), place, unsafe_pickle=False)
    assert not sign.exists()
    with pytest.raises(FormatError, match=r"evil in f cannot be unpickled .*magic number"):
        blob_value(bytearray(both.getvalue()), place, unsafe_pickle=True)
    assert sign.exists()


@pytest.mark.parametrize("damage", [b"", b"\x80\x04 no pickle", b"PK\x03\x04 no archive"])
def test_a_trusted_blob_that_cannot_be_unpickled_is_a_format_error(damage: bytes) -> None:
    """No error of torch's own leaves the door: ours names the value and the file, in one line."""
    place = ChunkPlace(path="saves/f", fqn="object", start=0, size_bytes=len(damage))
    with pytest.raises(FormatError, match=r"object in saves/f cannot be unpickled") as caught:
        blob_value(bytearray(damage), place, unsafe_pickle=True)
    assert caught.value.path == "saves/f"
    assert "\n" not in str(caught.value)


def test_a_malicious_blob_that_is_not_loaded_does_no_harm(tmp_path: Path) -> None:
    """A load that leaves it out works, and so does `verify`; neither runs it."""
    sign = tmp_path / "ran"
    dcp_cases.save({"a": seeded(1, 3), "evil": Attack(sign)}, tmp_path / "run")
    target = {"a": torch.zeros(3)}
    dcp_cases.load(target, tmp_path / "run")
    assert same(target["a"], seeded(1, 3))
    assert verify(str(tmp_path / "run")).ok
    assert not sign.exists()


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_classes_of_a_program_load_when_it_says_so(tmp_path: Path, kind: str) -> None:
    """An object of one's own is refused, unless its class was allowed or pickles are trusted."""
    save_by(kind, {"own": Benign(5)}, tmp_path / "run")
    assert "Benign" in str(refused(tmp_path / "run", {"own": None}))
    trusting: dict[str, Any] = {"own": None}
    dcp_cases.load(trusting, tmp_path / "run", unsafe_pickle=True)
    assert trusting["own"] == Benign(5)
    allowed: dict[str, Any] = {"own": None}
    with torch.serialization.safe_globals([Benign]):
        dcp_cases.load(allowed, tmp_path / "run")
    assert allowed["own"] == Benign(5)


class Script(torch.nn.Module):
    """A module to be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file:UserWarning")
def test_an_archive_that_torch_would_give_to_torchscript_is_refused(tmp_path: Path) -> None:
    """A blob that is a TorchScript archive is never handed to `torch.load`."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Script()), stream)
    planner = BlobPlanner(stream.getvalue())
    dcp_cases.save({"x": 1}, tmp_path, planner=planner)
    refused(tmp_path, {"x": None})


class BlobPlanner(dcp.DefaultSavePlanner):
    """A planner that writes given bytes for every blob."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002, ARG002  # torch's names
        """Return the bytes."""
        return io.BytesIO(self.data)


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(1), b"PK\x03\x04" + b"\0" * 60])
def test_blobs_that_torch_cannot_read_are_refused(tmp_path: Path, data: bytes) -> None:
    """Bytes that are no torch.save file raise an error of ours that names the blob."""
    dcp_cases.save({"x": 1}, tmp_path, planner=BlobPlanner(data))
    error = load_failure(tmp_path, {"x": None})
    assert isinstance(error, FormatError | UnsafeContentError)
    assert "x in saves/" in str(error)
    assert "\n" not in str(error)


def test_a_malicious_legacy_blob_is_refused(tmp_path: Path) -> None:
    """The file format before torch 1.6, a plain sequence of pickles, is scanned as well."""
    stream = io.BytesIO()
    torch.save(Attack(tmp_path / "ran"), stream, _use_new_zipfile_serialization=False)
    planner = BlobPlanner(stream.getvalue())
    dcp_cases.save({"x": 1}, tmp_path / "run", planner=planner)
    refused(tmp_path / "run", {"x": None})
    assert not (tmp_path / "ran").exists()


def test_a_malicious_stock_metadata_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    """A `.metadata` that calls a function is refused by every entry point, and does not run."""
    folder = tmp_path / "run"
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder))
    sign = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(sign)))
    reader = CheckpointStorageReader(folder)
    for look in (reader.read_metadata, lambda: reader.format):
        with pytest.raises(UnsafeContentError, match=r"posix\.mkdir"):
            look()
    with pytest.raises(CheckpointException) as raised:
        dcp_cases.load({"a": torch.zeros(3)}, folder)
    assert dcp_cases.HIDES_REASONS or "posix.mkdir" in str(raised.value)
    assert not verify(str(folder)).ok
    assert not sign.exists()


def test_a_malicious_metadata_beside_ours_does_not_run(tmp_path: Path) -> None:
    """In a checkpoint of ours a `.metadata` that is not ours is refused without unpickling it."""
    folder = tmp_path / "run"
    dcp_cases.save({"a": seeded(1, 3)}, folder)
    sign = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(sign)))
    with pytest.raises(FormatError, match="holds two checkpoints"):
        ckpt_storage.load({"a": torch.zeros(3)}, folder)
    assert not sign.exists()


def test_a_tensor_item_that_is_something_else_is_refused(tmp_path: Path) -> None:
    """A stock item of a tensor whose pickle calls a function is refused, and does not run."""
    folder, sign = tmp_path / "run", tmp_path / "ran"
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    stream = io.BytesIO()
    torch.save(Attack(sign), stream)
    (folder / info.relative_path).write_bytes(stream.getvalue())
    info.offset, info.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(folder, {"a": torch.zeros(3)})
    assert "a in __0_0.distcp" in str(error)
    assert "posix.mkdir" in str(error)
    assert not sign.exists()
