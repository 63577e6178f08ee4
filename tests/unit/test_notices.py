"""Notices: signals are given back, whoever closes first, and a hook keeps nobody waiting."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from manager_cases import manager_of

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.manager.notices import Notices

LONG_S = 60.0


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """The signals that a handler of the user's gets, which is there before and afterwards."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: found.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    yield found
    assert signal.signal(signal.SIGUSR1, before) is mine
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


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


def test_handlers_of_others_are_called_past_those_that_closed(taken: list[int]) -> None:
    """What was there before the first one comes back after both, and is called meanwhile."""
    first, second = Notices([signal.SIGUSR1]), Notices([signal.SIGUSR1])
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert taken == [signal.SIGUSR1]
    second.close()


def test_a_signal_asks_for_one_save(tmp_path: Path, taken: list[int]) -> None:
    """It is due once, `preempted` says why, the handler before ours is called and comes back.

    Also where the manager is closed in another thread: the handler gives way to the next signal.
    """
    manager = manager_of(tmp_path, signals=[signal.SIGUSR1, signal.SIGUSR2])
    assert not manager.should_save(1)
    assert manager.preempted is None
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert len([step for step in range(2, 200) if manager.should_save(step)]) == 1
    assert manager.preempted == "SIGUSR1 on rank 0"
    manager.close()
    manager = manager_of(tmp_path, signals=[signal.SIGUSR1])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(manager.close).result(LONG_S)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [signal.SIGUSR1] * 2
        refused = thread.submit(manager_of, tmp_path, signals=[signal.SIGUSR1])
        with pytest.raises(InvalidInputError, match="main thread"):
            refused.result(LONG_S)
    with pytest.raises(InvalidInputError, match="cannot be taken"):
        manager_of(tmp_path, signals=[signal.SIGUSR1, signal.SIGKILL])


def test_a_hook_asks_for_one_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the hook says counts; that it fails does not end training."""
    away = RuntimeError("the metadata server is away")
    with manager_of(tmp_path, preemption=mock.Mock(side_effect=[None, away, "soon"])) as manager:
        clock_s = itertools.count()
        manager._schedule._clock = lambda: float(next(clock_s))  # noqa: SLF001  # not public
        assert len([step for step in range(1, 200) if manager.should_save(step)]) == 1
        assert manager.preempted == "the preemption hook on rank 0"
    assert "the metadata server is away" in caplog.text


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
