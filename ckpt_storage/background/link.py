"""The saves of one saver, one after another in a daemon thread; and its end of a worker process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors, travelling
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.options import Progress
from ckpt_storage.progress import reporting
from ckpt_storage.saves.planning import Steps, rank_save
from ckpt_storage.saves.save import look_up_outcome, run_save
from ckpt_storage.saves.session import SaveOptions, SaveSession
from ckpt_storage.store.threads import abandoned_thread_count, halted

from .handle import SaveStatus
from .staging import Arenas, StagingJob
from .worker import GoOn, Job, Reply, worker_main

log = logging.getLogger("ckpt_storage")

START_METHOD: Literal["spawn", "forkserver"] = "spawn"
"""How workers start: a fork of the trainer would have its locks and devices."""

_LOOK_S = 0.1
_END_S = 5.0
_GRACE_S = 5.0
"""How long a worker may take to give up a save that has failed elsewhere."""

_START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """One save; with `refusal` nothing is saved, and the other ranks are told why.

    `packed` are the options as a worker gets them.
    """

    status: SaveStatus
    options: SaveOptions
    url: str | os.PathLike[str]
    packed: bytes = b""
    staging: StagingJob | None = None
    refusal: CheckpointError | None = None

    def refuse(self, error: BaseException) -> None:
        """Save nothing, and tell the other ranks of what was raised here."""
        status = self.status
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"The save to {status.url} was not begun: rank {status.rank} was interrupted while "
                f"it copied its state ({type(error).__name__})."
            )
        error.phase = error.phase or "stage"
        error.rank = status.rank if error.rank is None else error.rank
        self.refusal = error


class GoneError(Exception):
    """The worker is gone; the message says how."""


class WorkerLink:
    """One worker process of a rank, and our end of its pipe; it runs one save at a time."""

    def __init__(self, rank: int, silence_s: float) -> None:
        """Start it. Raises `InvalidInputError` where that is not possible, or `CheckpointError`."""
        context = multiprocessing.get_context(START_METHOD)
        try:
            self._pipe, theirs = context.Pipe()
            self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # a stub
                target=worker_main,
                args=(rank, log.getEffectiveLevel(), theirs),
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

    def steps(self, operation: Operation, session: SaveSession, job: SaveJob) -> Steps:
        """Have the worker carry out `rank_save`; it may be closed then."""
        # Kept in no variable: an error, and with it this frame, may live longer than the copy.
        assert job.staging is not None  # noqa: S101  # else it would have been refused
        calls: list[Job | GoOn] = [
            Job(
                url=os.fspath(job.url),
                options=job.packed,
                staged=pickle.dumps(job.staging.staged),
                arena_bytes=job.staging.arena.size_bytes,
            )
        ]
        file, progress = job.staging.arena.file, job.options.progress

        def lost() -> CheckpointError | None:
            # A member whose part is written waits for the outcome, and needs no worker.
            needs_it = operation.is_coordinator or operation.save_id is None
            is_gone = needs_it and self.pid is None
            return self._death(GoneError(self.how()), operation) if is_gone else None

        def step() -> Any:  # noqa: ANN401  # as the call's own
            try:
                return self._call(calls.pop(), operation, progress, file)
            except GoneError as gone:
                return self._outcome_without_worker(gone, operation, session)

        operation.lost = lost
        try:
            while True:
                # Words of all ranks are many: neither what came nor what goes is kept here.
                calls.append(GoOn(word=(yield step())))
                file = None
        finally:
            operation.lost = lambda: None
            if not self._pipe.closed:
                try:
                    if not self._call(GoOn(is_over=True), operation, progress):
                        # A thread of it may still read the state that is given up now.
                        self.close()
                except GoneError as gone:
                    log.warning("%s", self._death(gone, operation))

    def _outcome_without_worker(
        self, gone: GoneError, operation: Operation, session: SaveSession
    ) -> CheckpointInfo:
        """Return what became of a save whose worker is gone in the commit. Raises why it failed."""
        error, failure = self._death(gone, operation), operation.failure()
        if operation.deadline.phase != "commit":
            if failure is None:
                raise error from None
            # The save had ended before, for all ranks alike.
            log.warning("%s", error)
            raise failure
        found = look_up_outcome(operation, session, error)
        if isinstance(found, CheckpointError):
            raise found from None
        log.warning("%s The save is committed all the same.", error)
        return found

    def _call(
        self, call: Job | GoOn, operation: Operation, progress: Progress, file: int | None = None
    ) -> Any:  # noqa: ANN401  # as the call's own
        """Return or raise what a call comes to. Raises `GoneError` if the worker is lost."""
        try:
            self._send(call, file)
            answer = self._answer(operation, progress)
            if answer.is_strange and operation.deadline.phase == "commit":
                # It may have committed: as little is known as of one that died.
                raise GoneError(f"broke and was ended ({answer.found})")  # noqa: TRY301  # as below
        except BaseException:
            # What it goes on to tell is of this save, and must not be taken for the next one's.
            self.process.kill()
            self.process.join(_END_S)
            with contextlib.suppress(EOFError, OSError):
                while self._pipe.poll():
                    if self._pipe.recv() == "commit":
                        operation.phase("commit")
            self.close()
            raise
        if isinstance(answer.found, CheckpointError):
            raise answer.found
        return answer.found

    def _answer(self, operation: Operation, progress: Progress) -> Reply:
        """Take in what it tells until it answers; tell it if the operation fails elsewhere."""
        heard_s, told_s = time.monotonic(), math.inf
        show: Callable[[int], None] | None = None
        with contextlib.ExitStack() as shown:
            while True:
                halted()
                failure = operation.failure()
                if failure is not None and told_s == math.inf:
                    self._send(travelling(failure))
                    told_s = time.monotonic()
                message, now_s = self._message(), time.monotonic()
                if message is None:
                    if now_s > heard_s + self._quiet_s:
                        raise GoneError(
                            f"gave no sign of life for {self._quiet_s:g} s and was ended"
                        )
                    # One that is starting has no part in a save that is over.
                    late_s = operation.deadline.at_monotonic_s + self._quiet_s
                    if now_s > min(late_s, told_s + self._silence_s) + _GRACE_S:
                        raise GoneError("did not give up the save and was ended")
                    continue
                heard_s, self.has_spoken = now_s, True
                if isinstance(message, Reply):
                    return message
                if isinstance(message, CheckpointError):
                    # Where no rank can be told, each learns it from its next step.
                    with contextlib.suppress(CheckpointError):
                        operation.failed(message)
                elif not isinstance(message, RankProgress):
                    operation.phase(message)
                elif (more_bytes := _more_bytes(operation, message)) > 0:
                    show = show or shown.enter_context(
                        reporting(
                            progress,
                            phase="write",
                            rank=operation.rank,
                            total_bytes=message.total_bytes,
                            save_id=operation.save_id,
                            with_bar=operation.is_coordinator,
                        )
                    )
                    show(more_bytes)

    def _send(self, message: object, file: int | None = None) -> None:
        """Send a message and a descriptor. Raises `GoneError` if nobody takes it in time."""
        limit = struct.pack("ll", max(1, int(self._quiet_s)), 0)
        try:
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._pipe.send(message)
            if file is not None:
                reduction.send_handle(self._pipe, file, None)
        except OSError:
            raise GoneError(self.how()) from None

    def _message(self) -> Any:  # noqa: ANN401  # of any kind
        """Return what it tells next, None if nothing came. Raises `GoneError` if it has ended."""
        with contextlib.suppress(EOFError, OSError):
            if not wait([self._pipe, self.process.sentinel], _LOOK_S):
                return None
            if self._pipe.poll():
                return self._pipe.recv()
        raise GoneError(self.how())

    @property
    def _quiet_s(self) -> float:
        """How long it may say nothing during a call."""
        return self._silence_s + (0.0 if self.has_spoken else _START_S)

    def _death(self, gone: GoneError, operation: Operation) -> RankFailedError:
        """Return the error that names the worker that is gone, and how it went."""
        rank, phase = operation.rank, operation.deadline.phase
        return RankFailedError(
            f"The worker process {self.process.pid} of rank {rank} {gone} in the {phase} phase of "
            f"{operation.what}.",
            failures={rank: str(gone)},
            rank=rank,
            phase=phase,
            next_step="See why (out of memory?). Training can go on, and the next save starts "
            "a new worker."
            if self.has_spoken
            else "It never took the save up: see what it printed. The trainer's script must be "
            "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
        )

    def how(self) -> str:
        """Return how it went; one whose pipe is closed is about to."""
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
        return pickle.dumps(dataclasses.replace(options, progress=None, consolidate=None))
    except BaseException as error:
        raise InvalidInputError(
            f"The planner or another argument cannot be sent to the worker process: {error}.",
            phase="stage",
            next_step="Define its class at the top of a module, or use mode='thread'.",
        ) from error


def _more_bytes(operation: Operation, beat: RankProgress) -> int:
    """Note how far a worker is; return how many bytes that is more than was known."""
    own = operation.heartbeats.own()
    if beat.total_bytes:
        operation.expect(beat.total_bytes)
    more_bytes = beat.done_bytes - own.done_bytes
    more_files = beat.done_files - own.done_files
    if more_bytes > 0 or more_files > 0:
        operation.advanced(max(0, more_bytes), file_count=max(0, more_files))
    return more_bytes


class SaveQueue:
    """Carries out jobs in order, each one operation of `ranks`, in a thread that ends with them.

    It owns ranks, arenas and, with `has_worker`, the worker, which is started anew once it died.
    """

    def __init__(self, ranks: RankGroup, silence_s: float, *, has_worker: bool) -> None:
        self.ranks = ranks
        self.has_worker = has_worker
        self.worker: WorkerLink | None = None
        self._silence_s = silence_s
        if has_worker:
            try:
                self.worker = WorkerLink(ranks.rank, silence_s)
            except BaseException as error:
                if not isinstance(error, CheckpointError) or isinstance(error, InvalidInputError):
                    ranks.close()
                    raise
                # The next save tries again, and tells the other ranks.
                log.warning("%s", error)
        self.arenas = Arenas("shared" if has_worker else "private")
        self.process_id = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may save in the middle of a save
        self._waiting: deque[SaveJob] = deque()
        self._has_thread = self._is_busy = self._is_closed = False

    def put(self, job: SaveJob) -> None:
        """Accept a job: its status ends. Raises `CheckpointError` where no thread is to be had."""
        with self._lock:
            self._waiting.append(job)
            if self._has_thread:
                return
            self._has_thread = True
        thread = threading.Thread(target=self._drain, name="ckpt-storage saves", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            status = job.status
            failure = job.refusal = job.refusal or CheckpointError(
                f"The save to {status.url} was not begun: rank {status.rank} has no thread for it "
                f"({error}).",
                rank=status.rank,
                phase="stage",
                next_step="See how many threads the process has and may have (ulimit -u).",
            )
            status.take()
            self._drain()
            raise failure from error

    def close(self) -> None:
        """Let go of all once it is idle, as the saver puts no more; idempotent, never waits."""
        if os.getpid() != self.process_id:
            return  # a child of fork owns nothing of this
        with self._lock:
            self._is_closed = True
            is_idle = not (self._is_busy or self._waiting)
        self.arenas.close()
        if is_idle and self.worker is not None:
            self.worker.close()
        self.ranks.close()

    def _drain(self) -> None:
        while (job := self._next()) is not None:
            self._end(job)
        if self._is_closed and self.worker is not None:
            self.worker.close()

    def _next(self) -> SaveJob | None:
        with self._lock:
            self._has_thread = self._is_busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _end(self, job: SaveJob) -> None:
        status, part = job.status, partial(self._steps, job)
        try:
            with as_checkpoint_errors(f"the save to {status.url}", status.rank, in_background=True):
                info = run_save(self.ranks, job.url, job.options, part, in_background=True)
        except CheckpointError as error:
            what = f"save {status.save_id or '(without id)'} to {status.url}"
            log.warning("%s failed on rank %d: %s", what, status.rank, error)
            # A thread that was left behind may still read the state.
            self._free(job, is_read=abandoned_thread_count() > 0)
            status.fail(error)
        else:
            what = f"save {info.save_id} to {status.url}"
            log.info("%s is committed, says rank %d", what, status.rank)
            self._free(job, is_read=False)
            status.succeed(info)

    def _steps(self, job: SaveJob, operation: Operation, session: SaveSession) -> Steps:
        """Return what this rank does in a save, once it is staged. Raises why it is refused."""
        copy = job.staging
        if job.refusal is not None:
            raise job.refusal
        assert copy is not None  # noqa: S101  # else it would have been refused
        try:
            copy.wait(job.options.timeouts.stage)
        finally:
            # Also a rank that failed now waits for the others, to tell them.
            operation.phase("plan")
        job.status.mark_staged()
        job.status.follow(lambda: (operation.progress(), operation.save_id), operation.failed)
        if self.has_worker:
            if self.worker is None or not self.worker.is_ready():
                self.worker = WorkerLink(self.ranks.rank, self._silence_s)
            return self.worker.steps(operation, session, job)
        memory, planner = copy.arena.memory, job.options.planner
        return rank_save(session, partial(copy.staged.part, memory, planner))

    def _free(self, job: SaveJob, *, is_read: bool) -> None:
        """Give the memory back for the next save, unless somebody still reads or writes there."""
        # Before anybody who waits for the save goes on, perhaps to `close`.
        self._is_busy = False
        staging, job.staging = job.staging, None
        if staging is None:
            return
        if is_read or not staging.done():
            staging.arena.close()
        else:
            self.arenas.give_back(staging.arena)
