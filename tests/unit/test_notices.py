"""Notices: signals are given back, whoever closes first, and a hook keeps nobody waiting."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.notices import Notices

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _back() -> Iterator[None]:
    """Check that each test leaves the handlers as they were."""
    yield
    left, default = signal.getsignal(signal.SIGUSR1), signal.SIG_DFL
    signal.signal(signal.SIGUSR1, default)
    assert left == default


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=False
    )


def test_a_forked_child_is_ended_by_the_signal() -> None:
    """A child inherits the handler, and the signal does to it what it did before there was one."""
    found = run("""
import os, signal
from ckpt_storage.manager.notices import Notices
notices = Notices([signal.SIGTERM])
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os.write(write, b"x")
    while True:
        signal.pause()
os.read(read, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
assert notices.given() is None
os.kill(os.getpid(), signal.SIGTERM)
assert notices.given() == "SIGTERM"
print("both lived as long as they should")
""")
    assert found.stdout.startswith("both"), found.stderr


def test_handlers_of_others_are_called_past_those_that_closed() -> None:
    """What was there before the first one comes back after both, and is called meanwhile."""
    taken: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: taken.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    first, second = Notices([signal.SIGUSR1]), Notices([signal.SIGUSR1])
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert taken == [signal.SIGUSR1]
    second.close()
    assert signal.getsignal(signal.SIGUSR1) is mine
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_closing_in_another_thread_frees_all(tmp_path: Path) -> None:
    """No error; the handler gives way when the signal comes."""
    taken: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: taken.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(tmp_path, signals=[signal.SIGUSR1])
    errors: list[BaseException] = []

    def close() -> None:
        try:
            manager.close()
        except BaseException as error:  # noqa: BLE001  # shown by the test
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert errors == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert taken == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is mine
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_hook_that_hangs_keeps_nobody_waiting() -> None:
    """It is asked on a thread of its own, once at a time; what it says later counts."""
    go, said = threading.Event(), threading.Event()
    count = 0

    def hook() -> object:
        nonlocal count
        count += 1
        assert go.wait(LONG_S)
        said.set()
        return count == 2

    notices = Notices((), hook)
    assert [notices.given() for _ in range(100)] == [None] * 100
    assert count == 1
    go.set()
    assert said.wait(LONG_S)
    while notices.given() is None:
        assert count <= 2
    assert notices.given() == "the preemption hook"
    notices.close()
    assert not [thread for thread in threading.enumerate() if "preemption" in thread.name]


def test_a_hook_that_hangs_is_left_behind_by_close(caplog: pytest.LogCaptureFixture) -> None:
    """Closing does not wait for it, and what it raises afterwards harms nobody."""
    go = threading.Event()

    def hook() -> object:
        go.wait(LONG_S)
        raise RuntimeError("too late")

    notices = Notices((), hook)
    assert notices.given() is None
    (thread,) = [thread for thread in threading.enumerate() if "preemption" in thread.name]
    notices.close()
    assert thread.is_alive()
    with caplog.at_level(logging.CRITICAL, "ckpt_storage"):
        go.set()
        thread.join(LONG_S)
    assert not thread.is_alive()
