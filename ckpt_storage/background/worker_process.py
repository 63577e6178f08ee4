"""The worker process of a rank, as its trainer sees it: how it starts, messages, how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from multiprocessing import Pipe, reduction, spawn
from typing import Any

from ckpt_storage.errors import CheckpointError

from .messages import Response
from .priorities import IoClass
from .start import LAUNCHER_SIGNALS, StartRequest

log = logging.getLogger("ckpt_storage")

LOOK_S = 0.1
"""How long one check for a message takes."""

START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""

_END_S = 5.0


class WorkerGoneError(Exception):
    """The worker is gone; the message says how."""


class WorkerProcess:
    """One worker process of a rank, and the trainer's end of its pipe; one save at a time.

    `silence_s`: how long it may send nothing during a call. `name` is for messages.
    """

    def __init__(
        self,
        global_rank: int,
        rank: int,
        silence_s: float,
        *,
        nice: int | None = None,
        io_class: IoClass | None = None,
    ) -> None:
        """Start it, with its priorities, and do not wait. Raises `CheckpointError`."""
        self.silence_s = silence_s
        self.has_started = False
        self._start_end_s = time.monotonic() + START_S
        preparation = spawn.get_preparation_data(f"ckpt-storage worker {global_rank}")
        del preparation["authkey"]  # does not pickle
        request = StartRequest(
            rank=rank, log_level=log.getEffectiveLevel(), preparation=preparation
        )
        try:
            self._pipe, worker_end = Pipe()
            with worker_end:
                self._process = start_process(worker_end.fileno(), nice, io_class)
            self.name = f"worker process {self._process.pid} of rank {global_rank}"
            self.close = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())
        except OSError as error:
            raise CheckpointError(
                f"Rank {global_rank} cannot start its worker process: {error}.",
                rank=global_rank,
                phase="stage",
                next_step="See how many processes and open files it has and may have (ulimit -u, "
                "-n), or use mode='thread'.",
            ) from error
        with contextlib.suppress(OSError):  # it has ended, which the save reports
            self._pipe.send(request)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        return self._process.pid if self._process.poll() is None else None

    def check_start(self) -> bool:
        """Return whether the worker can begin a save: `has_started`. Raises `WorkerGoneError`."""
        if not self.has_started and self._pipe.poll():
            self.has_started = isinstance(self.receive(), Response)
        if not self.has_started and time.monotonic() > self._start_end_s:
            self.kill()
            raise WorkerGoneError(f"did not start within {START_S:g} s and was ended")
        return self.has_started

    def is_usable(self) -> bool:
        """Return whether the worker is starting, or waits for a save."""
        if self._pipe.closed:
            return False
        with contextlib.suppress(WorkerGoneError):
            # A worker that waits sends nothing: what can be read is its end.
            if not (self.check_start() and self._pipe.poll()) and self.pid is not None:
                return True
        log.warning("The %s %s; a new worker is started.", self.name, self.exit_description())
        self.close()
        return False

    def send(self, message: object, file: int | None = None) -> None:
        """Send a message and a descriptor.

        Raises `WorkerGoneError` if the worker reads neither within `silence_s`.
        """
        limit = struct.pack("ll", max(1, int(self.silence_s)), 0)
        try:
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._pipe.send(message)
            if file is not None:
                reduction.send_handle(self._pipe, file, None)
        except OSError:
            raise WorkerGoneError(self.exit_description()) from None

    def receive(self) -> Any:  # noqa: ANN401  # a message of any kind
        """Return the next message, None if there is none within `LOOK_S`.

        Raises `WorkerGoneError`.
        """
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(LOOK_S):
                return self._pipe.recv()
            if self.pid is not None:
                return None
        raise WorkerGoneError(self.exit_description())

    def kill(self) -> list[Any]:
        """End the worker; return the messages that it had sent."""
        self._process.kill()
        messages: list[Any] = []
        with contextlib.suppress(EOFError, OSError, subprocess.TimeoutExpired):
            self._process.wait(_END_S)
            while self._pipe.poll():
                messages.append(self._pipe.recv())
        self.close()
        return messages

    def exit_description(self) -> str:
        """Return how the process ended; a process whose pipe is closed is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
            return f"ended with exit code {code}"
        return "read no message and was ended"


def start_process(
    pipe_fd: int, nice: int | None, io_class: IoClass | None
) -> subprocess.Popen[bytes]:
    """Start a new interpreter that runs `run_worker` and ignores the signals of launchers.

    Not a fork, which would have the locks and devices of the trainer.
    """
    path = [str(entry) for entry in sys.path]  # programs add objects of `pathlib`
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        "from ckpt_storage.background.start import run_worker; "
        f"run_worker({pipe_fd}, {os.getpid()}, {nice!r}, {io_class!r})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  # as multiprocessing
    command = [spawn.get_executable(), *flags, "-c", code]
    # Inherited: Python takes a moment until it can ignore a signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[pipe_fd])  # noqa: S603  # this interpreter
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[bytes], pipe: Any, owner_pid: int) -> None:  # noqa: ANN401  # a Connection
    pipe.close()
    if os.getpid() != owner_pid:
        process.returncode = 0  # a child of fork has no part in it
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
