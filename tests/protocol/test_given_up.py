"""What is given up leaves nothing behind, and takes away nothing that is another's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage.errors import IntegrityError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.workers import Workers


def test_an_abort_that_fails_in_any_way_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several open files each is aborted, whatever the abort of another raises."""
    tried: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise IntegrityError("the copy failed", path="a", offset=0)

    def abort(upload: Upload) -> None:
        tried.append(repr(upload))
        raise ValueError("odd")

    ckpt_storage.save({f"t{i}": torch.ones(10) for i in range(3)}, tmp_path / "src")
    ckpt_storage.convert(tmp_path / "src", tmp_path / "dcp", to="dcp", max_file_bytes=40)
    monkeypatch.setattr(Upload, "complete", fail)
    monkeypatch.setattr(Upload, "abort", abort)
    with pytest.raises(IntegrityError) as caught:
        ckpt_storage.copy(tmp_path / "dcp", tmp_path / "dst", copies="never")
    assert len(caught.value.__notes__) == len(tried) > 1


def test_workers_that_cannot_all_be_started_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have no more threads keeps none that waits for jobs for ever."""
    began: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(began) == 3:
            raise RuntimeError("can't start new thread")
        began.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Workers(5, name="few", deadline=Deadline("write", 60.0))
    for thread in began:
        thread.join(20)
    assert not any(thread.is_alive() for thread in began)
