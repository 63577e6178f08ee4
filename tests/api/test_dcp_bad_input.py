"""Input that cannot be used: each case is one line that says what is wrong and what to do."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from copy_cases import saved_stock
from damage_cases import load_failure
from dcp_cases import files_below, zeros_like
from s3_server import S3Server
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_storage import CheckpointStorageReader as Reader
from ckpt_storage import CheckpointStorageWriter as Writer
from ckpt_storage import RetryPolicy, errors, open_checkpoint
from ckpt_storage.errors import CheckpointError

STATE = {"w": torch.ones(4), "step": 1}
NOBODY = 65_534


def save_error(path: Any, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        dcp_cases.save_alone(dict(STATE), path, **options)
    return caught.value


def load_error(path: Any, **options: Any) -> CheckpointError:
    """Return what opening for a load raises; assert that torch's load says the same."""
    try:
        reader = Reader(path, **options)
    except CheckpointError as error:
        return error
    with pytest.raises(CheckpointException) as told:
        dcp.load(zeros_like(STATE), storage_reader=reader)
    with pytest.raises(CheckpointError) as raised:
        reader.read_metadata()
    # Two slots are read side by side; either may fail first.
    first, other = (re.sub(r"0[12]\.json", "json", str(one.value)) for one in (raised, told))
    assert dcp_cases.HIDES_REASONS or first in other
    return raised.value


def assert_says(error: CheckpointError, kind: str, what: str, step: str) -> None:
    """Assert an error's class, and that it is one line with these two parts in order."""
    assert type(error).__name__ == kind, repr(error)
    assert re.search(f"{what}.*{step}", str(error)), str(error)
    assert "\n" not in str(error)
    assert error.next_step
    assert str(error).endswith(error.next_step)


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


def test_a_folder_one_may_not_write_to_or_read_is_named(reachable: Path) -> None:
    """The error says whose rights to check, and is not taken for an absent checkpoint."""
    run = reachable / "run"
    with as_nobody():
        error = save_error(run)
    assert_says(error, "StorageError", f"{run}.*Permission denied", "owner and mode")
    assert files_below(reachable) == set()
    reachable.chmod(0o755)
    dcp_cases.save(dict(STATE), run)
    (run / "commits").chmod(0)
    with as_nobody():
        error = load_error(run)
    (run / "commits").chmod(0o755)
    assert_says(error, "StorageError", f"{run}.*Permission denied", "owner and mode")


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


def test_a_place_that_cannot_be_is_named(tmp_path: Path, server: S3Server) -> None:
    """A file in place of a folder, a bucket or a server that is not there; without credentials."""
    (tmp_path / "notes").write_text("x", encoding="ascii")
    client = {"endpoint_url": "http://127.0.0.1:9"}
    nobody = {"key": "user", "secret": "very-secret", "client_kwargs": client}
    absent = {"storage_options": server.storage_options}
    silent = {"storage_options": nobody, "retry": RetryPolicy(attempt_count=1)}
    places: list[tuple[str, dict[str, Any], str, str]] = [
        (f"{tmp_path}/notes", {}, f"{tmp_path}/notes", "Part of the path is a file"),
        (f"{tmp_path}/notes/step-1", {}, f"{tmp_path}/notes", "Part of the path is a file"),
        ("s3://absent/run", absent, "s3://absent/run.*does not exist", "create it first"),
        ("s3://bucket/run", silent, "s3://bucket/run.*127.0.0.1:9", "Check the address"),
    ]
    for url, options, told, step in places:
        for error_of in (save_error, load_error):
            error = error_of(url, **options)
            assert_says(error, "StorageError", told, step)
            assert "very-secret" not in repr(error) + str(vars(error))
    assert {request.op for request in server.requests} == {"get", "head", "list"}


OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (Writer, {"timeout": -1}, "positive"),
    (Writer, {"timeout": "soon"}, "Give seconds"),
    (Writer, {"thread_count": 0}, "1 or more"),
    (Writer, {"part_bytes": 16e6}, "an integer"),
    (Writer, {"part_bytes": True}, "an integer"),
    (Writer, {"memory_limit_bytes": 0}, "Raise memory_limit_bytes"),
    (Writer, {"part_bytes": 10}, "at least one block"),
    (Writer, {"part_bytes": 1 << 20, "memory_limit_bytes": 1 << 19}, "lower part_bytes"),
    (Reader, {"memory_limit_bytes": 10}, "Raise memory_limit_bytes"),
    (Reader, {"shared_reads": "yes"}, "'auto', 'always' or 'never'"),
]


def test_paths_and_options_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    """A writer or reader is not even made for them."""
    for plugin in (Writer, Reader):
        with pytest.raises(errors.InvalidInputError, match=r"s3:/bucket/run.*'s3://bucket/run'"):
            plugin(Path("s3://bucket/run"))
    for plugin, option, step in OPTIONS:
        with pytest.raises(errors.InvalidInputError) as caught:
            plugin(tmp_path / "run", **option).read_metadata()
        assert_says(caught.value, "InvalidInputError", "", re.escape(step))


def test_a_folder_without_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    """Absent, empty, the parent of checkpoints, or of another writer without its metadata."""
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        error = load_error(tmp_path / name)
        told = f"{tmp_path}/{name} is empty or"
        assert_says(error, "CheckpointNotFoundError", told, "Check the path")
        assert isinstance(error, FileNotFoundError)
    dcp_cases.save(dict(STATE), tmp_path / "run" / "step-1")
    error = load_error(tmp_path / "run")
    assert_says(error, "CheckpointNotFoundError", "holds no checkpoint", f"{tmp_path}/run/step-1")
    (tmp_path / "empty" / "__0_0.distcp").write_bytes(b"x")
    error = load_error(tmp_path / "empty")
    assert_says(error, "CheckpointInProgressError", "no .metadata", "Wait for the save to end")


