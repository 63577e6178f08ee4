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
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import place_of, travelling
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.progress import reporting
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import hear_outcome, look_up_outcome, unexported
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.calls import halted

from .arena import Arena
from .worker import KEPT_PLANS, Beat, Failed, Job, Outcome, Reply, Step, worker_main

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

_EXCHANGES = frozenset({"gather_bytes", "scatter_bytes", "broadcast_bytes"})


class GoneError(Exception):
    """The worker is gone; the message says how."""


class _Child:
    """One worker process that has been started, and our end of its pipe."""

    def __init__(self, rank: int, world_size: int, silence_s: float) -> None:
        context = multiprocessing.get_context(START_METHOD)
        try:
            self.pipe, theirs = context.Pipe()
            self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # a stub
                target=worker_main,
                args=(rank, world_size, log.getEffectiveLevel(), theirs),
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
        self._arenas: dict[int, weakref.ref[Arena]] = {}
        self._plans: list[str] = []
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self.has_spoken = False
        # Runs before multiprocessing asks it to end and waits: a stopped process never would.
        self.end = Finalize(None, _end, (self.process, self.pipe), exitpriority=100)

    @property
    def quiet_s(self) -> float:
        """How long it may say nothing."""
        return self._silence_s + (0.0 if self.has_spoken else _START_S)

    def send(self, message: object, *, file: int | None = None) -> None:
        """Send a message and a descriptor. Raises `GoneError` if nobody takes it in time."""
        limit = struct.pack("ll", max(1, int(self.quiet_s)), 0)
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as pipe:
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self.pipe.send(message)
            if file is not None:
                reduction.send_handle(self.pipe, file, None)
        except OSError:
            raise GoneError(self.how()) from None

    def send_job(self, job: SaveJob) -> None:
        """Send a save; as `send`. An arena's descriptor crosses once, and so does a local plan."""
        assert job.staging is not None  # noqa: S101  # or it were refused
        arena, plan = job.staging.arena, job.staging.plan
        self._arenas = {
            at: held for at, held in self._arenas.items() if (it := held()) is not None and it.file
        }
        is_new = arena.arena_id not in self._arenas
        self._arenas[arena.arena_id] = weakref.ref(arena)
        message = Job(
            number=job.number,
            url=os.fspath(job.url),
            options=job.packed,
            plan_id=plan.plan_id,
            plan=None if plan.plan_id in self._plans else pickle.dumps(plan),
            places=job.staging.places,
            arena_id=arena.arena_id,
            arena_bytes=arena.size_bytes,
            arena_ids=list(self._arenas),
            with_file=is_new,
        )
        self.send(message, file=arena.file if is_new else None)
        if message.plan is not None:
            self._plans = [*self._plans, plan.plan_id][-KEPT_PLANS:]

    def messages(self, limit_s: float) -> Iterator[Beat | Step | Outcome]:
        """Yield what it tells. Raises `GoneError` once it is silent, or was not done in time."""
        heard_s = time.monotonic()
        end_s = heard_s + limit_s + self.quiet_s
        try:
            while True:
                halted()
                if not wait([self.pipe, self.process.sentinel], _LOOK_S):
                    if time.monotonic() > heard_s + self.quiet_s:
                        told = f"gave no sign of life for {self.quiet_s:g} s and was ended"
                        raise GoneError(told)
                    if time.monotonic() > end_s:
                        raise GoneError("did not end the save by its deadlines and was ended")
                elif self.pipe.poll():
                    message = self.pipe.recv()
                    heard_s, self.has_spoken = time.monotonic(), True
                    yield message
                else:
                    raise GoneError(self.how())
        except (EOFError, OSError):
            raise GoneError(self.how()) from None

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


class Worker:
    """One rank's worker process, started at once and again after it died."""

    def __init__(self, ranks: RankGroup, silence_s: float) -> None:
        self._start = partial(_Child, ranks.rank, ranks.world_size, silence_s)
        self._child: _Child | None = None
        try:
            self._child = self._start()
        except InvalidInputError:
            raise
        except CheckpointError as error:
            # The next save tries again, and tells the other ranks.
            log.warning("%s", error)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if one runs."""
        child = self._child
        return child.process.pid if child is not None and child.process.is_alive() else None

    def close(self) -> None:
        """End the worker; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def run(self, operation: Operation, job: SaveJob) -> CheckpointInfo:
        """Let the worker run one save in `operation`, and return or raise how it ended."""
        child = self._child
        # An idle one says nothing: what can be read is the end of its pipe.
        if child is not None and (child.pipe.poll() or not child.process.is_alive()):
            how = child.how()
            log.warning("The worker of rank %d %s; a new one is started.", operation.rank, how)
            self.close()
        child = self._child = self._child or self._start()
        run = _Run(child, operation, job)
        try:
            outcome = run.serve()
        except GoneError as gone:
            error = run.death(gone)
            self.close()
            return run.ended_without_worker(error)
        except BaseException:
            # What it goes on to tell is of this save, and must not be taken for the next one's.
            self.close()
            raise
        if not outcome.is_clean:
            # A thread of it may still read the state that is given up now.
            self.close()
        operation.is_void = outcome.is_void
        if isinstance(outcome.found, CheckpointError):
            raise outcome.found
        return outcome.found


