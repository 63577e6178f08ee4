"""Training jobs: signals of launchers, late ranks, skipped saves, stalls, restarts.

Each job trains and saves every 5 steps (`launched_rank.py`); faults hit one of its saves. Signals
to a job's process groups, and restarts, run under real torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_history import Bounds, History, contents, stalls_of
from launch_jobs import QUICK_TIMEOUTS, Event, Job, Logs, Settings, is_alive
from limits import HANG_S, SLACK_S
from saver_cases import until

SLOW_S = 1.0
"""A save in which a rank plans so long is in flight when the fault comes."""

STALL_S = 4.0
"""Longer than `Timeouts.silence`."""

PATIENT = dict.fromkeys(QUICK_TIMEOUTS, HANG_S / 4)
"""For tests in which no deadline passes."""

STALLED = {**QUICK_TIMEOUTS, "plan": 15.0}
"""For tests of stalls; in some saves a worker imports torch."""

THREAD: dict[str, Any] = {"api": "saver", "mode": "thread", "timeouts": PATIENT}
PROCESS: dict[str, Any] = {"api": "saver", "mode": "process", "timeouts": PATIENT}
MANAGER: dict[str, Any] = {
    "api": "manager",
    "mode": "process",
    "timeouts": PATIENT,
    "background": True,
    "rolling": False,
    "signals": ["SIGTERM"],
    "on_error": "raise",
}


def fault(at_save: int, rank: int, kind: str, **more: Any) -> Event:
    return {"id": f"{kind}-{at_save}-{rank}", "at_save": at_save, "rank": rank, "kind": kind} | more


def slow(at_save: int, seconds: float = SLOW_S) -> list[Event]:
    return [fault(at_save, rank, "slow", seconds=seconds) for rank in (0, 1)]


def finished(job: Job) -> Logs:
    """Return the log of a job that ends well, and whose history is sound."""
    code = job.run()
    assert code == 0, job.output.read_text()[-3000:]
    settings = job.settings
    # Reported there as well, but an outcome says more.
    findings = history_of(settings, job.logs)
    assert findings == [], "\n".join(findings)
    return job.logs


def history_of(settings: Settings, logs: Logs) -> list[str]:
    logs.read()
    for event in logs.events:
        if "url" in event:
            event["url"] = event["url"].removeprefix("file://")
    folders = [one for one in (settings.folder / "saved").iterdir() if (one / "commits").exists()]
    return (
        History(
            events=logs.events,
            seen=[],
            final=[{**contents(str(folder)), "url": str(folder)} for folder in folders],
            bounds=Bounds(timeouts=settings.timeouts, mode=settings.mode),
            stalls=stalls_of(logs.events),
            faults=[],
            world_size=2,
            is_manager=settings.api == "manager",
        )
        .check()
        .lines()
    )


def outcomes(logs: Logs, step: int) -> list[str]:
    """Return how the save of a step ended on each rank that made it."""
    found = {}
    for event in logs.events:
        is_end = event["event"] in {"ended", "raised"} or "save_id" in event
        if is_end and event["event"] != "seen" and event.get("step") == step:
            found[event["rank"]] = event.get("kind", "committed")
    return [found[rank] for rank in sorted(found)]


def message_of(logs: Logs, step: int, rank: int = 0) -> str:
    """Return why the save of a step failed on a rank."""
    ends = logs.all("ended", step=step, rank=rank) + logs.all("raised", step=step, rank=rank)
    return " ".join(event.get("message", "") for event in ends)


def steps_committed(folder: Path) -> list[int]:
    return [contents(str(one))["scalar"] for one in sorted((folder / "saved").iterdir())]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_group_signal_spares_the_save_in_flight(tmp_path: Path, name: str) -> None:
    """A signal to the ranks' process groups, workers included, leaves a save in flight alone."""
    faults = slow(2) + [fault(2, rank, "signal-group", signal=name, after=True) for rank in (0, 1)]
    settings = Settings(
        **PROCESS,
        folder=tmp_path,
        steps=15,
        handled=[name],
        faults=faults,
        on_error="raise",
        has_strict_close=True,
    )
    logs = finished(Job(settings))
    assert outcomes(logs, 10) == ["committed", "committed"]
    assert len(logs.all("returned", name="close")) == 2


