"""Interpreters that end with saves in flight: what can end is committed, the rest is named."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import saver_cases as cases
import torch
import torch.distributed as dist
from fork_server import ForkServer, exit_codes
from limits import HANG_S, SLACK_S
from s3_server import S3Server
from saver_cases import Hold, is_alive, state_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt_storage
from ckpt_storage import AsyncSaver, list_checkpoints
from ckpt_storage.coordination.connections import _threads_in_calls
from ckpt_storage.coordination.keyvalue import (
    KeyListener,
    KeyValues,
    LostStoreError,
    StoreAddress,
    StoreClient,
)
from ckpt_storage.store.threads import halt_threads, park_if_exiting


class Slow(DefaultSavePlanner):
    """A planner that takes its time."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        time.sleep(0.5)
        return super().create_global_plan(all_plans)


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _save_and_end(
    rank: int, folder: Path, mode: Any, how: str, url: str = "", options: Any = None, count: int = 1
) -> None:
    """End with a save in flight, in the way that `how` says."""
    warnings.simplefilter("ignore")
    if count > 1:
        store = dist.FileStore(str(folder / "rendezvous"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    hangs, url = "hangs" in how or "forked" in how, url or f"{folder}/saved"
    hold = Hold(folder, "write", rank)
    # Only the deadlines of its phases end a save that is too late.
    timeouts = ckpt_storage.Timeouts.of(2) if "late" in how else cases.quick_timeouts()
    exit_timeout_s = 600 if "late" in how else 1 if "hangs" in how else HANG_S
    saver = AsyncSaver(mode=mode, timeout=timeouts, exit_timeout_s=exit_timeout_s)
    if mode == "process":
        _say(saver.worker_pid)
    begin: Any = ckpt_storage.save_async if how == "function" else saver.save
    planner = cases.held(hold) if hangs else Slow()
    begin(state_of(rank, 7), url, storage_options=options, planner=planner)
    if hangs:
        hold.reached()
    if "late" in how:
        _say(time.time())
    if "block" in how:
        with saver:
            raise ZeroDivisionError
    if "forked" in how:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        begin_s = time.monotonic()
        child.start()
        child.join()
        _say(time.monotonic() - begin_s)
        hold.go()
    if "sys.exit" in how:
        sys.exit(3)
    if "error" in how:
        raise ZeroDivisionError
    if "several" in how:
        second = AsyncSaver(mode="thread", exit_timeout_s=HANG_S, name="two")
        second.save({"x": torch.ones(3)}, f"{url}-second", planner=Slow())
        # Not in flight when the interpreter begins to end, and none of ours.
        threading.Thread(target=_save_later, args=(f"{url}-third",)).start()


def _save_at_exit(rank: int, folder: Path, mode: Any) -> None:
    """Save in a handler that runs after those of a saver, which are registered later."""
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(folder / "rendezvous"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    options: Any = {"timeout": ckpt_storage.Timeouts.of(HANG_S)}
    last = functools.partial(ckpt_storage.save, {"w": torch.ones(3)}, f"{folder}/last", **options)
    atexit.register(last)
    with AsyncSaver(mode=mode, **options) as saver:
        saver.save(state_of(rank, 7), f"{folder}/before").result()


@pytest.mark.parametrize("mode", cases.MODES)
def test_a_save_in_a_handler_of_the_exit_is_made(
    fork_server: ForkServer, tmp_path: Path, mode: str
) -> None:
    """The threads of savers are parked by then; those of the save are not."""
    codes, _, errors = fork_server.run(tmp_path, _save_at_exit, tmp_path, mode, count=2)
    assert codes == [0, 0], errors
    assert [info.name for info in list_checkpoints(tmp_path)] == ["before", "last"]


def _reuse_identifier(_: int) -> None:
    """Begin a thread as the process exits, with the identifier of a thread that has ended since."""
    ended, has_run = threading.Event(), threading.Event()
    old = threading.Thread(target=ended.wait, daemon=True)
    old.start()
    halt_threads()
    ended.set()
    old.join()

    def run() -> None:
        park_if_exiting()
        has_run.set()

    for _ in range(1_000):
        has_run.clear()
        new = threading.Thread(target=run, daemon=True)
        new.start()
        if new.ident == old.ident:
            break
        new.join()
    else:
        _say("no thread got the identifier")
    _say(has_run.wait(10.0))


def test_a_thread_with_the_identifier_of_a_parked_thread_is_not_parked(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The system gives the identifier of a thread that has ended to a new thread."""
    codes, said, errors = fork_server.run(tmp_path, _reuse_identifier)
    assert (codes, said) == ([0], ["True"]), errors


class _Finalized:
    """A value of a module: it is deleted while the interpreter is finalized."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __del__(self) -> None:
        (self._folder / "finalizing").touch()
        while not (self._folder / "answered").exists():
            time.sleep(0.01)
        # Threads that return from their calls now ask for the interpreter.
        time.sleep(0.3)


def _end_in_a_call(_number: int, folder: Path, port: int, call: str) -> None:
    """End while a thread is in a call to the ranks' store."""
    address = StoreAddress(host="127.0.0.1", port=port)
    keys = KeyValues(StoreClient(address.connect, address), "test")
    assert keys.get("answer", HANG_S) is None
    if call == "wait":
        KeyListener(lambda _: None, keys, name="listener").listen("answer")
    else:
        with pytest.raises(LostStoreError):
            keys.client.call("get", keys.name_of("answer"), timeout_s=1, is_idempotent=False)
    cases.until(lambda: _threads_in_calls, "a call")
    module = sys.modules["finalized"] = types.ModuleType("finalized")
    module.__dict__["value"] = _Finalized(folder)


@pytest.mark.parametrize("call", ["wait", "get"])
def test_a_call_to_the_store_does_not_bring_an_exiting_process_down(
    fork_server: ForkServer, tmp_path: Path, call: str
) -> None:
    """A store that answers while the interpreter is finalized finds no thread in torch's client."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork_server.start(tmp_path / "log", _end_in_a_call, 0, tmp_path, store.port, call)
    cases.until((tmp_path / "finalizing").exists, "the finalization")
    store.set("test/answer", "")
    (tmp_path / "answered").touch()
    codes = exit_codes([tmp_path / "log"], HANG_S)
    assert codes == [0], (tmp_path / "log.err").read_text()


def _save_later(url: str) -> None:
    time.sleep(2)
    ckpt_storage.save({"x": torch.ones(3)}, url, planner=Slow())


@pytest.mark.parametrize(
    ("mode", "how"),
    [("thread", "sys.exit"), ("thread", "error"), ("thread", "function"), ("process", "error")],
)
def test_save_in_flight_is_flushed(
    fork_server: ForkServer, tmp_path: Path, mode: str, how: str
) -> None:
    """However the main thread ends, the save in flight is committed and nothing else is said."""
    codes, printed, errors = fork_server.run(tmp_path, _save_and_end, tmp_path, mode, how)
    assert codes == [{"sys.exit": 3, "error": 1}.get(how, 0)], errors
    target = cases.loaded(tmp_path / "saved", 0)
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])
    if how == "error":
        assert errors.startswith("Traceback")
        assert errors.endswith("raise ZeroDivisionError\nZeroDivisionError\n")
    else:
        assert errors == ""
    assert not any(is_alive(int(pid)) for pid in printed)


def test_all_saves_in_flight_are_flushed(fork_server: ForkServer, tmp_path: Path) -> None:
    """Saves of several savers are all waited for, and of threads that the interpreter waits for."""
    codes, _, errors = fork_server.run(tmp_path, _save_and_end, tmp_path, "thread", "several")
    assert (codes, errors) == ([0], "")
    names = [info.name for info in list_checkpoints(tmp_path)]
    assert names == ["saved", "saved-second", "saved-third"]


def test_save_to_object_storage_is_flushed(
    fork_server: ForkServer, server: S3Server, tmp_path: Path
) -> None:
    """A client that needs executors of the standard library still has them."""
    given = ("s3://bucket/saved", server.storage_options)
    codes, _, errors = fork_server.run(
        tmp_path, _save_and_end, tmp_path, "thread", "returns", *given
    )
    assert (codes, errors) == ([0], "")
    target = {"w0": torch.zeros(1000)}
    ckpt_storage.load(target, given[0], storage_options=given[1])
    assert torch.equal(target["w0"], state_of(0, 7)["w0"])


@pytest.mark.parametrize(
    ("mode", "how", "count"),
    [("thread", "hangs, sys.exit", 1), ("thread", "hangs", 2), ("process", "hangs, error", 2)],
)
def test_save_that_cannot_end_is_named_and_the_interpreter_ends(
    fork_server: ForkServer, tmp_path: Path, mode: str, how: str, count: int
) -> None:
    """What is lost is said once on standard error; the exit code stays the program's own.

    Threads that look at the ranks' store all the time do not bring the process down.
    """
    given = (mode, how, "", None, count)
    codes, printed, errors = fork_server.run(tmp_path, _save_and_end, tmp_path, *given, count=count)
    assert codes == [3 if "sys.exit" in how else 1 if "error" in how else 0] * count, errors
    assert errors.count("is lost") == count
    assert errors.count("while it was writing") == count
    assert str(tmp_path / "saved") in errors
    assert "terminate" not in errors
    assert list_checkpoints(tmp_path) == []
    assert not any(is_alive(int(pid)) for pid in printed)


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("mode", "how"), [("thread", "hangs, late, block"), ("process", "hangs, late, error")]
)
def test_crash_waits_no_longer_than_the_deadlines_of_the_save(
    fork_server: ForkServer, tmp_path: Path, mode: str, how: str
) -> None:
    """A save that is late by its own deadline, here of 2 s, holds a process up a few seconds."""
    codes, printed, errors = fork_server.run(tmp_path, _save_and_end, tmp_path, mode, how)
    ended = time.time()
    assert codes == [1], errors
    assert "ZeroDivisionError" in errors
    assert errors.count("has not ended" if "block" in how else "is lost") == 1, errors
    assert ended - float(printed[-1]) < 2 + 3 + SLACK_S


@pytest.mark.parametrize("mode", cases.MODES)
def test_forked_child_waits_for_no_save(fork_server: ForkServer, tmp_path: Path, mode: str) -> None:
    """A child that is forked while a save is in flight, as data loaders do, ends at once."""
    codes, printed, errors = fork_server.run(tmp_path, _save_and_end, tmp_path, mode, "forked")
    assert (codes, errors) == ([0], "")
    assert float(printed[-1]) < HANG_S / 4  # it waited for half of it without progress
    assert [info.name for info in list_checkpoints(tmp_path)] == ["saved"]


def _parent(_number: int, folder: Path, mode: Any) -> None:
    warnings.simplefilter("ignore")
    saver = AsyncSaver(mode=mode, timeout=HANG_S)
    handle = saver.save(state_of(0, 0), f"{folder}/step-0")
    handle.result()
    worker = saver.worker_pid
    child = os.fork()
    if child == 0:
        calls: list[Any] = [
            lambda: saver.save(state_of(0, 1), f"{folder}/step-1"),
            *(saver.wait, saver.close, saver.step_guard().__enter__),
            *(handle.result, handle.exception, handle.cancel, handle.wait_staged, handle.progress),
        ]
        for call in calls:
            try:
                call()
            except ckpt_storage.InvalidInputError as error:
                _say("refused", str(os.getppid()) in str(error))
        ckpt_storage.save_async(state_of(0, 3), f"{folder}/step-3").result(HANG_S)
        sys.exit(0)  # with all that an interpreter does when it ends
    _say("exit-code", os.waitpid(child, 0)[1])
    saver.save(state_of(0, 2), f"{folder}/step-2").result()
    _say("same-worker", saver.worker_pid == worker)
    saver.close()


@pytest.mark.parametrize("mode", cases.MODES)
def test_child_of_fork_has_no_part_in_its_parents_saver(
    fork_server: ForkServer, tmp_path: Path, mode: str
) -> None:
    """It is refused saver and handle, saves by itself, and its end leaves the worker alone."""
    codes, printed, errors = fork_server.run(tmp_path, _parent, tmp_path, mode)
    assert codes == [0], errors
    assert printed == ["refused", "True"] * 9 + ["exit-code", "0", "same-worker", "True"]
    names = [info.name for info in list_checkpoints(tmp_path)]
    assert names == ["step-0", "step-2", "step-3"]


def _trainer(_number: int, folder: Path, how: str) -> None:
    saver = AsyncSaver(timeout=cases.quick_timeouts(), exit_timeout_s=1)
    hold = Hold(folder, "write", 0)
    saver.save(state_of(0, 0), f"{folder}/saved", planner=cases.held(hold))
    pid = hold.reached()
    child = os.fork() if "forks" in how else 0
    if "forks" in how and child == 0:
        time.sleep(60)
        os._exit(0)
    _say(pid, child, *cases.named_memory(os.getpid()) | cases.named_memory(pid))
    if "stopped" in how:
        os.kill(pid, signal.SIGSTOP)
    if "killed" in how:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed trainer", "killed trainer, forks", "stopped by trainer"])
def test_worker_ends_with_its_trainer(fork_server: ForkServer, tmp_path: Path, how: str) -> None:
    """However a trainer ends while its worker is stuck, both are gone and no memory is left."""
    codes, printed, errors = fork_server.run(tmp_path, _trainer, tmp_path, how)
    assert codes == [-signal.SIGKILL if "killed" in how else 0], errors
    pid, child_pid = int(printed[0]), int(printed[1])
    cases.until(lambda: not is_alive(pid), "the end of the worker")
    if child_pid:
        assert is_alive(child_pid)
        os.kill(child_pid, signal.SIGKILL)
    assert cases.left_of(set(printed[2:])) == set()
    assert errors.count("is lost") == (0 if "killed" in how else 1)


def _trainer_of_a_hanging_import(_number: int, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text("import time; time.sleep(600)")
    sys.modules["__main__"].__file__ = str(script)  # a worker imports the script of its trainer
    saver = AsyncSaver()
    _say(saver.worker_pid)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.deadline
def test_starting_worker_ends_with_its_trainer(fork_server: ForkServer, tmp_path: Path) -> None:
    """An import that hangs in a new worker does not outlive a trainer that is killed."""
    _, printed, errors = fork_server.run(tmp_path, _trainer_of_a_hanging_import, tmp_path)
    pid = int(printed[0])
    try:
        cases.until(lambda: not is_alive(pid), "the end of the worker", limit_s=SLACK_S)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    assert errors == ""
