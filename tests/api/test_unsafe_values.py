"""Values that only pickle can hold: the save names them, `verify` lists them; buffers are inert."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_tools import call
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
    UnsafeContentError,
)


class Schedule:
    """A value of a class of the trainer's own."""


def by_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    """Save by our front door."""
    ckpt_storage.save(state, path, **options)


def by_dcp(state: dict[str, Any], path: Path, **options: Any) -> None:
    """Save by torch's, with our writer."""
    dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options))


each_door = pytest.mark.parametrize("door", [by_save, by_dcp])
Door = Callable[..., None]


@each_door
def test_a_value_that_only_pickle_holds_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: Door
) -> None:
    """The save warns with key and type, `verify` notes it, `load` refuses it."""
    path = tmp_path / "run-1"
    state = {"a": torch.ones(2), "trainer": {"schedule": Schedule(), "step": 3}}
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        door(state, path)
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"trainer.schedule ({__name__}.Schedule)" in message
    report = ckpt_storage.verify(path)
    assert report.ok
    (note,) = report.notes
    assert note.fqn == "trainer.schedule"
    assert f"{__name__}.Schedule" in note.message
    assert "unsafe_pickle=True" in note.next_step
    told = call("verify", str(path))
    assert told.exit_code == 0
    assert "trainer.schedule" in told.stdout
    target = {"a": torch.zeros(2), "trainer": {"schedule": None, "step": 0}}
    with pytest.raises(UnsafeContentError, match=r"trainer\.schedule"):
        ckpt_storage.load(target, path)


@each_door
def test_a_save_may_refuse_such_values(tmp_path: Path, door: Door) -> None:
    """With `unsafe_values="refuse"` the error names key and type, and nothing is committed."""
    state = {"a": torch.ones(2), "trainer": {"schedule": Schedule()}}
    with pytest.raises((InvalidInputError, CheckpointException)) as caught:
        door(state, tmp_path / "run-1", unsafe_values="refuse")
    assert f"trainer.schedule is a value ({__name__}.Schedule)" in str(caught.value)
    assert ckpt_storage.list_checkpoints(tmp_path) == []


def test_plain_values_and_buffers_are_inert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers, texts, arrays and `io.BytesIO` are saved without a word and load everywhere."""
    buffer = io.BytesIO(bytes(range(256)))
    buffer.seek(7)
    state = {
        "buffer": buffer,
        "empty": io.BytesIO(),
        "plain": (1, 2.5, "text", None, b"bytes", {"a": [True]}),
        "array": np.arange(3),
        "count": 1 << 70,
    }
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        ckpt_storage.save(state, tmp_path / "run", unsafe_values="refuse")
    assert caplog.records == []
    assert ckpt_storage.verify(tmp_path / "run").notes == ()
    loaded: dict[str, Any] = dict.fromkeys(state)
    ckpt_storage.load(loaded, tmp_path / "run")
    by_torch: dict[str, Any] = dict.fromkeys(state)
    dcp.load(by_torch, storage_reader=CheckpointStorageReader(tmp_path / "run"))
    for found in (loaded, by_torch, ckpt_storage.open_checkpoint(tmp_path / "run").load()):
        assert found["buffer"].getvalue() == bytes(range(256))
        assert found["buffer"].tell() == 7
        assert found["empty"].getvalue() == b""
        assert found["plain"] == state["plain"]
        assert found["count"] == 1 << 70


def test_a_buffer_that_is_more_than_bytes_is_refused(tmp_path: Path) -> None:
    """A crafted buffer whose state would set attributes is no inert one."""

    class Odd(io.BytesIO):
        def __reduce__(self) -> tuple[Any, ...]:
            return io.BytesIO, (), (b"x", 0, {"close": 1})

    ckpt_storage.save({"odd": Odd()}, tmp_path / "run")
    with pytest.raises(UnsafeContentError, match=r"_io\.BytesIO"):
        ckpt_storage.load({"odd": None}, tmp_path / "run")
