"""The worker process of a rank: runs saves in its trainer's operation, and ends with it."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import Report, as_checkpoint_errors, travelling
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import run_save
from ckpt_storage.store.calls import abandoned_thread_count
from ckpt_storage.store.deadline import Deadline

from .arena import map_shared
from .staging import StagedPlan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BEAT_S = 0.25
"""How often a worker tells its trainer how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save; the descriptor of its arena follows."""

    url: str
    options: bytes
    staged: bytes
    arena_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a step came to: a value, or an error to be raised."""

    value: Any = None
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A call of the trainer's operation, whose attributes become `facts`; a `Reply` answers it."""

    name: str
    args: tuple[Any, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a save ended; `is_clean`: no thread was left behind that may still read the state."""

    found: CheckpointInfo | CheckpointError
    is_clean: bool
    is_void: bool


def _step(name: str) -> Any:  # noqa: ANN401  # each step has a type of its own
    def call(operation: PipedOperation, *args: object) -> Any:  # noqa: ANN401  # as the step's own
        return operation.step(name, *args)

    return call


class PipedOperation(Operation):
    """The trainer's `Operation`, borrowed: each step is a call that the trainer carries out."""

    def __init__(
        self, send: Callable[[object], None], group: RankGroup, timeouts: Timeouts
    ) -> None:
        super().__init__(group, "", timeouts)
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._send = send

    meet = _step("meet")
    gather_bytes = _step("gather_bytes")
    scatter_bytes = _step("scatter_bytes")
    broadcast_bytes = _step("broadcast_bytes")
    announce_bytes = _step("announce_bytes")
    outcome_bytes = _step("outcome_bytes")
    is_last_word = _step("is_last_word")

    def step(self, name: str, *args: object) -> Any:  # noqa: ANN401  # as the step's own
        """Let the trainer carry out a step, and return or raise what it comes to."""
        facts = {"what": self.what, "save_id": self.save_id, "committed": self.committed}
        self._send(Step(name=name, args=args, facts=facts))
        reply = self.replies.get()
        if reply.error is not None:
            raise reply.error
        return reply.value

    def end(self, error: CheckpointError) -> None:
        """End all waits of this process with `error`."""
        self.take_report(Report(rank=self.rank, error=error))

    def failed(self, error: CheckpointError) -> None:
        """Let the trainer tell all ranks of a failure before it leaves the save."""
        if self.failure() is None:
            self.end(error)
            self._send(travelling(error))

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase, here and in the trainer."""
        self._send(self.heartbeats.own())
        self.step("phase", phase, timeout_s)
        return super().phase(phase, timeout_s, total_bytes=total_bytes)


class _Worker:
    """The loop of one worker."""

    def __init__(self, group: RankGroup, pipe: Connection) -> None:
        self._group = group
        self._pipe = pipe
        self._sending = threading.Lock()
        self._operation: PipedOperation | None = None
        self._is_busy = False
        self._jobs: queue.SimpleQueue[tuple[Job, NDArray[np.uint8]]] = queue.SimpleQueue()

    def serve(self) -> None:
        """Serve until the trainer closes the pipe."""
        for target in (self._beat, self._listen):
            name = f"ckpt-storage {target.__name__.strip('_')}"
            threading.Thread(target=target, name=name, daemon=True).start()
        while True:
            # Held in no variable while waiting: the trainer may want the memory back.
            self._carry_out(*self._jobs.get())

    def _carry_out(self, job: Job, memory: NDArray[np.uint8]) -> None:
        self._is_busy = True
        found: CheckpointInfo | CheckpointError
        try:
            with as_checkpoint_errors(f"the save to {job.url}", self._group.rank):
                found = self._run(job, memory)
        except CheckpointError as error:
            found = travelling(error)
        begun = self._operation
        outcome = Outcome(
            found=found,
            is_clean=abandoned_thread_count() == 0,
            is_void=begun is not None and begun.is_void,
        )
        self._is_busy, self._operation = False, None
        self._send(outcome)

    def _run(self, job: Job, memory: NDArray[np.uint8]) -> CheckpointInfo:
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
        part = partial(staged.part, memory, options.planner)
        self._operation = PipedOperation(self._send, self._group, options.timeouts)
        return run_save(self._operation, job.url, options, lambda _: part, in_background=True)

    def _beat(self) -> None:
        pause, parent_pid = threading.Event(), os.getppid()
        idle = RankProgress(rank=self._group.rank, phase="plan")
        while not pause.wait(BEAT_S):
            if os.getppid() != parent_pid:
                # Its pipe may still be open in children that it forked.
                os._exit(0)
            # Made and sent at once: an older one that came later would tell of the last phase.
            with self._sending:
                # In this order: the end of a save clears them in the other.
                operation, is_busy = self._operation, self._is_busy
                if is_busy:
                    self._pipe.send(idle if operation is None else operation.heartbeats.own())

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._pipe.recv()
                operation = self._operation
                if isinstance(message, Job):
                    file = reduction.recv_handle(self._pipe)
                    self._jobs.put((message, map_shared(file, message.arena_bytes)))
                elif operation is not None and isinstance(message, Reply):
                    operation.replies.put(message)
                elif operation is not None:
                    operation.end(message)
        except (EOFError, OSError):
            # Nobody is left to save for; threads that hang in a storage must not keep us.
            os._exit(0)


def worker_main(rank: int, world_size: int, log_level: int, pipe: Connection) -> None:
    """Run a worker; the target of a spawned process."""
    # An interrupt at the terminal reaches all processes of the job; what it means, the trainer
    # decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("ckpt_storage").setLevel(log_level)
    # What was imported is no garbage: to look for some there takes longer than to read a plan.
    gc.freeze()
    _Worker(RankGroup.alone(rank, world_size), pipe).serve()
