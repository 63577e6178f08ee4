"""Workers that are killed or stopped at any time: all ranks learn of it, and training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import saver_cases as cases
import torch.distributed as dist
from dcp_cases import same
from limits import HANG_S, SLACK_S
from rank_pool import RankPool

from ckpt_storage import CheckpointError, RankFailedError, SaveHandle, SaveState, list_checkpoints
from ckpt_storage.background import worker_process
from ckpt_storage.coordination.failure_detector import FailureDetector

Cell = tuple[cases.Where, int]

KILLED: tuple[Cell, ...] = (
    ("local plan", 0),
    ("local plan", 1),
    ("global plan", 0),
    ("write", 0),
    ("write", 1),
    ("commit", 0),
    ("committed", 0),
    ("outcome", 1),
)


def _save_id(handle: SaveHandle) -> str | None:
    return handle.save_id


def _is_listed(folder: str, step: int) -> bool:
    return f"step-{step}" in {info.name for info in list_checkpoints(folder)}


def _deaths(rank: int, folder: str, number: int, cells: tuple[Cell, ...]) -> list[dict[str, Any]]:
    """End workers in each cell, on one saver; return how the saves went."""
    seen = []
    timeouts = cases.quick_timeouts(silence=cases.SILENCE_S)
    with cases.quick_saver("process", timeout=timeouts, on_error="warn") as saver:
        cases.save_step(saver, folder, rank, 0).result(HANG_S)
        for step, (where, victim) in enumerate(cells, start=1):
            marks = Path(folder) / f"marks-{step}"
            marks.mkdir(exist_ok=True)
            hold = cases.Hold(marks, where, victim)
            planner = cases.held(hold) if rank == victim else None
            # Without its worker, too, a rank whose part is written takes part in what follows.
            follows = True if where == "outcome" else None
            handle = cases.save_step(
                saver, folder, rank, step, planner=planner, consolidate=follows
            )
            pid = hold.reached()
            if rank == victim:
                pid = saver.worker_pid or 0 if where == "outcome" else pid
                assert pid == saver.worker_pid
                if "plan" not in where:
                    cases.until(partial(_save_id, handle), "a beat that knows the save id")
                if where == "outcome":
                    cases.until(partial(_is_listed, folder, step), "the commit")
                (marks / "time").write_text(str(time.monotonic()))
                os.kill(pid, number)
                hold.go()
            error = handle.exception(HANG_S)
            seen.append(
                {
                    "state": handle.state,
                    "error": str(error),
                    "failures": sorted(getattr(error, "failures", ())),
                    "after_s": time.monotonic() - float((marks / "time").read_text()),
                    "own": rank == victim,
                }
            )
            assert where != "outcome" or Path(folder, f"step-{step}", "hf").is_dir()
            after = cases.save_step(saver, f"{folder}/after", rank, step)
            after.result(HANG_S)
            if rank == victim:
                assert not cases.is_alive(pid)
            dist.barrier()
        last = saver.worker_pid
    assert last is not None
    assert not cases.is_alive(last)
    for step in range(1, len(cells) + 1):
        assert same(cases.loaded(f"{folder}/after/step-{step}", rank), cases.state_of(rank, step))
    return seen


@pytest.mark.deadline
@pytest.mark.parametrize("cells", [KILLED[:5], KILLED[5:]], ids=["before", "committing"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_that_is_ended_is_told_on_all_ranks(
    ranks: RankPool, tmp_path: Path, number: int, cells: tuple[Cell, ...]
) -> None:
    """All ranks end alike, truly and in time, wherever the worker was; the next save works."""
    outcomes = ranks.run(_deaths, str(tmp_path), number, cells, world_size=2)
    for step, ((where, victim), *seen) in enumerate(zip(cells, *outcomes, strict=True), start=1):
        is_there = _is_listed(str(tmp_path), step)
        assert is_there == (where in {"committed", "outcome"}), seen
        for one in seen:
            # A doubt is true as well, but only where the coordinator died in its commit, or may
            # only be slow: a member that has written all cannot know what it is doing.
            allowed = {SaveState.COMMITTED if is_there else SaveState.FAILED}
            if victim == 0 and (where == "commit" or (number == signal.SIGSTOP and not one["own"])):
                allowed.add(SaveState.UNKNOWN)
            assert one["state"] in allowed, seen
            limit_s = SLACK_S if number == signal.SIGKILL else cases.SILENCE_S + SLACK_S
            assert one["after_s"] < limit_s, seen
            if one["state"] is SaveState.FAILED:
                assert one["failures"] == [victim], seen
                assert "worker process" in one["error"] or "sent no" in one["error"], seen


def _dies_while_others_write(rank: int, folder: str) -> list[Any]:
    """End the worker of rank 0 once its part is written, while rank 1 is held in its own."""
    with cases.quick_saver("process", on_error="warn") as saver:
        hold = cases.Hold(folder, "write", 1)
        planner = cases.held(hold) if rank == 1 else None
        handle = cases.save_step(saver, folder, rank, 0, planner=planner)
        hold.reached()
        begin = time.monotonic()
        if rank == 0:
            cases.until(lambda: handle.progress().done_bytes, "bytes of rank 0")
            time.sleep(1.0)  # now it waits for the other part
            begin = time.monotonic()
            os.kill(saver.worker_pid or 0, signal.SIGKILL)
            handle.exception(HANG_S)
            hold.go()
        waited_s = time.monotonic() - begin
        return [handle.state if handle.exception(HANG_S) else None, waited_s]


@pytest.mark.deadline
def test_worker_that_is_ended_while_others_write_is_told_at_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The worker of rank 0 is to commit: without it, nobody need write on."""
    first, second = ranks.run(_dies_while_others_write, str(tmp_path), world_size=2)
    assert first[0] is second[0] is SaveState.FAILED
    assert first[1] < SLACK_S
    assert list_checkpoints(tmp_path) == []


