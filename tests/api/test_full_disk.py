"""A disk that is full: what a failed save leaves there, and what the next one frees."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import dcp_cases
import pytest
import torch
from front_door_cases import faulty_disk

import ckpt_storage
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
    with (
        faulty_disk([full]),
        pytest.raises(ckpt_storage.StorageError, match="space") as caught,
    ):
        SAVES[way](tmp_path)
    assert caught.value.kind == "no-space"
    assert list(tmp_path.rglob("*.distcp")) == []
    SAVES[way](tmp_path)
    assert ckpt_storage.verify(tmp_path).ok


@pytest.mark.parametrize("way", SAVES)
def test_a_save_without_space_frees_what_a_dead_one_left(tmp_path: Path, way: str) -> None:
    """It frees the files of a save that died, and then goes on by itself."""
    crash = Rule(action="crash_before", operation="pwritev", path="manifest.json")
    with faulty_disk([crash]), pytest.raises(SimulatedCrash):
        dcp_cases.save_alone(STATE, tmp_path)
    (left,) = tmp_path.rglob("*.distcp")
    full = Rule(action="error", operation="pwritev", path="distcp", errno=errno.ENOSPC)
    with faulty_disk([full]):
        SAVES[way](tmp_path)
    assert not left.exists()
    assert ckpt_storage.verify(tmp_path).ok


def test_what_cannot_be_freed_does_not_hide_that_space_is_lacking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is of the full disk, and the log says why nothing was freed."""
    crash = Rule(action="crash_before", operation="pwritev", path="manifest.json")
    with faulty_disk([crash]), pytest.raises(SimulatedCrash):
        dcp_cases.save_alone(STATE, tmp_path)
    full = Rule(action="error", operation="pwritev", path="distcp", errno=errno.ENOSPC)
    refused = Rule(action="error", operation="pwritev", path="00000001", errno=errno.EACCES)
    with faulty_disk([full, refused]), pytest.raises(ckpt_storage.StorageError) as caught:
        ckpt_storage.save(STATE, tmp_path)
    assert caught.value.kind == "no-space"
    assert "dead attempts stay" in caplog.text


def test_a_close_that_fails_does_not_hide_that_a_disk_is_full(tmp_path: Path) -> None:
    """Of two errors in a row the first is told: it says what to do."""
    rules = [
        Rule(action="error", operation="fsync", path="distcp", errno=errno.ENOSPC),
        Rule(action="error", operation="close", path="distcp", errno=errno.EIO),
    ]
    with faulty_disk(rules), pytest.raises(ckpt_storage.StorageError) as caught:
        ckpt_storage.save(STATE, tmp_path)
    assert caught.value.kind == "no-space"
