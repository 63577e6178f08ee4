"""`copy` between storages: what arrives, what is sent, and what is refused."""

from __future__ import annotations

import json
import logging
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
from safetensors.torch import load_file, save_file

from ckpt_storage import CheckpointManager, consolidate, copy, errors, open_checkpoint, verify
from ckpt_storage.commit import cleaning
from ckpt_storage.commit.cleaning import delete, delete_attempt
from ckpt_storage.export import plan as export_plan
from ckpt_storage.export.output import place_within
from ckpt_storage.format.documents import seal
from ckpt_storage.options import MIB
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Content
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A committed checkpoint of ours."""
    cases.save(cases.state_of(1), tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where copies go."""
    return tmp_path / "dst"


def test_a_copy_on_a_disk_is_the_same_save_byte_for_byte(tmp_path: Path, target: Path) -> None:
    """Below `saves/` all is equal, and the slot names the same save; a second sends nothing.

    The copy's commit record keeps the keys that a manager put there for lists of checkpoints.
    """
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
    assert same(cases.load_stock(cases.state_of(1), target), cases.state_of(1))
    assert verify(target).ok
    assert report.sent_bytes == report.total_bytes > 0
    assert not report.was_there
    report = copy(source, target)
    assert report.was_there
    assert report.sent_bytes == report.read_bytes == 0
    assert cases.files_below(target) == new


def test_another_checkpoint_is_replaced_only_when_asked(source: Path, target: Path) -> None:
    """Without `overwrite` nothing is touched; with it the older one stays readable until then."""
    cases.save(cases.state_of(2), target)
    before = cases.files_below(target)
    with pytest.raises(errors.CheckpointExistsError, match="overwrite"):
        copy(source, target)
    assert cases.files_below(target) == before
    copy(source, target, overwrite=True)
    assert same(cases.load_stock(cases.state_of(1), target), cases.state_of(1))
    assert verify(target).ok
    # The one before is kept, as after any save.
    after = cases.files_below(target)
    kept = {path: data for path, data in before.items() if path != ".metadata"}
    assert {path: after.get(path) for path in kept} == kept


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
    report = copy(source, target, overwrite=True)
    assert report.save_id != old_id
    # The late deleter ends its work.
    delete_attempt(store, old_id)
    assert verify(target).problems == []
    assert same(cases.load_stock(cases.state_of(1), target), cases.state_of(1))
    again = copy(source, target)
    assert again.was_there
    assert again.save_id == report.save_id


def test_golden_checkpoints_of_several_ranks_can_be_copied_and_renamed(target: Path) -> None:
    """Under its own id and under another."""
    golden = Path(__file__).parents[1] / "format" / "golden" / "v1" / "step-00000007"
    head = str(copy(golden, target).save_id)
    found, wanted = (
        {name for name in cases.save_files(cases.files_below(root)) if head in name}
        for root in (target, golden)
    )
    assert found == wanted
    store = open_store(target, sync_files=False)
    delete(store)
    report = copy(golden, target)
    assert verify(target).ok
    stock = dcp.FileSystemReader(target).read_metadata()
    named = {place.relative_path.split("/")[1] for place in stock.storage_data.values()}
    assert named == {report.save_id}
    old = (golden / "saves" / head).glob("*.distcp")
    new = (target / "saves").rglob("*.distcp")
    assert sorted(path.read_bytes() for path in old) == sorted(path.read_bytes() for path in new)


def test_exports_of_the_same_save_go_with_it(source: Path, target: Path) -> None:
    """Weight files arrive byte for byte with what lies beside them, and are sound and not stale."""
    consolidate(source)
    (source / "hf" / "config.json").write_text("{}")
    (source / "hf" / "original").mkdir()
    (source / "hf" / "original" / "params.json").write_text("[]")
    (source / "notes.txt").write_text("mine")
    report = copy(source, target)
    assert report.exports == ("hf",)
    assert report.left_out == ("notes.txt",)
    new = target / "hf"
    assert (new / "config.json").read_text() == "{}"
    assert (new / "original" / "params.json").read_text() == "[]"
    old_weights, weights = (load_file(f / "model.safetensors") for f in (source / "hf", new))
    assert old_weights.keys() == weights.keys()
    assert all(torch.equal(weights[name], old_weights[name]) for name in weights)
    found = verify(target)
    assert found.ok
    assert [(one.path, one.is_stale) for one in found.exports] == [("hf", False)]
    # A later export at the copy goes on from there.
    assert consolidate(target).sent_bytes == 0
    # An export of an older save is not the checkpoint's, and stays behind.
    cases.save(cases.state_of(4), source, overwrite=True)
    report = copy(source, target.with_name("later"))
    assert (report.exports, report.left_out) == ((), ("hf/", "notes.txt"))


