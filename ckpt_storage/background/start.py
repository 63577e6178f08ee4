"""The first code of a worker process. It imports no torch, and begins before the trainer's script.

An import that hangs must neither end by a launcher's signal nor outlive the trainer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
from typing import Any

from .priorities import IoClass, apply_priorities

LAUNCHER_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *range(getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", -1) + 1),
)
"""What launchers send to all processes of a job; the trainer decides what it means."""

_PARENT_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The first message to a new worker. It responds once it can begin a save.

    `preparation` is that of `multiprocessing.spawn`: `sys.path`, the working folder, the script.
    """

    rank: int
    log_level: int
    preparation: Mapping[str, Any]


def run_worker(pipe_fd: int, parent_pid: int, nice: int | None, io_class: IoClass | None) -> None:
    """Run a worker until its parent ends or closes the pipe."""
    # The parent blocked these already, while Python started.
    for number in LAUNCHER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Threads that start later inherit the priorities.
    apply_priorities(nice, io_class)
    threading.Thread(
        target=_end_with_parent, args=[parent_pid], name="ckpt-storage parent", daemon=True
    ).start()
    pipe = Connection(pipe_fd)
    request: StartRequest = pipe.recv()
    # As multiprocessing's own spawned processes: a script without a main guard gets its error.
    current: object = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
    spawn.prepare(request.preparation)
    del current._inheriting  # type: ignore[attr-defined]  # noqa: SLF001  # as above

    from .worker import Worker  # noqa: PLC0415  # imports torch

    Worker(request.rank, pipe, log_level=request.log_level).serve()


def _end_with_parent(parent_pid: int) -> None:
    """End this process once its parent has: the pipe may still be open in forks of the parent."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_LOOK_S)
    os._exit(0)
