"""The trainer's end of its worker process: starts it, sends saves, carries out their steps."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.boardoperation import BoardOperation
from ckpt_storage.coordination.failures import place_of, travelling
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    ConsolidationError,
    InvalidInputError,
    RankFailedError,
)
from ckpt_storage.progress import reporting
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.timed import halted

from .process import GoneError, WorkerProcess
from .worker import Beat, Failed, Job, Outcome, Reply, Setup, Step

if TYPE_CHECKING:
    from .job import SaveJob

log = logging.getLogger("ckpt_storage")

_LOOK_S = 0.1
_GRACE_S = 5.0
"""How long a worker may take to give up a save that has failed elsewhere."""


class Worker:
    """One rank's worker process, started at once and again after it died.

    Used by one save at a time. Raises `InvalidInputError` where no worker can be had.
    """

    def __init__(self, *, rank: int, world_size: int, silence_s: float) -> None:
        self._setup = Setup(rank=rank, world_size=world_size, log_level=log.getEffectiveLevel())
        self._silence_s = silence_s
        self._child: WorkerProcess | None = None
        try:
            self._child = WorkerProcess(self._setup)
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

    def run(self, operation: BoardOperation, job: SaveJob) -> CheckpointInfo:
        """Let the worker run one save in `operation`, and return or raise how it ended.

        A worker that dies, or gives no sign of life, is ended, and the save with it.
        """
        run = _Run(operation, job.options, job.url, job.number)
        try:
            with run.shown():
                try:
                    outcome = self._attempt(run, job)
                except GoneError as gone:
                    if run.has_begun:
                        raise
                    # It never took the save up, so no other rank knows of it.
                    log.warning("The worker process of rank %d %s.", operation.rank, gone)
                    self.close()  # it may be stopped, not dead
                    outcome = self._attempt(run, job)
        except GoneError as gone:
            error = run.death(str(gone))
            run.leave()
            self.close()
            return _after_death(run, error)
        if not outcome.is_clean:
            # A thread of it may still read the state that is given up now.
            self.close()
        if outcome.error is not None:
            raise run.own(outcome.error)
        assert outcome.info is not None  # noqa: S101  # there is one or the other
        return outcome.info

    def _attempt(self, run: _Run, job: SaveJob) -> Outcome:
        """Hand a save to the worker and carry out its steps. Raises `GoneError`."""
        child = self._child
        if child is not None and not child.process.is_alive():
            log.warning(
                "The worker process of rank %d %s; a new one is started.",
                self._setup.rank,
                child.how(),
            )
            self.close()
        child = self._child = self._child or WorkerProcess(self._setup)
        run.watch(child, self._silence_s)
        told = Job(number=job.number, url=os.fspath(job.url), options=job.packed)
        child.send(told, self._silence_s)
        assert job.staged is not None  # noqa: S101  # or it were refused
        child.send_state(job.staged)
        return run.served()


class _Run:
    """One save in the worker: its steps are carried out in the trainer's operation."""

    def __init__(
        self,
        operation: BoardOperation,
        options: SaveOptions,
        url: str | os.PathLike[str],
        number: int,
    ) -> None:
        self.operation = operation
        self.options = options
        self.url = url
        self.has_begun = False
        self.word: bytes | None = None
        """What the coordinator announced, once a member's worker asked for it."""
        self._number = number
        self._child: WorkerProcess | None = None
        self._silence_s = 0.0
        self._outcome: Outcome | None = None
        self._steps: list[Step] = []
        self._gone: str | None = None
        self._is_deaf = False
        self._death: CheckpointError | None = None
        self._raised: CheckpointError | None = None
        self._done_bytes = self._done_files = 0
        self._reading = threading.Lock()
        self._heard_s = self._failed_s = 0.0
        self._bar: _Bar | None = None
        t = options.timeouts
        limit_s = 2 * t.plan + 2 * t.write + 2 * t.commit + t.consolidate + t.silence
        self._end_s = time.monotonic() + limit_s
        operation.also_watch(self._look)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the user's progress follow the beats."""
        with contextlib.ExitStack() as stack:
            if self.options.progress:
                self._bar = _Bar(self.operation, self.options, stack)
            yield

    def watch(self, child: WorkerProcess, silence_s: float) -> None:
        """Listen to this worker from now on."""
        self._child, self._gone = child, None
        self._silence_s = silence_s
        self._heard_s = time.monotonic()

    def served(self) -> Outcome:
        """Carry out steps until the save has ended. Raises `GoneError`."""
        is_told = False
        while self._outcome is None:
            halted()
            self._read(_LOOK_S)
            self._raise_if_gone()
            while self._steps:
                self._carry_out(self._steps.pop(0))
            failure = self.operation.failure()
            if failure is not None and not is_told:
                is_told, self._failed_s = True, time.monotonic()
                self._send(Failed(number=self._number, error=travelling(failure)))
            elif is_told and time.monotonic() > self._failed_s + _GRACE_S + self._silence_s:
                self._gone = "did not give up the save and was ended"
        return self._outcome

    def _raise_if_gone(self) -> None:
        if self._outcome is None and self._gone is not None:
            raise GoneError(self._gone)

    def _carry_out(self, step: Step) -> None:
        operation = self.operation
        for name, fact in step.facts.items():
            if getattr(operation, name) != fact:
                setattr(operation, name, fact)
        value: Any = None
        try:
            # What fails before all have met is told to none, so a dead worker's rank meets first;
            # and what the coordinator says counts, whoever asked for it.
            self._is_deaf = step.name in {"meet", "outcome"}
            if step.name == "phase":
                phase, timeout_s, total_bytes = step.args
                operation.phase(phase, timeout_s, total_bytes=total_bytes)
                self._done_bytes = self._done_files = 0
            else:
                value = getattr(operation, step.name)(*step.args)
            if step.name == "outcome":
                self.word = value
        except CheckpointError as error:
            if self._gone is not None:
                raise GoneError(self._gone) from None
            self._raised = error
            reply = Reply(number=self._number, error=travelling(error))
        else:
            reply = Reply(number=self._number, value=value)
        finally:
            self._is_deaf = False
        self._send(reply)

    def _send(self, message: object) -> None:
        assert self._child is not None  # noqa: S101  # it is watched
        self._child.send(message, self._silence_s)

    def _look(self) -> CheckpointError | None:
        """Read on while the trainer waits in a step; return that the worker is gone."""
        if self._child is None or not self._reading.acquire(blocking=False):
            return None
        self._reading.release()
        self._read(0)
        if self._gone is None or self._is_deaf or self._death is not None:
            return None
        error = self.death(self._gone)
        self.operation.failed(error)
        return error

    def death(self, how: str) -> CheckpointError:
        """Return the error that names the worker that is gone, and how it went."""
        if self._death is not None:
            return self._death
        rank, phase = self.operation.rank, self.operation.current_phase
        pid = self._child.process.pid if self._child is not None else None
        self._death = RankFailedError(
            f"The worker process {pid} of rank {rank} {how} in the {phase} phase of the save to "
            f"{place_of(self.url)}.",
            failures={rank: how},
            rank=rank,
            phase=phase,
            next_step="See why (out of memory?). Training can go on, and the next save starts a "
            "new worker."
            if self.has_begun
            else "It never took the save up: see what it printed. The trainer's script must be "
            "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
        )
        return self._death

    def leave(self) -> None:
        """Listen to no worker any more: what comes now is told by whoever raises it."""
        self._child = None

    def own(self, error: CheckpointError) -> CheckpointError:
        """Return an error that the worker passed on as this process knows it, with its cause."""
        raised = self._raised
        is_same = type(raised) is type(error) and str(raised) == str(error)
        return raised if raised is not None and is_same else error

    def _read(self, timeout_s: float) -> None:
        """Take in what the worker told, waiting at most so long for the first of it."""
        child = self._child
        assert child is not None  # noqa: S101  # it is watched
        with self._reading:
            if self._gone is not None or self._outcome is not None:
                return
            if not wait([child.control, child.process.sentinel], timeout_s):
                quiet_s = self._silence_s + child.slack_s
                if time.monotonic() > self._heard_s + quiet_s:
                    self._gone = f"gave no sign of life for {quiet_s:g} s and was ended"
                elif time.monotonic() > self._end_s:
                    self._gone = "did not end the save within all its deadlines and was ended"
                return
            try:
                while child.control.poll():
                    self._take(child.control.recv())
            except (EOFError, OSError):
                self._gone = child.how()
                return
            if not child.process.is_alive() and not child.control.poll():
                self._gone = child.how()

    def _take(self, message: Beat | Step | Outcome) -> None:
        if message.number != self._number:
            return
        child = self._child
        assert child is not None  # noqa: S101  # it is watched
        self._heard_s = time.monotonic()
        child.has_beaten = True
        self.has_begun = True
        if isinstance(message, Step):
            self._steps.append(message)
        elif isinstance(message, Outcome):
            self._outcome = message
        elif message.failure is not None:
            self.operation.failed(message.failure)
        else:
            self._take_beat(message)

    def _take_beat(self, beat: Beat) -> None:
        operation = self.operation
        if beat.total_bytes:
            operation.expect(beat.total_bytes)
        if beat.done_bytes > self._done_bytes:
            operation.advanced(beat.done_bytes - self._done_bytes)
            self._done_bytes = beat.done_bytes
        for _ in range(beat.done_files - self._done_files):
            operation.ended_file()
        self._done_files = max(self._done_files, beat.done_files)
        if self._bar is not None:
            self._bar.show(beat)


