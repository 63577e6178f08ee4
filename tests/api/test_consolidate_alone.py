"""One process exports: what arrives, is kept, replaced, refused, and what `verify` says of it."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from consolidate_cases import INDEX, check, check_report, files_in
from copy_cases import flip
from dcp_cases import seeded
from fault_tools import Opener
from s3_server import S3Server

import ckpt_storage
import ckpt_storage.export.output
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import (
    CheckpointExistsError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.export.consolidate import ConsolidateSpec, consolidate, run_consolidate
from ckpt_storage.options import MIB, Timeouts
from ckpt_storage.store import Location, Part
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.monitor import StallDetector
from ckpt_storage.testing.faults import FaultBackend, Rule

STATE = {f"w{i}": seeded(i, 600, 1024) for i in range(5)}


def test_tensors_are_cast_on_the_way(tmp_path: Path) -> None:
    """Floating-point tensors arrive as torch converts them, bit by bit; all others as they are."""
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn)
    state = {str(dtype): seeded(1, 301, 129, dtype=dtype) for dtype in dtypes}
    ckpt_storage.save(state, tmp_path / "run")
    for dtype in (torch.float32, torch.bfloat16):
        consolidate(tmp_path / "run", dtype=dtype)
        expected = {
            name: one.to(dtype) if one.dtype in dtypes[:3] else one for name, one in state.items()
        }
        check(files_in(tmp_path / "run" / "hf"), expected)


def test_names_with_thousands_of_digits_are_exported(tmp_path: Path) -> None:
    """Python converts no text of over 4,300 digits to an int; names are sorted all the same."""
    state = {f"w{'9' * count}": torch.ones(2) * count for count in (1, 2, 5000, 5001)}
    ckpt_storage.save(state, tmp_path / "run")
    consolidate(tmp_path / "run")
    check(files_in(tmp_path / "run" / "hf"), state)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_storage_copies_unless_it_refuses(
    monkeypatch: pytest.MonkeyPatch, *, refuses: bool
) -> None:
    """A storage that turns out not to copy whole files costs a refusal, no failure."""
    rule = Rule(action="error", operation="copy_part", kind="unsupported", hit_count=None)
    rules = [rule] if refuses else []
    url = f"memory://{uuid.uuid4().hex}/run"
    ckpt_storage.save(STATE, url)
    opener = Opener(lambda _, backend: FaultBackend(backend, rules))
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", opener)
    report = ckpt_storage.copy(url, f"{url}-copy")
    assert (report.copied_bytes == 0) == refuses
    assert report.sent_bytes + report.copied_bytes == report.total_bytes
    assert ckpt_storage.verify(report.url).ok


def test_a_storage_that_wants_parts_in_order_gets_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of each file arrive one after another; a failure in any is raised at once."""
    ends: dict[str, list[int]] = {}
    able: dict[str, Any] = dict.fromkeys(
        ("parallel_parts", "tokens_travel", "lists_uploads"), False
    )

    class InOrder(LocalBackend):
        capabilities = dataclasses.replace(
            LocalBackend.capabilities, **able, copy_min_bytes=None, is_remote=True
        )

        def put_part(self, path: str, token: str, part: Part, *rest: Any, **more: Any) -> str:
            assert part.offset == sum(ends.setdefault(path, []))
            ends[path].append(part.size_bytes)
            return super().put_part(path, token, part, *rest, **more)

    backend = InOrder(str(tmp_path / "out"))
    opener = Opener(lambda place, inner: backend if place.path.endswith("out") else inner)
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", opener)
    ckpt_storage.save(STATE, tmp_path / "run")
    given: dict[str, Any] = {"memory_limit_bytes": 8 * MIB, "max_file_bytes": 6_000_000}
    report = consolidate(tmp_path / "run", tmp_path / "out", **given)
    assert len(ends) == 3
    assert min(map(len, ends.values())) > 2
    assert sum(map(sum, ends.values())) == report.total_bytes
    check(files_in(tmp_path / "out"), STATE)
    (shard,) = (tmp_path / "run").glob("saves/*/*.distcp")
    flip(shard, shard.stat().st_size // 2)
    ends.clear()
    with pytest.raises(IntegrityError) as caught:
        consolidate(tmp_path / "run", tmp_path / "out", exclude="w0", **given)
    assert (caught.value.fqn, caught.value.rank) == ("w2", 0)
    # A thread that went on would be named in a note.
    assert not getattr(caught.value, "__notes__", [])


def test_too_little_memory_is_refused(server: S3Server, tmp_path: Path) -> None:
    """If not even one part fits the limit, the error says how much is needed."""
    ckpt_storage.save({"w": torch.zeros(4 * MIB)}, tmp_path / "run")
    given: dict[str, Any] = {"output_storage_options": server.storage_options}
    with pytest.raises(InvalidInputError, match="memory_limit_bytes to"):
        consolidate(tmp_path / "run", "s3://bkt/hf", memory_limit_bytes=MIB, **given)


def model(version: int) -> dict[str, Any]:
    return {"model": {f"w{i}": seeded(100 * version + i, 40, 50) for i in range(4)}}


@pytest.fixture
def url(tmp_path: Path) -> Path:
    ckpt_storage.save(model(1), tmp_path / "run")
    consolidate(tmp_path / "run", max_file_bytes=20_000)
    return tmp_path / "run"


def test_only_what_is_not_sound_is_made_again(tmp_path: Path) -> None:
    """What is missing, short or of other bytes is written anew; `verify` names it and says so."""
    ckpt_storage.save(model(1), tmp_path / "run")
    consolidate(tmp_path / "run", max_file_bytes=8_000)
    folder = tmp_path / "run" / "hf"
    before = files_in(folder)
    one, two, three, four = sorted(name for name in before if name.endswith(".safetensors"))
    time_ns = (folder / four).stat().st_mtime_ns
    (folder / one).unlink()
    (folder / two).write_bytes(before[two][:-1])
    for deep in (True, False):
        problems = ckpt_storage.verify(tmp_path / "run", deep=deep).problems
        assert {problem.file for problem in problems} == {f"hf/{one}", f"hf/{two}"}
        assert all("onsolidate again" in problem.next_step for problem in problems)
    flip(folder / three, -1)
    assert consolidate(tmp_path / "run", max_file_bytes=8_000).resumed == (four,)
    assert ckpt_storage.verify(tmp_path / "run").ok
    assert files_in(folder).keys() == before.keys()
    check(files_in(folder), model(1)["model"])
    report = consolidate(tmp_path / "run", max_file_bytes=8_000)
    assert (report.read_bytes, report.sent_bytes) == (0, 0)
    assert len(report.resumed) == len(report.files) == 4
    assert (folder / four).stat().st_mtime_ns == time_ns


def test_another_content_replaces_an_export(tmp_path: Path) -> None:
    """Another save, dtype, cut or naming replaces a single file; old files are deleted."""
    url = tmp_path / "run"
    ckpt_storage.save(model(1), url)
    first = consolidate(url)
    ckpt_storage.save(model(2), url, overwrite=True)
    second = consolidate(url)
    files = files_in(url / "hf")
    check(files, model(2)["model"])
    check_report(second, files)
    name = "model.safetensors"
    assert [file.name for file in (*first.files, *second.files)] == [name, name]
    assert not second.removed
    assert json.loads(files[INDEX])["metadata"]["save_id"] == second.save_id
    cast = consolidate(url, dtype=torch.bfloat16, max_file_bytes=10_000)
    assert list(cast.removed) == [name]
    tail = f"{cast.fingerprint[:8]}.safetensors"
    assert all(file.name.endswith(tail) for file in cast.files)
    check(files_in(url / "hf"), {name: one.bfloat16() for name, one in model(2)["model"].items()})
    assert [file.name for file in consolidate(url).files] == [name]
    weights = model(2)["model"]
    check(files_in(url / "hf"), weights)
    consolidate(url, rename={"model.w0": "w1", "model.w1": "w0"})
    check(files_in(url / "hf"), weights | {"w0": weights["w1"], "w1": weights["w0"]})


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    """A folder with weights that we did not write is refused, untouched; others may be there."""
    ckpt_storage.save(model(1), tmp_path / "run")
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("{}")
    (output / "model.safetensors").write_bytes(b"theirs")
    with pytest.raises(CheckpointExistsError, match="did not export"):
        consolidate(tmp_path / "run", output)
    assert files_in(output) == {"config.json": b"{}", "model.safetensors": b"theirs"}
    (output / "model.safetensors").unlink()
    (output / "tokenizer").mkdir()
    consolidate(tmp_path / "run", output)
    assert (output / "config.json").read_text() == "{}"
    check(files_in(output), model(1)["model"])


@pytest.mark.parametrize("wrong", [3, "nosuch://bucket", "", "saves", "commits/x"])
def test_what_can_be_no_output_is_refused(tmp_path: Path, wrong: Any) -> None:
    """So are the folders of the checkpoint's own files; a save refuses before it saves."""
    url = tmp_path / "run"
    output = wrong if wrong == 3 or ":" in wrong else str(url / wrong)
    with pytest.raises(InvalidInputError):
        ckpt_storage.save(model(1), url, consolidate=output)
    assert not url.exists()
    ckpt_storage.save(model(1), url)
    before = files_in(url)
    with pytest.raises((InvalidInputError, TypeError)):
        consolidate(url, output)
    assert files_in(url) == before


def test_a_save_can_go_on_with_its_own_commit(tmp_path: Path) -> None:
    """`slot` names the commit to consolidate although a later save has become the head."""
    first = ckpt_storage.save(model(1), tmp_path / "run")
    ckpt_storage.save(model(2), tmp_path / "run", overwrite=True)
    source = Location.of(tmp_path / "run")
    job = ConsolidateSpec(source=source, target=source.child("hf"), slot=first.slot)
    with RankGroup.alone().operation("the test", timeouts=Timeouts()) as operation:
        operation.meet(job.terms())
        assert run_consolidate(operation, job).save_id == first.save_id
    check(files_in(tmp_path / "run" / "hf"), model(1)["model"])
    # An export of another save is stale, not damaged.
    found = ckpt_storage.verify(tmp_path / "run")
    assert found.ok
    assert [export.is_stale for export in found.exports] == [True]


def test_every_byte_of_an_export_counts(url: Path) -> None:
    """A flipped bit anywhere in a weight file, the index or the record is found, with the file."""
    folder = url / "hf"
    report = ckpt_storage.verify(url)
    assert report.ok
    (export,) = report.exports
    assert (export.path, export.save_id, export.is_stale) == ("hf", report.save_id, False)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert (export.file_count, export.size_bytes) == (2, sum(sizes))
    assert report.checked_bytes > sum(sizes)
    record = next(name for name in files_in(folder) if name.endswith("output.json"))
    for name in [*(path.name for path in folder.glob("*.safetensors")), INDEX, record]:
        path = folder / name
        for at in (0, 9, path.stat().st_size // 2, -1):
            flip(path, at)
            report = ckpt_storage.verify(url)
            found = {problem.file for problem in report.problems}
            # An index that names another fingerprint is told by the record that is missing.
            assert f"hf/{name}" in found or (name == INDEX and found), (name, at)
            flip(path, at)
    assert ckpt_storage.verify(url).ok


def test_an_index_of_other_bytes_is_found(url: Path) -> None:
    """So is one that names the same files for the same tensors, in another spelling."""
    index = url / "hf" / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()), indent=7))
    (problem,) = ckpt_storage.verify(url).problems
    assert problem.file == f"hf/{INDEX}"


