"""`.metadata` for torch's own readers: written, left out, newer than ours, or not replaceable."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, zeros_like
from rank_pool import run_ranks
from report_tools import SAVE_ID, Written, reports_of
from s3_server import S3Server
from saver_cases import quick_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckpt_storage
from ckpt_storage import CheckpointStorageWriter, InvalidInputError
from ckpt_storage.commit.assembly import entries_of
from ckpt_storage.store.store import Store

STATE: dict[str, Any] = {
    "w": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "step": 5,
    "ü": torch.arange(3),
}


def test_a_chunk_with_elements_wins_over_an_empty_one_at_its_place() -> None:
    """Torch's reader finds the one that has what it wants, whichever was written first."""
    ranks = [
        [Written("w", (0, 0), (0, 4)), Written("e", (0,), (0,))],
        [Written("w", (0, 0), (4, 4)), Written("w", (0, 0), (0, 4))],
    ]
    found = entries_of(reports_of(ranks))
    assert len(found) == 2
    assert found[MetadataIndex("w", [0, 0])] == _StorageInfo(
        f"saves/{SAVE_ID}/__1_0.distcp", 0, 128
    )
    assert found[MetadataIndex("e", [0])].relative_path.endswith("__0_0.distcp")


def save(path: Path, state: dict[str, Any] = STATE, **options: Any) -> None:
    dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options))


def check_note(path: Path) -> None:
    """Assert that torch's reader is refused with a reason, and that all else works."""
    with pytest.raises(CheckpointException) as raised:
        dcp.load(zeros_like(STATE), storage_reader=FileSystemReader(path))
    (failure,) = failures_of(raised.value).values()
    assert dcp_cases.HIDES_REASONS or "load it with ckpt_storage" in str(failure)
    with pytest.raises(ValueError, match=r"no \.metadata for torch's own readers"):
        FileSystemReader(path).read_metadata()
    dcp_cases.assert_holds(path, STATE, [dcp_cases.load])
    assert ckpt_storage.verify(path).ok
    (info,) = ckpt_storage.list_checkpoints(path.parent)
    assert info.stock_metadata is False


def test_never_always_and_the_limit_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it torch's reader is told why, ours loads, and everyone who is asked says so."""
    save(tmp_path / "never" / "run", stock_metadata="never")
    check_note(tmp_path / "never" / "run")

    def limit(entry_count: int) -> None:
        for module in ("options", "planning", "rank_save"):
            name = f"ckpt_storage.saves.{module}.STOCK_ENTRY_LIMIT"
            monkeypatch.setattr(name, entry_count)

    limit(len(STATE) - 1)
    caplog.set_level("INFO", "ckpt_storage")
    save(tmp_path / "large" / "run")
    assert "would have 5 entries" in caplog.text
    check_note(tmp_path / "large" / "run")
    limit(0)
    save(tmp_path / "run", stock_metadata="always")
    dcp_cases.load_stock(zeros_like(STATE), tmp_path / "run")
    assert ckpt_storage.save(STATE, tmp_path / "door", stock_metadata="always").stock_metadata
    assert not ckpt_storage.save(STATE, tmp_path / "doors").stock_metadata
    with pytest.raises(InvalidInputError, match="'sometimes'"):
        CheckpointStorageWriter(tmp_path, stock_metadata="sometimes")  # type: ignore[arg-type]


def test_a_note_replaces_what_an_older_save_published(tmp_path: Path) -> None:
    """Torch's reader never gets the older one instead, also where the next load publishes it."""
    path = tmp_path / "run"
    save(path, {"w": torch.zeros(2, 3)})
    save(path, stock_metadata="never", overwrite=True)
    check_note(path)
    note = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    dcp_cases.load(zeros_like(STATE), path)
    assert (path / ".metadata").read_bytes() == note
    save(path, {"w": torch.ones(2, 3)}, overwrite=True)
    dcp_cases.assert_holds(path, {"w": torch.ones(2, 3)}, [dcp_cases.load_stock])


pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")

OLD, NEW = {"w": torch.zeros(8)}, {"w": torch.ones(8)}


def load(url: str, **options: Any) -> None:
    ckpt_storage.load({"w": torch.empty(8)}, url, **options)


