"""A checkpoint that is overwritten, and freed, between a reader's look at the head and its read."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import ckpt_storage
from ckpt_storage.testing.posix_faults import FaultPosix


@pytest.mark.parametrize(
    ("way", "name"),
    [("load", "manifest.json"), ("open_checkpoint", "manifest.json"), ("load", ".distcp")],
)
def test_a_reader_whose_save_was_freed_reads_the_new_head(
    tmp_path: Path, way: str, name: str
) -> None:
    """It looks again, and gives the values of the save that is there now."""
    ckpt_storage.save({"w": torch.zeros(4)}, tmp_path)
    left = [torch.ones(4), torch.full((4,), 2.0)]

    class Overwriting(FaultPosix):
        """Saves over the checkpoint just before one of its files is opened."""

        def open_read(self, path: str) -> int:
            while left and path.endswith(name):
                ckpt_storage.save({"w": left.pop(0)}, tmp_path, overwrite=True)
            return super().open_read(path)

    with patch("ckpt_storage.store.backends.local.Posix", Overwriting):
        if way == "load":
            state = {"w": torch.empty(4)}
            ckpt_storage.load(state, tmp_path)
            found = state["w"]
        else:
            with ckpt_storage.open_checkpoint(tmp_path) as checkpoint:
                found = checkpoint["w"].torch()
    assert torch.equal(found, torch.full((4,), 2.0))


def test_verify_of_what_was_opened_says_that_it_was_deleted(tmp_path: Path) -> None:
    """A handle verifies the save that it was opened on, or says what became of it."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path / "c")
    with ckpt_storage.open_checkpoint(tmp_path / "c") as opened:
        shutil.rmtree(tmp_path / "c" / "commits")
        with pytest.raises(ckpt_storage.CheckpointGoneError, match="was deleted since"):
            opened.verify()
