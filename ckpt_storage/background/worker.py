"""The worker process of a rank: runs the steps of its trainer's saves, and ends with it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from ckpt_storage.coordination.failures import as_checkpoint_errors, picklable_copy
from ckpt_storage.coordination.heartbeats import Heartbeats, heartbeat_keys
from ckpt_storage.coordination.keyvalue import COORDINATOR, LostStoreError, StoreClient
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.rank_save import RankSave
from ckpt_storage.saves.session import SaveSession
from ckpt_storage.store import redacted_url
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.threads import abandoned_thread_count

from .arenas import map_shared
from .messages import (
    FinishCall,
    HeartbeatRequest,
    LogMessage,
    Response,
    SaveRequest,
    StepCall,
)
from .staged_plan import StagedPlan

log = logging.getLogger("ckpt_storage")

BEAT_S = 0.25
"""How often a worker that is at work reports its progress to its trainer."""


class _SaveMonitor(Heartbeats):
    """Monitors a save in the worker: phases and progress, and the error that cancels it."""

    def __init__(self, rank: int, send: Callable[[object], None]) -> None:
        super().__init__(rank, process_id=os.getppid())
        self.timeouts = Timeouts()
        self.error: CheckpointError | None = None
        self._send = send

    def phase(self, phase: Phase) -> Deadline:
        """Begin a phase, in the trainer as well."""
        self._send(phase)
        self.begin(phase, 0)
        return Deadline(phase, getattr(self.timeouts, phase), monitor=self)

    def failure(self) -> CheckpointError | None:
        return self.error

    def failed(self, error: CheckpointError) -> None:
        """Let the trainer report a failure before the call returns, which may hang."""
        if self.error is None:
            self.error = error
            self._send(picklable_copy(error))


class _TrainerLog(logging.Handler):
    """Sends records to the trainer as text."""

    def __init__(self, send: Callable[[LogMessage], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, with its traceback."""
        self._send(LogMessage(level=record.levelno, text=self.format(record)))


class Worker:
    """The loop of one worker: one call at a time, each with a response."""

    def __init__(self, rank: int, pipe: Connection, *, log_level: int = logging.NOTSET) -> None:
        log.setLevel(log_level)
        # The script of the trainer, which is imported here too, may have set up logging.
        log.propagate = False
        log.handlers[:] = [_TrainerLog(self._send_log)]
        self._rank = rank
        self._pipe = pipe
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._monitor = _SaveMonitor(rank, self._send)
        self._what = ""
        self._save: RankSave | None = None
        self._beats: threading.Event | None = None
        self._is_busy = False

    def serve(self) -> None:
        """Serve until the trainer closes the pipe."""
        # Imported modules are no garbage: to search them takes longer than to read a plan.
        gc.freeze()
        self._send(Response())
        threading.Thread(target=self._listen, name="ckpt-storage listen", daemon=True).start()
        while True:
            # Held in no variable while waiting: the trainer may want the memory back.
            self._respond(self._calls.get())

    def _respond(self, call: Callable[[], Any]) -> None:
        self._is_busy, is_unexpected = True, False
        try:
            with as_checkpoint_errors(self._what, self._monitor.rank, in_background=True):
                value = call()
        except CheckpointError as error:
            value = picklable_copy(error)
            is_unexpected = type(error) is CheckpointError and error.__cause__ is not None
        with self._sending:
            # The last progress of this call; after the response it would belong to the next.
            self._pipe.send(self._monitor.own())
            self._is_busy = False
            self._pipe.send(Response(value=value, is_unexpected=is_unexpected))

    def _begin(self, request: SaveRequest, file: int) -> None:
        memory = map_shared(file, request.arena_bytes)
        staged: StagedPlan = pickle.loads(request.staged)  # noqa: S301  # our trainer's
        try:
            options: SaveOptions = pickle.loads(request.options)  # noqa: S301  # our trainer's
        except BaseException as error:
            raise InvalidInputError(
                "The planner or another argument cannot be read in the worker process: "
                f"{type(error).__name__}: {error}.",
                phase="plan",
                next_step="Define its class at the top of a module, or use mode='thread'.",
            ) from error
        self._monitor.timeouts = options.timeouts
        session = SaveSession(
            request.url,
            options,
            self._rank,
            self._monitor.phase,
            is_coordinator=self._rank == COORDINATOR,
            global_ranks=request.global_ranks,
        )
        make_plan = partial(staged.local_plan, memory, options.planner)
        self._save = RankSave(session, make_plan, packs=True)

    def _step(self, call: StepCall) -> object:
        assert self._save is not None  # noqa: S101  # the request comes first
        return getattr(self._save, call.step)(*call.arguments)

    def _finish(self) -> bool:
        """Forget the save; return False if an abandoned thread may still read the state."""
        self._save = self._monitor.error = None
        if self._beats is not None:
            self._beats.set()
            self._beats = None
        return abandoned_thread_count() == 0

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)

    def _send_log(self, message: LogMessage) -> None:
        with self._sending, contextlib.suppress(OSError):  # the trainer is gone
            # Between calls the trainer reads nothing.
            if self._is_busy:
                self._pipe.send(message)

    def _listen(self) -> None:
        """Receive the trainer's messages; while there is none, report progress."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._pipe.poll(BEAT_S):
                    self._receive(self._pipe.recv())
                    continue
                with self._sending:
                    if self._is_busy:
                        self._pipe.send(self._monitor.own())
        # The trainer is gone; threads that hang in a storage must not keep this process.
        os._exit(0)

    def _receive(
        self, message: SaveRequest | HeartbeatRequest | StepCall | FinishCall | CheckpointError
    ) -> None:
        if isinstance(message, SaveRequest):
            self._what = f"the save to {redacted_url(message.url)}"
            self._monitor = _SaveMonitor(message.global_ranks[self._rank], self._send)
            file = reduction.recv_handle(self._pipe)
            self._calls.put(partial(self._begin, message, file))
        elif isinstance(message, HeartbeatRequest):
            if self._beats is None:
                self._beats = threading.Event()
                beat = partial(_send_heartbeats, message, self._monitor, self._beats)
                threading.Thread(target=beat, name="ckpt-storage heartbeats", daemon=True).start()
        elif isinstance(message, StepCall):
            self._calls.put(partial(self._step, message))
        elif isinstance(message, FinishCall):
            self._calls.put(self._finish)
        else:
            self._monitor.error = self._monitor.error or message


def _send_heartbeats(request: HeartbeatRequest, progress: Heartbeats, end: threading.Event) -> None:
    """Send heartbeats of this rank until `end`, while its trainer sends none."""
    keys, timeout_s = heartbeat_keys(StoreClient(request.store.connect)), 2 * request.beat_s
    progress.number = request.number
    last: bytes | None = None
    try:
        while not end.wait(request.beat_s):
            heartbeat = keys.get(request.key, timeout_s)
            if heartbeat == last:
                heartbeat = progress.pack()
                keys.set(request.key, heartbeat, timeout_s)
            last = heartbeat
    except LostStoreError as error:
        # The trainer sends heartbeats, too.
        log.debug("no heartbeats from the worker: %s", error)