def test_preemption_save_follows_a_group_signal(tmp_path: Path) -> None:
    """`kill -- -PGID` of every rank leads to a committed preemption save and exit code 0."""
    faults = slow(2) + [
        fault(2, rank, "signal-group", signal="SIGTERM", after=True) for rank in (0, 1)
    ]
    settings = Settings(**MANAGER, folder=tmp_path, faults=faults, has_strict_close=True)
    logs = finished(Job(settings))
    step = logs.all("preempted")[0]["step"]
    assert steps_committed(tmp_path)[-2:] == [10, step]


def test_interrupt_leads_to_a_save(tmp_path: Path) -> None:
    """With `signals=(SIGINT,)` Ctrl-C saves and raises no KeyboardInterrupt."""
    faults = [fault(2, rank, "signal", signal="SIGINT", after=True) for rank in (0, 1)]
    given = {**MANAGER, "mode": "thread", "signals": ["SIGINT"]}
    logs = finished(Job(Settings(**given, folder=tmp_path, faults=faults)))
    step = logs.all("preempted")[0]["step"]
    assert steps_committed(tmp_path)[-1] == step


def test_preemption_save_is_made_after_a_failed_save(tmp_path: Path) -> None:
    """A background save that failed before, unasked, does not keep the preemption save away."""
    faults = [
        *(fault(2, rank, "fail") for rank in (0, 1)),
        fault(2, 1, "signal", signal="SIGTERM", after=True),
    ]
    given = {**MANAGER, "mode": "thread"}
    settings = Settings(**given, folder=tmp_path, every=40, faults=faults)
    logs = finished(Job(settings, launcher="forks"))
    step = logs.all("preempted")[0]["step"]
    assert steps_committed(tmp_path) == [40, step]


@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_skipped_background_save(tmp_path: Path, mode: dict[str, Any]) -> None:
    """One rank skips one save of a rolling URL: that save fails with both steps, the next is OK."""
    faults = [fault(2, 1, "skip")]
    settings = Settings(**mode, folder=tmp_path, steps=25, faults=faults)
    logs = finished(Job(settings, launcher="forks"))
    assert outcomes(logs, 10) == ["failed"]
    assert "10" in message_of(logs, 10)
    assert "15" in message_of(logs, 10)
    assert [outcomes(logs, step) for step in (15, 20, 25)] == 3 * [["committed", "committed"]]


@pytest.mark.deadline
def test_skipped_save_of_ranks_in_lockstep(tmp_path: Path) -> None:
    """Others wait their deadline where the skipping rank sits in a collective; the next is OK."""
    settings = Settings(folder=tmp_path, steps=20, faults=[fault(2, 1, "skip")])
    logs = finished(Job(settings, launcher="forks"))
    assert outcomes(logs, 10) in (["failed"], ["timed-out"])
    assert "ank 1" in message_of(logs, 10)
    assert [outcomes(logs, step) for step in (15, 20)] == 2 * [["committed", "committed"]]


def test_skipped_save_of_ranks_that_run_apart(tmp_path: Path) -> None:
    """Where the skipping rank comes with its next save, the skipped one fails at once."""
    faults = [fault(2, 1, "skip")]
    settings = Settings(
        folder=tmp_path, steps=25, lockstep_every=25, timeouts=PATIENT, faults=faults
    )
    logs = finished(Job(settings, launcher="forks"))
    assert outcomes(logs, 10) == ["failed"]
    assert "10" in message_of(logs, 10)
    assert "15" in message_of(logs, 10)
    assert [outcomes(logs, step) for step in (15, 20, 25)] == 3 * [["committed", "committed"]]


