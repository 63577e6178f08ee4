"""The trainer's end of its worker process: starts it, feeds it saves, carries out their steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import travelling
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.progress import reporting
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import hear_outcome, look_up_outcome, unexported
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.calls import halted

from .worker import Job, Outcome, Reply, Step, worker_main

if TYPE_CHECKING:
    from .queue import SaveJob

log = logging.getLogger("ckpt_storage")

START_METHOD: Literal["spawn", "forkserver"] = "spawn"
"""How workers start: a fork of the trainer would have its locks and devices."""

_LOOK_S = 0.1
_END_S = 5.0
_GRACE_S = 5.0
"""How long a worker may take to give up a save that has failed elsewhere."""

_START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""


Message = RankProgress | Step | Outcome | CheckpointError
"""What a worker tells: how far it is, or, with an error, that the save cannot go on."""


class GoneError(Exception):
    """The worker is gone; the message says how."""


class Worker:
    """One worker process of a rank, and our end of its pipe; it runs one save at a time."""

    def __init__(self, ranks: RankGroup, silence_s: float) -> None:
        """Start it. Raises `InvalidInputError` where that is not possible, or `CheckpointError`."""
        rank = ranks.rank
        context = multiprocessing.get_context(START_METHOD)
        try:
            self._pipe, theirs = context.Pipe()
            self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # a stub
                target=worker_main,
                args=(rank, ranks.world_size, log.getEffectiveLevel(), theirs),
                name=f"ckpt-storage worker {rank}",
                daemon=True,
            )
            self.process.start()
        except AssertionError as error:
            raise InvalidInputError(
                f"No worker process can be started here: {error}.", next_step="Use mode='thread'."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"Rank {rank} cannot start its worker process: {error}.",
                rank=rank,
                phase="stage",
                next_step="See how many processes and open files it has and may have (ulimit -u, "
                "-n), or use mode='thread'.",
            ) from error
        theirs.close()
        _processes.add(self.process)
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self.has_spoken = False
        # Runs before multiprocessing asks it to end and waits: a stopped process never would.
        self.close = Finalize(None, _end, (self.process, self._pipe), exitpriority=100)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        return self.process.pid if self.process.is_alive() else None

    def is_ready(self) -> bool:
        """Return whether an idle worker lives: it says nothing, so there is only an end to read."""
        if self._pipe.closed:
            return False
        if self._pipe.poll() or not self.process.is_alive():
            log.warning("The %s %s; a new one is started.", self.process.name, self.how())
            self.close()
            return False
        return True

    def run(self, operation: Operation, job: SaveJob) -> CheckpointInfo:
        """Run one save in `operation`, and return or raise how it ended; it may be closed then."""
        run = _Run(self, operation, job)
        try:
            outcome = run.serve()
        except GoneError as gone:
            error = run.death(gone)
            self.close()
            return run.ended_without_worker(error)
        except BaseException:
            # What it goes on to tell is of this save, and must not be taken for the next one's.
            run.is_over = True
            self.close()
            raise
        if not outcome.is_clean:
            # A thread of it may still read the state that is given up now.
            self.close()
        operation.is_void = outcome.is_void
        if isinstance(outcome.found, CheckpointError):
            raise outcome.found
        return outcome.found

    def send(self, message: object, *, file: int | None = None) -> None:
        """Send a message and a descriptor. Raises `GoneError` if nobody takes it in time."""
        limit = struct.pack("ll", max(1, int(self._quiet_s)), 0)
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._pipe.send(message)
            if file is not None:
                reduction.send_handle(self._pipe, file, None)
        except OSError:
            raise GoneError(self.how()) from None

    def messages(self, limit_s: float) -> Iterator[Message]:
        """Yield what it tells to the end of a save.

        Raises `GoneError` once it is silent, or was not done in time.
        """
        heard_s = time.monotonic()
        end_s = heard_s + limit_s + self._quiet_s
        message: Message | None = None
        try:
            while not isinstance(message, Outcome):
                halted()
                if wait([self._pipe, self.process.sentinel], _LOOK_S):
                    if not self._pipe.poll():
                        raise GoneError(self.how())
                    message = self._pipe.recv()
                    heard_s, self.has_spoken = time.monotonic(), True
                    yield message
                elif time.monotonic() > heard_s + self._quiet_s:
                    raise GoneError(f"gave no sign of life for {self._quiet_s:g} s and was ended")
                elif time.monotonic() > end_s:
                    raise GoneError("did not end the save by its deadlines and was ended")
        except (EOFError, OSError):
            raise GoneError(self.how()) from None

    @property
    def _quiet_s(self) -> float:
        """How long it may say nothing."""
        return self._silence_s + (0.0 if self.has_spoken else _START_S)

    def how(self) -> str:
        """Return how it went; one whose pipe is closed is about to."""
        with self._lock:
            self.process.join(_END_S)
            code = self.process.exitcode
        if code is None:
            return "took no message and was ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


_processes: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _disown() -> None:
    """Let a child of fork end no worker of its parent when it exits, as multiprocessing would."""
    children: set[object] = multiprocessing.process._children  # type: ignore[attr-defined]  # noqa: SLF001  # no public way
    children.difference_update(_processes)


os.register_at_fork(after_in_child=_disown)


def _end(process: BaseProcess, pipe: Any) -> None:  # noqa: ANN401  # a Connection
    process.kill()
    process.join(_END_S)
    pipe.close()


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


class _Run:
    """One save in the worker: a thread hears it, and its steps are carried out in the operation."""

    def __init__(self, worker: Worker, operation: Operation, job: SaveJob) -> None:
        self._worker = worker
        self._operation = operation
        self._job = job
        self._inbox: queue.SimpleQueue[Step | Outcome | BaseException] = queue.SimpleQueue()
        self._gone: GoneError | None = None
        self._death: RankFailedError | None = None
        self._is_bound = False  # the save may end well without the worker
        self.is_over = False  # its end is our doing, and no news to other ranks
        self._reports: dict[str, Callable[[int], None]] = {}

    def serve(self) -> Outcome:
        """Carry out the steps of the worker until the save has ended. Raises `GoneError`."""
        worker, operation, job = self._worker, self._operation, self._job
        staging = job.staging
        assert staging is not None  # noqa: S101  # or it were refused
        first = Job(
            url=os.fspath(job.url),
            options=job.packed,
            staged=pickle.dumps(staging.staged),
            arena_bytes=staging.arena.size_bytes,
        )
        worker.send(first, file=staging.arena.file)
        threading.Thread(target=self._read, name="ckpt-storage save: worker", daemon=True).start()
        failed_s: float | None = None
        while True:
            halted()
            try:
                message = self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                pass
            else:
                if isinstance(message, Outcome):
                    return message
                if isinstance(message, BaseException):
                    raise message
                worker.send(self._reply_to(message))
            failure = operation.failure()
            if failure is not None and failed_s is None:
                failed_s = time.monotonic()
                worker.send(travelling(failure))
            elif failed_s and time.monotonic() > failed_s + _GRACE_S + operation.timeouts.silence:
                raise GoneError("did not give up the save and was ended")

    def _reply_to(self, step: Step) -> Reply:
        """Carry out one step. Raises `GoneError`."""
        operation = self._operation
        for name, fact in step.facts.items():
            setattr(operation, name, fact)
        if self._gone is not None and not self._is_bound:
            raise self._gone
        try:
            value = getattr(operation, step.name)(*step.args)
        except CheckpointError as error:
            if self._gone is not None:
                raise self._gone from None
            return Reply(error=travelling(error))
        return Reply(value=None if step.name == "phase" else value)

    def _read(self) -> None:
        """Take in what the worker tells until the save has ended, in a thread of its own."""
        operation, t = self._operation, self._job.options.timeouts
        end: Outcome | BaseException | None = None
        try:
            with contextlib.ExitStack() as shown:
                limit_s = 2 * t.plan + 2 * t.write + 2 * t.commit + t.consolidate
                for message in self._worker.messages(limit_s):
                    if isinstance(message, Outcome):
                        end = message
                    elif isinstance(message, Step):
                        self._is_bound = self._binds(message)
                        self._inbox.put(message)
                    elif isinstance(message, RankProgress):
                        self._take_beat(message, shown)
                    else:
                        operation.failed(message)
        except GoneError as gone:
            end = self._gone = gone
            if not (self._is_bound or self.is_over):
                try:
                    operation.failed(self.death(gone))
                except CheckpointError as error:
                    log.warning("Not all ranks may hear that a worker is gone: %s", error)
        except BaseException as error:  # noqa: BLE001  # raised by `serve`
            end = error
        self._inbox.put(end or AssertionError())

    def _binds(self, step: Step) -> bool:
        """Return whether, from this step on, others may commit, or this rank may have."""
        operation = self._operation
        if step.facts["committed"] is not None:
            return False
        is_part = step.name == "gather_bytes" and operation.deadline.phase == "write"
        is_commit = step.name == "phase" and step.args[0] == "commit"
        return self._is_bound or is_commit or (is_part and not operation.is_coordinator)

    def _take_beat(self, beat: RankProgress, shown: contextlib.ExitStack) -> None:
        """Note how far the worker is, and show it in the phases that move bytes."""
        operation, own = self._operation, self._operation.heartbeats.own()
        if beat.phase != own.phase:
            return  # it was under way while the next one began here
        if beat.total_bytes:
            operation.expect(beat.total_bytes)
        for _ in range(beat.done_files - own.done_files):
            operation.ended_file()
        more_bytes, phase = beat.done_bytes - own.done_bytes, own.phase
        if more_bytes <= 0:
            return
        operation.advanced(more_bytes)
        if phase in {"write", "consolidate"}:
            if phase not in self._reports:
                self._reports[phase] = shown.enter_context(
                    reporting(
                        self._job.options.progress,
                        phase=phase,
                        rank=operation.rank,
                        total_bytes=beat.total_bytes,
                        save_id=operation.save_id,
                        with_bar=operation.is_coordinator,
                    )
                )
            self._reports[phase](more_bytes)

    def death(self, gone: GoneError) -> RankFailedError:
        """Return the error that names the worker that is gone, and how it went."""
        if self._death is None:
            operation = self._operation
            rank, phase = operation.rank, operation.deadline.phase
            self._death = RankFailedError(
                f"The worker process {self._worker.process.pid} of rank {rank} {gone} in the "
                f"{phase} phase of {operation.what}.",
                failures={rank: str(gone)},
                rank=rank,
                phase=phase,
                next_step="See why (out of memory?). Training can go on, and the next save starts "
                "a new worker."
                if self._worker.has_spoken
                else "It never took the save up: see what it printed. The trainer's script must be "
                "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
            )
        return self._death

    def ended_without_worker(self, error: CheckpointError) -> CheckpointInfo:
        """Return what the save came to whose worker is gone, or raise it in the operation."""
        operation, options = self._operation, self._job.options
        if operation.committed is not None:
            raise unexported(error, operation.committed)
        if not self._is_bound:
            raise error
        session = SaveSession(self._job.url, options, operation)
        if operation.is_coordinator:
            found = look_up_outcome(operation, session, error)
            operation.announce(found)
            if isinstance(found, CheckpointError):
                raise found
        else:
            # Its part is complete, and the others go on with the save.
            if operation.deadline.phase == "write":
                operation.phase("commit", options.timeouts.write + options.timeouts.commit)
            found = hear_outcome(operation, session)
        if options.consolidate:
            raise unexported(error, found)
        log.warning("%s The save is committed all the same.", error)
        return found