def test_a_save_that_did_not_commit_is_in_progress(tmp_path: Path) -> None:
    """What a failed save leaves is told apart from an empty folder and from a checkpoint."""
    dying = dcp_cases.planner(resolve_data=mock.Mock(side_effect=RuntimeError("no data")))
    with pytest.raises(CheckpointException):
        dcp_cases.save(dict(STATE), tmp_path / "run", planner=dying)
    error = load_error(tmp_path / "run")
    assert_says(error, "CheckpointInProgressError", "has not committed", "Wait for the save to end")
    dcp_cases.save(dict(STATE), tmp_path / "run")
    dcp_cases.load(zeros_like(STATE), tmp_path / "run")


def test_a_taken_id_is_refused_whoever_took_it(tmp_path: Path) -> None:
    """Neither ours nor one of stock torch is replaced unasked; torch prints none of our frames."""
    dcp_cases.save(dict(STATE), tmp_path / "ours")
    saved_stock(dict(STATE), tmp_path / "stock")
    for name in ("ours", "stock"):
        before = files_below(tmp_path / name)
        error = save_error(tmp_path / name)
        assert_says(error, "CheckpointExistsError", f"{tmp_path}/{name}", "pass overwrite=True")
        assert name == "stock" or str(open_checkpoint(tmp_path / name).save_id) in str(error)
        assert isinstance(error, FileExistsError)
        assert files_below(tmp_path / name) == before
        with pytest.raises(CheckpointException, match="pass overwrite=True") as caught:
            dcp_cases.save(dict(STATE), tmp_path / name)
        assert str(caught.value).count("ckpt_storage/") == 1, caught.value


def test_a_checkpoint_that_is_not_whole_says_what_is_missing(tmp_path: Path) -> None:
    """A lost document is an error that names it; a lost shard also names rank and tensor."""
    dcp_cases.save(dict(STATE), tmp_path / "bare")
    # As a copy of what a pattern matched does.
    shutil.rmtree(tmp_path / "bare" / "commits")
    error = load_error(tmp_path / "bare")
    assert_says(error, "FormatError", "no commits/ folder", "Copy the whole checkpoint")
    dcp_cases.save(dict(STATE), tmp_path / "run")
    next((tmp_path / "run").rglob("manifest.json")).unlink()
    error = load_error(tmp_path / "run")
    assert_says(error, "IntegrityError", "manifest.json is missing", "Restore the file")
    dcp_cases.save(dict(STATE), tmp_path / "lost")
    next((tmp_path / "lost").rglob("*.distcp")).unlink()
    lost = load_failure(tmp_path / "lost", zeros_like(STATE))
    assert isinstance(lost, errors.IntegrityError)
    assert_says(lost, "IntegrityError", "__0_0.distcp, which rank 0 wrote", "Restore the file")
    assert lost.rank == 0
    assert lost.fqn in {"w", "step"}


def test_checkpoints_of_single_ranks_are_explained(tmp_path: Path) -> None:
    """What stock torch wrote with `use_collectives=False` is recognised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(tmp_path)
        dcp.save(dict(STATE), storage_writer=writer, use_collectives=False)
    error = load_error(tmp_path)
    assert_says(error, "FormatError", "use_collectives=False", "as many ranks as saved it")


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(errors.InvalidInputError, match="Leave use_collectives at True"):
        dcp.save(dict(STATE), storage_writer=Writer(tmp_path / "run"), use_collectives=False)
    assert not (tmp_path / "run").exists()


def test_a_save_that_failed_early_leaves_no_place_for_the_next(tmp_path: Path) -> None:
    """DCP asks for the target of each save, and announces only places that a caller gives."""
    writer = Writer(tmp_path / "run")
    writer.reset(tmp_path / "other")
    targets = [writer.storage_meta(), writer.storage_meta()]
    names = [Path(str(meta.checkpoint_id).removeprefix("file://")).name for meta in targets if meta]
    assert names == ["other", "run"]


def test_a_save_beside_the_metadata_of_single_ranks_is_still_running(tmp_path: Path) -> None:
    """What stock torch left there does not explain why a save has not committed."""
    dcp.save(dict(STATE), checkpoint_id=tmp_path, storage_writer=Writer(tmp_path))
    (tmp_path / "__0.metadata").write_bytes(b"1")
    shutil.rmtree(tmp_path / "commits")
    (tmp_path / ".metadata").unlink()
    error = load_error(tmp_path)
    assert_says(error, "CheckpointInProgressError", "has not committed", "Wait for the save")


class TwoPartError(Exception):
    """Pickles by its message alone, so that no process can unpickle it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class RefusingPlanner(dcp.DefaultLoadPlanner):
    """A planner of a user that raises an error of its own for a value."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise TwoPartError(7, read_item.dest_index.fqn)


def test_an_error_that_no_rank_could_unpickle_is_raised_by_its_text(tmp_path: Path) -> None:
    """DCP gathers errors by pickle: a rank that cannot unpickle an error leaves others waiting."""
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoPartError(7, "w")))
    dcp_cases.save_alone(dict(STATE), tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(zeros_like(STATE), storage_reader=Reader(tmp_path), planner=RefusingPlanner())
    (error, _) = caught.value.failures[0]
    assert isinstance(error, CheckpointError)
    assert "TwoPartError: 7: w" in str(pickle.loads(pickle.dumps(error)))
