"""Golden checkpoints stay readable: ours by us, torch and a stranger; those of torch by us."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import spec_reader
import torch
from dcp_cases import files_below, raw_bytes, same, zeros_like
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import CheckpointGoneError, open_checkpoint
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import seal, unseal
from ckpt_storage.format.exports import ExportRecord, Holder, Names
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.rank_manifest import RankManifest

GOLDEN = Path(__file__).parent / "golden" / "v1"
RUN = "step-00000007"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "v1"))


def bytes_of(name: str) -> bytes:
    return base64.b64decode(EXPECTED["tensors"][name]["bytes"])


def is_expected(state: dict[str, Any]) -> bool:
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    found = {name: (str(t.dtype)[6:], list(t.shape), raw_bytes(t)) for name, t in tensors.items()}
    told = EXPECTED["tensors"].items()
    wanted = {name: (t["dtype"], t["shape"], bytes_of(name)) for name, t in told}
    blobs = {name: state[name] for name in EXPECTED["blobs"]}
    return (found, blobs) == (wanted, EXPECTED["blobs"])


def zeros() -> dict[str, Any]:
    tensors = {
        name: torch.zeros(t["shape"], dtype=getattr(torch, t["dtype"]))
        for name, t in EXPECTED["tensors"].items()
    }
    return tensors | dict.fromkeys(EXPECTED["blobs"])


def test_each_reader_gives_what_was_saved(golden: Path) -> None:
    """Ours, torch's own by what is published, Hugging Face's of the export; no file changes."""
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(state := zeros(), golden / RUN)
        assert is_expected(state)
    for name in files_below(GOLDEN):
        assert (golden / name).read_bytes() == (GOLDEN / name).read_bytes()
    stored = load_file(GOLDEN / RUN / "hf" / "model.safetensors")
    found = {f"model.{name}": tensor for name, tensor in stored.items()}
    wanted = {name for name, t in EXPECTED["tensors"].items() if t["dtype"] != "complex64"}
    assert set(found) == wanted - {"model.tied"}, "the alias is left out"
    assert all(raw_bytes(tensor) == bytes_of(name) for name, tensor in found.items())


def inflated(document: bytes) -> bytes:
    """Return the body with what is packed inflated, as other releases of zlib pack otherwise."""
    _, body = document.split(b",", 1)  # behind the checksum
    return re.sub(rb'(?<="zlib":")[^"]+', lambda m: zlib.decompress(base64.b64decode(m[0])), body)


def test_documents_are_written_as_they_were() -> None:
    """Each document of a save and of its export, decoded and encoded again, says the same."""
    kinds = set()
    for path in (path for path in GOLDEN.rglob("*.json") if path.name != "expected.json"):
        data, where = path.read_bytes(), str(path)
        if not data.startswith(b'{"crc32c"'):
            continue
        body = unseal(data, path=where)
        kinds.add(kind := body["format"].removeprefix("ckpt_storage."))
        match kind:
            case "manifest/1":
                again = seal(Manifest.from_body(body, where=where).to_body())
            case "rank/1":
                again = seal(RankManifest.from_body(body, where=where).to_body())
            case "commit/1":
                again = SlotRecord.decode(data, slot=body["slot"]).encode()
            case "names/1" | "holder/1" | "export/1":
                one: Any = {"names/1": Names, "holder/1": Holder, "export/1": ExportRecord}[kind]
                again = one.decode(data, where).encode()
            case _:
                continue
        assert inflated(again) == inflated(data), path
    assert kinds >= {"manifest/1", "rank/1", "commit/1", "names/1", "export/1"}


def test_a_reader_made_from_the_format_page_alone_finds_everything() -> None:
    """docs/format.md is enough; the reader has at most 330 lines and imports nothing of ours."""
    found = spec_reader.read(GOLDEN / RUN)
    assert found.slot == 2
    assert found.ties == {"model.tied": "model.rows"}
    assert {name: dtype for name, (dtype, _) in found.tensors.items()} == {
        name: tensor["dtype"] for name, tensor in EXPECTED["tensors"].items()
    }
    for name, (_, array) in found.tensors.items():
        assert list(array.shape[:-1]) == EXPECTED["tensors"][name]["shape"]
        assert np.ascontiguousarray(array).tobytes() == bytes_of(name)
    assert {name: spec_reader.plain(blob) for name, blob in found.blobs.items()} == EXPECTED[
        "blobs"
    ]
    with pytest.raises(spec_reader.NoCheckpointError, match="deleted"):
        spec_reader.read(GOLDEN / "step-00000006")


def test_the_readers_agree_on_damage(golden: Path) -> None:
    """A flipped bit in any file that counts is refused by the reader of the page, and by verify."""
    run = golden / RUN
    head = spec_reader.read(run).save_id
    places = [run / "commits" / "00000002.json", *(run / "saves" / head).rglob("*")]
    unread = {"begun.json", "stock.metadata"}
    for path in (path for path in places if path.is_file() and path.name not in unread):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(spec_reader.RefusedError):
            spec_reader.read(run)
        assert not ckpt_storage.verify(run).ok
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert spec_reader.read(run).save_id == head


def test_it_is_listed_verified_and_overwritten(golden: Path) -> None:
    """A deep look takes in every byte of shard files and exports; a tombstone shows nothing."""
    (info,) = ckpt_storage.list_checkpoints(golden)
    assert (info.name, info.slot, info.format) == (RUN, 2, "ckpt_storage")
    history = open_checkpoint(golden / RUN).history
    assert [(one.slot, one.type) for one in history] == [(1, "commit"), (2, "commit")]
    assert history[-1].save_id == info.save_id
    assert all(one.created_at and one.pid for one in history)
    with pytest.raises(CheckpointGoneError):
        open_checkpoint(golden / "step-00000006")
    shards = (golden / RUN / "saves" / str(info.save_id)).glob("*.distcp")
    files = [*shards, golden / RUN / "hf" / "model.safetensors"]
    for deep in (True, False):
        report = ckpt_storage.verify(golden / RUN, deep=deep)
        assert (report.problems, report.ok, report.format) == ([], True, "ckpt_storage")
        assert report.checked_bytes == (sum(path.stat().st_size for path in files) if deep else 0)
    ckpt_storage.save({"step": 8}, golden / RUN, overwrite=True)
    assert open_checkpoint(golden / RUN)["step"] == 8
    assert ckpt_storage.verify(golden / RUN).ok


def test_the_reader_is_short_and_stands_alone() -> None:
    """At most 330 lines; neither torch nor the package is imported by it."""
    path = Path(spec_reader.__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 330
    code = "import sys, spec_reader; assert not {'torch', 'ckpt_storage'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=path.parent)


def saved_by_groups() -> dict[str, Any]:
    """Return the state in golden/v1-groups, of both ranks."""
    rows = torch.arange(12.0).reshape(3, 4)
    model = {"w0": rows, "w1": rows + 1, "b": torch.arange(5, dtype=torch.int16)}
    return {
        "model": model,
        "optimizer": {"m0": 2 * rows, "m1": 2 * rows - 1, "lr": 0.5},
        "step": 8,
    }


def test_files_by_group_are_read_by_everyone() -> None:
    """Ours, torch's own and the page's reader; a rank has a file of each group."""
    path, expected = GOLDEN.parent / "v1-groups" / "step-00000008", saved_by_groups()
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(state := zeros_like(expected), path)
        assert same(state, expected)
    found = spec_reader.read(path)
    assert found.groups == ["", "optim*", "", "optim*"]
    assert found.tensors["optimizer.m1"][1].tobytes() == raw_bytes(expected["optimizer"]["m1"])
    assert ckpt_storage.verify(path).ok
    for where in path.rglob("manifest.json"):
        body = unseal(data := where.read_bytes(), path=str(where))
        assert seal(Manifest.from_body(body, where=str(where)).to_body()) == data


def test_a_thin_checkpoint_is_read_by_everyone() -> None:
    """The optimizer of golden/v1-groups was dropped from its other folder."""
    path = GOLDEN.parent / "v1-groups" / "step-00000009"
    expected = {name: value for name, value in saved_by_groups().items() if name != "optimizer"}
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(state := zeros_like(expected), path)
        assert same(state, expected)
    found = spec_reader.read(path)
    assert {*found.tensors, *found.blobs} == {"model.w0", "model.w1", "model.b", "step"}
    assert ckpt_storage.verify(path).ok
    data = (path / "commits" / "00000002.json").read_bytes()
    record = SlotRecord.decode(data, slot=2)
    assert record.is_thinned
    assert record.part["exclude"] == ["optim*"]
    assert record.encode() == data


def saved_with_int_keys() -> dict[Any, Any]:
    """Return the state in golden/v1-int-keys."""
    rows = torch.arange(6.0).reshape(2, 3)
    return {
        "optimizer": {0: {"m": rows, "lr": 0.5}, 1: {"m": 2 * rows, "lr": 0.25}},
        "by_name": {"0": 7},
        3: [{-1: rows + 1}],
    }


def test_int_keys_are_read_by_everyone(tmp_path: Path) -> None:
    """Ours, also into a `torch.save` file, and the page's reader; torch's own finds the values."""
    path, expected = GOLDEN.parent / "v1-int-keys" / "step-00000010", saved_with_int_keys()
    ckpt_storage.load(state := zeros_like(expected), path)
    assert same(state, expected)
    texts = {"optimizer": {"0": {"m": torch.zeros(2, 3)}}}
    dcp_cases.load_stock(texts, path)
    assert same(texts["optimizer"]["0"]["m"], expected["optimizer"][0]["m"])
    ckpt_storage.convert(path, tmp_path / "a.pt", to="torch_save")
    assert same(torch.load(tmp_path / "a.pt"), expected)
    found = spec_reader.read(path)
    assert found.int_keys == [["3", 0], ["optimizer"], []]
    assert ckpt_storage.verify(path).ok
    (where,) = path.rglob("manifest.json")
    body = unseal(data := where.read_bytes(), path=str(where))
    assert seal(Manifest.from_body(body, where=str(where)).to_body()) == data


def saved_by_torch_2_15() -> dict[str, Any]:
    """Return the state in golden/torch-2.15, as golden/README.md tells."""
    return {
        "model": {
            "rows": torch.tensor([[(5 * i + j) / 2 for j in range(5)] for i in range(6)]),
            "uneven": torch.tensor(
                [[3 * i + j - 7 for j in range(3)] for i in range(5)], dtype=torch.bfloat16
            ),
            "columns": torch.tensor(
                [[100 * (4 * i + j) for j in range(4)] for i in range(3)], dtype=torch.int16
            ),
            "replicated": torch.tensor([0.0, 0.125, 0.25, 0.375], dtype=torch.float64),
            "turned": torch.tensor([[0, 3], [1, 4], [2, 5]]),
            "scalar": torch.tensor(42),
        },
        "step": 7,
    }


def test_metadata_of_a_later_torch_are_read() -> None:
    """Those of torch 2.15 have strides, which no older torch reads: each front door does."""
    path, expected = GOLDEN.parent / "torch-2.15", saved_by_torch_2_15()
    state = zeros_like(expected)
    assert dcp_cases.load(state, path).format == "dcp"
    assert same(state, expected)
    with open_checkpoint(path) as found:
        assert found.format == "dcp"
        for name, value in expected["model"].items():
            assert found[f"model.{name}"].torch().equal(value)
        assert np.array_equal(found["model.rows"][1:3, ::2], expected["model"]["rows"][1:3, ::2])
        assert found["step"] == 7
    assert ckpt_storage.verify(path).ok


DECIDED = GOLDEN.parent / "v1-decided"


def decided(kind: str) -> list[str]:
    return sorted(path.name for path in (DECIDED / kind).iterdir())


def with_changes(golden: Path, kind: str, name: str) -> Path:
    """Return the golden checkpoint with the changed documents of a case over its own."""
    shutil.copytree(DECIDED / kind / name, golden / RUN, dirs_exist_ok=True)
    return golden / RUN


@pytest.mark.parametrize("name", decided("sound"))
def test_what_was_decided_to_be_sound_stays_readable(golden: Path, name: str) -> None:
    """Notes of any form and a damaged superseded slot hide nothing from ours or the stranger."""
    run = with_changes(golden, "sound", name)
    dcp_cases.load(state := zeros(), run)
    assert is_expected(state)
    assert spec_reader.read(run).slot == 2


@pytest.mark.parametrize("name", decided("refused"))
def test_what_was_decided_to_be_refused_stays_refused(golden: Path, name: str) -> None:
    """Missing keys and contradictions are refused by both readers, and reported by `verify`."""
    run = with_changes(golden, "refused", name)
    with pytest.raises(spec_reader.RefusedError):
        spec_reader.read(run)
    with pytest.raises(ckpt_storage.FormatError):
        ckpt_storage.load(zeros(), run)
    assert not ckpt_storage.verify(run).ok


STATES: dict[str, type[ckpt_storage.CheckpointError]] = {
    "deleted": CheckpointGoneError,
    "in-progress": ckpt_storage.CheckpointInProgressError,
    "lost": ckpt_storage.FormatError,
    "lost-behind-a-tombstone": ckpt_storage.FormatError,
    "nothing": ckpt_storage.CheckpointNotFoundError,
}


@pytest.mark.parametrize("name", decided("states"))
def test_the_rows_of_the_state_table_stay(name: str) -> None:
    """Each folder without a readable head is what docs/format.md calls it."""
    with pytest.raises(STATES[name]):
        open_checkpoint(DECIDED / "states" / name)
    with pytest.raises((spec_reader.RefusedError, spec_reader.NoCheckpointError)):
        spec_reader.read(DECIDED / "states" / name)


def saved_by_reuse(step: int) -> dict[str, Any]:
    """Return the state of a step of golden/v1-reuse, of both ranks."""
    rows = torch.arange(12.0).reshape(3, 4)
    changed = rows + 1 if step == 10 else rows + 2
    return {"model": {"w0": rows, "w1": changed, "w2": rows + 3, "w3": rows + 4}, "step": step}


@pytest.mark.parametrize(("step", "ages"), [(11, [1, None, 0, None]), (12, [2, None, 1, None])])
def test_reused_files_are_read_by_everyone(step: int, ages: list[int | None]) -> None:
    """Ours, torch's own and the page's reader; of a value that changed its rank says so."""
    path, expected = GOLDEN.parent / "v1-reuse" / f"step-{step:08d}", saved_by_reuse(step)
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(state := zeros_like(expected), path)
        assert same(state, expected)
    found = spec_reader.read(path)
    assert found.tensors["model.w1"][1].tobytes() == raw_bytes(expected["model"]["w1"])
    assert ckpt_storage.verify(path).ok
    files, moving = list[Any](), set[str]()
    for where in sorted(path.rglob("rank-*.json")):
        body = unseal(data := where.read_bytes(), path=str(where))
        manifest = RankManifest.from_body(body, where=str(where))
        assert seal(manifest.to_body()) == data
        files += manifest.files
        moving |= {manifest.fqns[file.fqn[at]] for file in manifest.files for at in file.moving}
    assert [file.age for file in files] == ages
    assert moving == {"model.w1"}
