"""The saves of one saver, one after another in a daemon thread: what was accepted always ends."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.errors import CheckpointError, RankMismatchError

from .job import SaveJob

log = logging.getLogger("ckpt_storage")


class SaveQueue:
    """Calls `run` for each job, in order, in a thread that ends when there is none.

    `run` returns what was committed, or raises `CheckpointError`. `drained` is called once all
    saves have ended after `close`.
    """

    def __init__(
        self, run: Callable[[SaveJob], CheckpointInfo], *, drained: Callable[[], None]
    ) -> None:
        self._run = run
        self._drained = drained
        self._lock = threading.RLock()  # a signal's handler may save in the middle of a save
        self._waiting: deque[SaveJob] = deque()
        self._has_thread = False
        self._is_busy = False
        self._is_closed = False

    def put(self, job: SaveJob) -> None:
        """Accept a job; it is carried out or refused, and its status ends.

        Raises `CheckpointError` where no thread is to be had, once the other ranks are told.
        """
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
        """Accept no more; idempotent, never waits."""
        with self._lock:
            self._is_closed = True
            if self._is_busy or self._waiting:
                return
        self._drained()

    def _drain(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._carry_out(job)
            finally:
                job.end_lease()
        if self._is_closed:
            self._drained()

    def _next(self) -> SaveJob | None:
        with self._lock:
            self._has_thread = self._is_busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _carry_out(self, job: SaveJob) -> None:
        status = job.status
        try:
            with as_checkpoint_errors(f"the save to {status.url}", status.rank, in_background=True):
                try:
                    job.end_staging()
                    info = self._run(job)
                finally:
                    # Before anybody who waits for the save goes on, perhaps to `close`.
                    self._is_busy = False
        except CheckpointError as error:
            log.warning(
                "save %s to %s failed on rank %d: %s",
                status.save_id or "(without id)",
                status.url,
                status.rank,
                error,
            )
            if isinstance(error, RankMismatchError):
                self._refuse_waiting(error)
            status.fail(error)
        else:
            log.info(
                "save %s to %s is committed, says rank %d", info.save_id, status.url, status.rank
            )
            status.succeed(info)

    def _refuse_waiting(self, error: CheckpointError) -> None:
        """Refuse what waits: ranks have called different saves, and would meet the wrong ones."""
        with self._lock:
            for job in self._waiting:
                job.refusal = job.refusal or CheckpointError(
                    f"The save to {job.status.url} was not begun: in the save before it, ranks "
                    f"did not mean the same. {error}",
                    rank=job.status.rank,
                    phase="plan",
                    next_step="Make all ranks call the same saves in the same order.",
                )
