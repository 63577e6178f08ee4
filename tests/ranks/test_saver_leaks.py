"""Many saves and many savers leave no threads, connections or descriptors behind."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from ckpt_storage import AsyncSaver, SaveHandle
from ckpt_storage.testing.ranks import RankPool

COUNT = 8
STATE = {"w": torch.ones(100)}


def in_use() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def saves(rank: int, folder: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Save many times with one saver, keeping all handles; return what is in use, before, after."""
    assert rank >= 0
    kept: list[SaveHandle] = []
    with AsyncSaver(mode="thread", timeout=30) as saver:
        for number in range(2):
            kept.append(saver.save(STATE, f"{folder}/{number}"))
            kept[-1].result()
        before = in_use()
        for number in range(2, 2 + COUNT):
            kept.append(saver.save(STATE, f"{folder}/{number}"))
            kept[-1].result()
        saver.wait()
        return before, in_use()


def savers(rank: int, folder: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Make many savers, one after another; return what is in use, before and after."""
    assert rank >= 0
    before = (0, 0)
    for number in range(2 + COUNT):
        if number == 2:  # the first ones start what all use
            before = in_use()
        with AsyncSaver(mode="thread", timeout=30) as saver:
            saver.save(STATE, f"{folder}/{number}").result()
    return before, in_use()


def test_savers_leave_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    """Threads and descriptors do not grow with the number of savers that came and went."""
    for before, after in ranks.run(savers, str(tmp_path), world_size=2):
        assert after[0] <= before[0] + COUNT // 2
        assert after[1] <= before[1] + COUNT // 2
