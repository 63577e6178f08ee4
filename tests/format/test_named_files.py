"""Every document that names a file, with names that lead elsewhere; `hostile_names` has them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile_names import UNSAFE, UNSENDABLE, tree
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ckpt_storage import (
    CheckpointError,
    FormatError,
    UnsafeContentError,
    consolidate,
    convert,
    copy,
    open_checkpoint,
    verify,
)
from ckpt_storage.format import exports
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef, seal, unseal
from ckpt_storage.format.fields import Fields
from ckpt_storage.format.manifest import Manifest

NAMES = [name for name in (*UNSAFE, *UNSENDABLE, "", "s3:b", "x:y/z") if name != "\ud800"]
"""A document must not begin a name with any scheme, nor leave it empty."""

READERS: dict[str, Callable[[Path, Path], object]] = {
    "open_checkpoint": lambda source, _: open_checkpoint(source),
    "convert": lambda source, target: convert(source, target, to="dcp"),
    "consolidate": consolidate,
    "copy": copy,
}
EXAMPLES = [("copy", name) for name in NAMES]
EXAMPLES += [(key, name) for key in READERS if key != "copy" for name in ("../x", "a\n")]


def refused(source: Path, target: Path, reader: str, where: str) -> None:
    """Have a reader refuse the folder; nothing is made anywhere."""
    before = tree(source.parent)
    with pytest.raises(UnsafeContentError) as caught:
        READERS[reader](source, target)
    assert where in str(caught.value)
    assert caught.value.next_step
    assert tree(source.parent) == before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder two levels below one with files that hostile names could mean."""
    for name in ("x", "deep/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / "deep" / "src").mkdir()
    return tmp_path / "deep" / "src"


@pytest.mark.parametrize(("reader", "name"), EXAMPLES)
def test_an_index_names_no_weight_file_elsewhere(source: Path, name: str, reader: str) -> None:
    """`model.safetensors.index.json`, whose names torch and transformers join to the folder."""
    save_file({"v": torch.ones(2)}, source / "model.safetensors")
    index = {"weight_map": {"v": "model.safetensors", "w": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, source.parent / "dst", reader, "model.safetensors.index.json")


@pytest.mark.parametrize(("reader", "name"), EXAMPLES)
def test_stock_metadata_names_no_shard_elsewhere(source: Path, name: str, reader: str) -> None:
    """`.metadata` of torch, whose `relative_path` its own reader joins to the folder."""
    metadata = Metadata(
        state_dict_metadata={"step": BytesStorageMetadata()},
        storage_data={MetadataIndex("step"): _StorageInfo(name, 0, 5)},
    )
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(source, source.parent / "dst", reader, ".metadata")


REFS: dict[str, tuple[bytes, Callable[[bytes, str], object]]] = {}
_ID, _PRINT, _FILE = "20260101T000000Z-0123456789abcdef", "0" * 64, FileRef.of("a", b"1")
REFS["files of an export record"] = (
    exports.ExportRecord(
        fingerprint=_PRINT, save_id=_ID, source_format="dcp", files=[_FILE], index=_FILE
    ).encode(),
    exports.ExportRecord.decode,
)
REFS["file of a record of a sealed file"] = (
    exports.Sealed(fingerprint=_PRINT, file=_FILE).encode(),
    exports.Sealed.decode,
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("document", REFS)
def test_no_record_of_an_export_names_a_file_elsewhere(document: str, name: str) -> None:
    """They are read back by a later export, by `verify` and by `copy`."""
    data, decode = REFS[document]
    assert decode(data, "output.json")
    body = unseal(data, path="output.json")
    for entry in [*body.get("files", ()), *([body["file"]] if "file" in body else [])]:
        entry["path"] = name
    with pytest.raises(UnsafeContentError, match=r"output\.json"):
        decode(seal(body), "output.json")


DOCUMENTS: dict[str, tuple[bytes, Callable[[bytes, str], object]]] = {
    "names.json": (exports.Names(fingerprint=_PRINT).encode(), exports.Names.decode),
    "job.json": (exports.Holder(fingerprint=_PRINT, run_id="1").encode(), exports.Holder.decode),
    "output.json": REFS["files of an export record"],
    "00001.json": REFS["file of a record of a sealed file"],
}


@pytest.mark.parametrize("fingerprint", ["../" * 21 + "x", "..", "/" * 64, "0" * 63 + "\n"])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_fingerprint_that_is_none_is_refused(document: str, fingerprint: str) -> None:
    """The folder of records and the suffix of weight files are its first digits."""
    data, decode = DOCUMENTS[document]
    assert decode(data, document)
    body = {**unseal(data, path=document), "fingerprint": fingerprint}
    with pytest.raises(FormatError, match="fingerprint"):
        decode(seal(body), document)
    metadata = {"save_id": _ID, "fingerprint": fingerprint}
    index = json.dumps({"metadata": metadata, "weight_map": {}}).encode()
    assert exports.IndexTag.of(index) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["manifest", "stock"])
def test_a_commit_record_names_documents_of_its_own_save_alone(key: str, name: str) -> None:
    """Their place follows from the save id; any other name is refused, also a plain one."""
    record = {
        "format": "ckpt_storage.commit/1",
        "type": "commit",
        "slot": 1,
        "write_id": "w",
        "head": {"slot": 1, "save_id": _ID},
        "save_id": _ID,
        "manifest": FileRef.of(f"saves/{_ID}/manifest.json", b"1").as_json(),
        "stock": FileRef.of(f"saves/{_ID}/stock.metadata", b"1").as_json(),
    }
    assert SlotRecord.decode(seal(record), slot=1).save_id == _ID
    record[key] = FileRef.of(name, b"1").as_json()
    with pytest.raises(UnsafeContentError, match=r"commits/00000001\.json"):
        SlotRecord.decode(seal(record), slot=1)
    record[key] = FileRef.of("hf/model.safetensors", b"1").as_json()
    with pytest.raises(FormatError, match="not a document of this save"):
        SlotRecord.decode(seal(record), slot=1)


@pytest.mark.parametrize("save_id", ["../../other", "..", "", "a", f"{_ID}/..", f"{_ID}\n"])
@pytest.mark.parametrize("place", ["save_id", "head", "previous", "fenced"])
def test_a_save_id_that_is_none_is_refused(place: str, save_id: str) -> None:
    """Folders are named by it: they are read, freed and deleted."""
    record: dict[str, object] = {
        "format": "ckpt_storage.commit/1",
        "type": "commit",
        "slot": 2,
        "write_id": "w",
        "head": {"slot": 2, "save_id": _ID},
        "save_id": _ID,
        "previous": {"slot": 1, "save_id": _ID},
        "manifest": FileRef.of(f"saves/{_ID}/manifest.json", b"1").as_json(),
        "stock": None,
    }
    assert SlotRecord.decode(seal(record), slot=2).save_id == _ID
    if place == "save_id":
        record["save_id"] = save_id
        record["manifest"] = FileRef.of(f"saves/{save_id}/manifest.json", b"1").as_json()
    elif place == "fenced":
        record |= {"type": "fence", "fenced": [save_id]}
    else:
        record[place] = {"slot": 1, "save_id": save_id}
    with pytest.raises((FormatError, UnsafeContentError), match=r"commits/00000002\.json"):
        SlotRecord.decode(seal(record), slot=2)


@pytest.mark.parametrize("save_id", ["../../other", "..", "", f"{_ID}/.."])
def test_a_manifest_of_a_save_id_that_is_none_is_refused(save_id: str) -> None:
    """The paths of its shards are made of it."""
    with pytest.raises(FormatError, match="save_id"):
        Manifest.from_body({"format": "ckpt_storage.manifest/1", "save_id": save_id}, where="m")


@pytest.mark.parametrize("name", NAMES)
def test_verify_reports_an_export_record_that_names_a_file_elsewhere(
    tmp_path: Path, name: str
) -> None:
    """As damage of that record; nothing outside is looked at."""
    save_file({"w": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "src").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "src" / "model.safetensors")
    consolidate(tmp_path / "src", tmp_path / "out")
    (path,) = (tmp_path / "out" / ".ckpt-storage").glob("*/output.json")
    body = unseal(path.read_bytes(), path="output.json")
    body["files"][0]["path"] = name
    path.write_bytes(seal(body))
    report = verify(tmp_path / "out")
    assert any("output.json" in f"{problem}" for problem in report.problems)


def test_a_reference_is_checked_once() -> None:
    """Where it is read; who gets it may join it."""
    get = Fields({"path": "a/b", "bytes": 1, "crc32c": "00000000"}, "m")
    assert get.ref().path == "a/b"
    with pytest.raises(CheckpointError):
        Fields({"path": "a/../b", "bytes": 1, "crc32c": "00000000"}, "m").ref()
