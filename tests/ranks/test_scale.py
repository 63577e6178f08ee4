"""Saves of many ranks, simulated: sizes do not grow with tensors times ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from scale import Figures, simulate


def grown(few: Figures, many: Figures) -> dict[str, float]:
    return {name: many[name] / few[name] for name in few if few[name]}


def test_nothing_grows_as_tensors_times_ranks() -> None:
    """Eight times the ranks, eight times the chunks: not twice the bytes, and reports as large."""
    times = grown(simulate(64, 500), simulate(512, 500))
    assert times["item_count"] > 7.9
    assert times["written_bytes"] < 2.2
    assert times["metadata_bytes"] < 2.2
    assert 0.9 < times["report_bytes"] < 1.1


def test_the_measure_sees_what_does_grow() -> None:
    """`.metadata` has an entry for each chunk: with it bytes grow as chunks do."""
    few, many = (simulate(ranks, 60, stock_metadata=True) for ranks in (16, 128))
    assert grown(few, many)["written_bytes"] > 4
