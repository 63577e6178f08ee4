"""One worker process, as its trainer holds it: how it starts, how it went, how it is ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import weakref
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize

from ckpt_storage.errors import CheckpointError, InvalidInputError

from .stagewire import StateSender
from .worker import Setup, worker_main

__all__ = ["WorkerProcess"]

_END_S = 5.0

_START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""


class WorkerProcess:
    """A worker that has been started, and our ends of its pipes.

    Raises `InvalidInputError` where none may be had, `CheckpointError` where none is to be had now.
    """

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        try:
            self.control, their_control = context.Pipe()
            states, their_states = context.Pipe()
        except OSError as error:
            raise _no_worker(setup, error) from error
        self._process = context.Process(
            target=worker_main,
            args=(setup, their_control, their_states),
            name=f"ckpt-storage worker {setup.rank}",
            daemon=True,
        )
        try:
            self._process.start()
        except AssertionError as error:
            raise InvalidInputError(
                f"No worker process can be started here: {error}.", next_step="Use mode='thread'."
            ) from error
        except OSError as error:
            raise _no_worker(setup, error) from error
        their_control.close()
        their_states.close()
        _workers.add(self._process)
        self.sender = StateSender(states)
        self.has_beaten = False
        # Runs before multiprocessing asks it to end and waits: a stopped process never would.
        self.end = Finalize(None, _end, (self._process, self.control, states), exitpriority=100)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` finds ready once it has ended."""
        return self._process.sentinel

    @property
    def slack_s(self) -> float:
        """How much longer than a sign of life its first one may take."""
        return 0 if self.has_beaten else _START_S

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return self._process.is_alive()

    def how(self) -> str:
        """Return how it went; one whose pipes are closed is about to."""
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "took no message and was ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _no_worker(setup: Setup, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Rank {setup.rank} cannot start its worker process: {error}.",
        rank=setup.rank,
        phase="stage",
        next_step="See how many processes and open files it has and may have (ulimit -u, -n), or "
        "use mode='thread'.",
    )


_workers: weakref.WeakSet[SpawnProcess] = weakref.WeakSet()


def _disown() -> None:
    """Let a child of fork end no worker of its parent when it exits, as multiprocessing would."""
    children: set[object] = multiprocessing.process._children  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
    children.difference_update(_workers)


os.register_at_fork(after_in_child=_disown)


def _end(process: SpawnProcess, control: Connection, states: Connection) -> None:
    control.close()
    states.close()
    process.kill()
    process.join(_END_S)
