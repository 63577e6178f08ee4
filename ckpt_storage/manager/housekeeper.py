"""One thread that does a job in the background each time it is asked to, and ends when told.

Owned by a `CheckpointManager`, whose job for it is to prune.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.deadline import Deadline

__all__ = ["Housekeeper"]

log = logging.getLogger("ckpt_storage")

_STOP_S = 10.0
"""How long a job that was told to stop may take; a request that hangs is then left behind."""


class Housekeeper:
    """Runs `job(deadline)` in a named daemon thread, once for any number of wishes meanwhile.

    What it raises is logged and kept as `error`: nobody waits for it. The thread starts with the
    first wish and ends with `close`.
    """

    def __init__(self, job: Callable[[Deadline], object], *, name: str, timeout_s: float) -> None:
        self._job = job
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._wish_count = 0
        self._done_count = 0
        self._is_closing = False
        self._halt = _Halt(name)
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def wake(self) -> None:
        """Ask for a run that begins from now on; without effect after `close`."""
        with self._changed:
            if self._is_closing:
                return
            self._wish_count += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return whether all that was asked for so far has been done, within `timeout_s`."""
        with self._changed:
            wished = self._wish_count
            return self._changed.wait_for(lambda: self._done_count >= wished, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Let what was asked for end, at most `timeout_s` seconds; then stop it. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            self._halt.stop()
            thread.join(_STOP_S)
        if thread.is_alive():
            log.warning("%s hangs in a storage request and is left behind.", self._name)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._done_count < self._wish_count or self._is_closing
                )
                if self._done_count >= self._wish_count or self._halt.failure() is not None:
                    self._done_count = self._wish_count
                    self._changed.notify_all()
                    return
                wished = self._wish_count
            error: BaseException | None = None
            begin_s = time.monotonic()
            try:
                self._job(Deadline("commit", self._timeout_s, watch=self._halt))
            except CheckpointError as failure:
                error = failure
                if self._halt.failure() is None:
                    log.warning("%s failed and is tried again later: %s", self._name, failure)
            except Exception as failure:  # the next run may do better, and training goes on
                error = failure
                log.exception("%s failed.", self._name)
            log.debug("%s took %.1f s", self._name, time.monotonic() - begin_s)
            with self._changed:
                self.error = error
                self._done_count = wished
                self._changed.notify_all()


class _Halt:
    """A `Watch` by which a job's requests are given up from outside."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: CheckpointError | None = None

    def stop(self) -> None:
        """Give up what is under way."""
        self._error = CheckpointError(f"{self._name} was stopped; the next one goes on.")

    def failure(self) -> CheckpointError | None:
        """Return why the job cannot go on."""
        return self._error

    def advanced(self, byte_count: int) -> None:
        """Take no note."""

    def expect(self, total_bytes: int) -> None:
        """Take no note."""

    def failed(self, error: CheckpointError) -> None:
        """Take no note: it is raised as well."""

    def ended_file(self) -> None:
        """Take no note."""
