"""Interpreters that end with saves in flight: what can end is committed, the rest is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_cases import SLACK_S, is_alive, left_of, loaded, state_of, until

from ckpt_storage import list_checkpoints, load
from ckpt_storage.testing.s3_server import S3Server

NURSERY = """
import json, multiprocessing, os, signal, sys, threading, time, warnings
sys.path.insert(0, {tests!r})
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import ckpt_storage
from saver_cases import DefaultSavePlanner, Hold, held, named_memory, quick_timeouts, state_of

class Slow(DefaultSavePlanner):
    def create_global_plan(self, plans):
        time.sleep(0.5)
        return super().create_global_plan(plans)

def born():
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["rank_count"] or 1):
            pids.append(os.fork())
            if pids[-1] == 0:
                for number, name in enumerate(("null", "out", "err")):
                    os.dup2(os.open(job[name], os.O_RDWR | os.O_APPEND), number)
                return job, rank
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    os._exit(0)

def main(job, rank):
    folder, mode, how, url = (job[name] for name in ("folder", "mode", "how", "url"))
    if how == "parent":
        return parent(folder, mode)
    if "trainer" in how:
        return trainer(folder, how)
    if job["rank_count"]:
        store = dist.FileStore(folder + "/rendezvous", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    hangs = "hangs" in how or "forked" in how
    hold = Hold(folder, "write", rank)
    # Only the deadlines of its phases end a save that is too late.
    timeouts = ckpt_storage.Timeouts.of(2) if "late" in how else quick_timeouts()
    exit_timeout_s = 600 if "late" in how else 1 if "hangs" in how else 60
    saver = ckpt_storage.AsyncSaver(mode=mode, timeout=timeouts, exit_timeout_s=exit_timeout_s)
    if mode == "process":
        print(saver.worker_pid, flush=True)
    begin = ckpt_storage.save_async if how == "function" else saver.save
    begin(state_of(rank, 7), url, storage_options=job["options"],
          planner=held(hold) if hangs else Slow())
    if hangs:
        hold.reached()
    if "late" in how:
        print(time.time(), flush=True)
    if "block" in how:
        with saver:
            raise ZeroDivisionError
    if "forked" in how:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        begin = time.monotonic()
        child.start()
        child.join()
        print(time.monotonic() - begin, flush=True)
        hold.go()
    if "sys.exit" in how:
        sys.exit(3)
    if "error" in how:
        raise ZeroDivisionError
    if "several" in how:
        saver2 = ckpt_storage.AsyncSaver(mode="thread", exit_timeout_s=60, name="two")
        saver2.save({{"x": torch.ones(3)}}, url + "-second", planner=Slow())
        # Not in flight when the interpreter begins to end, and none of ours.
        def later():
            time.sleep(2)
            ckpt_storage.save({{"x": torch.ones(3)}}, url + "-third", planner=Slow())
        threading.Thread(target=later).start()

def trainer(folder, how):
    saver = ckpt_storage.AsyncSaver(timeout=quick_timeouts(), exit_timeout_s=1)
    hold = Hold(folder, "write", 0)
    saver.save(state_of(0, 0), folder + "/saved", planner=held(hold))
    pid = hold.reached()
    child = os.fork() if "forks" in how else 0
    if "forks" in how and child == 0:
        time.sleep(60)
        os._exit(0)
    print(pid, child, *named_memory(os.getpid()) | named_memory(pid), flush=True)
    if "stopped" in how:
        os.kill(pid, signal.SIGSTOP)
    if "killed" in how:
        os.kill(os.getpid(), signal.SIGKILL)

def parent(folder, mode):
    saver = ckpt_storage.AsyncSaver(mode=mode, timeout=60)
    handle = saver.save(state_of(0, 0), folder + "/step-0")
    handle.result()
    worker = saver.worker_pid
    child = os.fork()
    if child == 0:
        calls = [
            lambda: saver.save(state_of(0, 1), folder + "/step-1"),
            saver.wait, saver.close, saver.step_guard().__enter__,
            handle.result, handle.exception, handle.cancel, handle.wait_staged, handle.progress,
        ]
        for call in calls:
            try:
                call()
            except ckpt_storage.InvalidInputError as error:
                print("refused", str(os.getppid()) in str(error), flush=True)
        ckpt_storage.save_async(state_of(0, 3), folder + "/step-3").result(60)
        sys.exit(0)  # with all that an interpreter does when it ends
    print("exit-code", os.waitpid(child, 0)[1], flush=True)
    saver.save(state_of(0, 2), folder + "/step-2").result()
    print("same-worker", saver.worker_pid == worker, flush=True)
    saver.close()

if __name__ == "__main__":
    main(*born())
"""

Nursery = subprocess.Popen[str]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A process that has imported torch; each script is a fork of it, and ends as scripts do."""
    script = tmp_path_factory.mktemp("nursery") / "script.py"
    script.write_text(NURSERY.format(tests=str(Path(__file__).parents[1] / "support")))
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run(
    nursery: Nursery,
    tmp_path: Path,
    mode: str,
    how: str,
    *,
    url: str = "",
    options: dict[str, Any] | None = None,
    rank_count: int = 0,
) -> tuple[list[int], list[str], str]:
    """Run the script; return exit codes, words on standard output, and errors."""
    files = {"out": tmp_path / "out", "err": tmp_path / "err"}
    for path in files.values():
        path.touch()
    job = {
        **{name: str(path) for name, path in files.items()},
        "folder": str(tmp_path),
        "mode": mode,
        "how": how,
        "null": os.devnull,
        "url": url or str(tmp_path / "saved"),
        "options": options or {},
        "rank_count": rank_count,
    }
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(job) + "\n")
    nursery.stdin.flush()
    codes = json.loads(nursery.stdout.readline())
    return codes, files["out"].read_text().split(), files["err"].read_text()


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("thread", "sys.exit"),
        ("thread", "error"),
        ("thread", "function"),
        ("process", "error"),
    ],
)
def test_save_in_flight_is_flushed(nursery: Nursery, tmp_path: Path, mode: str, how: str) -> None:
    """However the main thread ends, the save in flight is committed and nothing else is said."""
    codes, printed, errors = run(nursery, tmp_path, mode, how)
    assert codes == [{"sys.exit": 3, "error": 1}.get(how, 0)], errors
    target = loaded(tmp_path / "saved", 0)
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])
    if how == "error":
        assert "ZeroDivisionError" in errors
        assert "ckpt_storage" not in errors
    else:
        assert errors == ""
    assert not any(is_alive(int(pid)) for pid in printed)


