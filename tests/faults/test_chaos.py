"""The chaos run in short, and its judge. `python tests/faults/chaos.py --minutes 60` is the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_history import Bounds, Event, Findings, History
from launch_jobs import QUICK_TIMEOUTS

sys.path.insert(0, str(Path(__file__).parent))

import chaos  # a script beside this file


@pytest.mark.parametrize(("seed", "mode"), [(2, "thread"), (3, "process")])
def test_faults_leave_a_sound_history(tmp_path: Path, seed: int, mode: str) -> None:
    """Under random faults no checkpoint mixes steps, no OK is lost and no rank waits for ever."""
    totals = chaos.run_chaos(
        seed=seed, minutes=1, mode=mode, rank_counts=[2], round_count=1, round_s=12, keep=tmp_path
    )
    assert totals.findings.lines() == []
    assert sum(totals.faults.values()) > 0


def sound_history() -> dict[str, Any]:
    """Return the log of two ranks that save steps 1 to 9 to one URL."""
    events: list[Event] = []
    for step in range(1, 10):
        for rank in (0, 1):
            call: Event = {"event": "call", "t": float(step), "name": "save", "url": "u"}
            call.update(rank=rank, life=0, pid=rank, id=step, step=step)
            end: Event = {"event": "returned", "t": step + 0.5, "save_id": f"s{step}", "slot": step}
            events += [call, call | end]
    return {"events": events, "final": [committed(9)]}


def committed(step: int) -> Event:
    """Return the view of a committed save."""
    return {
        "url": "u",
        "save_id": f"s{step}",
        "slot": step,
        "scalar": step,
        "marks": {rank: [step, 0, 0] for rank in ("0", "1")},
        "buffers": {rank: [float(step)] for rank in ("0", "1")},
    }


def fail(history: dict[str, Any], count: int) -> None:
    """Let the last saves fail on both ranks, and not be committed."""
    for event in history["events"][-4 * count + 1 :: 2]:
        del event["save_id"]
        event |= {"event": "raised", "kind": "failed"}
    history["final"] = [committed(9 - count)]


def test_judge_accepts_a_sound_history() -> None:
    """Saves that succeed, and some that fail, are no finding."""
    history = sound_history()
    fail(history, 2)
    assert judged(history).lines() == []


def mix(history: dict[str, Any]) -> None:
    history["final"] = [committed(9) | {"scalar": 8}]


def lose(history: dict[str, Any]) -> None:
    history["final"] = [committed(8)]


def replace_payload(history: dict[str, Any]) -> None:
    history["seen"] = [committed(7) | {"save_id": "s9"}]
    history["final"] = [committed(10)]


def wait_long(history: dict[str, Any]) -> None:
    history["events"][-1]["t"] += sum(QUICK_TIMEOUTS.values())


def fail_falsely(history: dict[str, Any]) -> None:
    fail(history, 1)
    history["final"] = [committed(9)]


def go_on_failing(history: dict[str, Any]) -> None:
    fail(history, 3)


def load_in_vain(history: dict[str, Any]) -> None:
    common = {"rank": 0, "life": 1, "pid": 9, "id": 1, "name": "load", "step": -1}
    history["events"] += [
        {"event": "call", "t": 20.0, **common},
        {"event": "raised", "t": 21.0, "kind": "failed", **common},
    ]


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (mix, "mixtures"),
        (lose, "lost"),
        (replace_payload, "lost"),
        (wait_long, "waits"),
        (fail_falsely, "false_failures"),
        (go_on_failing, "stuck"),
        (load_in_vain, "unfinished"),
    ],
)
def test_judge_finds(spoil: Callable[[dict[str, Any]], None], kind: str) -> None:
    """Each way in which a history breaks a promise is a finding of its kind, and of no other."""
    history = sound_history()
    spoil(history)
    findings = judged(history)
    assert {line.partition(":")[0] for line in findings.lines()} == {kind}


def judged(history: dict[str, Any]) -> Findings:
    bounds = Bounds(timeouts=QUICK_TIMEOUTS, mode="thread")
    defaults = {"seen": [], "stalls": [], "faults": [], "world_size": 2, "is_manager": False}
    return History(**{**defaults, **history}, bounds=bounds).check()