def dcp_load(url: str, **options: Any) -> None:
    reader = ckpt_storage.CheckpointStorageReader(url, **options)
    try:
        dcp.load({"w": torch.empty(8)}, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:
        if dcp_cases.HIDES_REASONS:
            reader.read_metadata()
        # torch asks the reader for its metadata in a way that keeps only the text of its error.
        raise ckpt_storage.FormatError(str(error.failures[0][0])) from error


def restore(url: str, **options: Any) -> None:
    with ckpt_storage.CheckpointManager(url.rpartition("/")[0], **options) as manager:
        manager.restore({"w": torch.empty(8)})


READ: dict[str, Callable[..., object]] = {
    "load": load,
    "dcp.load": dcp_load,
    "open_checkpoint": ckpt_storage.open_checkpoint,
    "restore": restore,
    "consolidate": ckpt_storage.consolidate,
    "copy": lambda url, **options: ckpt_storage.copy(url, "memory://stock/copy", **options),
    "convert": lambda url, **options: ckpt_storage.convert(
        url, "memory://stock/converted", to="dcp", **options
    ),
}


@pytest.mark.parametrize("way", READ)
@pytest.mark.parametrize("is_remote", [False, True], ids=["disk", "s3"])
def test_reading_says_that_a_stock_save_is_newer_and_keeps_it(
    tmp_path: Path, server: S3Server, way: str, *, is_remote: bool
) -> None:
    """No way to read, on a disk or S3, gives older values or takes the newer ones from torch."""
    url, given = str(tmp_path / "step-00000001"), dict[str, Any]()
    if is_remote:
        url, given = "s3://bkt/step-00000001", dict(server.storage_options)
    options = {"storage_options": given} if is_remote else {}
    info = ckpt_storage.save(OLD, url, **options)  # type: ignore[arg-type]
    dcp.save(NEW, storage_writer=FsspecWriter(url, **given), no_dist=True)
    with pytest.raises(ckpt_storage.FormatError, match=r"\.metadata") as caught:
        READ[way](url, **options)
    assert str(info.save_id) in str(caught.value)
    assert "overwrite=True" in str(caught.value)
    found = zeros_like(NEW)
    dcp.load(found, storage_reader=FsspecReader(url, **given), no_dist=True)
    assert same(found, NEW)


def test_verify_and_an_overwriting_save_know_of_a_newer_stock_save(tmp_path: Path) -> None:
    """`verify` names both saves; a save with `overwrite=True` replaces both for all readers."""
    info = ckpt_storage.save(OLD, tmp_path)
    dcp.save(NEW, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (problem,) = ckpt_storage.verify(tmp_path).problems
    assert problem.file == ".metadata"
    assert str(info.save_id) in problem.message
    ckpt_storage.save({"w": NEW["w"] + 1}, tmp_path, overwrite=True)
    assert ckpt_storage.verify(tmp_path).ok
    dcp_cases.assert_holds(tmp_path, {"w": NEW["w"] + 1})


def test_a_stock_save_that_ours_replaced_is_no_newer_one(tmp_path: Path) -> None:
    """Whoever opens a save that replaced a stock one, and could not publish, publishes it."""
    dcp.save(OLD, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    stock = (tmp_path / ".metadata").read_bytes()
    ckpt_storage.save(NEW, tmp_path, overwrite=True)
    # As if the saver had died between its commit and its publication.
    (tmp_path / ".metadata").write_bytes(stock)
    time_s = (tmp_path / "commits" / "00000001.json").stat().st_mtime - 60
    os.utime(tmp_path / ".metadata", (time_s, time_s))
    load(str(tmp_path))
    dcp_cases.assert_holds(tmp_path, NEW, [dcp_cases.load_stock])


def test_a_stock_save_of_the_same_second_is_a_newer_one(tmp_path: Path) -> None:
    """Where a storage tells whole seconds, both have one time; nothing older is read in silence."""
    ckpt_storage.save(OLD, tmp_path)
    dcp.save(NEW, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    for path in (tmp_path / ".metadata", tmp_path / "commits" / "00000001.json"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    with pytest.raises(ckpt_storage.FormatError, match="overwrite=True"):
        load(str(tmp_path))


def test_a_metadata_that_cannot_be_looked_at_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nobody can tell whether a stock save is newer, ours is read, with a warning."""
    ckpt_storage.save(OLD, tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").symlink_to(".metadata")
    assert "w" in ckpt_storage.open_checkpoint(tmp_path)
    assert [one.levelname for one in caplog.records if "is ignored" in one.message] == ["WARNING"]


def refuse(folder: Path) -> None:
    """Let no `.metadata` be put there: no file replaces a folder."""
    (folder / ".metadata").unlink()
    (folder / ".metadata").mkdir()


def background_save(url: Path, mode: Literal["thread", "process"]) -> None:
    with quick_saver(mode) as saver:
        handle = saver.save(NEW, url, overwrite=True)
        error = handle.exception(60)
        assert handle.state is ckpt_storage.SaveState.COMMITTED
        assert saver.save(NEW, url.parent / "other").result(60).slot == 1
    assert error is not None
    raise error


SAVES: dict[str, Callable[[Path], object]] = {
    "save": lambda url: ckpt_storage.save(NEW, url, overwrite=True),
    "dcp.save": lambda url: dcp_cases.save_alone(NEW, url, overwrite=True),
    "AsyncSaver in a thread": lambda url: background_save(url, "thread"),
    "AsyncSaver in a process": lambda url: background_save(url, "process"),
}


@pytest.mark.parametrize("way", SAVES)
def test_a_save_that_stock_readers_cannot_find_says_so(tmp_path: Path, way: str) -> None:
    """It raises an error of its own with what was committed; `publish` makes it good."""
    folder = tmp_path / "step"
    ckpt_storage.save(OLD, folder)
    refuse(folder)
    with pytest.raises(ckpt_storage.NotPublishedError, match=r"ckpt_storage\.publish") as caught:
        SAVES[way](folder)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.code, error.phase, error.info.slot) == ("not-published", "commit", 2)
    dcp_cases.assert_holds(folder, NEW, [ckpt_storage.load])
    (folder / ".metadata").rmdir()
    ckpt_storage.publish(folder)
    ckpt_storage.publish(folder)
    dcp_cases.assert_holds(folder, NEW, [dcp_cases.load_stock])


def test_who_wants_no_stock_metadata_does_not_miss_it(tmp_path: Path) -> None:
    """With `stock_metadata="never"` a save returns although nothing could be published."""
    ckpt_storage.save(OLD, tmp_path)
    refuse(tmp_path)
    info = ckpt_storage.save(NEW, tmp_path, overwrite=True, stock_metadata="never")
    assert info.slot == 2


def overwrite(_rank: int, path: Path) -> object:
    with pytest.raises(ckpt_storage.NotPublishedError) as caught:
        ckpt_storage.save(NEW, path, overwrite=True)
    return caught.value.info


def test_all_ranks_hear_that_a_save_is_not_published(tmp_path: Path) -> None:
    """Every rank raises the same error with the same checkpoint."""
    ckpt_storage.save(OLD, tmp_path)
    refuse(tmp_path)
    outcomes = run_ranks(3, overwrite, tmp_path)
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * 3, outcomes
    assert outcomes[0].value is not None


def test_a_manager_counts_a_save_that_is_not_published(tmp_path: Path) -> None:
    """The manager raises it, keeps the step as its newest, and goes on with the next."""
    with ckpt_storage.CheckpointManager(tmp_path) as manager:
        manager.save(1, OLD)
        folder = tmp_path / "step-00000001"
        refuse(folder)
        with pytest.raises(ckpt_storage.NotPublishedError):
            manager.save(1, NEW, overwrite=True)
        assert manager.latest() is not None
        assert manager.save(2, NEW).slot == 1


def test_a_copy_that_stock_readers_cannot_find_says_so(tmp_path: Path) -> None:
    """It raises each time until it can publish; nothing is copied again."""
    source, target = tmp_path / "source", tmp_path / "target"
    ckpt_storage.save(NEW, source)
    ckpt_storage.save(OLD, target)
    refuse(target)
    for _ in range(2):
        with pytest.raises(ckpt_storage.NotPublishedError, match=r"storage\.publish") as caught:
            ckpt_storage.copy(source, target, overwrite=True)
        assert (caught.value.phase, caught.value.info.slot) == ("commit", 2)
    (target / ".metadata").rmdir()
    assert ckpt_storage.copy(source, target, overwrite=True).was_there
    dcp_cases.assert_holds(target, NEW, [dcp_cases.load_stock])


def test_a_load_that_publishes_is_ended_by_the_failure_of_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests to the storage are watched, like all others of the load."""
    ckpt_storage.save(STATE, tmp_path / "run")
    are_monitored: list[bool] = []

    def roll_forward(store: Store, save_id: str) -> None:
        del save_id
        are_monitored.append(store.calls.deadline.is_monitored)

    monkeypatch.setattr("ckpt_storage.commit.publishing.roll_forward", roll_forward)
    ckpt_storage.load(zeros_like(STATE), tmp_path / "run")
    assert are_monitored == [True]
