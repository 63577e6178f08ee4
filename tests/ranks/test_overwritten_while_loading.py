"""A checkpoint that is overwritten, and freed, while several ranks load it together."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ckpt_storage
from ckpt_storage.testing.posix_faults import FaultPosix
from ckpt_storage.testing.ranks import run_ranks

STEP = "step-00000001"


def full(value: float) -> dict[str, torch.Tensor]:
    """Return a state of which all elements are `value`."""
    return {"w": torch.full((4,), value)}


def overwritten(tmp_path: Path, *, times: int) -> tuple[Path, Path]:
    """Return a root with one checkpoint, and one with what later saves over it make of it."""
    now, later = tmp_path / "now", tmp_path / "later"
    with ckpt_storage.CheckpointManager(now) as manager:
        manager.save(1, full(0))
    shutil.copytree(now, later)
    for value in range(1, times + 1):
        ckpt_storage.save(full(value), later / STEP, overwrite=True)
    return now, later


def put_in_place(now: Path, later: Path) -> None:
    """Let the later saves happen."""
    shutil.copytree(later, now, dirs_exist_ok=True)
    kept = {path.name for path in (later / STEP / "saves").iterdir()}
    for path in (now / STEP / "saves").iterdir():
        if path.name not in kept:
            shutil.rmtree(path)


def load_overwritten(rank: int, now: Path, later: Path, way: str, name: str) -> list[float]:
    """Load while rank 1 opens `name` only once the checkpoint was overwritten."""
    left = [later]
    # Values are opened only after all ranks have told what they found.
    waits = name != ".distcp"

    class Overwriting(FaultPosix):
        """Lets the saves happen when rank 0 knows the older one and rank 1 opens a file."""

        def open_read(self, path: str) -> int:
            if left and rank == 1 and path.endswith(name):
                root = left.pop()
                if waits:
                    dist.barrier()
                put_in_place(now, root)
            found = super().open_read(path)
            if left and rank == 0 and waits and path.endswith("manifest.json"):
                left.pop()
                dist.barrier()
            return found

    state = full(-1)
    with patch("ckpt_storage.store.backends.local.Posix", Overwriting):
        if way == "load":
            ckpt_storage.load(state, now / STEP)
        else:
            with ckpt_storage.CheckpointManager(now) as manager:
                manager.restore(state)
    found: list[float] = state["w"].tolist()
    return found


@pytest.mark.parametrize(
    ("way", "name", "times"),
    [
        ("load", "00000001.json", 1),
        ("load", "manifest.json", 2),
        ("load", ".distcp", 2),
        ("restore", ".distcp", 2),
    ],
)
def test_all_ranks_load_the_new_save_together(
    tmp_path: Path, way: str, name: str, times: int
) -> None:
    """Ranks that find different saves, or one that was freed, all load the one that is there now.

    Rank 1 finds the new save in the first case, and no file of the old one in the others.
    """
    now, later = overwritten(tmp_path, times=times)
    outcomes = run_ranks(2, load_overwritten, now, later, way, name)
    assert [outcome.value for outcome in outcomes] == [[float(times)] * 4] * 2, outcomes