@pytest.mark.deadline
def test_late_rank_joins_no_later_save(tmp_path: Path) -> None:
    """A rank that comes 7 s late to a save of 4 s is given up, and mixes into no later one."""
    faults = [fault(2, 1, "delay", seconds=7.0)]
    given = {**THREAD, "timeouts": QUICK_TIMEOUTS}
    settings = Settings(**given, folder=tmp_path, steps=25, lockstep_every=25, faults=faults)
    logs = finished(Job(settings, launcher="forks"))
    assert outcomes(logs, 25) == ["committed", "committed"]


@pytest.mark.parametrize("launcher", ["c10d", "static"])
def test_restart_under_the_same_torchrun(tmp_path: Path, launcher: Any) -> None:
    """Ranks that torchrun starts again, over the same store, load and save."""
    faults = [fault(3, 1, "signal", signal="SIGKILL")]
    settings = Settings(folder=tmp_path, steps=30, timeouts=PATIENT, has_finals=True, faults=faults)
    logs = finished(Job(settings, max_restarts=1, launcher=launcher))
    assert {event["step"] for event in logs.all("ready", life=1)} == {10}
    assert [event["attempt"] for event in logs.all("final")] == [1, 1]


@pytest.mark.deadline
@pytest.mark.parametrize("mode", [THREAD, PROCESS])
@pytest.mark.parametrize("rank", [0, 1])
def test_held_interpreter_lock(tmp_path: Path, mode: dict[str, Any], rank: int) -> None:
    """A rank whose interpreter is held in C strands nobody, loses no worker, and saves again."""
    faults = [*slow(2), fault(2, rank, "gil", seconds=STALL_S, after=True)]
    given = {**mode, "timeouts": STALLED}
    settings = Settings(**given, folder=tmp_path, steps=20, faults=faults)
    logs = finished(Job(settings, launcher="forks"))
    assert_stall_was_survived(logs, "thread" if mode is THREAD else "process")


def assert_stall_was_survived(logs: Logs, mode: str) -> None:
    """Look that both ranks agreed on the save, in time, and on all others."""
    first, second = outcomes(logs, 10)
    assert first == second
    for rank in (0, 1):
        (begun,) = logs.all("returned", step=10, rank=rank, name="begin")
        (end,) = logs.all("ended", step=10, rank=rank)
        assert end["t"] - begun["t"] < STALL_S + QUICK_TIMEOUTS["silence"] + SLACK_S
        assert "store" not in message_of(logs, 10, rank)
    assert [outcomes(logs, step) for step in (15, 20)] == 2 * [["committed", "committed"]]
    if mode == "process":
        assert len({event["worker"] for event in logs.all("worker")}) == 2


def stalled(folder: Path, mode: dict[str, Any], pid_of: Callable[[Logs], int]) -> Logs:
    """Run a job, and stop the process that `pid_of(logs)` names while the second save runs."""
    given = {**mode, "timeouts": STALLED}
    settings = Settings(**given, folder=folder, steps=20, faults=slow(2))
    with Job(settings, launcher="forks") as job:
        for rank in (0, 1):
            job.logs.wait_for(1, "returned", name="begin", step=10, rank=rank)
        pid = pid_of(job.logs)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STALL_S)  # the fault itself
        with contextlib.suppress(ProcessLookupError):  # its trainer may have ended a worker
            os.kill(pid, signal.SIGCONT)
        return finished(job)


@pytest.mark.deadline
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank(tmp_path: Path, rank: int) -> None:
    """A rank that is stopped and continued strands nobody, and takes part in the next save."""
    logs = stalled(tmp_path, THREAD, lambda logs: logs.all("start", rank=rank)[0]["pid"])
    assert_stall_was_survived(logs, "thread")


@pytest.mark.deadline
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_with_a_worker(tmp_path: Path, rank: int) -> None:
    """A rank that is stopped does not take its own healthy worker for dead afterwards."""
    logs = stalled(tmp_path, PROCESS, lambda logs: logs.all("start", rank=rank)[0]["pid"])
    assert_stall_was_survived(logs, "process")