def test_what_lies_beside_an_export_is_never_believed_by_its_length(
    source: Path, target: Path
) -> None:
    """A configuration that was edited to the same length is copied again; nothing else is.

    Who reads the copied export meanwhile is not disturbed.
    """
    consolidate(source)
    (source / "hf" / "config.json").write_text('{"rope": 10000}')
    copy(source, target)
    (source / "hf" / "config.json").write_text('{"rope": 50000}')

    def below() -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in (target / "hf").rglob("*")}
        return {path: (one.st_ino, one.st_mtime_ns) for path, one in found.items()}

    kept = below()
    with open_checkpoint(target / "hf") as opened:
        report = copy(source, target)
        assert opened.load()
    assert report.exports == ("hf",)
    assert (target / "hf" / "config.json").read_text() == '{"rope": 50000}'
    changed = {path.name for path, mark in below().items() if kept.get(path) != mark}
    assert changed == {"config.json"}


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
    """No byte of a large file travels, in one part or many, and checksums told are compared."""
    monkeypatch.setattr(export_plan, "_COPY_BYTES", 6 * MIB)
    state = {"a": torch.arange(5 * MIB, dtype=torch.float32), "b": torch.ones(3)}
    options = server.storage_options
    cases.save(state, "s3://bkt/run", storage_options=options)
    server.reset_counters()
    report = copy("s3://bkt/run", "s3://bkt/copy", storage_options=options)
    asked = [request.op for request in server.requests]
    assert asked.count("part_copy") == 3
    assert asked.count("complete") == 1
    assert report.copied_bytes == report.total_bytes > 20 * MIB
    assert report.sent_bytes == report.read_bytes == 0
    stored = server.dump("bkt")
    old = {key.removeprefix("run/"): data for key, data in stored.items() if key.startswith("run/")}
    new = {k.removeprefix("copy/"): data for k, data in stored.items() if k.startswith("copy/")}
    assert cases.save_files(new) == cases.save_files(old)
    assert cases.head_of(new) == cases.head_of(old)


