"""`copy` between storages: what arrives, what is sent, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from copy_cases import (
    files_below,
    head_of,
    load_stock,
    same,
    save,
    save_files,
    saved_stock,
    state_of,
)
from safetensors.torch import load_file, save_file

from ckpt_storage import CheckpointManager, consolidate, verify
from ckpt_storage.commit import cleaning
from ckpt_storage.commit.cleaning import delete, delete_attempt
from ckpt_storage.errors import (
    CheckpointExistsError,
    IntegrityError,
    InvalidInputError,
)
from ckpt_storage.export import pieces
from ckpt_storage.export.copy import copy
from ckpt_storage.format.documents import seal
from ckpt_storage.options import MIB
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A committed checkpoint of ours."""
    save(state_of(1), tmp_path / "src")
    return tmp_path / "src"


def test_a_copy_on_a_disk_is_the_same_save_byte_for_byte(source: Path, tmp_path: Path) -> None:
    """Everything below `saves/` is equal, the slot names the same save, torch loads it."""
    report = copy(source, tmp_path / "dst")
    old, new = files_below(source), files_below(tmp_path / "dst")
    assert save_files(new) == save_files(old)
    assert head_of(new) == head_of(old) == report.save_id
    assert same(load_stock(state_of(1), tmp_path / "dst"), state_of(1))
    assert verify(tmp_path / "dst").ok
    assert report.sent_bytes == report.total_bytes > 0
    assert not report.was_there


def test_a_second_copy_finds_the_first_and_sends_nothing(source: Path, tmp_path: Path) -> None:
    """Copying what is there already changes no file."""
    copy(source, tmp_path / "dst")
    before = files_below(tmp_path / "dst")
    report = copy(source, tmp_path / "dst")
    assert report.was_there
    assert report.sent_bytes == report.read_bytes == 0
    assert files_below(tmp_path / "dst") == before


def test_what_a_manager_recorded_goes_with_the_copy(tmp_path: Path) -> None:
    """The copy's commit record keeps the keys that are for lists of checkpoints."""
    source = tmp_path / "src" / "step-00000007"
    with CheckpointManager(source.parent) as manager:
        manager.save(7, state_of(1), metrics={"loss": 0.5}, sync_files=False)
    copy(source, tmp_path / "dst")
    old, new = (
        json.loads((root / "commits/00000001.json").read_text())["body"]
        for root in (source, tmp_path / "dst")
    )
    own = {"write_id", "created_at", "host", "pid"}
    assert old["user"] == {"step": 7, "metrics": {"loss": 0.5}}
    assert {key: old[key] for key in old.keys() - own} == {
        key: new[key] for key in new.keys() - own
    }


def test_another_checkpoint_is_replaced_only_when_asked(source: Path, tmp_path: Path) -> None:
    """Without `overwrite` nothing is touched; with it the older one stays readable until then."""
    target = tmp_path / "dst"
    save(state_of(2), target)
    before = files_below(target)
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        copy(source, target)
    assert files_below(target) == before
    copy(source, target, overwrite=True)
    assert same(load_stock(state_of(1), target), state_of(1))
    assert verify(target).ok
    # The one before is kept, as after any save.
    after = files_below(target)
    kept = {path: data for path, data in before.items() if path != ".metadata"}
    assert {path: after.get(path) for path in kept} == kept


@pytest.mark.parametrize("kind", ["deleted", "superseded", "fenced"])
def test_an_id_that_the_target_gave_up_is_never_used_again(
    source: Path, tmp_path: Path, kind: str
) -> None:
    """Whoever was about to delete the files of that id cannot hit the new copy."""
    target = tmp_path / "dst"
    old_id = head_of(files_below(source))
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
        save(state_of(2), target, overwrite=True)
    report = copy(source, target, overwrite=True)
    assert report.save_id != old_id
    # The late deleter ends its work.
    delete_attempt(store, old_id)
    assert verify(target).problems == []
    assert same(load_stock(state_of(1), target), state_of(1))
    again = copy(source, target)
    assert again.was_there
    assert again.save_id == report.save_id


