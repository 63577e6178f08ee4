"""`copy` between storages: what arrives, what is sent, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import copy_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same
from s3_server import S3Server
from safetensors.torch import save_file

from ckpt_storage import CheckpointManager, consolidate, copy, errors, verify
from ckpt_storage.commit import cleaning
from ckpt_storage.commit.attempt_files import delete_attempt
from ckpt_storage.commit.deletion import delete
from ckpt_storage.export.output import place_within
from ckpt_storage.format.documents import seal
from ckpt_storage.format.names import PROBE_PREFIX
from ckpt_storage.options import MIB
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Content
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule


@pytest.fixture
def source(tmp_path: Path) -> Path:
    cases.save(cases.state_of(1), tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def holds(target: Path, number: int = 1) -> bool:
    state = cases.state_of(number)
    return verify(target).ok and same(cases.load_stock(state, target), state)


def test_a_copy_on_a_disk_is_the_same_save_byte_for_byte(tmp_path: Path, target: Path) -> None:
    """All below `saves/` is equal, and what lists show; a second copy sends nothing."""
    source = tmp_path / "src" / "step-00000007"
    with CheckpointManager(source.parent) as manager:
        manager.save(7, cases.state_of(1), metrics={"loss": 0.5}, sync_files=False)
    report = copy(source, target)
    old, new = cases.files_below(source), cases.files_below(target)
    assert cases.save_files(new) == cases.save_files(old)
    assert cases.head_of(new) == cases.head_of(old) == report.save_id
    records = [json.loads(files["commits/00000001.json"])["body"] for files in (old, new)]
    assert records[0]["user"] == {"step": 7, "metrics": {"loss": 0.5}}
    own = {key: records[1][key] for key in ("write_id", "created_at", "host", "pid")}
    assert records[0] | own == records[1]
    assert holds(target)
    assert report.sent_bytes == report.total_bytes > 0
    assert not report.was_there
    report = copy(source, target)
    assert report.was_there
    assert report.sent_bytes == report.read_bytes == 0
    assert cases.files_below(target) == new


@pytest.mark.parametrize("kind", ["deleted", "superseded", "fenced"])
def test_an_id_that_the_target_gave_up_is_never_used_again(
    source: Path, target: Path, kind: str
) -> None:
    """Whoever was about to delete the files of that id cannot hit the new copy."""
    old_id = cases.head_of(cases.files_below(source))
    assert old_id is not None
    store = open_store(target, sync_files=False)
    if kind == "fenced":
        store.make_folders(["commits"])
        cleaning.fence(store, [old_id])
    else:
        copy(source, target)
    if kind == "deleted":
        delete(store)
    if kind == "superseded":
        cases.save(cases.state_of(2), target, overwrite=True)
        before = cases.files_below(target)
        with pytest.raises(errors.CheckpointExistsError, match="overwrite"):
            copy(source, target)
        assert cases.files_below(target) == before
    last = {path: data for path, data in cases.files_below(target).items() if path != ".metadata"}
    report = copy(source, target, overwrite=True)
    assert report.save_id != old_id
    # The one before is kept, as after any save.
    kept = {path: data for path, data in last.items() if old_id not in path}
    assert kept.items() <= cases.files_below(target).items()
    # The late deleter ends its work.
    delete_attempt(store, old_id)
    assert holds(target)
    again = copy(source, target)
    assert again.was_there
    assert again.save_id == report.save_id


def test_golden_checkpoints_of_several_ranks_can_be_copied_and_renamed(target: Path) -> None:
    """Under its own id and under another."""
    golden = Path(__file__).parents[1] / "format" / "golden" / "v1" / "step-00000007"
    head = str(copy(golden, target).save_id)
    old, new = (cases.save_files(cases.files_below(root)) for root in (golden, target))
    assert [name for name in old if head in name] == [name for name in new if head in name]
    delete(open_store(target, sync_files=False))
    report = copy(golden, target)
    assert verify(target).ok
    stock = dcp.FileSystemReader(target).read_metadata()
    named = {place.relative_path.split("/")[1] for place in stock.storage_data.values()}
    assert named == {report.save_id} != {head}
    shards = [(golden / "saves" / head).glob("*.distcp"), (target / "saves").rglob("*.distcp")]
    found = [sorted(path.read_bytes() for path in paths) for paths in shards]
    assert found[0] == found[1]


def test_an_export_is_left_out_and_copied_by_its_own_url(source: Path, target: Path) -> None:
    """The report of the checkpoint names it; by its URL all files in it are copied."""
    consolidate(source)
    hf = source / "hf"
    (hf / "config.json").write_text('{"rope": 10000}')
    (hf / "original").mkdir()
    (hf / "original" / "params.json").write_text("[]")
    (source / "notes.txt").write_text("mine")
    assert copy(source, target).left_out == ("hf/", "notes.txt")
    assert not (target / "hf").exists()
    copy(hf, target / "hf")
    old, new = (cases.files_below(root / "hf").items() for root in (source, target))
    # All is equal but the note of who holds the folder.
    assert {path for path, _ in old ^ new if not path.endswith("job.json")} == set()
    found = verify(target)
    assert found.ok
    assert [(one.path, one.is_stale) for one in found.exports] == [("hf", False)]
    # A later export at the copy goes on from there.
    assert consolidate(target).sent_bytes == 0


def test_every_flipped_bit_of_the_source_is_found_and_nothing_is_committed(
    source: Path, tmp_path: Path
) -> None:
    """Damage anywhere in a file stops the copy before it counts; so does a missing one."""
    files = cases.files_below(source)
    places = [
        (path, at)
        for path, data in cases.save_files(files).items()
        for at in sorted({0, len(data) // 3, len(data) // 2, len(data) - 1})
    ]
    assert len(places) >= 16
    for number, (path, at) in enumerate(places):
        cases.flip(source / path, at)
        target = tmp_path / f"dst-{number}"
        with pytest.raises(errors.IntegrityError) as caught:
            copy(source, target)
        cases.flip(source / path, at)
        assert caught.value.path is not None
        assert path.endswith(caught.value.path.rpartition("/")[2]), (path, at, caught.value)
        assert cases.head_of(cases.files_below(target)) is None, (path, at)
        assert not (target / ".metadata").exists(), (path, at)
    copy(source, tmp_path / "dst-0")
    assert verify(tmp_path / "dst-0").ok
    (shard,) = source.rglob("*.distcp")
    shard.unlink()
    with pytest.raises(errors.IntegrityError, match="distcp is missing"):
        copy(source, tmp_path / "dst")
    assert cases.head_of(cases.files_below(tmp_path / "dst")) is None


def test_a_copy_into_or_around_its_source_is_refused(tmp_path: Path, server: S3Server) -> None:
    """Neither may lie inside the other, however the two are spelt."""
    folder = tmp_path / "run" / "inner" / "step-1"
    cases.save(cases.state_of(1), folder)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "step").symlink_to(folder)
    before = cases.files_below(tmp_path)
    run = tmp_path / "run"
    for inner in ("", "saves/x", "backup"):
        with pytest.raises(errors.InvalidInputError, match="inside"):
            copy(folder, folder / inner)
        with pytest.raises(errors.InvalidInputError, match="inside"):
            copy(folder, tmp_path / "step" / inner, overwrite=True)
    for target in (f"{run}/", f"{run}/inner", run.as_uri(), tmp_path / "link"):
        for source in (folder, f"{folder.as_uri()}/", tmp_path / "step"):
            with pytest.raises(errors.InvalidInputError, match="inside"):
                copy(source, target, overwrite=True)
    copy(folder, run / "inner" / "step-10", copies="never")
    shutil.rmtree(run / "inner" / "step-10")
    assert cases.files_below(tmp_path) == before
    options = server.storage_options
    copy(folder, "s3://bkt/run/step-1", destination_storage_options=options)
    for address in ("s3://bkt/run/", "s3://bkt"):
        with pytest.raises(errors.InvalidInputError, match="inside"):
            copy("s3://bkt/run/step-1/", address, overwrite=True, storage_options=options)


def test_a_place_that_may_not_be_listed_is_found_all_the_same() -> None:
    """A probe that is written there is seen where is read; without rights to write it is not."""
    inner = MemoryBackend(Location.of(f"memory://{uuid.uuid4().hex}/run"))
    plain = Store(inner, url="memory://run")
    plain.put("x", b"data")
    deny = partial(Rule, action="error", hit_count=None, kind="permission", retryable=False)
    closed = Store(FaultBackend(inner, [deny(operation="list")]), url="memory://run")
    assert place_within(plain, closed) == ""
    assert [entry.path for entry in plain.list("")] == ["x"]
    closed = Store(FaultBackend(inner, [deny(operation="list|put")]), url="memory://run")
    assert place_within(plain, closed) is None


# Between storages.


def test_within_a_bucket_the_storage_copies(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte travels, in one part or many, but to another bucket; checksums tell of damage."""
    monkeypatch.setattr("ckpt_storage.export.copy_base._COPY_PART_BYTES", MIB)
    state = {"a": torch.arange(5 * MIB, dtype=torch.float32), "b": torch.ones(3)}
    options = server.storage_options
    cases.save(state, "s3://bkt/run", storage_options=options)
    server.reset_counters()
    report = copy("s3://bkt/run", "s3://bkt/copy", storage_options=options)
    asked = [one.op for one in server.requests if PROBE_PREFIX not in one.key]
    assert (asked.count("part_copy"), asked.count("complete")) == (3, 1)
    assert report.copied_bytes == report.total_bytes > 20 * MIB
    assert report.sent_bytes == report.read_bytes == 0
    report = copy("s3://bkt/run", "s3://bucket/run", storage_options=options)
    assert (report.copied_bytes, report.sent_bytes) == (0, report.total_bytes)
    stored = server.dump("bkt")
    old, new = (
        {key.removeprefix(root): data for key, data in stored.items() if key.startswith(root)}
        for root in ("run/", "copy/")
    )
    assert cases.save_files(new) == cases.save_files(old)
    assert cases.head_of(new) == cases.head_of(old)
    (shard,) = (key for key in old if key.endswith(".distcp"))
    store = open_store("s3://bkt/run", storage_options=options)
    store.put(shard, old[shard][: 9 * MIB] + b"?" + old[shard][9 * MIB + 1 :])
    with pytest.raises(errors.IntegrityError) as caught:
        copy("s3://bkt/run", "s3://bkt/other", storage_options=options)
    assert (caught.value.path or "").endswith(".distcp")
    assert not [key for key in server.dump("bkt") if key.startswith("other/commits")]
    assert store.abort_uploads("") == server.open_upload_count == 0
    store.close()