def test_an_export_is_verified_by_its_own_url(url: Path, tmp_path: Path) -> None:
    """The record in a folder checks it, wherever it lies; without an index it promises nothing."""
    consolidate(url, tmp_path / "elsewhere")
    assert ckpt_storage.verify(tmp_path / "elsewhere").ok
    (file,) = (tmp_path / "elsewhere").glob("*.safetensors")
    flip(file, -3)
    (problem,) = ckpt_storage.verify(tmp_path / "elsewhere").problems
    assert problem.file == file.name
    (url / "hf" / INDEX).unlink()
    (url / "theirs").mkdir()
    body = {"metadata": {"total_size": 1}, "weight_map": {"x": "model.safetensors"}}
    (url / "theirs" / INDEX).write_text(json.dumps(body))
    report = ckpt_storage.verify(url)
    assert report.ok
    assert not report.exports


def test_an_export_that_takes_long_goes_on_while_bytes_move(
    url: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the whole takes: the limit is of standing still."""
    now_s = 0.0

    def wait(_event: object) -> None:
        nonlocal now_s
        now_s += 10

    defaults: Any = StallDetector.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", lambda: now_s)
    consolidate(url, tmp_path / "out", max_file_bytes=8_000, timeout=17, progress=wait)
    assert now_s > 34


def test_an_export_that_stands_still_ends_with_a_documented_error(
    url: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that hangs is a `PhaseTimeoutError` of the phase, no error of a thread."""
    rule = Rule(action="hang", operation="put_part", hit_count=None)
    hanging: list[FaultBackend] = []

    def wrap(place: Location, backend: Any) -> Any:
        if not place.path.endswith("out"):
            return backend
        hanging.append(FaultBackend(backend, [rule]))
        return hanging[-1]

    monkeypatch.setattr(ckpt_storage.export.output, "open_store", Opener(wrap))
    try:
        with pytest.raises(PhaseTimeoutError, match="made no progress for") as caught:
            consolidate(url, tmp_path / "out", timeout=Timeouts(consolidate=0.5))
    finally:
        for backend in hanging:
            backend.script.release()
    assert (type(caught.value), caught.value.phase) == (PhaseTimeoutError, "consolidate")


@pytest.mark.parametrize("is_first", [True, False])
def test_without_the_right_to_delete_nothing_is_changed(
    url: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """What could not be replaced whole is refused before, with the right that is missing."""
    output = tmp_path / "out"
    if not is_first:
        consolidate(url, output)
    before = files_in(output)
    rule = Rule(action="error", operation="delete", kind="permission", hit_count=None)
    opener = Opener(
        lambda place, inner: FaultBackend(inner, [rule] if place.path.endswith("out") else [])
    )
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", opener)
    with pytest.raises(StorageError, match="right to delete") as caught:
        consolidate(url, output, max_file_bytes=8_000)
    assert caught.value.kind == "permission"
    after = {name: data for name, data in files_in(output).items() if "probe" not in name}
    assert after == before
