"""Interpreters that end with saves in flight: what can end is committed, the rest is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_cases import SLACK_S, is_alive, loaded, state_of

from ckpt_storage import list_checkpoints, load
from ckpt_storage.testing.s3_server import S3Server

SCRIPT = """
import json, os, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
import ckpt_storage
from saver_cases import DefaultSavePlanner, Hold, held, quick_timeouts, state_of

folder, mode, how, url, options = sys.argv[1:]

class Slow(DefaultSavePlanner):
    def resolve_data(self, item):
        time.sleep(0.5)
        return super().resolve_data(item)

def main():
    rank = int(os.environ.get("RANK", "-1"))
    if rank >= 0:
        import torch.distributed as dist
        store = dist.FileStore(folder + "/rendezvous", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rank = max(rank, 0)
    hangs = "hangs" in how or "forked" in how
    hold = Hold(folder, "write", rank)
    # Only the deadlines of its phases end a save that is too late.
    timeouts = ckpt_storage.Timeouts.of(2) if "late" in how else quick_timeouts()
    exit_timeout_s = 600 if "late" in how else 1 if "hangs" in how else 60
    saver = ckpt_storage.AsyncSaver(mode=mode, timeout=timeouts, exit_timeout_s=exit_timeout_s)
    if mode == "process":
        print(saver.worker_pid, flush=True)
    state = state_of(rank, 7)
    if how == "function":
        handle = ckpt_storage.save_async(state, url, storage_options=json.loads(options),
                                         planner=Slow())
    else:
        handle = saver.save(state, url, storage_options=json.loads(options),
                            planner=held(hold) if hangs else Slow())
    if hangs:
        hold.reached()
    if "late" in how:
        print(time.time(), flush=True)
    if "block" in how:
        with saver:
            raise ZeroDivisionError
    if "forked" in how:
        import multiprocessing
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
        saver2 = ckpt_storage.AsyncSaver(mode="thread", exit_timeout_s=60)
        saver2.save({{"x": torch.ones(3)}}, url + "-second", planner=Slow())
        # Not in flight when the interpreter begins to end, and none of ours.
        def later():
            time.sleep(2)
            ckpt_storage.save({{"x": torch.ones(3)}}, url + "-third", planner=Slow())
        threading.Thread(target=later).start()

if __name__ == "__main__":
    main()
"""


def run(
    tmp_path: Path,
    mode: str,
    how: str,
    *,
    url: str = "",
    options: dict[str, Any] | None = None,
    rank_count: int = 0,
) -> tuple[list[int], list[str], str, float]:
    """Run the script; return exit codes, lines on standard output, errors, seconds it took."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1] / "support")))
    command = [
        *(sys.executable, "-W", "ignore", str(script), str(tmp_path), mode, how),
        *(url or str(tmp_path / "saved"), json.dumps(options or {})),
    ]
    begin = time.monotonic()
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        processes = [
            subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env={**os.environ, **({"RANK": str(rank)} if rank_count else {})},
            )
            for rank in range(rank_count or 1)
        ]
        try:
            codes = [process.wait(90) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    printed = (tmp_path / "out").read_text().split()
    return codes, printed, (tmp_path / "err").read_text(), time.monotonic() - begin


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("thread", "returns"),
        ("thread", "sys.exit"),
        ("thread", "error"),
        ("thread", "function"),
        ("process", "returns"),
        ("process", "error"),
    ],
)
def test_save_in_flight_is_flushed(tmp_path: Path, mode: str, how: str) -> None:
    """However the main thread ends, the save in flight is committed and nothing else is said."""
    codes, printed, errors, _ = run(tmp_path, mode, how)
    assert codes == [{"sys.exit": 3, "error": 1}.get(how, 0)], errors
    target = loaded(tmp_path / "saved", 0)
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])
    if how == "error":
        assert "ZeroDivisionError" in errors
        assert "ckpt_storage" not in errors
    else:
        assert errors == ""
    assert not any(is_alive(int(pid)) for pid in printed)


