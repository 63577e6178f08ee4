"""Work in a background thread; every wait for it has a limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.monitor import OperationMonitor

log = logging.getLogger("ckpt_storage")

_STOP_S = 10.0
"""How long a stopped job may take to end; a request that hangs is then abandoned."""

_Work = Callable[[Deadline], object]


class BackgroundJob(OperationMonitor):
    """Runs `work(deadline)` in a named daemon thread; requests that arrive meanwhile share a run.

    It is the `OperationMonitor` of the deadline: `close` cancels the storage requests of a run.
    """

    def __init__(self, work: _Work, *, name: str, timeout_s: float) -> None:
        # Only a run refers to the owner of `work`, so that the manager and its saver are freed with
        # their last reference.
        self._work: Callable[[], _Work | None] = (
            WeakMethod(work) if isinstance(work, MethodType) else lambda: work
        )
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._requested_count = self._done_count = 0
        self._is_closing = False
        self._stopped: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def failure(self) -> CheckpointError | None:
        """Return why a run cannot go on."""
        return self._stopped

    def wake(self) -> None:
        """Request a run that begins after this call; without effect after `close`. Never raises."""
        work = self._work()
        with self._changed:
            if self._is_closing or work is None:
                return
            self._requested_count += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(work,), name=self._name, daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads; or the interpreter is ending
                    self._thread, self._done_count, self.error = None, self._requested_count, error
                    log.warning("%s is tried again later: %s", self._name, error)

    def wait(self, timeout_s: float) -> bool:
        """Wait `timeout_s` at most; return whether all runs requested so far have ended."""
        with self._changed:
            requested_count = self._requested_count
            return self._changed.wait_for(lambda: self._done_count >= requested_count, timeout_s)

    def close(self, timeout_s: float, *, stop_s: float = _STOP_S) -> None:
        """Wait `timeout_s` at most for the runs that are requested, then stop them. Idempotent."""
        with self._changed:
            self._is_closing = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            self._stopped = CheckpointError(f"{self._name} was stopped; the next run continues.")
            thread.join(stop_s)
        if thread.is_alive():
            log.warning("%s hangs and is abandoned.", self._name)

    def _run(self, work: _Work) -> None:
        is_over = False
        while not is_over:
            requested_count = self._requested_count
            self._run_once(work)
            with self._changed:
                is_over = self._requested_count == requested_count or self._stopped is not None
                self._done_count = self._requested_count if is_over else requested_count
                self._thread = None if is_over else self._thread
                self._changed.notify_all()

    def _run_once(self, work: _Work) -> None:
        self.error = None
        try:
            work(Deadline("commit", self._timeout_s, monitor=self))
        except CheckpointError as failure:
            self.error = failure
            if self._stopped is None:
                log.warning("%s failed and is tried again later: %s", self._name, failure)
        except Exception as failure:  # the next run may do better, and training goes on
            self.error = failure
            log.exception("%s failed.", self._name)