class _Bar:
    """The user's progress: bytes of the phase that writes or exports."""

    def __init__(
        self, operation: BoardOperation, options: SaveOptions, stack: contextlib.ExitStack
    ) -> None:
        self._operation = operation
        self._options = options
        self._stack = stack
        self._report: Callable[[int], None] | None = None
        self._phase = ""
        self._shown_bytes = 0

    def show(self, beat: Beat) -> None:
        """Show the bytes of a beat."""
        phase = self._operation.current_phase
        if phase not in {"write", "consolidate"} or not beat.total_bytes:
            return  # not planned yet
        if phase != self._phase:
            self._phase, self._shown_bytes = phase, 0
            self._report = self._stack.enter_context(
                reporting(
                    self._options.progress,
                    phase=phase,
                    rank=self._operation.rank,
                    total_bytes=beat.total_bytes,
                    save_id=self._operation.save_id,
                    with_bar=self._operation.is_coordinator,
                )
            )
        if self._report is not None and beat.done_bytes > self._shown_bytes:
            self._report(beat.done_bytes - self._shown_bytes)
            self._shown_bytes = beat.done_bytes


def _after_death(run: _Run, error: CheckpointError) -> CheckpointInfo:
    """Return what a save without its worker came to, or raise it in the operation."""
    operation = run.operation
    if operation.committed is not None:
        raise _unexported(error, operation.committed)
    phase = operation.current_phase
    found: CheckpointInfo | CheckpointError | None = None
    if operation.is_coordinator and phase == "commit":
        found = _looked_up(run, error)
        operation.announce(pickle.dumps(found))
    elif phase in {"write", "commit"} and not operation.is_coordinator:
        # It had perhaps written all, and the coordinator committed.
        word = run.word if run.word is not None else _word(operation, error)
        found = pickle.loads(word) if word is not None else _looked_up(run, error)  # noqa: S301  # our own ranks
    if not isinstance(found, CheckpointInfo):
        raise found if isinstance(found, CommitUnknownError) else error
    if run.options.consolidate:
        raise _unexported(error, found)
    log.warning("%s It had committed before.", error)
    return found


