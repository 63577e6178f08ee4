"""`.metadata` for torch's own readers: written quickly, or left out and said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, zeros_like
from report_tools import SAVE_ID, Written, reports_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckpt_storage
from ckpt_storage import CheckpointStorageWriter, InvalidInputError
from ckpt_storage.commit.assembly import entries_of

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
    """Save by `dcp.save`."""
    dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options))


def test_a_large_one_has_a_note_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Above the limit torch's reader is told why, ours loads, and everyone who is asked says so."""
    monkeypatch.setattr("ckpt_storage.saves.options.STOCK_ENTRY_LIMIT", len(STATE) - 1)
    caplog.set_level("INFO", "ckpt_storage")
    save(tmp_path / "run")
    assert "would hold 5 entries" in caplog.text
    check_note(tmp_path / "run")


def check_note(path: Path) -> None:
    """Assert that torch's reader is refused with a reason, and that all else works."""
    with pytest.raises(CheckpointException) as raised:
        dcp.load(zeros_like(STATE), storage_reader=FileSystemReader(path))
    (failure,) = failures_of(raised.value).values()
    assert dcp_cases.HIDES_REASONS or "load it with ckpt_storage" in str(failure)
    with pytest.raises(ValueError, match=r"no \.metadata for torch's own readers"):
        FileSystemReader(path).read_metadata()
    state = zeros_like(STATE)
    dcp_cases.load(state, path)
    assert same(state, STATE)
    assert ckpt_storage.verify(path).ok
    (info,) = ckpt_storage.list_checkpoints(path.parent)
    assert info.stock_metadata is False


def test_never_and_always_are_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size."""
    save(tmp_path / "never" / "run", stock_metadata="never")
    check_note(tmp_path / "never" / "run")
    monkeypatch.setattr("ckpt_storage.saves.options.STOCK_ENTRY_LIMIT", 0)
    save(tmp_path / "run", stock_metadata="always")
    dcp_cases.load_stock(zeros_like(STATE), tmp_path / "run")
    assert ckpt_storage.save(STATE, tmp_path / "door", stock_metadata="always").stock_metadata
    assert not ckpt_storage.save(STATE, tmp_path / "doors").stock_metadata
    with pytest.raises(InvalidInputError, match="'sometimes'"):
        CheckpointStorageWriter(tmp_path, stock_metadata="sometimes")  # type: ignore[arg-type]


def test_a_note_replaces_what_an_older_save_published(tmp_path: Path) -> None:
    """Torch's reader never gets the older checkpoint instead; a later save publishes again."""
    path = tmp_path / "run"
    save(path, {"w": torch.zeros(2, 3)})
    save(path, stock_metadata="never", overwrite=True)
    check_note(path)
    save(path, {"w": torch.ones(2, 3)}, overwrite=True)
    state = {"w": torch.zeros(2, 3)}
    dcp_cases.load_stock(state, path)
    assert same(state, {"w": torch.ones(2, 3)})


def test_an_opener_puts_the_note_in_place(tmp_path: Path) -> None:
    """Where the saver died before it published, the next load does."""
    path = tmp_path / "run"
    save(path, stock_metadata="never")
    note = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    dcp_cases.load(zeros_like(STATE), path)
    assert (path / ".metadata").read_bytes() == note
