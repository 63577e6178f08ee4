"""A save that is committed, while `.metadata` for torch's own readers cannot be replaced."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_storage
from ckpt_storage.testing.ranks import run_ranks

OLD, NEW = {"w": torch.zeros(8)}, {"w": torch.ones(8)}


def refuse(folder: Path) -> None:
    """Let no `.metadata` be put there: no file replaces a folder."""
    (folder / ".metadata").unlink()
    (folder / ".metadata").mkdir()


def background_save(url: Path, mode: Literal["thread", "process"]) -> None:
    """Save in the background, and once more after it."""
    with ckpt_storage.AsyncSaver(mode=mode) as saver:
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
    found = {"w": torch.full((8,), 7.0)}
    ckpt_storage.load(found, folder)
    assert torch.equal(found["w"], NEW["w"])
    (folder / ".metadata").rmdir()
    ckpt_storage.publish(folder)
    ckpt_storage.publish(folder)
    found = {"w": torch.full((8,), 7.0)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(found["w"], NEW["w"])


def test_who_wants_no_stock_metadata_does_not_miss_it(tmp_path: Path) -> None:
    """With `stock_metadata="never"` a save returns although nothing could be published."""
    ckpt_storage.save(OLD, tmp_path)
    refuse(tmp_path)
    info = ckpt_storage.save(NEW, tmp_path, overwrite=True, stock_metadata="never")
    assert info.slot == 2


def overwrite(_rank: int, path: Path) -> object:
    """Save over what is there; return what the error says is committed."""
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
    found = {"w": torch.full((8,), 7.0)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(target), no_dist=True)
    assert torch.equal(found["w"], NEW["w"])
