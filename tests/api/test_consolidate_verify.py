"""`verify` covers the exports of a checkpoint: records, index and every byte of weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from consolidate_cases import INDEX, files_in
from dcp_cases import seeded

import ckpt_storage
from ckpt_storage.export.consolidate import consolidate


def model(version: int) -> dict[str, Any]:
    """Return a small model."""
    return {"model": {f"w{i}": seeded(100 * version + i, 40, 50) for i in range(4)}}


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A checkpoint with an export of two files."""
    ckpt_storage.save(model(1), tmp_path / "run")
    consolidate(tmp_path / "run", max_file_bytes=20_000)
    return tmp_path / "run"


def test_a_sound_export_is_counted(url: Path) -> None:
    """The report names the export, its save and its size; every byte was read."""
    report = ckpt_storage.verify(url)
    assert report.ok
    (export,) = report.exports
    assert (export.path, export.save_id, export.is_stale) == ("hf", report.save_id, False)
    sizes = [path.stat().st_size for path in (url / "hf").glob("*.safetensors")]
    assert (export.file_count, export.size_bytes) == (2, sum(sizes))
    assert report.checked_bytes > sum(sizes)


def test_every_byte_of_an_export_counts(url: Path) -> None:
    """A flipped bit anywhere in a weight file, the index or the record is found, with the file."""
    folder = url / "hf"
    record = next(name for name in files_in(folder) if name.endswith("output.json"))
    names = [*(path.name for path in folder.glob("*.safetensors")), INDEX, record]
    for name in names:
        path = folder / name
        data = path.read_bytes()
        for at in (0, 9, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            report = ckpt_storage.verify(url)
            found = {problem.file for problem in report.problems}
            # An index that names another fingerprint is told by the record that is missing.
            assert f"hf/{name}" in found or (name == INDEX and found), (name, at)
            path.write_bytes(data)
    assert ckpt_storage.verify(url).ok


@pytest.mark.parametrize("deep", [True, False])
def test_missing_and_cut_files_are_found(url: Path, *, deep: bool) -> None:
    """A weight file that is gone or short is a problem that says how to make it anew; it works."""
    one, two = sorted((url / "hf").glob("*.safetensors"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-10])
    report = ckpt_storage.verify(url, deep=deep)
    assert {problem.file for problem in report.problems} == {f"hf/{one.name}", f"hf/{two.name}"}
    assert all("onsolidate again" in problem.next_step for problem in report.problems)
    consolidate(url, max_file_bytes=20_000)
    assert ckpt_storage.verify(url).ok


def test_an_export_of_another_save_is_stale_not_damaged(url: Path) -> None:
    """After an overwriting save the old export is sound and said to be stale."""
    ckpt_storage.save(model(2), url, overwrite=True)
    report = ckpt_storage.verify(url)
    assert report.ok
    assert [export.is_stale for export in report.exports] == [True]
    consolidate(url)
    assert [export.is_stale for export in ckpt_storage.verify(url).exports] == [False]


def test_an_export_is_verified_by_its_own_url(url: Path, tmp_path: Path) -> None:
    """The folder of an export, wherever it lies, is checked by the record in it."""
    consolidate(url, tmp_path / "elsewhere")
    assert ckpt_storage.verify(tmp_path / "elsewhere").ok
    (file,) = (tmp_path / "elsewhere").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    report = ckpt_storage.verify(tmp_path / "elsewhere")
    assert [problem.file for problem in report.problems] == [file.name]


def test_an_export_that_died_is_no_problem(url: Path) -> None:
    """Without an index nothing is promised: leftovers of a run that died are no damage."""
    (url / "hf" / INDEX).unlink()
    report = ckpt_storage.verify(url)
    assert report.ok
    assert not report.exports


def test_weights_of_others_are_passed_over(tmp_path: Path) -> None:
    """A folder with an index that is not ours is none of our exports."""
    ckpt_storage.save(model(1), tmp_path / "run")
    (tmp_path / "run" / "theirs").mkdir()
    body = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"x": "model.safetensors"}})
    (tmp_path / "run" / "theirs" / INDEX).write_text(body)
    report = ckpt_storage.verify(tmp_path / "run")
    assert report.ok
    assert not report.exports