class _Run:
    """One save in the worker: a thread hears it, and its steps are carried out in the operation."""

    def __init__(self, child: _Child, operation: Operation, job: SaveJob) -> None:
        self._child = child
        self._operation = operation
        self._job = job
        self._inbox: queue.SimpleQueue[Step | Outcome | BaseException] = queue.SimpleQueue()
        self._gone: GoneError | None = None
        self._death: RankFailedError | None = None
        self._is_exchanging = self._is_part_told = False
        self._word: bytes | None = None
        self._reports: dict[str, Callable[[int], None]] = {}

    def serve(self) -> Outcome:
        """Carry out the steps of the worker until the save has ended. Raises `GoneError`."""
        child, operation = self._child, self._operation
        child.send_job(self._job)
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
                child.send(self._reply_to(message))
            failure = operation.failure()
            if failure is not None and failed_s is None:
                failed_s = time.monotonic()
                child.send(Failed(number=self._job.number, error=travelling(failure)))
            elif failed_s and time.monotonic() > failed_s + _GRACE_S + operation.timeouts.silence:
                raise GoneError("did not give up the save and was ended")

    def _reply_to(self, step: Step) -> Reply:
        """Carry out one step. Raises `GoneError`."""
        operation = self._operation
        for name, fact in step.facts.items():
            setattr(operation, name, fact)
        # Elsewhere a death is told to none: before all have met, its rank meets them first; and
        # the coordinator's last word counts, whoever asked for it.
        if step.name == "gather_bytes" and operation.deadline.phase == "write":
            self._is_part_told = not operation.is_coordinator
        self._is_exchanging = step.name in _EXCHANGES and not self._is_part_told
        try:
            if self._is_exchanging and self._gone is not None:
                raise self._gone
            value = getattr(operation, step.name)(*step.args)
        except CheckpointError as error:
            if self._gone is not None:
                raise self._gone from None
            return Reply(error=travelling(error))
        finally:
            self._is_exchanging = False
        if step.name == "outcome_bytes":
            self._word = value
        return Reply(value=None if step.name == "phase" else value)

    def _read(self) -> None:
        """Take in what the worker tells until the save has ended, in a thread of its own."""
        end: Outcome | BaseException
        try:
            with contextlib.ExitStack() as shown:
                end = self._take(shown)
        except GoneError as gone:
            end = self._gone = gone
            if self._is_exchanging:
                try:
                    self._operation.failed(self.death(gone))
                except CheckpointError as error:
                    log.warning("Not all ranks may hear that a worker is gone: %s", error)
        except BaseException as error:  # noqa: BLE001  # raised by `serve`
            end = error
        self._inbox.put(end)

    def _take(self, shown: contextlib.ExitStack) -> Outcome:
        operation, t = self._operation, self._job.options.timeouts
        limit_s = 2 * t.plan + 2 * t.write + 2 * t.commit + t.consolidate
        for message in self._child.messages(limit_s):
            if isinstance(message, Outcome):
                return message
            if isinstance(message, Step):
                self._inbox.put(message)
            elif message.failure is not None:
                operation.failed(message.failure)
            else:
                self._take_beat(message, shown)
        raise AssertionError  # they end with an error

    def _take_beat(self, beat: Beat, shown: contextlib.ExitStack) -> None:
        """Note how far the worker is, and show it in the phases that move bytes."""
        operation, own = self._operation, self._operation.heartbeats.own()
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
            rank, phase = self._operation.rank, self._operation.deadline.phase
            self._death = RankFailedError(
                f"The worker process {self._child.process.pid} of rank {rank} {gone} in the "
                f"{phase} phase of the save to {place_of(self._job.url)}.",
                failures={rank: str(gone)},
                rank=rank,
                phase=phase,
                next_step="See why (out of memory?). Training can go on, and the next save starts "
                "a new worker."
                if self._child.has_spoken
                else "It never took the save up: see what it printed. The trainer's script must be "
                "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
            )
        return self._death

    def ended_without_worker(self, error: CheckpointError) -> CheckpointInfo:
        """Return what the save came to whose worker is gone, or raise it in the operation."""
        operation, options = self._operation, self._job.options
        if operation.committed is not None:
            raise unexported(error, operation.committed)
        is_committing = operation.is_coordinator and operation.deadline.phase == "commit"
        if not is_committing and not self._is_part_told:
            raise error
        session = SaveSession.on(operation, self._job.url, options)
        if is_committing:
            found = look_up_outcome(operation, session, error)
            operation.announce(found)
            if isinstance(found, CheckpointError):
                raise found
        else:
            # Its part is complete, and the others go on with the save.
            if operation.deadline.phase == "write":
                operation.phase("commit", options.timeouts.write + options.timeouts.commit)
            found = hear_outcome(operation, session, self._word)
        if options.consolidate:
            raise unexported(error, found)
        log.warning("%s The save is committed all the same.", error)
        return found
