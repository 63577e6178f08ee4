"""The steps of a save that are run by the worker process of a rank."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import picklable_copy
from ckpt_storage.coordination.heartbeats import RankProgress, beat_interval_s
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import Phase, Progress
from ckpt_storage.progress import reporting
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.rank_save import Proposal
from ckpt_storage.saves.save import find_outcome, unknown_outcome
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store.threads import park_if_exiting

from .messages import (
    FinishCall,
    HeartbeatRequest,
    LogMessage,
    Response,
    SaveRequest,
    Step,
    StepCall,
)
from .worker_process import LOOK_S, START_S, WorkerGoneError, WorkerProcess

log = logging.getLogger("ckpt_storage")

_GRACE_S = 5.0
"""How long a worker may take to give up a save that has failed elsewhere."""

_STARTING = pickle.dumps(Proposal(plan=None, plan_id="a worker is starting"))
"""The proposal of a rank whose worker is starting, so that the others do not miss it."""

_ALLOW_START = b"allow a worker to start"
"""The answer to such a proposal: all ranks propose again, with `START_S` more time."""


class WorkerSave:
    """The steps of one save, run by the worker; as `RankSave`, with values packed for it.

    `file` is the descriptor of the arena. Raises `RankFailedError` if the worker is lost before the
    commit. If it is lost in the commit, the storage is asked for the outcome.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        operation: Operation,
        session: SaveSession,
        request: SaveRequest,
        file: int | None,
        progress: Progress,
    ) -> None:
        self._worker = worker
        self._operation = operation
        self._session = session
        self._request: SaveRequest | None = request
        self._file = file
        self._progress = progress
        self._has_proposed = False
        operation.set_local_failure(self._local_failure)

    def propose(self) -> object:
        """Return the packed proposal of this rank."""
        is_first, self._has_proposed = not self._has_proposed, True
        try:
            if is_first and not self._worker.check_start():
                return _STARTING
            while not self._worker.check_start():
                if (failure := self._operation.failure()) is not None:
                    raise failure
                time.sleep(LOOK_S)
            if self._request is not None:
                request, self._request = self._request, None
                self._call(request, self._file)
        except WorkerGoneError as gone:
            self._resolve(gone)
        return self._step("propose")

    def decide(self, proposals: Sequence[Any]) -> object:
        """Return the packed answers to all proposals."""
        return _ALLOW_START if _STARTING in proposals else self._step("decide", proposals)

    def accept(self, answer: object) -> str | None:
        """Take a packed answer; return the save id, or None."""
        operation = self._operation
        if answer == _ALLOW_START:
            operation.phase("plan", operation.timeouts.plan + START_S)
            return None
        self._request_heartbeats()
        save_id: str | None = self._step("accept", answer)
        return save_id

    def _request_heartbeats(self) -> None:
        lane = self._operation.lane
        store = None if lane.world_size == 1 else lane.keys.client.address
        if store is not None:
            request = HeartbeatRequest(
                store=store,
                key=lane.heartbeat_key(lane.rank),
                number=lane.number,
                beat_s=beat_interval_s(lane.world_size, self._operation.timeouts.silence),
            )
            with contextlib.suppress(WorkerGoneError):  # the call that follows finds it gone
                self._worker.send(request)

    def write(self) -> object:
        """Return the packed report of this rank."""
        return self._step("write")

    def commit(self, reports: Sequence[Any], stats: OperationStats) -> CheckpointInfo:
        """Commit; return what was committed."""
        info: CheckpointInfo = self._step("commit", reports, stats)
        return info

    def close(self) -> None:
        """Let the worker forget the save; end a worker that may still read the state."""
        self._operation.set_local_failure(lambda: None)
        if not self._worker.close.alive or self._request is not None:
            return
        try:
            if not self._call(FinishCall()):
                # A thread of it may still read the state, which is to be freed.
                self._worker.close()
        except WorkerGoneError as gone:
            log.warning("%s", self._error_of(gone))
        except CheckpointError as error:
            log.warning("The %s did not end the save: %s", self._worker.name, error)

    def _step(self, step: Step, *arguments: Any) -> Any:  # noqa: ANN401  # as the step's own
        try:
            return self._call(StepCall(step=step, arguments=arguments))
        except WorkerGoneError as gone:
            return self._resolve(gone)

    def _resolve(self, gone: WorkerGoneError) -> CheckpointInfo:
        """Return what a worker that was lost in the commit has committed, or raise the error."""
        error, failure = self._error_of(gone), self._operation.failure()
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
        """Return the loss of the worker, as long as this rank still needs it."""
        operation = self._operation
        # A member whose report is sent waits for the outcome only.
        needs_worker = operation.is_coordinator or operation.save_id is None
        if not needs_worker or self._worker.pid is not None:
            return None
        return self._error_of(WorkerGoneError(self._worker.exit_description()))

    def _call(self, call: object, file: int | None = None) -> Any:  # noqa: ANN401  # as the call's own
        """Return or raise the response to a call. Raises `WorkerGoneError` if there is none."""
        try:
            self._worker.send(call, file)
            response = self._await_response()
            if response.is_unexpected and self._operation.deadline.phase == "commit":
                # It may have committed: as little is known as of a worker that died.
                raise WorkerGoneError(f"broke and was ended ({response.value})")  # noqa: TRY301  # as below
        except BaseException:
            # Its later messages are of this save, and must not be read in the next save.
            if "commit" in self._worker.kill():
                self._operation.phase("commit")
            raise
        if isinstance(response.value, CheckpointError):
            raise response.value
        return response.value

    def _await_response(self) -> Response:
        """Read the worker's messages until it responds; pass a failure of the operation on.

        Silence is counted in checks, each after reading what has arrived: a trainer that was
        stopped itself must not take its worker for dead.
        """
        worker, operation = self._worker, self._operation
        quiet_checks, notified_s = 0, math.inf
        with contextlib.ExitStack() as stack:
            show: Callable[[int], None] | None = None
            while True:
                park_if_exiting()
                failure = operation.failure()
                if failure is not None and notified_s == math.inf:
                    worker.send(picklable_copy(failure))
                    notified_s = time.monotonic()
                message = worker.receive()
                if message is None:
                    quiet_checks += 1
                    if quiet_checks * LOOK_S > worker.silence_s:
                        raise WorkerGoneError(
                            f"sent no message for {worker.silence_s:g} s and was ended"
                        )
                    end_s = min(operation.deadline.at_monotonic_s, notified_s) + worker.silence_s
                    if time.monotonic() > end_s + _GRACE_S:
                        raise WorkerGoneError("did not give up the save and was ended")
                    continue
                quiet_checks = 0
                if isinstance(message, Response):
                    return message
                if not isinstance(message, RankProgress):
                    self._on_message(message)
                elif (more_bytes := _add_progress(operation, message)) > 0:
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

    def _on_message(self, message: LogMessage | CheckpointError | Phase) -> None:
        if isinstance(message, LogMessage):
            log.log(message.level, "%s", message.text)
        elif isinstance(message, CheckpointError):
            self._operation.failed(message)
        else:
            self._operation.phase(message)

    def _error_of(self, gone: WorkerGoneError) -> RankFailedError:
        """Return the error that names the worker that is gone, and how it ended."""
        rank, phase = self._operation.global_rank, self._operation.deadline.phase
        return RankFailedError(
            f"The {self._worker.name} {gone} in the {phase} phase of {self._operation.what}.",
            failures={rank: str(gone)},
            rank=rank,
            phase=phase,
            next_step="See why (out of memory?). Training can go on, and the next save starts "
            "a new worker."
            if self._worker.has_started
            else "It never began the save: see what it printed. The trainer's script must be "
            "importable (`if __name__ == '__main__':`); mode='thread' needs no worker.",
        )


def pack_options(options: SaveOptions) -> bytes:
    """Return options as a worker gets them. Raises `InvalidInputError`."""
    try:
        # Callables of the trainer are not sent: they get the progress that the worker reports.
        return pickle.dumps(replace(options, progress=None, consolidate=None))
    except BaseException as error:
        raise InvalidInputError(
            f"The planner or another argument cannot be sent to the worker process: {error}.",
            phase="stage",
            next_step="Define its class at the top of a module, or use mode='thread'.",
        ) from error


def _add_progress(operation: Operation, progress: RankProgress) -> int:
    """Count the progress of a worker as that of its rank; return the bytes that are new."""
    own = operation.heartbeats.own()
    if progress.retry_count > own.retry_count:
        operation.retried(progress.retry_count - own.retry_count)
    if progress.total_bytes:
        operation.expect(progress.total_bytes)
    more_bytes = progress.done_bytes - own.done_bytes
    more_files = progress.done_files - own.done_files
    if more_bytes > 0 or more_files > 0:
        operation.advanced(max(0, more_bytes), file_count=max(0, more_files))
    return more_bytes
