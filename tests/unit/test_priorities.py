"""The priorities of worker processes, as the kernel and util-linux show them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG_S
from saver_cases import quick_saver, until

from ckpt_storage import AsyncSaver, InvalidInputError
from ckpt_storage.background.priorities import apply_priorities, check_priorities

SCRIPT = """
import os, subprocess, sys, threading
from ckpt_storage.background.priorities import apply_priorities

end = threading.Event()
apply_priorities(7, sys.argv[1])
threading.Thread(target=end.wait).start()
tasks = os.listdir("/proc/self/task")
for task in tasks:
    nice = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[16]
    shown = subprocess.run(["ionice", "-p", task], capture_output=True, text=True).stdout.strip()
    print(nice, shown)
end.set()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("ionice"), reason="needs Linux and util-linux"
)
@pytest.mark.parametrize(
    ("io_class", "shown"), [("idle", "idle"), ("best-effort", "best-effort: prio 7")]
)
def test_all_threads_have_the_priorities(io_class: str, shown: str) -> None:
    """Threads that start later are as nice, and of the same class of I/O."""
    command = [sys.executable, "-c", SCRIPT, io_class]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    lines = done.stdout.splitlines()
    assert set(lines) == {f"7 {shown}"}
    assert len(lines) >= 2
    assert done.stderr == ""


def test_what_the_system_refuses_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A priority that needs a privilege, or a system without ionice, ends no worker."""
    monkeypatch.setenv("PATH", "")
    apply_priorities(None, "idle")
    assert "No such file or directory: 'ionice'" in caplog.text
    caplog.clear()

    def refused(*_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refused)
    apply_priorities(-5, None)
    assert "Permission denied" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "process", "worker_nice": 20}, "worker_nice is 20"),
        ({"mode": "process", "worker_nice": True}, "worker_nice is True"),
        ({"mode": "process", "worker_ionice": "realtime"}, "worker_ionice is 'realtime'"),
        ({"mode": "thread", "worker_nice": 5}, "mode='thread' has none"),
    ],
)
def test_priorities_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    """A saver refuses them before it starts a worker."""
    with pytest.raises(InvalidInputError, match=message):
        AsyncSaver(**options)


def test_the_ends_of_the_range_are_priorities() -> None:
    """-20 and 19 are what setpriority(2) takes."""
    for nice in (-20, 19):
        check_priorities(nice, None, has_worker=True)


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("ionice"), reason="needs Linux and util-linux"
)
def test_workers_have_the_priorities_and_the_trainer_has_not(tmp_path: Path) -> None:
    """So also the worker that takes the place of one that was killed."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    with quick_saver("process", worker_nice=12, worker_ionice="idle", on_error="warn") as saver:
        for step in range(2):
            saver.save({"w": torch.ones(3)}, tmp_path / f"{step}", sync_files=False).result(HANG_S)
            pid = saver.worker_pid
            assert pid is not None
            assert os.getpriority(os.PRIO_PROCESS, pid) == 12
            shown = subprocess.run(["ionice", "-p", str(pid)], capture_output=True, check=True)  # noqa: S607
            assert shown.stdout.strip() == b"idle"
            os.kill(pid, signal.SIGKILL)
            until(lambda: saver.worker_pid is None, "the end of the worker")
    assert os.getpriority(os.PRIO_PROCESS, 0) == nice
