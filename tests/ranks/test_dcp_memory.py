"""What saves, loads and reads cost in memory beyond the values, as the kernel counts it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import ckpt_storage
from ckpt_storage import open_checkpoint

MIB = 1 << 20
STATE_MIB = 200
SLACK_MIB = 40
"""Clients, checksums, tables, and what the allocator does not give back."""

READ_MIB, READ_LIMIT_MIB = 160, 32
READ_SLACK_MIB = 60
"""Pieces of elements as float64, buffers of threads, and what the allocator keeps."""

OPTIONS = {"memory_limit_bytes": 32 * MIB, "part_bytes": 4 * MIB}
LIMIT_MIB = 32 + SLACK_MIB


def peak_mib(call: Callable[..., object], *args: Any, **options: Any) -> float:
    """Return how far the resident memory rises in a call, in MiB."""

    def status_mib(field: str) -> float:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return int(text.partition(f"\n{field}:")[2].split()[0]) / 1024

    # Writing 5 resets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before_mib = status_mib("VmRSS")
    call(*args, **options)
    return status_mib("VmHWM") - before_mib


def big_state() -> dict[str, Any]:
    """Return ten tensors of 200 MiB in all, every page of them written."""
    length = STATE_MIB * MIB // 20
    return {f"w{i}": torch.full((length,), i + 0.5, dtype=torch.bfloat16) for i in range(10)}


def warm_up(path: Path) -> None:
    """Import and start what the first save and load of a process start."""
    dcp_cases.save({"x": torch.ones(8)}, path / "warm", **OPTIONS)
    dcp_cases.load({"x": torch.ones(8)}, path / "warm")


def cast(transform: Callable[..., Any], item: WriteItem, value: Any) -> Any:
    found = transform(item, value)
    return found if item.type is WriteItemType.BYTE_IO else found.to(torch.float32)


@on_ranks(1)
def test_saves_are_bounded_by_the_options(tmp_path: Path) -> None:
    """Contiguous tensors of 200 MiB are not copied; others within `memory_limit_bytes`.

    A planner's ten conversions of 40 MiB each never exist all at once: two at the most.
    """
    warm_up(tmp_path)
    side = 7_000
    state, save = big_state(), dcp_cases.save
    assert peak_mib(save, state, tmp_path / "plain") < SLACK_MIB
    given = {"planner": dcp_cases.planner(transform_object=cast), **OPTIONS}
    assert peak_mib(save, state, tmp_path / "converted", **given) < 2 * 40 + LIMIT_MIB
    del state
    base = torch.arange(side * side, dtype=torch.int16).reshape(side, side)
    strided = {"turned": base.t(), "wide": torch.arange(side).expand(2_000, side)}
    assert peak_mib(save, strided, tmp_path / "strided", **OPTIONS) < LIMIT_MIB
    target = {"w3": torch.zeros(STATE_MIB * MIB // 20, dtype=torch.float32)}
    dcp_cases.load(target, tmp_path / "converted")
    assert bool((target["w3"] == 3.5).all())
    target = {"turned": torch.zeros(side, side, dtype=torch.int16)}
    dcp_cases.load(target, tmp_path / "strided")
    assert torch.equal(target["turned"], base.t())


@on_ranks(1)
def test_loading_needs_no_second_copy(tmp_path: Path) -> None:
    """A load of 200 MiB reads into the targets; with a conversion it stays within its limit."""
    warm_up(tmp_path)
    dcp_cases.save(big_state(), tmp_path / "run")
    for dtype, most_mib in ((torch.bfloat16, SLACK_MIB), (torch.float32, LIMIT_MIB)):
        target = {f"w{i}": torch.full((STATE_MIB * MIB // 20,), 9, dtype=dtype) for i in range(10)}
        given = {"memory_limit_bytes": 32 * MIB}
        assert peak_mib(dcp_cases.load, target, tmp_path / "run", **given) < most_mib
        assert all(bool((target[f"w{i}"] == i + 0.5).all()) for i in range(10))


@pytest.mark.parametrize(
    ("save", "load"),
    [(ckpt_storage.save, ckpt_storage.load), (dcp_cases.save, dcp_cases.load)],
    ids=["ours", "dcp"],
)
def test_nothing_of_a_state_waits_for_the_collector(tmp_path: Path, save: Any, load: Any) -> None:
    """What was saved and loaded ends with its last user, though the collector never runs."""

    def saved_and_loaded(state: dict[str, Any]) -> None:
        save(state, tmp_path, overwrite=True)
        load(state, tmp_path)

    # What a process does once may leave cycles.
    saved_and_loaded({"w": torch.ones(3)})
    gc.disable()
    try:
        state = {f"w{number}": torch.ones(3) for number in range(3)}
        refs = [weakref.ref(tensor) for tensor in state.values()]
        saved_and_loaded(state)
        saved_and_loaded(state)
        del state
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


@on_ranks(1)
def test_reading_is_bounded(tmp_path: Path) -> None:
    """Nothing needs more than the limit and a few pieces, however large the tensor."""
    large = torch.full((READ_MIB, MIB // 4), 0.5)
    for name in ("left", "right"):
        dcp_cases.save({"a": large, "b": large[:1]}, tmp_path / name)
        large[7, 7] = 3.0
    del large
    left, right = (
        open_checkpoint(tmp_path / name, memory_limit_bytes=READ_LIMIT_MIB * MIB)
        for name in ("left", "right")
    )
    left.stats("b")
    left.diff(right, names=["b"])
    found: list[Any] = []
    reads: dict[str, tuple[Callable[[], Any], float]] = {
        "stats": (lambda: left.stats("a").max, 0),
        "diff": (lambda: [change.at for change in left.diff(right).changed], 0),
        "strided": (lambda: left["a"][::3, ::5].shape, 54 * 52_429 * 4 / MIB),
        "rows": (lambda: sum(float(row[0]) for row in left["a"]), 0),
        "whole": (lambda: np.asarray(left["a"]).shape, READ_MIB),
    }
    for name, (read, result_mib) in reads.items():
        most_mib = READ_LIMIT_MIB + READ_SLACK_MIB + result_mib
        assert peak_mib(lambda read=read: found.append(read())) < most_mib, name
    assert found == [0.5, [(7, 7)], (54, 52_429), READ_MIB / 2, (READ_MIB, MIB // 4)]
