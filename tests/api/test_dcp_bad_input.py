"""Input that cannot be used: each case is one line that says what is wrong and what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import dcp_cases
import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, files_below, zeros_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from ckpt_storage import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    CheckpointStorageReader,
    CheckpointStorageWriter,
    FormatError,
    IntegrityError,
    InvalidInputError,
    RetryPolicy,
    StorageError,
)
from ckpt_storage.testing.s3_server import S3Server

STATE = {"w": torch.ones(4), "step": 1}
NOBODY = 65_534


def save_error(path: Any, **options: Any) -> CheckpointError:
    """Return what a save raises, taken out of torch's exception where it is in one."""
    try:
        dcp_cases.save(dict(STATE), path, **options)
    except CheckpointException as error:
        (failure,) = failures_of(error).values()
        assert isinstance(failure, CheckpointError)
        return failure
    except CheckpointError as error:
        return error
    raise AssertionError(f"saved to {path}")


def load_error(path: Any, **options: Any) -> CheckpointError:
    """Return what opening for a load raises; assert that torch's load says the same."""
    try:
        reader = CheckpointStorageReader(path, **options)
    except CheckpointError as error:
        return error
    with pytest.raises(CheckpointException) as told:
        dcp.load(zeros_like(STATE), storage_reader=reader)
    with pytest.raises(CheckpointError) as raised:
        reader.read_metadata()
    assert str(raised.value) in str(told.value)
    return raised.value


def assert_says(error: CheckpointError, kind: type[CheckpointError], what: str, step: str) -> None:
    """Assert an error's class, and that it is one line with these two parts in order."""
    assert type(error) is kind, repr(error)
    assert re.search(f"{what}.*{step}", str(error)), str(error)
    assert "\n" not in str(error)
    assert error.next_step
    assert str(error).endswith(error.next_step)


@pytest.mark.parametrize("below", ["", "/step-1"], ids=["itself", "parent"])
def test_a_path_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    """A file in place of the folder, or of a parent of it, is an error of saves and loads."""
    (tmp_path / "notes").write_text("x", encoding="ascii")
    for error_of in (save_error, load_error):
        error = error_of(f"{tmp_path}/notes{below}")
        assert_says(error, StorageError, f"{tmp_path}/notes", "Part of the path is a file")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Drop the right of root to pass over permissions; nothing to drop for other users."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """A folder that every user may enter, but not write to."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder.stat().st_mode & 0o077 == 0:
            folder.chmod(0o711)
    tmp_path.chmod(0o755 if os.geteuid() == 0 else 0o555)
    return tmp_path


def test_a_folder_one_may_not_write_to_is_named(reachable: Path) -> None:
    """A save without the right to write says which folder and whose rights to check."""
    with as_nobody():
        error = save_error(reachable / "run")
    assert_says(error, StorageError, f"{reachable}/run.*Permission denied", "owner and mode")
    assert files_below(reachable) == set()


def test_a_checkpoint_one_may_not_read_is_named(reachable: Path) -> None:
    """A load without the right to read says so, and is not taken for an absent checkpoint."""
    reachable.chmod(0o755)
    dcp_cases.save(dict(STATE), reachable / "run")
    (reachable / "run" / "commits").chmod(0)
    with as_nobody():
        error = load_error(reachable / "run")
    (reachable / "run" / "commits").chmod(0o755)
    assert_says(error, StorageError, f"{reachable}/run.*Permission denied", "owner and mode")


def test_a_checkpoint_one_may_read_but_not_write_loads(reachable: Path) -> None:
    """Publishing is left to others by a loader that has no right to write."""
    reachable.chmod(0o755)
    dcp_cases.save(dict(STATE), reachable / "run")
    (reachable / "run" / ".metadata").unlink()
    target = zeros_like(STATE)
    with as_nobody():
        if os.geteuid() != 0:
            dcp_cases.load(target, reachable / "run")
    assert torch.equal(target["w"], STATE["w"])  # type: ignore[arg-type]


def test_a_missing_bucket_is_named_and_not_created() -> None:
    """A save to or load from a bucket that does not exist says to create it."""
    with S3Server() as server:
        for error_of in (save_error, load_error):
            error = error_of("s3://absent/run", storage_options=server.storage_options)
            assert_says(error, StorageError, "s3://absent/run.*does not exist", "create it first")
        assert {request.op for request in server.requests} == {"get", "head"}


def test_a_storage_that_does_not_answer_is_named_without_credentials() -> None:
    """Where nobody listens the error has the address and no secret."""
    options = {
        "key": "user",
        "secret": "very-secret",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
    }
    retry = RetryPolicy(attempt_count=1)
    for error_of in (save_error, load_error):
        error = error_of("s3://bucket/run", storage_options=options, retry=retry)
        assert_says(error, StorageError, "s3://bucket/run.*127.0.0.1:9", "Check the address")
        assert "very-secret" not in repr(error) + str(vars(error))


