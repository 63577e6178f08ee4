"""The benchmarks run, and the simulation of many ranks shows that nothing multiplies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from scale import Figures, simulate  # noqa: E402


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


def test_every_scenario_runs_on_a_disk(tmp_path: Path) -> None:
    """Each contender's outcome is checked against what was saved, so one that lies fails."""
    told = tmp_path / "told.json"
    small = ["--gib", "0.01", "--small", "20", "--runs", "1", "--peers", "--json", str(told)]
    subprocess.run(
        [sys.executable, str(BENCHMARKS), str(tmp_path / "disk"), *small],
        check=True,
        capture_output=True,
        timeout=150,
    )
    found = json.loads(told.read_text(encoding="utf-8"))["comparisons"]
    assert len(found) == 11
    assert all(runs for comparison in found for runs in comparison["runs"].values())
    assert list((tmp_path / "disk").iterdir()) == []
