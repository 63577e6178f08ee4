"""What fails beside a save: a disk that is full, a progress callback that raises."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
import tqdm.auto
from front_door_cases import faulty_disk
from saver_cases import quick_saver

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, ProgressEvent
from ckpt_storage.testing.faults import Rule, SimulatedCrash

STATE = {"w": torch.arange(1 << 16, dtype=torch.float32)}


SAVES: dict[str, Callable[[Path], object]] = {
    "save": lambda url: ckpt_storage.save(STATE, url),
    "dcp.save": lambda url: dcp_cases.save_alone(STATE, url),
}


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("name", ["rank-00000.json", "stock.metadata", "manifest.json", "00000001"])
def test_a_save_for_which_there_is_no_space_leaves_no_values(
    tmp_path: Path, way: str, name: str
) -> None:
    """Whichever document finds no space, complete shards go too, and the next save succeeds."""
    full = Rule(action="error", operation="pwritev", path=name, errno=errno.ENOSPC, hit_count=None)
    with faulty_disk([full]), pytest.raises(ckpt_storage.StorageError, match="space") as caught:
        SAVES[way](tmp_path)
    assert caught.value.kind == "no-space"
    assert list(tmp_path.rglob("*.distcp")) == []
    SAVES[way](tmp_path)
    assert ckpt_storage.verify(tmp_path).ok


@pytest.mark.parametrize("way", SAVES)
def test_a_save_without_space_frees_what_a_dead_one_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Then it goes on by itself; if nothing can be freed, the log says why."""
    crash = Rule(action="crash_before", operation="pwritev", path="manifest.json")
    with faulty_disk([crash]), pytest.raises(SimulatedCrash):
        dcp_cases.save_alone(STATE, tmp_path)
    (left,) = tmp_path.rglob("*.distcp")
    full = Rule(action="error", operation="pwritev", path="distcp", errno=errno.ENOSPC)
    refused = Rule(action="error", operation="pwritev", path="00000001", errno=errno.EACCES)
    # The fence of the dead attempt is there, but may not be durable.
    unsure = Rule(action="error", operation="fsync_folder", path="commits")
    for rule in (refused, unsure):
        caplog.clear()
        with faulty_disk([full, rule]), pytest.raises(ckpt_storage.StorageError) as caught:
            SAVES[way](tmp_path)
        assert caught.value.kind == "no-space"
        assert "dead attempts stay" in caplog.text
    with faulty_disk([full]):
        SAVES[way](tmp_path)
    assert not left.exists()
    assert ckpt_storage.verify(tmp_path).ok


def test_a_close_that_fails_does_not_hide_that_a_disk_is_full(tmp_path: Path) -> None:
    """Of two errors in a row the first is told: it says what to do."""
    rules = [
        Rule(action="error", operation="fsync", path="distcp", errno=errno.ENOSPC),
        Rule(action="error", operation="close", path="distcp", errno=errno.EIO),
    ]
    with faulty_disk(rules), pytest.raises(ckpt_storage.StorageError) as caught:
        ckpt_storage.save(STATE, tmp_path)
    assert caught.value.kind == "no-space"


def test_an_export_that_found_no_space_is_no_fault_of_its_checkpoint(tmp_path: Path) -> None:
    """The error says at which byte it stopped; `verify` shows the export as unfinished."""
    ckpt_storage.save({"w": torch.arange(1 << 22, dtype=torch.float32)}, tmp_path)
    full = Rule(
        action="error", operation="pwritev", path="model.safetensors.tmp", errno=errno.ENOSPC
    )
    with faulty_disk([full]), pytest.raises(ckpt_storage.StorageError, match="at byte") as caught:
        ckpt_storage.consolidate(tmp_path, max_file_bytes=1 << 30)
    assert caught.value.kind == "no-space"
    report = ckpt_storage.verify(tmp_path)
    assert (report.ok, report.problems) == (True, [])
    assert [(export.path, export.is_unfinished) for export in report.exports] == [("hf", True)]
    ckpt_storage.consolidate(tmp_path)
    (export,) = ckpt_storage.verify(tmp_path).exports
    assert (export.is_unfinished, export.file_count) == (False, 1)


SMALL = {"w": torch.arange(1000.0), "b": torch.ones(3)}


def broken(event: ProgressEvent) -> None:
    raise BrokenPipeError(event.phase)


@pytest.mark.parametrize("kind", ["callback", "bar"])
def test_progress_that_raises_is_logged_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every front door does its work and says once in the log what showing it raised."""
    bar = mock.Mock(side_effect=BrokenPipeError("the terminal is gone"))
    monkeypatch.setattr(tqdm.auto, "tqdm", bar)
    progress = broken if kind == "callback" else True
    run, target = tmp_path / "run", {name: torch.zeros_like(one) for name, one in SMALL.items()}

    def background(mode: str) -> None:
        with quick_saver(mode) as saver:  # type: ignore[arg-type]
            saver.save(SMALL, tmp_path / mode, progress=progress).result(60)

    doors: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt_storage.save(SMALL, run, progress=progress),
        "thread": lambda: background("thread"),
        "dcp.save": lambda: dcp.save(
            SMALL, storage_writer=CheckpointStorageWriter(tmp_path / "dcp", progress=progress)
        ),
        "load": lambda: ckpt_storage.load(target, run, progress=progress),
        "dcp.load": lambda: dcp.load(
            target, storage_reader=CheckpointStorageReader(run, progress=progress)
        ),
        "consolidate": lambda: ckpt_storage.consolidate(run, tmp_path / "hf", progress=progress),
        "copy": lambda: ckpt_storage.copy(run, tmp_path / "copy", progress=progress),
        "convert": lambda: ckpt_storage.convert(
            run, tmp_path / "model.pt", to="torch_save", progress=progress
        ),
        "verify": lambda: ckpt_storage.verify(run, progress=progress),
    }
    if kind == "callback":
        doors["process"] = lambda: background("process")
    told = {}
    for door, act in doors.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckpt_storage"):
            act()
        told[door] = sum("BrokenPipeError" in text for text in caplog.messages)
    assert told == dict.fromkeys(doors, 1)
    assert torch.equal(target["w"], SMALL["w"])
    names = {info.name for info in ckpt_storage.list_checkpoints(tmp_path)}
    assert names == {"run", "dcp", "copy"} | doors.keys() & {"thread", "process"}
