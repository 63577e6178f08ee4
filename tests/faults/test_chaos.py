"""The chaos run in short: `python tests/faults/chaos.py --minutes 60` is the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chaos  # a script beside this file


@pytest.mark.parametrize(("seed", "mode"), [(2, "thread"), (3, "process")])
def test_faults_leave_a_sound_history(tmp_path: Path, seed: int, mode: str) -> None:
    """Under random faults no checkpoint mixes steps, no OK is lost and nobody waits for ever."""
    totals = chaos.run_chaos(
        seed=seed, minutes=1, mode=mode, rank_counts=[2], round_count=1, round_s=15, keep=tmp_path
    )
    assert totals.findings.lines() == []
    assert sum(totals.faults.values()) > 0