@pytest.mark.parametrize(
    ("path", "what", "step"),
    [
        ("", "empty", "Give a folder"),
        (7, "int is no path", "Give a str"),
        ("s4://bucket/run", "s4://bucket/run", "Did you mean s3://"),
        ("nope://bucket/run", "nope://bucket/run", "Install the fsspec backend"),
        ("oci://bucket/run", "ocifs, which is not installed", "pip install 'ocifs'"),
        ("s3:/bucket/run", "s3:/bucket/run", "'s3://bucket/run'"),
        (Path("s3://bucket/run"), "s3:/bucket/run", "'s3://bucket/run'"),
        ("s3://", "names no bucket", "s3://BUCKET/PREFIX"),
        ("https://host/run", "can only be read", "Give a storage"),
    ],
)
def test_paths_that_mean_nothing_are_refused_at_once(path: Any, what: str, step: str) -> None:
    """A writer or reader is not even made for them."""
    for plugin in (CheckpointStorageWriter, CheckpointStorageReader):
        with pytest.raises(InvalidInputError) as caught:
            plugin(path)
        assert_says(caught.value, InvalidInputError, re.escape(what), re.escape(step))


def test_a_missing_backend_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where s3fs is not installed the error has the command that installs it."""
    assert fsspec.available_protocols()
    find_spec = importlib.util.find_spec

    def without_s3fs(name: str, *args: Any) -> Any:
        return None if name.startswith("s3fs") else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_s3fs)
    # Classes that are loaded already are there; in a new process none is.
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", {})
    with pytest.raises(InvalidInputError) as caught:
        CheckpointStorageWriter("s3://bucket/run")
    command = re.escape("pip install 'ckpt-storage[s3]'")
    assert_says(caught.value, InvalidInputError, "s3fs, which is not installed", command)


@pytest.mark.parametrize("is_made", [False, True], ids=["absent", "empty"])
def test_an_empty_or_absent_folder_holds_no_checkpoint(tmp_path: Path, *, is_made: bool) -> None:
    """Nothing there is an error that a FileNotFoundError handler catches."""
    if is_made:
        (tmp_path / "run").mkdir()
    error = load_error(tmp_path / "run")
    assert_says(error, CheckpointNotFoundError, f"{tmp_path}/run is empty or", "Check the path")
    assert isinstance(error, FileNotFoundError)


def test_a_folder_of_checkpoints_leads_to_one_of_them(tmp_path: Path) -> None:
    """Giving the parent of checkpoints is answered with the path of one."""
    dcp_cases.save(dict(STATE), tmp_path / "run" / "step-1")
    error = load_error(tmp_path / "run")
    assert_says(error, CheckpointNotFoundError, "holds no checkpoint", f"{tmp_path}/run/step-1")


class DyingPlanner(dcp.DefaultSavePlanner):
    """A planner that fails when data are asked for."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Fail."""
        raise RuntimeError(write_item.index.fqn)


def test_a_save_that_did_not_commit_is_in_progress(tmp_path: Path) -> None:
    """What a failed save leaves is told apart from an empty folder and from a checkpoint."""
    with pytest.raises(CheckpointException):
        dcp_cases.save(dict(STATE), tmp_path / "run", planner=DyingPlanner())
    error = load_error(tmp_path / "run")
    assert_says(error, CheckpointInProgressError, "has not committed", "Wait for the save to end")
    dcp_cases.save(dict(STATE), tmp_path / "run")
    dcp_cases.load(zeros_like(STATE), tmp_path / "run")


