"""A folder with a checkpoint of ours, and a newer one that torch's own writer saved over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import ckpt_storage
from ckpt_storage.testing.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")

OLD, NEW = torch.zeros(8), torch.ones(8)


def stock_values(url: str | Path) -> torch.Tensor:
    """Return what torch's own reader finds."""
    state = {"w": torch.full((8,), 7.0)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(url), no_dist=True)
    return state["w"]


def load(url: str) -> None:
    """Load by the front door."""
    ckpt_storage.load({"w": torch.empty(8)}, url)


def dcp_load(url: str) -> None:
    """Load by the plug-in."""
    reader = ckpt_storage.CheckpointStorageReader(url)
    try:
        dcp.load({"w": torch.empty(8)}, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException as error:
        if dcp_cases.HIDES_REASONS:
            reader.read_metadata()
        # torch asks the reader for its metadata in a way that keeps only the text of its error.
        raise ckpt_storage.FormatError(str(error.failures[0][0])) from error


def restore(url: str) -> None:
    """Resume by the manager."""
    with ckpt_storage.CheckpointManager(url.rpartition("/")[0]) as manager:
        manager.restore({"w": torch.empty(8)})


READ: dict[str, Callable[[str], object]] = {
    "load": load,
    "dcp.load": dcp_load,
    "open_checkpoint": lambda url: ckpt_storage.open_checkpoint(url).close(),
    "restore": restore,
    "consolidate": ckpt_storage.consolidate,
}


@pytest.mark.parametrize("way", READ)
def test_reading_says_that_a_stock_save_is_newer_and_keeps_it(tmp_path: Path, way: str) -> None:
    """No way to read gives the older values, or takes the newer save from torch's own readers."""
    folder = tmp_path / "step-00000001"
    info = ckpt_storage.save({"w": OLD}, folder)
    dcp.save({"w": NEW}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    with pytest.raises(ckpt_storage.FormatError, match=r"\.metadata") as caught:
        READ[way](str(folder))
    assert str(info.save_id) in str(caught.value)
    assert "overwrite=True" in str(caught.value)
    assert torch.equal(stock_values(folder), NEW)


def test_verify_and_an_overwriting_save_know_of_a_newer_stock_save(tmp_path: Path) -> None:
    """`verify` names both saves; a save with `overwrite=True` replaces both for all readers."""
    info = ckpt_storage.save({"w": OLD}, tmp_path)
    dcp.save({"w": NEW}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (problem,) = ckpt_storage.verify(tmp_path).problems
    assert problem.file == ".metadata"
    assert str(info.save_id) in problem.message
    ckpt_storage.save({"w": NEW + 1}, tmp_path, overwrite=True)
    assert ckpt_storage.verify(tmp_path).ok
    assert torch.equal(stock_values(tmp_path), NEW + 1)


def test_reading_from_object_storage_says_so_too(tmp_path: Path) -> None:
    """Where `.metadata` costs requests, every way to read looks at it, too."""
    with S3Server() as server:
        server.create_bucket("bkt")
        url = "s3://bkt/step-00000001"
        options: dict[str, Any] = {"storage_options": server.storage_options}
        ways: list[Callable[[], object]] = [
            lambda: ckpt_storage.load({"w": torch.empty(8)}, url, **options),
            lambda: ckpt_storage.open_checkpoint(url, **options),
            lambda: ckpt_storage.consolidate(url, tmp_path / "hf", **options),
            lambda: ckpt_storage.copy(url, tmp_path / "copy", **options),
            lambda: ckpt_storage.convert(url, tmp_path / "converted", to="dcp", **options),
        ]
        ckpt_storage.save({"w": OLD}, url, **options)
        stock = FsspecWriter(url, **server.storage_options)
        dcp.save({"w": NEW}, storage_writer=stock, no_dist=True)
        for way in ways:
            with pytest.raises(ckpt_storage.FormatError, match="overwrite=True"):
                way()


def test_a_stock_save_that_ours_replaced_is_no_newer_one(tmp_path: Path) -> None:
    """Whoever opens a save that replaced a stock one, and could not publish, publishes it."""
    dcp.save({"w": OLD}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    stock = (tmp_path / ".metadata").read_bytes()
    ckpt_storage.save({"w": NEW}, tmp_path, overwrite=True)
    # As if the saver had died between its commit and its publication.
    _put_back(tmp_path / ".metadata", stock, older_than=tmp_path / "commits" / "00000001.json")
    load(str(tmp_path))
    assert torch.equal(stock_values(tmp_path), NEW)


def test_a_stock_save_of_the_same_second_is_a_newer_one(tmp_path: Path) -> None:
    """Where a storage tells whole seconds, both have one time; nothing older is read in silence."""
    ckpt_storage.save({"w": OLD}, tmp_path)
    dcp.save({"w": NEW}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    for path in (tmp_path / ".metadata", tmp_path / "commits" / "00000001.json"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    with pytest.raises(ckpt_storage.FormatError, match="overwrite=True"):
        load(str(tmp_path))


def _put_back(path: Path, data: bytes, *, older_than: Path) -> None:
    path.write_bytes(data)
    time_s = older_than.stat().st_mtime - 60
    os.utime(path, (time_s, time_s))


def test_a_lost_commit_record_is_told_by_the_metadata(tmp_path: Path) -> None:
    """A `.metadata` that names a later slot than there are says that commit records are lost."""
    ckpt_storage.save({"w": OLD}, tmp_path)
    ckpt_storage.save({"w": NEW}, tmp_path, overwrite=True)
    (tmp_path / "commits" / "00000002.json").unlink()
    with pytest.raises(ckpt_storage.FormatError, match="slot 2"):
        load(str(tmp_path))
    assert any("slot 2" in problem.message for problem in ckpt_storage.verify(tmp_path).problems)
    assert torch.equal(stock_values(tmp_path), NEW)
