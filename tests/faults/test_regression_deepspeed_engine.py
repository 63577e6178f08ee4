"""Failure 2: the decoupled checkpoint engine whose trainer waits for a dead process for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import saver_cases as cases
from fork_server import ForkServer
from limits import HANG_S, SLACK_S
from rank_pool import RankPool

from ckpt_storage import RankFailedError, SaveState, list_checkpoints

PATIENCE_S = 2.0
"""A wait that takes longer than this, though its process is dead, is called blocked."""


def _engine_process(requests: Queue[Any], began: Event, _saved: Event) -> None:
    requests.get()
    began.set()
    time.sleep(HANG_S)  # a write that takes its time, until the process is killed


class PlainEngine:
    """The pattern: a process, a queue, an event, no deadline and no look at the process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.requests = context.Queue()
        self.began, self.saved = context.Event(), context.Event()
        self.process = context.Process(
            target=_engine_process, args=(self.requests, self.began, self.saved), daemon=True
        )
        self.process.start()

    def save(self, state: object) -> None:
        self.requests.put(state)

    def commit(self) -> None:
        self.saved.wait()

    def __del__(self) -> None:
        self.commit()


def test_plain_pattern_waits_for_a_dead_process() -> None:
    """The pattern fails: neither its wait nor its finalizer returns once the process is dead."""
    engine = PlainEngine()
    engine.save(1)
    assert engine.began.wait(HANG_S)
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.process.join(HANG_S)
    assert engine.process.exitcode == -signal.SIGKILL
    waits = [threading.Thread(target=wait, daemon=True) for wait in (engine.commit, engine.__del__)]
    for waiting in waits:
        waiting.start()
    waits[0].join(PATIENCE_S)
    are_blocked = [waiting.is_alive() for waiting in waits]
    engine.saved.set()
    for waiting in waits:
        waiting.join(HANG_S)
    engine.requests.close()
    engine.requests.join_thread()
    engine.process.close()
    assert are_blocked == [True, True]


def _killed(rank: int, folder: str) -> list[Any]:
    """Kill the worker of rank 1 while it writes; train on; save again; forget the saver."""
    saver = cases.quick_saver("process", on_error="warn")
    hold = cases.Hold(folder, "write", 1)
    planner = cases.held(hold) if rank == 1 else None
    handle = cases.save_step(saver, folder, rank, 0, planner=planner)
    pid = hold.reached()
    begin = time.monotonic()
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    error = handle.exception(HANG_S)
    waited_s = time.monotonic() - begin
    with saver.step_guard():
        pass  # training goes on
    cases.save_step(saver, folder, rank, 1).result(HANG_S)
    last = saver.worker_pid
    begin = time.monotonic()
    del saver  # its finalizer must not block
    forgotten_s = time.monotonic() - begin
    assert last is not None
    cases.until(lambda: not cases.is_alive(last), "the end of the worker")
    return [type(error).__name__, str(error), handle.state, waited_s, forgotten_s]


@pytest.mark.deadline
def test_killed_worker_is_an_error_on_all_ranks_and_training_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Ours: all ranks raise soon, naming rank and phase; the next save works; nothing blocks."""
    for kind, text, state, waited_s, forgotten_s in ranks.run(_killed, str(tmp_path), world_size=2):
        assert kind == RankFailedError.__name__
        assert "ank 1" in text
        assert "write phase" in text
        assert state is SaveState.FAILED
        assert waited_s < SLACK_S
        assert forgotten_s < PATIENCE_S
    assert [info.name for info in list_checkpoints(tmp_path)] == ["step-1"]
    for rank in range(2):
        assert cases.loaded(tmp_path / "step-1", rank).keys() == cases.state_of(rank, 1).keys()


def _dies_with_its_save(_number: int, folder: Path) -> None:
    saver, hold = cases.quick_saver("process"), cases.Hold(folder, "write", 0)
    cases.save_step(saver, folder, 0, 0, planner=cases.held(hold))
    os.kill(hold.reached(), signal.SIGKILL)
    # Nobody waits, nobody closes: the interpreter ends, and finalizers run.


def test_exit_is_not_blocked_by_a_dead_worker(fork_server: ForkServer, tmp_path: Path) -> None:
    """Ours: an interpreter ends though the worker died with a save, and the failure is told."""
    codes, _, errors = fork_server.run(tmp_path, _dies_with_its_save, tmp_path)
    assert codes == [0], errors
    assert "was ended by SIGKILL in the write phase" in errors
