"""What reading an open checkpoint costs in memory beyond the result, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import dcp_cases
import numpy as np
import torch
from test_dcp_memory import Peak

from ckpt_storage.inspect.checkpoint import open_checkpoint
from ckpt_storage.testing.ranks import RankPool

MIB = 1 << 20
SIZE_MIB = 160
LIMIT_MIB = 32
SLACK_MIB = 60
"""Pieces of elements as float64, buffers of threads, and what the allocator keeps."""


def save_large(folder: Path) -> None:
    """Save a tensor of 160 MiB twice, the second with one element changed; and warm up."""
    large = torch.full((SIZE_MIB, MIB // 4), 0.5)
    for name in ("left", "right"):
        dcp_cases.save({"a": large, "b": large[:1]}, folder / name)
        large[7, 7] = 3.0
    opened = open_checkpoint(folder / "left")
    opened.stats("b")
    opened.diff(folder / "right", names=["b"])


def peak_of_reading(_rank: int, folder: Path) -> dict[str, float]:
    """Read, summarise and compare; return the peak of each in MiB."""
    save_large(folder)
    peaks: dict[str, float] = {}
    left = open_checkpoint(folder / "left", memory_limit_bytes=LIMIT_MIB * MIB)
    right = open_checkpoint(folder / "right", memory_limit_bytes=LIMIT_MIB * MIB)
    with Peak() as peak:
        assert left.stats("a").max == 0.5
    peaks["stats"] = peak.mib
    with Peak() as peak:
        (change,) = left.diff(right).changed
        assert change.at == (7, 7)
    peaks["diff"] = peak.mib
    with Peak() as peak:
        assert left["a"][::3, ::5].shape == (54, 52_429)
    peaks["strided"] = peak.mib - 54 * 52_429 * 4 / MIB
    with Peak() as peak:
        total = sum(float(row[0]) for row in left["a"])
        assert total == SIZE_MIB / 2
    peaks["rows"] = peak.mib
    with Peak() as peak:
        assert np.asarray(left["a"]).shape == (SIZE_MIB, MIB // 4)
    peaks["whole"] = peak.mib - SIZE_MIB
    return peaks


def test_memory_is_bounded(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing needs more than the limit and a few pieces, however large the tensor."""
    (peaks,) = ranks.run(peak_of_reading, tmp_path, world_size=1)
    assert {name: mib for name, mib in peaks.items() if mib > LIMIT_MIB + SLACK_MIB} == {}
