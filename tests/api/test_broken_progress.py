"""A progress callback or bar that raises costs no checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tqdm.auto

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, ProgressEvent

STATE = {"w": torch.arange(1000.0), "b": torch.ones(3)}


def broken(event: ProgressEvent) -> None:
    """Raise, as a callback may whose terminal or server is gone."""
    raise BrokenPipeError(event.phase)


class BrokenBar:
    """Stands for a bar of tqdm whose terminal is gone."""

    def __init__(self, **_: object) -> None:
        raise BrokenPipeError("the terminal is gone")


@pytest.mark.parametrize("kind", ["callback", "bar"])
def test_progress_that_raises_is_logged_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every front door does its work and says once in the log what showing it raised."""
    monkeypatch.setattr(tqdm.auto, "tqdm", BrokenBar)
    progress = broken if kind == "callback" else True
    run, target = tmp_path / "run", {name: torch.zeros_like(one) for name, one in STATE.items()}

    def background(mode: str) -> None:
        with ckpt_storage.AsyncSaver(mode=mode, timeout=60) as saver:  # type: ignore[arg-type]
            saver.save(STATE, tmp_path / mode, progress=progress).result(60)

    doors: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt_storage.save(STATE, run, progress=progress),
        "thread": lambda: background("thread"),
        "dcp.save": lambda: dcp.save(
            STATE, storage_writer=CheckpointStorageWriter(tmp_path / "dcp", progress=progress)
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
    assert torch.equal(target["w"], STATE["w"])
    names = {info.name for info in ckpt_storage.list_checkpoints(tmp_path)}
    assert names == {"run", "dcp", "copy"} | doors.keys() & {"thread", "process"}
