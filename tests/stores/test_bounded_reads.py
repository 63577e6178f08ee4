"""Documents of any length, on a disk or behind a server, are refused before they are read."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from damage_cases import Checkpoint
from local_stores import local_store
from s3_server import FaultRule, S3Server

import ckpt_storage
from ckpt_storage import FormatError, IntegrityError, InvalidInputError
from ckpt_storage.commit import slotlog
from ckpt_storage.format import documents
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, MAX_SLOT_BYTES, seal
from ckpt_storage.format.names import slot_path
from ckpt_storage.store import open_store

SPARSE_BYTES = 4 << 40
LITTLE_BYTES = 32 << 20
STATE = {"aa": torch.arange(8.0), "step": 3}


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if Python's memory grows by much; what is mapped and never touched counts, too."""
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < LITTLE_BYTES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    ckpt_storage.save(STATE, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own, one of two at a root."""
    shutil.copytree(saved, tmp_path / "good")
    return shutil.copytree(saved, tmp_path / "odd")


def load(folder: Path) -> None:
    ckpt_storage.load({"aa": torch.zeros(8), "step": 0}, folder)


@pytest.mark.parametrize(
    ("pattern", "most_bytes"),
    [
        ("commits/*.json", MAX_SLOT_BYTES),
        ("saves/*/manifest.json", None),
        ("saves/*/ranks/*.json", None),
    ],
)
def test_a_sparse_document_is_read_no_further_than_it_may_be_long(
    folder: Path, pattern: str, most_bytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By its ceiling, or by what refers to it; the checkpoint beside it is found as ever."""
    (path,) = folder.glob(pattern)
    told = most_bytes or path.stat().st_size
    os.truncate(path, SPARSE_BYTES)
    with little_memory():
        with pytest.raises(IntegrityError, match=f"{told} at most were to be expected"):
            load(folder)
        report = ckpt_storage.verify(folder)
        names = [info.name for info in ckpt_storage.list_checkpoints(folder.parent)]
    assert not report.ok
    if most_bytes is None:
        assert [problem.file for problem in report.problems] == [str(path.relative_to(folder))]
    else:
        assert names == ["good"]
        assert "odd is left out of the list" in caplog.text


def test_a_reference_beyond_the_ceiling_is_refused_before_the_read(folder: Path) -> None:
    """A commit record names a manifest longer than any may be, a sparse file of that length."""
    checkpoint, size_bytes = Checkpoint(folder), MAX_DOCUMENT_BYTES + 1
    checkpoint.change(checkpoint.slot, lambda body: body["manifest"].update(bytes=size_bytes))
    os.truncate(checkpoint.manifest, size_bytes)
    with little_memory(), pytest.raises(IntegrityError, match=r"manifest\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        (".metadata", b"", "at most were to be expected"),
        ("model.safetensors.index.json", b"", "at most were to be expected"),
        # The reference implementation takes 100 MB.
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "claims a header of"),
    ],
)
def test_what_others_write_has_ceilings_too(
    tmp_path: Path, name: str, head: bytes, message: str
) -> None:
    """A sparse `.metadata`, index or weight file is refused when its folder is opened."""
    (tmp_path / "model-1.safetensors").write_bytes(head)
    (tmp_path / name).write_bytes(head)
    os.truncate(tmp_path / name, SPARSE_BYTES)
    with little_memory(), pytest.raises((FormatError, IntegrityError), match=message):
        ckpt_storage.open_checkpoint(tmp_path)


def test_a_sparse_file_at_metadata_is_not_read_by_a_save(folder: Path) -> None:
    """Its last bytes are judged; a save that overwrites commits and replaces it."""
    os.truncate(folder / ".metadata", SPARSE_BYTES)
    with little_memory():
        ckpt_storage.save(STATE, folder, overwrite=True)
    assert (folder / ".metadata").stat().st_size < SPARSE_BYTES
    load(folder)
    assert slotlog.read_log(local_store(str(folder))).last_slot == 2


def test_writers_refuse_what_readers_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record or document beyond its ceiling is an error before it is sent."""
    many = [f"20260101T000000Z-{number:016x}" for number in range(MAX_SLOT_BYTES // 36)]
    head = HeadRef(slot=1, save_id=many[0])
    record = SlotRecord(type="fence", slot=1, write_id="x", head=head, fenced=many[:-100])
    assert len(record.encode()) <= MAX_SLOT_BYTES
    with pytest.raises(InvalidInputError, match=f"readers accept {MAX_SLOT_BYTES}"):
        dataclasses.replace(record, fenced=many).encode()
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 1000)
    assert len(seal({"x": "y" * 900})) < 1000
    with pytest.raises(InvalidInputError, match="readers accept 1000"):
        seal({"x": "y" * 1000})


def test_a_stranger_on_s3_does_not_hide_the_others(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A record beyond the ceiling is a damaged one, as on a disk, and is not read."""
    options = server.storage_options
    ckpt_storage.save(STATE, "s3://bkt/run/root/good", storage_options=options)
    store = open_store("s3://bkt/run/root/odd", storage_options=options)
    store.put(slot_path(1), bytes(2 * LITTLE_BYTES))
    server.reset_counters()
    told = f"s3://bkt/run/root/odd/{slot_path(1)} has"
    with little_memory(), pytest.raises(IntegrityError, match=told):
        slotlog.read_slot(store, 1)
    assert [request.op for request in server.requests] == ["get"] * 2
    found = ckpt_storage.list_checkpoints("s3://bkt/run/root", storage_options=options)
    assert [info.name for info in found] == ["good"]
    assert "s3://bkt/run/root/odd is left out of the list" in caplog.text
    assert f"{MAX_SLOT_BYTES} at most were to be expected" in caplog.text


def test_a_folder_that_may_not_be_read_is_not_hidden(server: S3Server) -> None:
    """A list calls it unreadable, and who resumes does not take an older one in its place."""
    root, options = "s3://bkt/run/mine", server.storage_options
    for step in (1, 2):
        ckpt_storage.save(STATE, f"{root}/step-{step:08d}", storage_options=options)
    rule = FaultRule(
        key="step-00000002/", times=0, action="status", status=403, code="AccessDenied"
    )
    server.faults([rule])
    old, new = ckpt_storage.list_checkpoints(root, storage_options=options)
    with ckpt_storage.CheckpointManager(root, storage_options=options) as manager:
        for call in (manager.latest, lambda: manager.restore({})):
            with pytest.raises(ckpt_storage.StorageError, match=r"step-00000002.*AccessDenied"):
                call()
    assert (old.name, old.format, old.problem) == ("step-00000001", "ckpt_storage", None)
    assert (new.name, new.format) == ("step-00000002", "unreadable")
    assert "AccessDenied" in str(new.problem)
