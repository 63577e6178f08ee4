"""The saves of one saver, one after another in a daemon thread."""

from __future__ import annotations

import contextvars
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.observe import telemetry
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.rank_save import RankSave
from ckpt_storage.saves.save import SaveSteps, run_save
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.threads import abandoned_thread_count

from .arenas import Arenas
from .handle import SaveStatus
from .messages import SaveRequest
from .staging import StagingJob
from .worker_process import WorkerProcess
from .worker_save import WorkerSave

log = logging.getLogger("ckpt_storage")


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """One save of the queue; with `refusal` nothing is saved, and the other ranks get that error.

    `packed_options` are the options as a worker gets them. `context` is that of the call of `save`,
    for the spans of a program that traces.
    """

    status: SaveStatus
    options: SaveOptions
    url: str | os.PathLike[str]
    packed_options: bytes = b""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    staging: StagingJob | None = None
    refusal: CheckpointError | None = None

    @property
    def staged_bytes(self) -> int:
        """The bytes of the copy of the state."""
        return 0 if self.staging is None else self.staging.arena.size_bytes

    def refuse(self, error: BaseException) -> None:
        """Save nothing, and report to the other ranks what was raised here."""
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
    """Runs saves in order, each an operation of `ranks`, in a thread that ends when none is left.

    It owns ranks, arenas and, with `start_worker`, a worker process, which is started again after
    it died.
    """

    def __init__(self, ranks: RankGroup, start_worker: Callable[[], WorkerProcess] | None) -> None:
        self.ranks = ranks
        self.worker: WorkerProcess | None = None
        self._start_worker = start_worker
        if start_worker is not None:
            try:
                self.worker = start_worker()
            except BaseException as error:
                if not isinstance(error, CheckpointError) or isinstance(error, InvalidInputError):
                    ranks.close()
                    raise
                # The next save tries again, and reports the failure to the other ranks.
                log.warning("%s", error)
        self.arenas = Arenas("shared" if self.has_worker else "private")
        self.process_id = os.getpid()
        self._lock = threading.RLock()  # a signal handler may save in the middle of a save
        self._pending: deque[PendingSave] = deque()
        self._has_thread = self._is_busy = self._is_closed = False

    @property
    def has_worker(self) -> bool:
        """Whether saves are written by a worker process."""
        return self._start_worker is not None

    def put(self, save: PendingSave) -> None:
        """Accept a save: its status will end. Raises `CheckpointError` without a thread."""
        telemetry.note_background(1, save.staged_bytes)
        with self._lock:
            self._pending.append(save)
            if self._has_thread:
                return
            self._has_thread = True
        thread = threading.Thread(target=self._drain, name="ckpt-storage saves", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            status = save.status
            failure = save.refusal = save.refusal or CheckpointError(
                f"The save to {status.url} was not begun: rank {status.rank} has no thread for it "
                f"({error}).",
                rank=status.rank,
                phase="stage",
                next_step="See how many threads the process has and may have (ulimit -u).",
            )
            status.mark_outcome_consumed()
            self._drain()
            raise failure from error

    def close(self) -> None:
        """Free everything once the queue is idle; the saver puts no more saves. Never waits."""
        if os.getpid() != self.process_id:
            return  # a child of fork owns nothing of this
        with self._lock:
            self._is_closed = True
            is_idle = not (self._is_busy or self._pending)
        self.arenas.close()
        if is_idle and self.worker is not None:
            self.worker.close()
        self.ranks.close()

    def _drain(self) -> None:
        while (save := self._next()) is not None:
            self._run(save)
        if self._is_closed and self.worker is not None:
            self.worker.close()

    def _next(self) -> PendingSave | None:
        with self._lock:
            self._has_thread = self._is_busy = bool(self._pending)
            return self._pending.popleft() if self._pending else None

    def _run(self, save: PendingSave) -> None:
        status, begin = save.status, partial(self._begin, save)
        what = f"the save to {status.url}"
        try:
            with as_checkpoint_errors(what, status.rank, in_background=True):
                run = partial(run_save, self.ranks, save.url, save.options, begin)
                info = save.context.run(run, in_background=True)
        except CheckpointError as error:
            # An abandoned thread may still read the state.
            self._free(save, is_read=abandoned_thread_count() > 0)
            status.fail(error)
        else:
            self._free(save, is_read=False)
            status.succeed(info)

    def _begin(self, save: PendingSave, operation: Operation, session: SaveSession) -> SaveSteps:
        """Return the steps of this rank once its state is staged. Raises the refusal."""
        staging = save.staging
        if save.refusal is not None:
            raise save.refusal
        assert staging is not None  # noqa: S101  # else it would have been refused
        try:
            staging.wait(save.options.timeouts.stage)
        finally:
            # Also a failed rank waits for the others, to report its error.
            operation.phase("plan")
        save.status.mark_staged()
        operation.timeline.add("stage", staging.start_s, staging.end_s)
        save.status.follow(lambda: (operation.progress(), operation.save_id), operation.failed)
        if self._start_worker is None:
            memory, planner = staging.arena.memory, save.options.planner
            return RankSave(session, partial(staging.staged.local_plan, memory, planner))
        if self.worker is None or not self.worker.is_usable():
            self.worker = self._start_worker()
        request = SaveRequest(
            url=os.fspath(save.url),
            options=save.packed_options,
            # Pickled here: an error, and with it this request, may live longer than the copy.
            staged=pickle.dumps(staging.staged),
            arena_bytes=staging.arena.size_bytes,
            global_ranks=tuple(self.ranks.lane.global_ranks),
        )
        progress = save.options.progress
        return WorkerSave(self.worker, operation, session, request, staging.arena.file, progress)

    def _free(self, save: PendingSave, *, is_read: bool) -> None:
        """Reuse the memory for the next save, unless a thread may still read or write there."""
        # Before a caller that waits for the save returns, and perhaps calls `close`.
        self._is_busy = False
        telemetry.note_background(-1, -save.staged_bytes)
        staging, save.staging = save.staging, None
        if staging is None:
            return
        if is_read or not staging.done():
            staging.arena.close()
        else:
            self.arenas.release(staging.arena)