def test_worker_that_is_ended_while_it_idles_costs_no_save(tmp_path: Path) -> None:
    """A worker that died between saves is replaced; the save succeeds."""
    with cases.quick_saver("process") as saver:
        cases.save_step(saver, tmp_path, 0, 0).result(HANG_S)
        pid = saver.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        cases.until(lambda: saver.worker_pid is None, "the end of the worker")
        cases.save_step(saver, tmp_path, 0, 1).result(HANG_S)
        assert saver.worker_pid != pid


def _never_starts(rank: int, folder: str) -> list[str]:
    """Let no worker of rank 1 start at all; return what is raised, and that the saver recovers."""
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with cases.quick_saver("process", on_error="warn") as saver:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(worker_process, "start_process", lambda *_: subprocess.Popen(command))
                os.kill(saver.worker_pid or 0, signal.SIGKILL)
                cases.until(lambda: saver.worker_pid is None, "the end of the first worker")
            error = cases.save_step(saver, folder, rank, 0).exception(HANG_S)
        assert isinstance(error, CheckpointError)
        cases.save_step(saver, folder, rank, 1).result(HANG_S)
    return [type(error).__name__, str(error)]


def test_worker_that_never_starts_is_told_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks raise; where a worker did not begin, the reason is hinted at."""
    first, second = ranks.run(_never_starts, str(tmp_path), world_size=2)
    assert first[0] == second[0] == RankFailedError.__name__
    assert "exit code 3" in first[1]
    assert "exit code 3" in second[1]
    assert "__main__" in second[1]


def _starts_late(rank: int, folder: str, *, is_cancelled: bool) -> SaveState:
    """Save while the worker of rank 1 is starting, for longer than ranks wait for one another."""
    gate = Path(folder) / "gate"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases.ForkedWorker, "gate", gate if rank == 1 else None)
        timeout = cases.quick_timeouts(plan=5.0)
        with cases.quick_saver("process", timeout=timeout, on_error="warn") as saver:
            pid = saver.worker_pid
            handle = cases.save_step(saver, folder, rank, 0)
            if is_cancelled and rank == 0:
                handle.cancel()
            if not is_cancelled:
                time.sleep(10.0)  # the fault itself: beyond the deadline, and what ranks add to it
                gate.touch()
            handle.exception(HANG_S)
            dist.barrier()
            gate.touch()
            if is_cancelled:
                cases.save_step(saver, folder, rank, 1).result(HANG_S)
            assert saver.worker_pid == pid
    return handle.state


@pytest.mark.deadline
def test_start_of_a_worker_does_not_count_as_planning(ranks: RankPool, tmp_path: Path) -> None:
    """The first save commits, however long the worker of one rank takes to start."""
    ended = ranks.run(partial(_starts_late, is_cancelled=False), str(tmp_path), world_size=2)
    assert ended == [SaveState.COMMITTED] * 2


def test_cancel_while_a_worker_starts_waits_for_no_worker(ranks: RankPool, tmp_path: Path) -> None:
    """The save is cancelled on all ranks before the worker has started, and the next commits."""
    ended = ranks.run(partial(_starts_late, is_cancelled=True), str(tmp_path), world_size=2)
    assert ended == [SaveState.CANCELLED] * 2


def _without_heartbeats(rank: int, folder: str) -> SaveState:
    """Save; while it writes, the trainer sends no heartbeats for longer than the silence limit."""
    timeouts = cases.quick_timeouts(silence=cases.SILENCE_S)
    with cases.quick_saver("process", timeout=timeouts) as saver:
        hold = cases.Hold(folder, "write", rank)
        handle = cases.save_step(saver, folder, rank, 0, planner=cases.held(hold))
        hold.reached()
        with patch.object(FailureDetector, "_send", lambda _: None):
            time.sleep(1.5 * cases.SILENCE_S)  # the fault itself
        hold.go()
        handle.result(HANG_S)
        return handle.state


@pytest.mark.deadline
def test_workers_send_heartbeats_of_a_trainer_that_is_busy(ranks: RankPool, tmp_path: Path) -> None:
    """No rank is taken for dead, and the first save commits."""
    ended = ranks.run(_without_heartbeats, str(tmp_path), world_size=2)
    assert ended == [SaveState.COMMITTED] * 2