@pytest.mark.deadline
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_worker(tmp_path: Path, rank: int) -> None:
    """A worker that is stopped and continued fails at most the save in flight."""
    logs = stalled(tmp_path, PROCESS, lambda logs: logs.all("worker", rank=rank)[0]["worker"])
    first, second = outcomes(logs, 10)
    assert first == second
    assert outcomes(logs, 20) == ["committed", "committed"]


@pytest.mark.deadline
def test_stopped_store(tmp_path: Path) -> None:
    """Where torchrun, which hosts the store, is stopped, a save ends in time; a later one is OK."""
    settings = Settings(
        **{**THREAD, "timeouts": STALLED}, folder=tmp_path, steps=20, faults=slow(2)
    )
    with Job(settings, launcher="static") as job:
        for rank in (0, 1):
            job.logs.wait_for(1, "returned", name="begin", step=10, rank=rank)
        assert isinstance(job.process, subprocess.Popen)
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(STALL_S)  # the fault itself
        job.process.send_signal(signal.SIGCONT)
        logs = finished(job)
    for rank in (0, 1):
        (begun,) = logs.all("returned", step=10, rank=rank, name="begin")
        (end,) = logs.all("ended", step=10, rank=rank)
        assert end["t"] - begun["t"] < STALL_S + QUICK_TIMEOUTS["silence"] + SLACK_S
    assert outcomes(logs, 20) == ["committed", "committed"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("api", ["save", "saver"])
def test_broken_store_connections(tmp_path: Path, rank: int, api: Any) -> None:
    """A rank whose connections to the store break in a save makes new ones, and it commits."""
    faults = [*slow(2), fault(2, rank, "break", after_s=SLOW_S / 2)]
    settings = Settings(folder=tmp_path, api=api, steps=20, timeouts=PATIENT, faults=faults)
    logs = finished(Job(settings, launcher="forks"))
    assert logs.all("fault", rank=rank)[-1]["connections"] > 0
    assert [outcomes(logs, step) for step in (10, 15, 20)] == 3 * [["committed", "committed"]]


@pytest.mark.parametrize("by", ["planner", "state"])
@pytest.mark.parametrize("api", ["save", "saver"])
def test_call_that_raises_on_one_rank(tmp_path: Path, api: Any, by: str) -> None:
    """A call that raises before it sent anything fails on all ranks at once; the next is OK."""
    settings = Settings(
        folder=tmp_path, api=api, steps=20, timeouts=PATIENT, faults=[fault(2, 1, "raise", by=by)]
    )
    logs = finished(Job(settings, launcher="forks"))
    assert outcomes(logs, 10) == ["failed", "failed"]
    (call,) = logs.all("call", step=10, rank=0, name="save" if api == "save" else "begin")
    ends = logs.all("ended", step=10, rank=0) + logs.all("raised", step=10, rank=0)
    assert ends[-1]["t"] - call["t"] < PATIENT["plan"] / 2
    assert "this" in message_of(logs, 10)
    assert [outcomes(logs, step) for step in (15, 20)] == 2 * [["committed", "committed"]]


def test_raised_error_is_no_cause_of_another(tmp_path: Path) -> None:
    """Where the next call raises why a save failed, this does not fail all later saves in turn."""
    settings = Settings(
        **THREAD, folder=tmp_path, steps=40, on_error="raise", faults=[fault(2, 1, "raise")]
    )
    logs = finished(Job(settings, launcher="forks"))
    assert [outcomes(logs, step) for step in (30, 35, 40)] == 3 * [["committed", "committed"]]


def test_no_rank_outlives_its_job(tmp_path: Path) -> None:
    """Ranks and workers of a job whose torchrun is killed are gone after its ranks."""
    settings = Settings(**PROCESS, folder=tmp_path)
    with Job(settings, launcher="forks") as job:
        job.logs.wait_for(2, "ended")
        workers = job.logs.all("worker")
        for event in job.logs.all("start"):
            os.kill(event["pid"], signal.SIGKILL)
        until(
            lambda: not any(is_alive(event["worker"], event["t"]) for event in workers),
            "the end of the workers",
        )
