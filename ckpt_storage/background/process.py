"""One worker process, as its trainer holds it: how it starts, is fed, went, and is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import weakref
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize

from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.saves.options import SaveOptions

from .arena import Arena
from .staging import Staged
from .worker import KEPT_PLANS, Setup, State, worker_main

_END_S = 5.0

_START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""


class GoneError(Exception):
    """The worker is gone; the message says how."""


class WorkerProcess:
    """One worker process that has been started, and our ends of its pipes.

    Raises `InvalidInputError` where none may be had, `CheckpointError` where none is to be had now.
    """

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        try:
            self.control, their_control = context.Pipe()
            states, their_states = context.Pipe()
            self.process: SpawnProcess = context.Process(
                target=worker_main,
                args=(setup, their_control, their_states),
                name=f"ckpt-storage worker {setup.rank}",
                daemon=True,
            )
            self.process.start()
        except AssertionError as error:
            raise InvalidInputError(
                f"No worker process can be started here: {error}.", next_step="Use mode='thread'."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"Rank {setup.rank} cannot start its worker process: {error}.",
                rank=setup.rank,
                phase="stage",
                next_step="See how many processes and open files it has and may have (ulimit -u, "
                "-n), or use mode='thread'.",
            ) from error
        their_control.close()
        their_states.close()
        _workers.add(self.process)
        self._states = states
        self._arenas: dict[int, weakref.ref[Arena]] = {}
        self._plans: list[str] = []
        self.has_beaten = False
        # Runs before multiprocessing asks it to end and waits: a stopped process never would.
        self.end = Finalize(None, _end, (self.process, self.control, states), exitpriority=100)

    @property
    def slack_s(self) -> float:
        """How much longer than a sign of life its first one may take."""
        return 0.0 if self.has_beaten else _START_S

    def send(self, message: object, timeout_s: float) -> None:
        """Send on the control pipe. Raises `GoneError` if nobody takes it within the limit."""
        with self._sent(self.control, timeout_s + self.slack_s):
            self.control.send(message)

    def send_state(self, staged: Staged) -> None:
        """Send what was staged on the other pipe; as `send`.

        An arena's descriptor crosses once, and so does a local plan.
        """
        arena, local = staged.arena, staged.local
        assert arena.file is not None  # noqa: S101  # it is shared, and leased
        gone = [at for at, held in self._arenas.items() if (it := held()) is None or not it.file]
        for at in gone:
            del self._arenas[at]
        state = State(
            arena_id=arena.arena_id,
            arena_bytes=arena.size_bytes,
            with_file=arena.arena_id not in self._arenas,
            gone=gone,
            key=local.key,
            local=None if local.key in self._plans else pickle.dumps(local),
            places=staged.places,
            ties=staged.ties,
        )
        with self._sent(self._states, _START_S):
            self._states.send(state)
            if state.with_file:
                reduction.send_handle(self._states, arena.file, None)
        self._arenas[arena.arena_id] = weakref.ref(arena)
        if state.local is not None:
            self._plans = [*self._plans, local.key][-KEPT_PLANS:]

    @contextlib.contextmanager
    def _sent(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        limit = struct.pack("ll", max(1, int(timeout_s)), 0)
        with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            yield
        except OSError:
            raise GoneError(self.how()) from None

    def how(self) -> str:
        """Return how it went; one whose pipes are closed is about to."""
        self.process.join(_END_S)
        code = self.process.exitcode
        if code is None:
            return "took no message and was ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


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


def twin_of(planner: SavePlanner) -> SavePlanner:
    """Return a planner with the same attributes, which may be set up without the other."""
    twin: SavePlanner = object.__new__(type(planner))
    vars(twin).update(vars(planner))
    return twin


def pack(options: SaveOptions) -> bytes:
    """Return options as a worker gets them. Raises `InvalidInputError`."""
    try:
        # Callables of the trainer stay here: they get what the worker's beats tell.
        return pickle.dumps(dataclasses.replace(options, progress=None))
    except BaseException as error:
        raise InvalidInputError(
            f"The planner or another argument cannot be sent to the worker process: {error}.",
            phase="stage",
            next_step="Define its class at the top of a module, or use mode='thread'.",
        ) from error
