"""The saves of one saver, one after another in a daemon thread: what was accepted always ends."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial

from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.planning import Steps, rank_save
from ckpt_storage.saves.save import run_save
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.threads import abandoned_thread_count

from .arena import Arenas
from .handle import SaveStatus
from .link import Worker
from .staging import StagingJob

log = logging.getLogger("ckpt_storage")


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


class SaveQueue:
    """Carries out jobs in order, each one operation of `ranks`, in a thread that ends with them.

    It owns ranks, arenas and, with `has_worker`, the worker, which is started anew once it died.
    """

    def __init__(self, ranks: RankGroup, silence_s: float, *, has_worker: bool) -> None:
        self.ranks = ranks
        self.has_worker = has_worker
        self.worker: Worker | None = None
        self._silence_s = silence_s
        if has_worker:
            try:
                self.worker = Worker(ranks.rank, silence_s)
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
        """Accept no more, and let go of all once it is idle; idempotent, never waits."""
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
        assert copy is not None  # noqa: S101  # or it were refused
        try:
            copy.wait(job.options.timeouts.stage)
        finally:
            # Also a rank that failed now waits for the others, to tell them.
            operation.phase("plan")
        job.status.mark_staged()
        job.status.follow(lambda: (operation.progress(), operation.save_id), operation.failed)
        if self.has_worker:
            if self.worker is None or not self.worker.is_ready():
                self.worker = Worker(self.ranks.rank, self._silence_s)
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