def test_golden_checkpoints_of_several_ranks_can_be_copied_and_renamed(tmp_path: Path) -> None:
    """Under its own id and under another."""
    golden = Path(__file__).parents[1] / "format" / "golden" / "v1" / "step-00000007"
    target = tmp_path / "dst"
    head = str(copy(golden, target).save_id)
    found, wanted = (
        {name for name in save_files(files_below(root)) if head in name}
        for root in (target, golden)
    )
    assert found == wanted
    store = open_store(target, sync_files=False)
    delete(store)
    report = copy(golden, target)
    assert verify(target).ok
    stock = dcp.FileSystemReader(target).read_metadata()
    assert {place.relative_path.split("/")[1] for place in stock.storage_data.values()} == {
        report.save_id
    }
    old = (golden / "saves" / head).glob("*.distcp")
    new = (target / "saves").rglob("*.distcp")
    assert sorted(path.read_bytes() for path in old) == sorted(path.read_bytes() for path in new)


def test_exports_of_the_same_save_go_with_it(source: Path, tmp_path: Path) -> None:
    """Weight files arrive byte for byte with what lies beside them, and are sound and not stale."""
    consolidate(source)
    (source / "hf" / "config.json").write_text("{}")
    (source / "hf" / "original").mkdir()
    (source / "hf" / "original" / "params.json").write_text("[]")
    (source / "notes.txt").write_text("mine")
    report = copy(source, tmp_path / "dst")
    assert report.exports == ("hf",)
    assert report.left_out == ("notes.txt",)
    new = tmp_path / "dst" / "hf"
    assert (new / "config.json").read_text() == "{}"
    assert (new / "original" / "params.json").read_text() == "[]"
    old_weights, weights = (load_file(f / "model.safetensors") for f in (source / "hf", new))
    assert old_weights.keys() == weights.keys()
    assert all(torch.equal(weights[name], old_weights[name]) for name in weights)
    found = verify(tmp_path / "dst")
    assert found.ok
    assert [(one.path, one.is_stale) for one in found.exports] == [("hf", False)]
    # A later export at the copy goes on from there.
    assert consolidate(tmp_path / "dst").sent_bytes == 0


def test_what_lies_beside_an_export_is_never_believed_by_its_length(
    source: Path, tmp_path: Path
) -> None:
    """A configuration that was edited to the same length is copied again; no weights are."""
    consolidate(source)
    (source / "hf" / "config.json").write_text('{"rope": 10000}')
    copy(source, tmp_path / "dst")
    (source / "hf" / "config.json").write_text('{"rope": 50000}')
    kept = (tmp_path / "dst" / "hf" / "model.safetensors").stat()
    report = copy(source, tmp_path / "dst")
    assert report.exports == ("hf",)
    assert (tmp_path / "dst" / "hf" / "config.json").read_text() == '{"rope": 50000}'
    assert (tmp_path / "dst" / "hf" / "model.safetensors").stat().st_ino == kept.st_ino