def test_all_saves_in_flight_are_flushed(nursery: Nursery, tmp_path: Path) -> None:
    """Saves of several savers are all waited for, and of threads that the interpreter waits for."""
    codes, _, errors = run(nursery, tmp_path, "thread", "several")
    assert codes == [0], errors
    assert errors == ""
    assert [info.name for info in list_checkpoints(tmp_path)] == [
        "saved",
        "saved-second",
        "saved-third",
    ]


def test_save_to_object_storage_is_flushed(
    nursery: Nursery, server: S3Server, tmp_path: Path
) -> None:
    """A client that needs executors of the standard library still has them."""
    options = server.storage_options
    url = "s3://bucket/saved"
    codes, _, errors = run(nursery, tmp_path, "thread", "returns", url=url, options=options)
    assert codes == [0], errors
    assert errors == ""
    target = {"w0": torch.zeros(1000)}
    load(target, url, storage_options=options)
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])


@pytest.mark.parametrize(
    ("mode", "how", "rank_count"),
    [
        ("thread", "hangs, sys.exit", 0),
        ("thread", "hangs", 2),
        ("process", "hangs, error", 2),
    ],
)
def test_save_that_cannot_end_is_named_and_the_interpreter_ends(
    nursery: Nursery, tmp_path: Path, mode: str, how: str, rank_count: int
) -> None:
    """What is lost is said once on standard error; the exit code stays the program's own.

    Threads that look at the ranks' store all the time do not bring the process down.
    """
    codes, printed, errors = run(nursery, tmp_path, mode, how, rank_count=rank_count)
    count = rank_count or 1
    assert codes == [3 if "sys.exit" in how else 1 if "error" in how else 0] * count, errors
    assert errors.count("is lost") == count
    assert errors.count("while it was writing") == count
    assert str(tmp_path / "saved") in errors
    assert "terminate" not in errors
    assert list_checkpoints(tmp_path) == []
    for pid in printed:
        assert not is_alive(int(pid))


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("thread", "hangs, late, block"),
        ("process", "hangs, late, error"),
    ],
)
def test_crash_waits_no_longer_than_the_deadlines_of_the_save(
    nursery: Nursery, tmp_path: Path, mode: str, how: str
) -> None:
    """A save that is late by its own deadline, here of 2 s, holds a process up a few seconds."""
    codes, printed, errors = run(nursery, tmp_path, mode, how)
    ended = time.time()
    assert codes == [1], errors
    assert "ZeroDivisionError" in errors
    assert errors.count("has not ended" if "block" in how else "is lost") == 1, errors
    assert ended - float(printed[-1]) < 2 + 3 + SLACK_S


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_forked_child_waits_for_no_save(nursery: Nursery, tmp_path: Path, mode: str) -> None:
    """A child that is forked while a save is in flight, as data loaders do, ends at once."""
    codes, printed, errors = run(nursery, tmp_path, mode, "forked")
    assert codes == [0], errors
    assert errors == ""
    assert float(printed[-1]) < 20.0  # it waited for 30 s of no progress
    assert [info.name for info in list_checkpoints(tmp_path)] == ["saved"]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_child_of_fork_has_no_part_in_its_parents_saver(
    nursery: Nursery, tmp_path: Path, mode: str
) -> None:
    """It is refused saver and handle, saves by itself, and its end leaves the worker alone."""
    codes, printed, errors = run(nursery, tmp_path, mode, "parent")
    assert codes == [0], errors
    assert printed == ["refused", "True"] * 9 + ["exit-code", "0", "same-worker", "True"]
    names = [info.name for info in list_checkpoints(tmp_path)]
    assert names == ["step-0", "step-2", "step-3"]


@pytest.mark.parametrize("how", ["killed trainer", "killed trainer, forks", "stopped by trainer"])
def test_worker_ends_with_its_trainer(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """However a trainer ends while its worker is stuck, both are gone and no memory is left."""
    codes, printed, errors = run(nursery, tmp_path, "process", how)
    assert codes == [-signal.SIGKILL if "killed" in how else 0], errors
    pid, child_pid = int(printed[0]), int(printed[1])
    until(lambda: not is_alive(pid), "the end of the worker")
    if child_pid:
        assert is_alive(child_pid)
        os.kill(child_pid, signal.SIGKILL)
    assert left_of(set(printed[2:])) == set()
    assert errors.count("is lost") == (0 if "killed" in how else 1)