def _word(operation: BoardOperation, error: CheckpointError) -> bytes | None:
    """Tell all ranks of a failure; return what the coordinator says of the save all the same."""
    operation.failed(error)
    operation.phase("commit", operation.timeouts.silence)
    try:
        return operation.outcome()
    except CheckpointError as silence:
        return None if not operation.is_last_word(silence) else pickle.dumps(error)


def _looked_up(run: _Run, error: CheckpointError) -> CheckpointInfo | CommitUnknownError:
    """Find out whether a save whose worker died while it committed is committed."""
    save_id = run.operation.save_id or ""
    try:
        session = SaveSession(
            run.url,
            run.options,
            rank=run.operation.rank,
            is_coordinator=False,
            phase=partial(Deadline.of, run.options.timeouts),
        )
        info = session.outcome(save_id)
    except CheckpointError as failure:
        error.add_note(f"Looking for the outcome failed too: {failure}")
    else:
        if info is not None:
            return info
    return CommitUnknownError(
        f"{error} Whether save {save_id} is committed cannot be told.",
        save_id=save_id,
        rank=error.rank,
        phase="commit",
        next_step="Load, or list the checkpoints: the save is committed if it shows there.",
    )


def _unexported(error: CheckpointError, info: CheckpointInfo) -> ConsolidationError:
    return ConsolidationError(
        f"The save to {info.url} is committed, but its consolidation failed: {error}",
        info=info,
        rank=error.rank,
        phase="consolidate",
        next_step="The checkpoint can be loaded; call consolidate to go on with it.",
    )
