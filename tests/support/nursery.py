"""A process that has imported what is slow to import, and forks of it that end as scripts do.

All that may keep an interpreter from ending does so in a fork, too. What one prints, and the code
with which it ended, are in files.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
_EXIT_S = 30.0

_Job = tuple[str, Callable[..., object], tuple[Any, ...]]


class Nursery:
    """Starts forks of a process that has imported `modules`; a context manager, which ends all.

    `flags` are those of the interpreter.
    """

    def __init__(self, *modules: str, flags: Sequence[str] = ("-W", "ignore")) -> None:
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, *flags, __file__, *modules],
            stdin=subprocess.PIPE,
            env={**os.environ, **path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._process.kill()  # its forks die with it
        self._process.communicate(timeout=_EXIT_S)

    def run(
        self, folder: Path, function: Callable[..., object], *args: Any, count: int = 1
    ) -> tuple[list[int | None], list[str], str]:
        """Let new processes call a function with their numbers first, and end.

        Return exit codes, the words that they printed, and what they wrote to standard error.
        """
        logs = [folder / f"log-{number}" for number in range(count)]
        for number, log in enumerate(logs):
            self.start(log, function, number, *args)
        codes = ended(logs, 120.0)
        out, err = ("".join(Path(f"{log}.{e}").read_text() for log in logs) for e in ("out", "err"))
        return codes, out.split(), err

    def start(self, log: Path, function: Callable[..., object], *args: Any) -> None:
        """Let a new process call a function; `log`.out and `log`.err get what it prints."""
        assert self._process.stdin is not None
        pickle.dump((str(log), function, args), self._process.stdin)
        self._process.stdin.flush()


def ended(logs: Iterable[Path], limit_s: float) -> list[int | None]:
    """Return the exit codes of the processes with these logs; None for one that does not end."""
    files = [Path(f"{log}.code") for log in logs]
    end_s = time.monotonic() + limit_s
    while not all(file.exists() for file in files) and time.monotonic() < end_s:
        time.sleep(0.005)
    return [int(file.read_text()) if file.exists() else None for file in files]


def _born() -> _Job | None:
    """Fork a process for each job; return the job there, None in the nursery, at its end."""
    for module in sys.argv[1:]:
        importlib.import_module(module)  # once, before the forks
    while True:
        try:
            job: _Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return None
        if (pid := os.fork()) == 0:
            return job
        threading.Thread(target=_tell_of_end, args=(pid, job[0]), daemon=True).start()


def _tell_of_end(pid: int, log: str) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(f"{log}.tmp").write_text(str(code))
    Path(f"{log}.tmp").rename(f"{log}.code")


def _settle(log: str) -> None:
    """Take a session and logs of its own, and the wish to die with the nursery."""
    os.setsid()
    # A shell that runs something in the background lets it ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, name in enumerate((os.devnull, f"{log}.out", f"{log}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)


if __name__ == "__main__" and (_job := _born()) is not None:
    _settle(_job[0])
    _job[1](*_job[2])