def test_all_saves_in_flight_are_flushed(tmp_path: Path) -> None:
    """Saves of several savers are all waited for, and of threads that the interpreter waits for."""
    codes, _, errors, _ = run(tmp_path, "thread", "several")
    assert codes == [0], errors
    assert errors == ""
    assert [info.name for info in list_checkpoints(tmp_path)] == [
        "saved",
        "saved-second",
        "saved-third",
    ]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_save_to_object_storage_is_flushed(tmp_path: Path, mode: str) -> None:
    """A client that needs executors of the standard library still has them."""
    with S3Server() as server:
        server.create_bucket("bucket")
        options = server.storage_options
        url = "s3://bucket/saved"
        codes, _, errors, _ = run(tmp_path, mode, "returns", url=url, options=options)
        assert codes == [0], errors
        assert errors == ""
        target = {"w0": torch.zeros(1000)}
        load(target, url, storage_options=options)
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])


@pytest.mark.parametrize("how", ["hangs", "hangs, error", "hangs, sys.exit"])
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_save_that_cannot_end_is_named_and_the_interpreter_ends(
    tmp_path: Path, mode: str, how: str
) -> None:
    """What is lost is said once on standard error; the exit code stays the program's own."""
    codes, printed, errors, _ = run(tmp_path, mode, how)
    expected = 3 if "sys.exit" in how else 1 if "error" in how else 0
    assert codes == [expected], errors
    assert errors.count("is lost") == 1
    assert str(tmp_path / "saved") in errors
    assert "while it was writing" in errors
    assert list_checkpoints(tmp_path) == []
    for pid in printed:
        assert not is_alive(int(pid))


@pytest.mark.parametrize("how", ["hangs, late, error", "hangs, late, block"])
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_crash_waits_no_longer_than_the_deadlines_of_the_save(
    tmp_path: Path, mode: str, how: str
) -> None:
    """A save that is late by its own deadline, here of 2 s, holds a process up a few seconds."""
    codes, printed, errors, _ = run(tmp_path, mode, how)
    ended = time.time()
    assert codes == [1], errors
    assert "ZeroDivisionError" in errors
    assert errors.count("has not ended" if "block" in how else "is lost") == 1
    assert ended - float(printed[-1]) < 2 + 3 + SLACK_S


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_ranks_that_cannot_end_their_save_end_in_order(tmp_path: Path, mode: str) -> None:
    """Threads that look at the ranks' store all the time do not bring the process down at exit."""
    for attempt in range(3 if mode == "thread" else 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        codes, _, errors, _ = run(folder, mode, "hangs", rank_count=2)
        assert codes == [0, 0], errors
        assert errors.count("is lost") == 2
        assert "terminate" not in errors


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_forked_child_waits_for_no_save(tmp_path: Path, mode: str) -> None:
    """A child that is forked while a save is in flight, as data loaders do, ends at once."""
    codes, printed, errors, _ = run(tmp_path, mode, "forked")
    assert codes == [0], errors
    assert errors == ""
    assert float(printed[-1]) < 20.0  # it waited for 30 s of no progress
    assert [info.name for info in list_checkpoints(tmp_path)] == ["saved"]


FORKING = """
import os, sys, warnings
sys.path.insert(0, {tests!r})
warnings.simplefilter("ignore")
import torch
import ckpt_storage
from saver_cases import state_of

folder, mode = sys.argv[1:]

def main():
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
                print("refused", str(os.getppid()) in str(error))
        ckpt_storage.save_async(state_of(0, 3), folder + "/step-3").result(60)
        sys.exit(0)  # with all that an interpreter does when it ends
    print("exit code", os.waitpid(child, 0)[1], flush=True)
    saver.save(state_of(0, 2), folder + "/step-2").result()
    print("same worker", saver.worker_pid == worker, flush=True)
    saver.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_child_of_fork_has_no_part_in_its_parents_saver(tmp_path: Path, mode: str) -> None:
    """It is refused saver and handle, saves by itself, and its end leaves the worker alone."""
    script = tmp_path / "script.py"
    script.write_text(FORKING.format(tests=str(Path(__file__).parents[1] / "support")))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "saved"), mode],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["refused True"] * 9 + ["exit code 0", "same worker True"]
    names = [info.name for info in list_checkpoints(tmp_path / "saved")]
    assert names == ["step-0", "step-2", "step-3"]