def test_damage_is_found_without_reading(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage's own checksum of what it copied gives a flipped bit away."""
    monkeypatch.setattr(export_plan, "_COPY_BYTES", 6 * MIB)
    state = {"a": torch.arange(4 * MIB, dtype=torch.float32)}
    options = server.storage_options
    cases.save(state, "s3://bkt/run", storage_options=options)
    store = open_store("s3://bkt/run", storage_options=options)
    (key,) = [key for key in server.dump("bkt") if key.endswith(".distcp")]
    data = bytearray(server.dump("bkt")[key])
    data[9 * MIB] ^= 4
    store.put(key.removeprefix("run/"), bytes(data))
    with pytest.raises(errors.IntegrityError) as caught:
        copy("s3://bkt/run", "s3://bkt/copy", storage_options=options)
    assert (caught.value.path or "").endswith(".distcp")
    assert not [key for key in server.dump("bkt") if key.startswith("copy/commits")]
    assert store.abort_uploads("") == 0
    store.close()


def test_from_bucket_to_bucket_bytes_are_sent(
    source: Path, tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the storage cannot copy by itself, every byte goes through this process.

    No credentials show in what is returned, nor in what is logged.
    """
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    options = server.storage_options | {"secret": secret}
    with caplog.at_level(logging.DEBUG, logger="ckpt_storage"):
        first = copy(source, "s3://bkt/run", destination_storage_options=options)
        report = copy("s3://bkt/run", "s3://bucket/run", storage_options=options)
    assert report.copied_bytes == 0
    assert report.sent_bytes == report.total_bytes
    assert secret not in repr((first, report)) + caplog.text
    copy("s3://bucket/run", tmp_path / "back", storage_options=options)
    assert cases.save_files(cases.files_below(tmp_path / "back")) == cases.save_files(
        cases.files_below(source)
    )
    assert verify(tmp_path / "back").ok


# Formats of others.


def test_every_file_of_another_format_is_copied(tmp_path: Path, target: Path) -> None:
    """Of a stock checkpoint, and of a Hugging Face folder with all that lies in it."""
    cases.saved_stock(cases.state_of(1), tmp_path / "dcp")
    (tmp_path / "safetensors" / "onnx").mkdir(parents=True)
    save_file({"a": torch.ones(5)}, tmp_path / "safetensors" / "model.safetensors")
    (tmp_path / "safetensors" / "config.json").write_text("{}")
    (tmp_path / "safetensors" / "onnx" / "model.onnx").write_bytes(b"x" * 10)
    for kind in ("dcp", "safetensors"):
        report = copy(tmp_path / kind, target / kind)
        assert report.format == kind
        assert cases.files_below(target / kind) == cases.files_below(tmp_path / kind)


def test_a_shorter_file_of_a_stock_checkpoint_is_found(tmp_path: Path, target: Path) -> None:
    """Lengths are compared with what the metadata says, before anything is written."""
    cases.saved_stock(cases.state_of(1), tmp_path / "src")
    shard = max((tmp_path / "src").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-700])
    with pytest.raises(errors.IntegrityError):
        copy(tmp_path / "src", target)
    assert not (target).exists()


def test_a_last_file_that_comes_short_shows_nothing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared by length, too, though a listing tells of no change."""
    cases.saved_stock(cases.state_of(1), tmp_path / "src")
    size_bytes, get = (tmp_path / "src" / ".metadata").stat().st_size, Store.get

    def short(store: Store, path: str, *, max_bytes: int | None = None) -> Content:
        found = get(store, path, max_bytes=max_bytes)
        return replace(found, data=found.data[:-9]) if max_bytes == size_bytes else found

    monkeypatch.setattr(Store, "get", short)
    with pytest.raises(errors.IntegrityError, match=r"\.metadata has"):
        copy(tmp_path / "src", target)
    assert not (target / ".metadata").exists()


def test_weights_of_an_older_export_do_not_mix_in(tmp_path: Path, target: Path) -> None:
    """Overwriting a folder of weights removes those that the new one has not."""
    for name, files in (("old", ("a", "b")), ("new", ("a",))):
        (tmp_path / name).mkdir()
        for file in files:
            save_file({f"{name}.{file}": torch.ones(3)}, tmp_path / name / f"{file}.safetensors")
    copy(tmp_path / "old", target)
    copy(tmp_path / "new", target, overwrite=True)
    assert cases.files_below(target) == cases.files_below(tmp_path / "new")


def test_other_formats_are_not_laid_between_our_files(source: Path, tmp_path: Path) -> None:
    """A checkpoint of ours is no place for one of torch's."""
    cases.saved_stock(cases.state_of(1), tmp_path / "stock")
    with pytest.raises(errors.InvalidInputError, match="another folder"):
        copy(tmp_path / "stock", source, overwrite=True)


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


def test_a_damaged_export_does_not_cost_the_copy(source: Path, target: Path) -> None:
    """The checkpoint is committed and sound; the export is not complete, with the reason."""
    consolidate(source)
    cases.flip(source / "hf" / "model.safetensors", -1)
    for _ in range(2):
        report = copy(source, target)
        assert report.exports == ()
        assert report.left_out == ("hf",)
        ((path, reason),) = report.failed_exports.items()
        assert path == "hf"
        assert "model.safetensors" in reason
        (problem,) = verify(target).problems
        assert "/hf is still being written, or its writer died" in problem.message
    cases.flip(source / "hf" / "model.safetensors", -1)
    assert copy(source, target).exports == ("hf",)
    assert verify(target).ok


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "unindexed"])
def test_a_note_that_was_left_behind_gives_no_leave_to_overwrite(tmp_path: Path, kind: str) -> None:
    """A whole checkpoint with the note of some earlier copy in it is replaced only when asked.

    Equal names and lengths are no proof: an overwriting copy sends everything.
    """
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


def test_what_a_dead_copy_sealed_does_not_stay_beside_another(tmp_path: Path, target: Path) -> None:
    """Files in folders, too, of names that the other one lacks."""
    for name, file in (("a", "model.safetensors"), ("b", "m.safetensors")):
        (tmp_path / name / "original").mkdir(parents=True)
        save_file({"w": torch.rand(1000)}, tmp_path / name / file)
    for file in ("big.bin", "original/x.pth"):
        (tmp_path / "a" / file).write_bytes(bytes(5000))

    def touch(_event: object) -> None:
        os.utime(tmp_path / "a" / "model.safetensors")

    with pytest.raises(errors.CheckpointGoneError):
        copy(tmp_path / "a", target, copies="never", progress=touch)
    assert list(target.rglob("*.tmp-*"))
    copy(tmp_path / "b", target, copies="never", overwrite=True)
    assert list(target.rglob("*.tmp-*")) == []