def test_a_stale_export_stays_behind(source: Path, tmp_path: Path) -> None:
    """An export of an older save is not the checkpoint's, and is reported."""
    consolidate(source)
    save(state_of(4), source, overwrite=True)
    report = copy(source, tmp_path / "dst")
    assert (report.exports, report.left_out) == ((), ("hf/",))
    assert not (tmp_path / "dst" / "hf").exists()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_of_the_source_is_found_and_nothing_is_committed(
    source: Path, tmp_path: Path
) -> None:
    """Damage anywhere in a shard file or document stops the copy before it counts."""
    files = files_below(source)
    places = [
        (path, at)
        for path, data in save_files(files).items()
        for at in sorted({0, len(data) // 3, len(data) // 2, len(data) - 1})
    ]
    assert len(places) >= 16
    for number, (path, at) in enumerate(places):
        _flip(source / path, at)
        target = tmp_path / f"dst-{number}"
        with pytest.raises(IntegrityError) as caught:
            copy(source, target)
        _flip(source / path, at)
        assert caught.value.path is not None
        assert path.endswith(caught.value.path.rpartition("/")[2]), (path, at, caught.value)
        assert head_of(files_below(target)) is None, (path, at)
        assert not (target / ".metadata").exists(), (path, at)
    copy(source, tmp_path / "dst-0")
    assert verify(tmp_path / "dst-0").ok


def test_a_missing_file_of_the_source_is_named(source: Path, tmp_path: Path) -> None:
    """Nothing is committed, and the error names the file."""
    (shard,) = [path for path in files_below(source) if path.endswith(".distcp")]
    (source / shard).unlink()
    with pytest.raises(IntegrityError, match="distcp is missing"):
        copy(source, tmp_path / "dst")
    assert head_of(files_below(tmp_path / "dst")) is None


def test_a_copy_into_its_own_source_is_refused(source: Path) -> None:
    """Neither the folder itself nor one inside it can be the target."""
    before = files_below(source)
    for target in (source, source / "saves" / "x", source / "backup"):
        with pytest.raises(InvalidInputError, match="inside"):
            copy(source, target)
    assert files_below(source) == before


def test_a_copy_around_its_own_source_is_refused(tmp_path: Path, s3: S3Server) -> None:
    """A source inside the target would be part of its own copy, however the two are spelt."""
    folder = tmp_path / "run" / "inner" / "step-1"
    save(state_of(1), folder)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "step").symlink_to(folder)
    before = files_below(tmp_path)
    run = tmp_path / "run"
    for target in (f"{run}/", f"{run}/inner", run.as_uri(), tmp_path / "link"):
        for source in (folder, f"{folder.as_uri()}/", tmp_path / "step"):
            with pytest.raises(InvalidInputError, match="inside"):
                copy(source, target, overwrite=True)
    copy(folder, run / "inner" / "step-10", copies="never")
    shutil.rmtree(run / "inner" / "step-10")
    assert files_below(tmp_path) == before
    options = s3.storage_options
    copy(folder, "s3://one/run/step-1", destination_storage_options=options)
    for address in ("s3://one/run/", "s3://one"):
        with pytest.raises(InvalidInputError, match="inside"):
            copy("s3://one/run/step-1/", address, overwrite=True, storage_options=options)


# Between storages.


@pytest.fixture
def s3() -> Any:
    """An S3 server with two buckets."""
    with S3Server() as server:
        server.create_bucket("one")
        server.create_bucket("two")
        yield server


def test_from_s3_to_a_disk_and_back(source: Path, tmp_path: Path, s3: S3Server) -> None:
    """A round trip ends with the bytes that it began with."""
    options = s3.storage_options
    copy(source, "s3://one/run", destination_storage_options=options)
    copy("s3://one/run", tmp_path / "back", storage_options=options)
    assert save_files(files_below(tmp_path / "back")) == save_files(files_below(source))
    assert verify(tmp_path / "back").ok


def test_within_a_bucket_the_storage_copies(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte of a large file travels, in one part or many, and checksums told are compared."""
    monkeypatch.setattr(pieces, "_COPY_BYTES", 6 * MIB)
    state = {"a": torch.arange(5 * MIB, dtype=torch.float32), "b": torch.ones(3)}
    options = s3.storage_options
    save(state, "s3://one/run", storage_options=options)
    s3.reset_counters()
    report = copy("s3://one/run", "s3://one/copy", storage_options=options)
    asked = [request.op for request in s3.requests]
    assert asked.count("part_copy") == 3
    assert asked.count("complete") == 1
    assert report.copied_bytes == report.total_bytes > 20 * MIB
    assert report.sent_bytes == report.read_bytes == 0
    stored = s3.dump("one")
    old = {key.removeprefix("run/"): data for key, data in stored.items() if key.startswith("run/")}
    new = {k.removeprefix("copy/"): data for k, data in stored.items() if k.startswith("copy/")}
    assert save_files(new) == save_files(old)
    assert head_of(new) == head_of(old)


def test_damage_is_found_without_reading(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage's own checksum of what it copied gives a flipped bit away."""
    monkeypatch.setattr(pieces, "_COPY_BYTES", 6 * MIB)
    state = {"a": torch.arange(4 * MIB, dtype=torch.float32)}
    options = s3.storage_options
    save(state, "s3://one/run", storage_options=options)
    store = open_store("s3://one/run", storage_options=options)
    (key,) = [key for key in s3.dump("one") if key.endswith(".distcp")]
    data = bytearray(s3.dump("one")[key])
    data[9 * MIB] ^= 4
    store.put(key.removeprefix("run/"), bytes(data))
    with pytest.raises(IntegrityError) as caught:
        copy("s3://one/run", "s3://one/copy", storage_options=options)
    assert (caught.value.path or "").endswith(".distcp")
    assert not [key for key in s3.dump("one") if key.startswith("copy/commits")]
    assert store.abort_uploads("") == 0
    store.close()


def test_from_bucket_to_bucket_bytes_are_sent(source: Path, s3: S3Server) -> None:
    """Where the storage cannot copy by itself, every byte goes through this process."""
    options = s3.storage_options
    copy(source, "s3://one/run", destination_storage_options=options)
    report = copy("s3://one/run", "s3://two/run", storage_options=options)
    assert report.copied_bytes == 0
    assert report.sent_bytes == report.total_bytes
    assert {k: v for k, v in s3.dump("two").items() if k.endswith(".distcp")} == {
        k: v for k, v in s3.dump("one").items() if k.endswith(".distcp")
    }


# Formats of others.


def test_a_stock_checkpoint_is_copied_file_by_file(tmp_path: Path) -> None:
    """All files are equal, and torch loads the copy."""
    saved_stock(state_of(1), tmp_path / "src")
    report = copy(tmp_path / "src", tmp_path / "dst")
    assert report.format == "dcp"
    assert files_below(tmp_path / "dst") == files_below(tmp_path / "src")
    assert same(load_stock(state_of(1), tmp_path / "dst"), state_of(1))


def test_a_hugging_face_folder_is_copied_with_all_that_lies_in_it(tmp_path: Path) -> None:
    """Configuration and tokenizer go along."""
    source = tmp_path / "src"
    (source / "onnx").mkdir(parents=True)
    save_file({"a": torch.ones(5)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    (source / "onnx" / "model.onnx").write_bytes(b"x" * 10)
    report = copy(source, tmp_path / "dst")
    assert report.format == "safetensors"
    assert files_below(tmp_path / "dst") == files_below(source)


def test_a_shorter_file_of_a_stock_checkpoint_is_found(tmp_path: Path) -> None:
    """Lengths are compared with what the metadata says, before anything is written."""
    saved_stock(state_of(1), tmp_path / "src")
    shard = max((tmp_path / "src").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-700])
    with pytest.raises(IntegrityError):
        copy(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_files_of_another_stock_checkpoint_are_never_believed(tmp_path: Path) -> None:
    """Equal names and lengths are no proof: an overwriting copy sends everything."""
    for seed in (1, 2):
        saved_stock(state_of(seed), tmp_path / f"src-{seed}")
    copy(tmp_path / "src-1", tmp_path / "dst")
    with pytest.raises(CheckpointExistsError):
        copy(tmp_path / "src-2", tmp_path / "dst")
    copy(tmp_path / "src-2", tmp_path / "dst", overwrite=True)
    assert files_below(tmp_path / "dst") == files_below(tmp_path / "src-2")


def test_weights_of_an_older_export_do_not_mix_in(tmp_path: Path) -> None:
    """Overwriting a folder of weights removes those that the new one has not."""
    for name, files in (("old", ("a", "b")), ("new", ("a",))):
        (tmp_path / name).mkdir()
        for file in files:
            save_file({f"{name}.{file}": torch.ones(3)}, tmp_path / name / f"{file}.safetensors")
    copy(tmp_path / "old", tmp_path / "dst")
    copy(tmp_path / "new", tmp_path / "dst", overwrite=True)
    assert files_below(tmp_path / "dst") == files_below(tmp_path / "new")


def test_other_formats_are_not_laid_between_our_files(source: Path, tmp_path: Path) -> None:
    """A checkpoint of ours is no place for one of torch's."""
    saved_stock(state_of(1), tmp_path / "stock")
    with pytest.raises(InvalidInputError, match="another folder"):
        copy(tmp_path / "stock", source, overwrite=True)


def test_credentials_show_in_no_report_and_no_log(
    source: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in what is returned nor in what is logged."""
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    options = s3.storage_options | {"secret": secret}
    with caplog.at_level(logging.DEBUG, logger="ckpt_storage"):
        report = copy(source, "s3://one/run", destination_storage_options=options)
    assert secret not in repr(report)
    assert secret not in caplog.text


# A copy never eats what it copies.


def test_a_folder_under_another_name_is_not_copied_onto_itself(tmp_path: Path) -> None:
    """A symlink to the source, or to what is above it, is the source: every file stays."""
    source = tmp_path / "a"
    saved_stock(state_of(1), source)
    (tmp_path / "b").symlink_to(source)
    (tmp_path / "root").symlink_to(tmp_path)
    before = files_below(source)
    for target in (tmp_path / "b", tmp_path / "root" / "a", tmp_path / "root" / "a" / "inner"):
        with pytest.raises(InvalidInputError, match="inside"):
            copy(source, target, overwrite=True)
        assert files_below(source) == before


@pytest.mark.parametrize("inner", ["", "/inner"])
def test_a_bucket_with_other_options_is_not_copied_onto_itself(
    tmp_path: Path, s3: S3Server, inner: str
) -> None:
    """Two endpoint spellings of one bucket: the storage itself is asked, and nothing is deleted."""
    one = s3.storage_options
    endpoint_url = s3.endpoint_url.replace("127.0.0.1", "localhost")
    client = {**one["client_kwargs"], "endpoint_url": endpoint_url}
    other = {**one, "key": "other", "client_kwargs": client}
    saved_stock(state_of(1), tmp_path / "a")
    for folder in {"", inner}:
        copy(tmp_path / "a", f"s3://one/x{folder}", destination_storage_options=one)
    before = s3.dump("one")
    for options in (other, {**one, "key": "other"}):
        with pytest.raises(InvalidInputError, match=r"same place|inside"):
            copy("s3://one/x", f"s3://one/x{inner}", overwrite=True, storage_options=one,
                 destination_storage_options=options)  # fmt: skip
        assert s3.dump("one") == before
    copy("s3://one/x", tmp_path / "back", storage_options=one)
    assert same(load_stock(state_of(1), tmp_path / "back"), state_of(1))


def test_a_damaged_export_does_not_cost_the_copy(source: Path, tmp_path: Path) -> None:
    """The checkpoint is committed and sound; the export is not complete, with the reason."""
    consolidate(source)
    _flip(source / "hf" / "model.safetensors", -1)
    for _ in range(2):
        report = copy(source, tmp_path / "dst")
        assert report.exports == ()
        assert report.left_out == ("hf",)
        ((path, reason),) = report.failed_exports.items()
        assert path == "hf"
        assert "model.safetensors" in reason
        (problem,) = verify(tmp_path / "dst").problems
        assert "/hf is still being written, or its writer died" in problem.message
    _flip(source / "hf" / "model.safetensors", -1)
    assert copy(source, tmp_path / "dst").exports == ("hf",)
    assert verify(tmp_path / "dst").ok


@pytest.mark.parametrize("kind", ["dcp", "indexed", "unindexed"])
def test_a_note_that_was_left_behind_gives_no_leave_to_overwrite(tmp_path: Path, kind: str) -> None:
    """A whole checkpoint with the note of some earlier copy in it is replaced only when asked."""
    if kind == "dcp":
        for seed in (1, 2):
            saved_stock(state_of(seed), tmp_path / str(seed))
    else:
        for seed in (1, 2):
            folder = tmp_path / str(seed)
            folder.mkdir()
            save_file({"a": torch.ones(3) * seed}, folder / "model.safetensors")
            if kind == "indexed":
                index = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "2" / ".ckpt-storage").mkdir()
    (tmp_path / "2" / ".ckpt-storage/job.json").write_bytes(seal({"identity": "of another"}))
    before = files_below(tmp_path / "2")
    with pytest.raises(CheckpointExistsError):
        copy(tmp_path / "1", tmp_path / "2")
    assert files_below(tmp_path / "2") == before
    copy(tmp_path / "1", tmp_path / "2", overwrite=True)
    assert files_below(tmp_path / "2") == files_below(tmp_path / "1")
