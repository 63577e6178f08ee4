"""A rank's worker process, as its trainer sees it: how it starts, what it is asked, how it ends."""

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
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Literal

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import picklable_copy
from ckpt_storage.coordination.liveness import RankProgress
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.options import Progress
from ckpt_storage.progress import reporting
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import find_outcome, unknown_outcome
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.threads import halted

from .messages import FinishCall, Response, SaveRequest, Step, StepCall
from .priorities import IoClass
from .staging import StagingJob
from .worker import LAUNCHER_SIGNALS, worker_main

log = logging.getLogger("ckpt_storage")

START_METHOD: Literal["spawn", "forkserver"] = "spawn"
"""How workers start: a fork of the trainer would have its locks and devices."""

_LOOK_S = 0.1
_END_S = 5.0
_GRACE_S = 5.0
"""How long a worker may take to give up a save that has failed elsewhere."""

_START_S = 120.0
"""How long a worker may take to start: importing torch from a loaded network disk is slow."""


class WorkerGoneError(Exception):
    """The worker is gone; the message says how."""


class WorkerLink:
    """One worker process of a rank, and our end of its pipe; it runs one save at a time."""

    def __init__(
        self,
        global_rank: int,
        rank: int,
        silence_s: float,
        *,
        nice: int | None = None,
        io_class: IoClass | None = None,
    ) -> None:
        """Start it, with its priorities. Raises `InvalidInputError`, `CheckpointError`."""
        context = multiprocessing.get_context(START_METHOD)
        self.global_rank = global_rank
        try:
            self._pipe, theirs = context.Pipe()
            self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # a stub
                target=worker_main,
                args=(rank, log.getEffectiveLevel(), theirs, nice, io_class),
                name=f"ckpt-storage worker {global_rank}",
                daemon=True,
            )
            with _blocked_signals():
                self.process.start()
        except AssertionError as error:
            raise InvalidInputError(
                f"No worker process can be started here: {error}.", next_step="Use mode='thread'."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"Rank {global_rank} cannot start its worker process: {error}.",
                rank=global_rank,
                phase="stage",
                next_step="See how many processes and open files it has and may have (ulimit -u, "
                "-n), or use mode='thread'.",
            ) from error
        theirs.close()
        _processes.add(self.process)
        self.silence_s = silence_s
        self.has_responded = False
        # Runs before multiprocessing asks it to end and waits: a stopped process never would.
        self.close = Finalize(None, _end, (self.process, self._pipe), exitpriority=100)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        return self.process.pid if self.process.is_alive() else None

    @property
    def is_closed(self) -> bool:
        """Whether our end of the pipe is closed."""
        return self._pipe.closed

    @property
    def patience_s(self) -> float:
        """How long it may send nothing during a call."""
        return self.silence_s + (0.0 if self.has_responded else _START_S)

    def is_ready(self) -> bool:
        """Return whether an idle worker lives: it sends nothing, so only its end can be read."""
        if self._pipe.closed:
            return False
        if self._pipe.poll() or not self.process.is_alive():
            ending = self.exit_description()
            log.warning("The %s %s; a new one is started.", self.process.name, ending)
            self.close()
            return False
        return True

    def send(self, message: object, file: int | None = None) -> None:
        """Send a message and a descriptor. Raises `WorkerGoneError` if nobody takes it in time."""
        limit = struct.pack("ll", max(1, int(self.patience_s)), 0)
        try:
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as pipe:
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._pipe.send(message)
            if file is not None:
                reduction.send_handle(self._pipe, file, None)
        except OSError:
            raise WorkerGoneError(self.exit_description()) from None

    def receive(self) -> Any:  # noqa: ANN401  # of any kind
        """Return its next message, None if there is none yet. Raises `WorkerGoneError`."""
        with contextlib.suppress(EOFError, OSError):
            if not wait([self._pipe, self.process.sentinel], _LOOK_S):
                return None
            if self._pipe.poll():
                message = self._pipe.recv()
                self.has_responded = True
                return message
        raise WorkerGoneError(self.exit_description())

    def kill(self) -> list[Any]:
        """End the worker; return the messages that it had sent."""
        self.process.kill()
        self.process.join(_END_S)
        messages: list[Any] = []
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                messages.append(self._pipe.recv())
        self.close()
        return messages

    def exit_description(self) -> str:
        """Return how the process ended; one whose pipe is closed is about to."""
        self.process.join(_END_S)
        code = self.process.exitcode
        if code is None:
            return "took no message and was ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class WorkerSave:
    """The steps of one save, run by the worker; as `RankSave`, with values packed for it.

    Raises `RankFailedError` if the worker is lost before the commit. If it is lost in the commit,
    the storage is asked for the outcome.
    """

    def __init__(
        self,
        worker: WorkerLink,
        operation: Operation,
        session: SaveSession,
        progress: Progress,
        staging: StagingJob,
    ) -> None:
        self._worker = worker
        self._operation = operation
        self._session = session
        self._progress = progress
        self._file = staging.arena.file
        self._arena_bytes = staging.arena.size_bytes
        # Not the staging itself: an error, and with it this object, may live longer than the copy.
        self._staged = pickle.dumps(staging.staged)
        operation.set_local_failure(self._local_failure)

    def begun(self, url: str, options: bytes) -> WorkerSave:
        """Send the request; return this save."""
        lane = self._operation.lane
        is_alone = self._operation.world_size == 1
        request = SaveRequest(
            url=url,
            options=options,
            staged=self._staged,
            arena_bytes=self._arena_bytes,
            global_ranks=tuple(lane.names),
            store=None if is_alone else lane.keys.client.address(),
            heartbeat_key=lane.heartbeat_key(lane.rank),
        )
        try:
            self._call(request, self._file)
        except WorkerGoneError as gone:
            self._settled(gone)
        self._staged, self._file = b"", None
        return self

    def propose(self) -> object:
        """Return the packed proposal of this rank."""
        return self._step("propose")

    def decide(self, proposals: Sequence[Any]) -> object:
        """Return the packed answers to all proposals."""
        return self._step("decide", proposals)

    def accept(self, answer: object) -> str | None:
        """Take a packed answer; return the save id, or None."""
        save_id: str | None = self._step("accept", answer)
        return save_id

    def write(self) -> object:
        """Return the packed report of this rank."""
        return self._step("write")

    def commit(self, reports: Sequence[Any]) -> CheckpointInfo:
        """Commit; return what was committed."""
        info: CheckpointInfo = self._step("commit", reports)
        return info

    def close(self) -> None:
        """Let the worker forget the save; end a worker that may still read the state."""
        self._operation.set_local_failure(lambda: None)
        if self._worker.is_closed:
            return
        try:
            if not self._call(FinishCall()):
                # A thread of it may still read the state, which is to be freed.
                self._worker.close()
        except WorkerGoneError as gone:
            log.warning("%s", self._death(gone))
        except CheckpointError as error:
            log.warning("The %s did not end the save: %s", self._worker.process.name, error)

    def _step(self, step: Step, argument: Any = None) -> Any:  # noqa: ANN401  # as the step's own
        try:
            return self._call(StepCall(step=step, argument=argument))
        except WorkerGoneError as gone:
            return self._settled(gone)

    def _settled(self, gone: WorkerGoneError) -> CheckpointInfo:
        """Return what became of a save whose worker is lost in the commit. Raises why it failed."""
        error, failure = self._death(gone), self._operation.failure()
        if self._operation.deadline.phase != "commit":
            if failure is None:
                raise error from None
            # The save had failed on all ranks before.
            log.warning("%s", error)
            raise failure
        info = find_outcome(self._operation, self._session, error)
        if info is None:
            raise unknown_outcome(str(error), self._operation, self._session) from None
        log.warning("%s The save is committed all the same.", error)
        return info

    def _local_failure(self) -> CheckpointError | None:
        """Return the death of the worker, as long as this rank still needs it."""
        operation = self._operation
        # A member whose report is sent waits for the outcome only.
        needs_worker = operation.is_coordinator or operation.save_id is None
        if not needs_worker or self._worker.pid is not None:
            return None
        return self._death(WorkerGoneError(self._worker.exit_description()))

    def _call(self, call: object, file: int | None = None) -> Any:  # noqa: ANN401  # as the call's own
        """Return or raise what a call comes to. Raises `WorkerGoneError` if the worker is lost."""
        try:
            self._worker.send(call, file)
            response = self._await_response()
            if response.is_unexpected and self._operation.deadline.phase == "commit":
                # It may have committed: as little is known as of a worker that died.
                raise WorkerGoneError(f"broke and was ended ({response.value})")  # noqa: TRY301  # as below
        except BaseException:
            # What it still sends is of this save, and must not be taken for the next one's.
            if "commit" in self._worker.kill():
                self._operation.phase("commit")
            raise
        if isinstance(response.value, CheckpointError):
            raise response.value
        return response.value

    def _await_response(self) -> Response:
        """Take in the worker's messages until it responds; pass on a failure of the operation.

        Silence is counted in looks, each after reading what has arrived: a trainer that was stopped
        itself must not take its worker for dead.
        """
        worker, operation = self._worker, self._operation
        quiet_looks, notified_s = 0, math.inf
        with contextlib.ExitStack() as stack:
            show: Callable[[int], None] | None = None
            while True:
                halted()
                failure = operation.failure()
                if failure is not None and notified_s == math.inf:
                    worker.send(picklable_copy(failure))
                    notified_s = time.monotonic()
                message = worker.receive()
                if message is None:
                    quiet_looks += 1
                    if quiet_looks * _LOOK_S > worker.patience_s:
                        raise WorkerGoneError(
                            f"gave no sign of life for {worker.patience_s:g} s and was ended"
                        )
                    # A worker that is starting has no part in a save that is over.
                    late_s = operation.deadline.at_monotonic_s + worker.patience_s
                    if time.monotonic() > min(late_s, notified_s + worker.silence_s) + _GRACE_S:
                        raise WorkerGoneError("did not give up the save and was ended")
                    continue
                quiet_looks = 0
                if isinstance(message, Response):
                    return message
                if isinstance(message, CheckpointError):
                    operation.failed(message)
                elif not isinstance(message, RankProgress):
                    operation.phase(message)
                elif (more_bytes := _more_bytes(operation, message)) > 0:
                    show = show or stack.enter_context(
                        reporting(
                            self._progress,
                            phase="write",
                            rank=operation.rank,
                            total_bytes=message.total_bytes,
                            save_id=operation.save_id,
                            with_bar=operation.is_coordinator,
                        )
                    )
                    show(more_bytes)

    def _death(self, gone: WorkerGoneError) -> RankFailedError:
        """Return the error that names the worker that is gone, and how it ended."""
        rank, phase = self._operation.global_rank, self._operation.deadline.phase
        return RankFailedError(
            f"The worker process {self._worker.process.pid} of rank {rank} {gone} in the {phase} "
            f"phase of {self._operation.what}.",
            failures={rank: str(gone)},
            rank=rank,
            phase=phase,
            next_step="See why (out of memory?). Training can go on, and the next save starts "
            "a new worker."
            if self._worker.has_responded
            else "It never began the save: see what it printed. The trainer's script must be "
            "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
        )


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Start a process deaf to what launchers send: Python takes seconds until it can ignore it."""
    # It would unblock them again if it started meanwhile.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
