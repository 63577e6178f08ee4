"""The worker process of a rank: carries out the steps of its trainer's saves, and ends with it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.coordination.failures import as_checkpoint_errors, place_of, travelling
from ckpt_storage.coordination.keyvalue import COORDINATOR
from ckpt_storage.coordination.liveness import Heartbeats
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.saves.planning import Steps, rank_save
from ckpt_storage.saves.session import SaveOptions, SaveSession
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.threads import abandoned_thread_count

from .staging import StagedPlan, map_shared

BEAT_S = 0.25
"""How often a worker that is at work tells its trainer how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The first call of a save; the descriptor of its arena follows."""

    url: str
    options: bytes
    staged: bytes
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """What the save goes on with, or, if `is_over`, that it is to be forgotten."""

    word: Any = None
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call came to; an error is to be raised, `is_strange` if of no kind of ours."""

    found: Any
    is_strange: bool = False


class _Watch(Heartbeats):
    """The `Watch` over a save, and its phases: how far it is, and why it is to be given up."""

    def __init__(self, rank: int, tell: Callable[[object], None]) -> None:
        super().__init__(rank)
        self.timeouts = Timeouts()
        self.error: CheckpointError | None = None
        self._tell = tell

    def phase(self, phase: Phase) -> Deadline:
        """Begin a phase, in the trainer as well."""
        self._tell(phase)
        self.begin(phase, 0)
        return Deadline(phase, getattr(self.timeouts, phase), watch=self)

    def failure(self) -> CheckpointError | None:
        return self.error

    def failed(self, error: CheckpointError) -> None:
        """Let the trainer tell all ranks of a failure before the call ends, which may hang."""
        if self.error is None:
            self.error = error
            self._tell(travelling(error))


class _Worker:
    """The loop of one worker: one call at a time, each with an answer."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self._rank = rank
        self._pipe = pipe
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._watch = _Watch(rank, self._send)
        self._what = ""
        self._steps: Steps | None = None
        self._is_busy = False

    def serve(self) -> None:
        """Serve until the trainer closes the pipe."""
        threading.Thread(target=self._listen, name="ckpt-storage listen", daemon=True).start()
        while True:
            # Held in no variable while waiting: the trainer may want the memory back.
            self._answer(self._calls.get())

    def _answer(self, call: Callable[[], Any]) -> None:
        self._is_busy, is_strange = True, False
        try:
            with as_checkpoint_errors(self._what, self._rank, in_background=True):
                found = call()
        except CheckpointError as error:
            found = travelling(error)
            is_strange = type(error) is CheckpointError and error.__cause__ is not None
        with self._sending:
            # Its last beat; one that came after the answer would be taken for the next call's.
            self._pipe.send(self._watch.own())
            self._is_busy = False
            self._pipe.send(Reply(found, is_strange))

    def _begin(self, job: Job, memory: NDArray[np.uint8]) -> object:
        staged: StagedPlan = pickle.loads(job.staged)  # noqa: S301  # our trainer's
        try:
            options: SaveOptions = pickle.loads(job.options)  # noqa: S301  # our trainer's
        except BaseException as error:
            raise InvalidInputError(
                "The planner or another argument cannot be read in the worker process: "
                f"{type(error).__name__}: {error}.",
                phase="plan",
                next_step="Define its class at the top of a module, or use mode='thread'.",
            ) from error
        self._watch.timeouts = options.timeouts
        rank, begin = self._rank, self._watch.phase
        session = SaveSession(job.url, options, rank, begin, is_coordinator=rank == COORDINATOR)
        part = partial(staged.part, memory, options.planner)
        self._steps = rank_save(session, part, pickle.dumps)
        return next(self._steps)

    def _go_on(self, call: GoOn) -> object:
        """Return the next word; at the end, whether no thread is left that may read the state."""
        steps = self._steps
        if steps is not None and not call.is_over:
            return steps.send(call.word)
        self._steps = self._watch.error = None
        return abandoned_thread_count() == 0

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)

    def _listen(self) -> None:
        """Take what the trainer says; while nothing comes, beat."""
        parent_pid = os.getppid()
        # Once the trainer is gone, its pipe may still be open in children that it forked.
        with contextlib.suppress(EOFError, OSError):
            while os.getppid() == parent_pid:
                if self._pipe.poll(BEAT_S):
                    self._hear(self._pipe.recv())
                    continue
                with self._sending:
                    if self._is_busy:
                        self._pipe.send(self._watch.own())
        # Nobody is left to save for; threads that hang in a storage must not keep us.
        os._exit(0)

    def _hear(self, message: Job | GoOn | CheckpointError) -> None:
        if isinstance(message, Job):
            self._what = f"the save to {place_of(message.url)}"
            self._watch = _Watch(self._rank, self._send)
            memory = map_shared(reduction.recv_handle(self._pipe), message.arena_bytes)
            self._calls.put(partial(self._begin, message, memory))
        elif isinstance(message, GoOn):
            self._calls.put(partial(self._go_on, message))
        else:
            self._watch.error = self._watch.error or message


def worker_main(rank: int, log_level: int, pipe: Connection) -> None:
    """Run a worker; the target of a spawned process."""
    # An interrupt at the terminal reaches all processes of the job; what it means, the trainer
    # decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("ckpt_storage").setLevel(log_level)
    # What was imported is no garbage: to look for some there takes longer than to read a plan.
    gc.freeze()
    _Worker(rank, pipe).serve()
