"""What saves, loads and reads cost in memory beyond the values, as the kernel counts it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import dcp_cases
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import ckpt_storage
from ckpt_storage import open_checkpoint
from ckpt_storage.testing.ranks import RankPool

MIB = 1 << 20
STATE_MIB = 200
SLACK_MIB = 40
"""Clients, checksums, tables, and what the allocator does not give back."""

READ_MIB, READ_LIMIT_MIB = 160, 32
READ_SLACK_MIB = 60
"""Pieces of elements as float64, buffers of threads, and what the allocator keeps."""

OPTIONS = {"memory_limit_bytes": 32 * MIB, "part_bytes": 4 * MIB}


def status_mib(field: str) -> float:
    """Return a field of this process' memory status in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


class Peak:
    """Measures how far the resident memory rose inside the block, in MiB."""

    def __init__(self) -> None:
        self.mib = self.before_mib = 0.0

    def __enter__(self) -> Self:
        # Writing 5 resets the peak to what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before_mib = status_mib("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = status_mib("VmHWM") - self.before_mib


def big_state(count: int = 10) -> dict[str, Any]:
    """Return tensors of 200 MiB in all, every page of them written."""
    length = STATE_MIB * MIB // 2 // count
    return {f"w{i}": torch.full((length,), i + 0.5, dtype=torch.bfloat16) for i in range(count)}


def warm_up(path: Path) -> None:
    """Import and start what the first save and load of a process start."""
    state = {"x": torch.ones(8)}
    dcp_cases.save(state, path / "warm", **OPTIONS)
    dcp_cases.load(state, path / "warm")


def cast(transform: Callable[..., Any], item: WriteItem, value: Any) -> Any:
    """Convert a tensor, only when it is written."""
    found = transform(item, value)
    return found if item.type is WriteItemType.BYTE_IO else found.to(torch.float32)


def peaks_of_saves(_rank: int, path: Path) -> list[float]:
    """Save contiguous tensors; strided and expanded ones; and what a planner converts."""
    warm_up(path)
    side = 7_000
    state = big_state()
    with Peak() as plain:
        dcp_cases.save(state, path / "plain")
    with Peak() as converted:
        dcp_cases.save(
            state, path / "converted", planner=dcp_cases.planner(transform_object=cast), **OPTIONS
        )
    del state
    base = torch.arange(side * side, dtype=torch.int16).reshape(side, side)
    wide = torch.arange(side).expand(2_000, side)
    with Peak() as strided:
        dcp_cases.save({"turned": base.t(), "wide": wide}, path / "strided", **OPTIONS)
    target = {"w3": torch.zeros(STATE_MIB * MIB // 20, dtype=torch.float32)}
    dcp_cases.load(target, path / "converted")
    assert bool((target["w3"] == 3.5).all())
    target = {"turned": torch.zeros(side, side, dtype=torch.int16)}
    dcp_cases.load(target, path / "strided")
    assert torch.equal(target["turned"], base.t())
    return [plain.mib, converted.mib, strided.mib]


def test_saves_are_bounded_by_the_options(ranks: RankPool, tmp_path: Path) -> None:
    """Contiguous tensors of 200 MiB are not copied; others within `memory_limit_bytes`.

    A planner's ten conversions of 40 MiB each never exist all at once: two at the most.
    """
    ((plain_mib, converted_mib, strided_mib),) = ranks.run(peaks_of_saves, tmp_path, world_size=1)
    limit_mib = OPTIONS["memory_limit_bytes"] / MIB + SLACK_MIB
    assert plain_mib < SLACK_MIB
    assert converted_mib < 2 * 40 + limit_mib
    assert strided_mib < limit_mib


def peaks_of_loads(_rank: int, path: Path) -> list[float]:
    """Load into targets of the same kind, and of another dtype."""
    warm_up(path)
    dcp_cases.save(big_state(), path / "run")
    peaks = []
    for dtype in (torch.bfloat16, torch.float32):
        target = {
            name: torch.full_like(value, 9, dtype=dtype) for name, value in big_state().items()
        }
        with Peak() as peak:
            dcp_cases.load(target, path / "run", memory_limit_bytes=32 * MIB)
        assert all(bool((target[f"w{i}"] == i + 0.5).all()) for i in range(len(target)))
        peaks.append(peak.mib)
    return peaks


def test_loading_needs_no_second_copy(ranks: RankPool, tmp_path: Path) -> None:
    """A load of 200 MiB reads into the targets; with a conversion it stays within its limit."""
    ((direct_mib, converted_mib),) = ranks.run(peaks_of_loads, tmp_path, world_size=1)
    assert direct_mib < SLACK_MIB
    assert converted_mib < 32 + SLACK_MIB


def by_front_doors(state: dict[str, Any], at: Path) -> None:
    """Save and load by `save` and `load`."""
    ckpt_storage.save(state, at, overwrite=True)
    ckpt_storage.load(state, at)


def by_dcp(state: dict[str, Any], at: Path) -> None:
    """Save and load by torch's calls with our plug-ins."""
    dcp_cases.save(state, at, overwrite=True)
    dcp_cases.load(state, at)


@pytest.mark.parametrize("saved_and_loaded", [by_front_doors, by_dcp])
def test_nothing_of_a_state_waits_for_the_collector(
    tmp_path: Path, saved_and_loaded: Callable[[dict[str, Any], Path], None]
) -> None:
    """What was saved and loaded ends with its last user, though the collector never runs."""
    # What a process does once may leave cycles.
    saved_and_loaded({"w": torch.ones(3)}, tmp_path / "first")
    gc.disable()
    try:
        state = {f"w{number}": torch.ones(3) for number in range(3)}
        refs = [weakref.ref(tensor) for tensor in state.values()]
        saved_and_loaded(state, tmp_path / "run")
        saved_and_loaded(state, tmp_path / "run")
        del state
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def save_large(folder: Path) -> None:
    """Save a tensor of 160 MiB twice, the second with one element changed; and warm up."""
    large = torch.full((READ_MIB, MIB // 4), 0.5)
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
    left = open_checkpoint(folder / "left", memory_limit_bytes=READ_LIMIT_MIB * MIB)
    right = open_checkpoint(folder / "right", memory_limit_bytes=READ_LIMIT_MIB * MIB)
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
        assert total == READ_MIB / 2
    peaks["rows"] = peak.mib
    with Peak() as peak:
        assert np.asarray(left["a"]).shape == (READ_MIB, MIB // 4)
    peaks["whole"] = peak.mib - READ_MIB
    return peaks


def test_reading_is_bounded(ranks: RankPool, tmp_path: Path) -> None:
    """Nothing needs more than the limit and a few pieces, however large the tensor."""
    (peaks,) = ranks.run(peak_of_reading, tmp_path, world_size=1)
    assert {name: mib for name, mib in peaks.items() if mib > READ_LIMIT_MIB + READ_SLACK_MIB} == {}