# Formats of others.


def test_every_file_of_another_format_is_copied(tmp_path: Path, source: Path, target: Path) -> None:
    """Stock ones and folders of weights; overwriting removes weights that the new one lacks."""
    stock, old, new = (tmp_path / name for name in ("dcp", "old", "new"))
    cases.saved_stock(cases.state_of(1), stock)
    for folder, names in ((old, "ab"), (new, "a")):
        (folder / "onnx").mkdir(parents=True)
        (folder / "onnx" / "model.onnx").write_bytes(b"x" * 10)
        (folder / "config.json").write_text("{}")
        for name in names:
            save_file({f"{folder.name}.{name}": torch.ones(5)}, folder / f"{name}.safetensors")
    for folder, kind in ((stock, "dcp"), (old, "safetensors"), (new, "safetensors")):
        report = copy(folder, target / kind, overwrite=folder == new)
        assert report.format == kind
        assert cases.files_below(target / kind) == cases.files_below(folder)
    with pytest.raises(errors.InvalidInputError, match="another folder"):
        copy(stock, source, overwrite=True)


def test_a_stock_checkpoint_whose_files_come_short_is_found(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are those of the metadata, before anything is written; of the last file, too."""
    cases.saved_stock(cases.state_of(1), tmp_path / "src")
    shard = max((tmp_path / "src").glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-700])
    with pytest.raises(errors.IntegrityError):
        copy(tmp_path / "src", target)
    assert not target.exists()
    shard.write_bytes(whole)
    size_bytes, get = (tmp_path / "src" / ".metadata").stat().st_size, Store.get

    def short(store: Store, path: str, *, max_bytes: int | None = None) -> Content:
        found = get(store, path, max_bytes=max_bytes)
        return replace(found, data=found.data[:-9]) if max_bytes == size_bytes else found

    monkeypatch.setattr(Store, "get", short)
    with pytest.raises(errors.IntegrityError, match=r"\.metadata has"):
        copy(tmp_path / "src", target)
    assert not (target / ".metadata").exists()


@pytest.mark.parametrize("inner", ["", "/inner"])
def test_a_bucket_with_other_options_is_not_copied_onto_itself(
    tmp_path: Path, server: S3Server, inner: str
) -> None:
    """Two endpoint spellings of one bucket: the storage itself is asked, and nothing is deleted."""
    one = server.storage_options
    endpoint_url = server.endpoint_url.replace("127.0.0.1", "localhost")
    client = {**one["client_kwargs"], "endpoint_url": endpoint_url}
    other = {**one, "key": "other", "client_kwargs": client}
    cases.saved_stock(cases.state_of(1), tmp_path / "a")
    for folder in {"", inner}:
        copy(tmp_path / "a", f"s3://bkt/x{folder}", destination_storage_options=one)
    before = server.dump("bkt")
    for options in (other, {**one, "key": "other"}):
        with pytest.raises(errors.InvalidInputError, match=r"same place|inside"):
            copy(
                "s3://bkt/x",
                f"s3://bkt/x{inner}",
                overwrite=True,
                storage_options=one,
                destination_storage_options=options,
            )
        assert server.dump("bkt") == before
    copy("s3://bkt/x", tmp_path / "back", storage_options=one)
    assert same(cases.load_stock(cases.state_of(1), tmp_path / "back"), cases.state_of(1))


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "unindexed"])
def test_a_note_that_was_left_behind_gives_no_leave_to_overwrite(tmp_path: Path, kind: str) -> None:
    """A whole checkpoint is replaced only when asked; then all is sent, equal lengths or not."""
    for number in (1, 2):
        state = {name: torch.ones(40) * number for name in "abc"}
        cases.make(kind, state, tmp_path / str(number))
    (tmp_path / "2" / ".ckpt-storage").mkdir()
    (tmp_path / "2" / ".ckpt-storage/job.json").write_bytes(seal({"identity": "of another"}))
    before = cases.files_below(tmp_path / "2")
    with pytest.raises(errors.CheckpointExistsError):
        copy(tmp_path / "1", tmp_path / "2")
    assert cases.files_below(tmp_path / "2") == before
    copy(tmp_path / "1", tmp_path / "2", overwrite=True)
    assert cases.files_below(tmp_path / "2") == cases.files_below(tmp_path / "1")


def test_files_of_an_unfinished_copy_do_not_stay_beside_another(
    tmp_path: Path, target: Path
) -> None:
    """Files in folders, too, of names that the other copy lacks."""
    for name, file in (("a", "model.safetensors"), ("b", "m.safetensors")):
        (tmp_path / name / "original").mkdir(parents=True)
        save_file({"w": torch.rand(1000)}, tmp_path / name / file)
    for file in ("big.bin", "original/x.pth"):
        (tmp_path / "a" / file).write_bytes(bytes(5000))

    def touch(_event: object) -> None:
        os.utime(tmp_path / "a" / "model.safetensors")

    with pytest.raises(errors.CheckpointGoneError):
        copy(tmp_path / "a", target, copies="never", progress=touch)
    assert (target / "original" / "x.pth").exists()
    copy(tmp_path / "b", target, copies="never", overwrite=True)
    assert cases.files_below(target).keys() == {"m.safetensors"}
    assert list(target.rglob("*.tmp-*")) == []