def test_a_taken_id_is_refused_whoever_took_it(tmp_path: Path) -> None:
    """Without `overwrite` neither a checkpoint of ours nor one of stock torch is replaced."""
    dcp_cases.save(dict(STATE), tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    for name in ("ours", "stock"):
        before = files_below(tmp_path / name)
        error = save_error(tmp_path / name)
        assert_says(error, CheckpointExistsError, f"{tmp_path}/{name}", "pass overwrite=True")
        assert isinstance(error, FileExistsError)
        assert files_below(tmp_path / name) == before


def test_a_refusal_comes_without_frames_of_this_package(tmp_path: Path) -> None:
    """What torch prints of a refused save has the frames of torch, and our error, but not ours."""
    dcp_cases.save(dict(STATE), tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.save(dict(STATE), tmp_path)
    printed = str(caught.value)
    assert "pass overwrite=True" in printed
    assert printed.count("ckpt_storage/") == 1, printed


def resealed(path: Path, **changes: object) -> None:
    """Change a sealed document so that it is sealed again, by the rules of docs/format.md."""
    body = json.loads(path.read_bytes())["body"] | changes
    packed = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32c":"%08x","body":%s}\n' % (crc32c.crc32c(packed), packed))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"format": "ckpt_storage.commit/2"}, "commit/2"), ({"type": "moved"}, "'moved'")],
)
def test_a_later_format_is_refused_by_version(
    tmp_path: Path, changes: dict[str, str], what: str
) -> None:
    """A checkpoint of an unknown major version, or record type, is neither read nor overwritten."""
    dcp_cases.save(dict(STATE), tmp_path)
    slot = tmp_path / "commits" / "00000001.json"
    resealed(slot)
    dcp_cases.load(zeros_like(STATE), tmp_path)
    resealed(slot, **changes)
    for error in (load_error(tmp_path), save_error(tmp_path, overwrite=True)):
        assert_says(error, FormatError, what, "Install a newer ckpt_storage")
    assert len(list((tmp_path / "commits").iterdir())) == 1


def without_commits(folder: Path) -> None:
    """Lose the commit slots, as a copy of what a pattern matched does."""
    shutil.rmtree(folder / "commits")


def without_manifest(folder: Path) -> None:
    """Lose the manifest."""
    next(folder.rglob("manifest.json")).unlink()


def without_shards(folder: Path) -> None:
    """Lose the data."""
    next(folder.rglob("*.distcp")).unlink()


def with_flipped_slot(folder: Path) -> None:
    """Change a byte of the commit record."""
    path = folder / "commits" / "00000001.json"
    path.write_bytes(path.read_bytes().replace(b'"commit"', b'"commIt"'))


@pytest.mark.parametrize(
    ("damage", "kind", "what", "step"),
    [
        (without_commits, FormatError, "no commits/ folder", "Copy the whole checkpoint"),
        (without_manifest, IntegrityError, "manifest.json is missing", "Restore the file"),
        (with_flipped_slot, IntegrityError, "commits/00000001.json", "Restore the file"),
    ],
)
def test_a_checkpoint_that_is_not_whole_says_what_is_missing(
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: type[CheckpointError],
    what: str,
    step: str,
) -> None:
    """A lost or damaged document is an error that names it."""
    dcp_cases.save(dict(STATE), tmp_path)
    damage(tmp_path)
    assert_says(load_error(tmp_path), kind, what, step)


def test_a_lost_shard_file_names_rank_file_and_tensor(tmp_path: Path) -> None:
    """A shard file that the manifest names and that is not there fails the load."""
    dcp_cases.save(dict(STATE), tmp_path)
    without_shards(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load(zeros_like(STATE), tmp_path)
    (error,) = failures_of(caught.value).values()
    assert isinstance(error, IntegrityError)
    assert_says(error, IntegrityError, "__0_0.distcp, which rank 0 wrote", "Restore the file")
    assert error.rank == 0
    assert error.fqn in {"w", "step"}


def test_an_overwritten_checkpoint_says_that_it_is_gone(tmp_path: Path) -> None:
    """A reader whose save was replaced and freed while it was open is told to load again."""
    dcp_cases.save(dict(STATE), tmp_path)
    planner = ReplacingPlanner(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load(zeros_like(STATE), tmp_path, planner=planner)
    (error,) = failures_of(caught.value).values()
    assert isinstance(error, CheckpointGoneError)
    assert_says(error, CheckpointGoneError, "is gone", "Load again")


class ReplacingPlanner(dcp.DefaultLoadPlanner):
    """A load planner in whose midst the checkpoint is overwritten until the old save is freed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Overwrite twice: the newest superseded save is kept."""
        for _ in range(2):
            dcp_cases.save(dict(STATE), self.path, overwrite=True)
        return new_plan


def test_checkpoints_of_single_ranks_are_explained(tmp_path: Path) -> None:
    """What stock torch wrote with `use_collectives=False` is recognised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(tmp_path)
        dcp.save(dict(STATE), storage_writer=writer, use_collectives=False)
    error = load_error(tmp_path)
    assert_says(error, FormatError, "use_collectives=False", "as many ranks as saved it")


def test_shards_without_metadata_are_a_save_in_progress(tmp_path: Path) -> None:
    """A folder of another writer without its metadata is not taken for empty."""
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    error = load_error(tmp_path)
    assert_says(error, CheckpointInProgressError, "no .metadata", "Wait for the save to end")


@pytest.mark.parametrize(
    ("plugin", "option", "step"),
    [
        (CheckpointStorageWriter, {"timeout": -1}, "positive"),
        (CheckpointStorageWriter, {"timeout": "soon"}, "Give seconds"),
        (CheckpointStorageWriter, {"thread_count": -1}, "1 or more"),
        (CheckpointStorageWriter, {"part_bytes": 10}, "at least one block"),
        (CheckpointStorageReader, {"memory_limit_bytes": 10}, "Raise memory_limit_bytes"),
        (CheckpointStorageReader, {"shared_reads": "yes"}, "'auto' or 'never'"),
    ],
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, plugin: Any, option: dict[str, Any], step: str
) -> None:
    """An option out of range is an error before anything is touched, with what to give instead."""
    with pytest.raises(InvalidInputError) as caught:
        plugin(tmp_path / "run", **option).read_metadata()
    assert_says(caught.value, InvalidInputError, "", re.escape(step))
