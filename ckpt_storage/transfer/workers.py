"""Named daemon threads that run jobs; a stuck thread never delays the exit."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.threads import start_thread

T = TypeVar("T")

_GRACE_S = 10.0
_REPORT_S = 1.0


class Workers:
    """A few daemon threads that run jobs in parallel; the first failure stops the rest.

    A context manager of one thread. `submit` blocks while `limit` jobs are queued or running. The
    end of the block starts no more of them, and waits at most `grace_s` for those that run.
    """

    def __init__(
        self,
        count: int,
        *,
        name: str,
        deadline: Deadline,
        limit: Callable[[], int] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._deadline, self._name, self._grace_s = deadline, name, grace_s
        self._limit = limit or (lambda: 2 * count)
        # A job, and the function to call after it, also if it is never run.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], ...] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open_count = 0
        self._failure: BaseException | None = None
        self._cancelled = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for number, thread in enumerate(self._threads):
            try:
                start_thread(thread)
            except BaseException:
                # At the system's limit of threads: end those that did start.
                for _ in range(number):
                    self._jobs.put(None)
                raise

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, ended = job
            try:
                try:
                    if not self._cancelled:
                        run()
                finally:
                    ended()
            except BaseException as error:  # noqa: BLE001  # handed to the submitting thread
                with self._changed:
                    self._failure = self._failure or error
                    self._cancelled = True
            finally:
                del job, run, ended
                with self._changed:
                    self._open_count -= 1
                    self._changed.notify_all()

    def submit(
        self, job: Callable[[], object], *, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Queue `job`; raise the failure of an earlier job, or `PhaseTimeoutError`.

        `ended` is called once, after `job` or, if the job is never run, in its place.
        """
        try:
            self.wait_for_slot()
        except BaseException:
            ended()
            raise
        with self._changed:
            self._open_count += 1
        self._jobs.put((job, ended))

    def wait_for_slot(self) -> None:
        """Wait until `submit` would not block; raises as it does."""
        self._wait(lambda: self._open_count < self._limit())

    def drain(self) -> None:
        """Wait until every job has ended; raise the first failure, or `PhaseTimeoutError`."""
        self._wait(lambda: self._open_count == 0)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not ready() and self._failure is None:
                if not self._changed.wait(min(1.0, self._deadline.remaining_s() + 0.001)):
                    self._deadline.check(self._name)
            if self._failure is not None:
                raise self._failure
        self._deadline.check(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancelled = True
        for _ in self._threads:
            self._jobs.put(None)
        begin = time.monotonic()
        end = begin + max(1.0, min(self._grace_s, self._deadline.remaining_s()))
        stuck = self._stuck(min(end, begin + _REPORT_S))
        if stuck and isinstance(error, CheckpointError):
            # Other ranks must not wait for the stuck thread, and requests are abandoned now.
            self._deadline.monitor.failed(error)
        stuck = self._stuck(end)
        if stuck and error is not None:
            error.add_note(
                f"{', '.join(stuck)} is still running: do not reuse memory that it was filling or "
                "sending."
            )

    def _stuck(self, end: float) -> list[str]:
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]


def side_by_side(store: Store, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what `calls` to `store` return; in parallel where each costs a round trip.

    Their order must not matter. All have ended on return. Raises the first failure; others may then
    still run, until the store's deadline.
    """
    if not store.capabilities.is_remote:
        return [call() for call in calls]
    return some_at_once(calls, len(calls))


def some_at_once(
    calls: Sequence[Callable[[], T]],
    thread_count: int,
    *,
    name: str = "ckpt-storage side by side",
    deadline: Deadline | None = None,
) -> list[T]:
    """Do as `side_by_side` with any storage, with `thread_count` calls at a time.

    With a `deadline`, calls that run during a failure get longer to end.
    """
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = calls[number]()

    grace_s = _GRACE_S if deadline else _REPORT_S
    deadline = deadline or Deadline("commit", math.inf)
    count = min(thread_count, len(calls))
    with Workers(count, name=name, deadline=deadline, grace_s=grace_s) as workers:
        for number in range(len(calls)):
            workers.submit(partial(run, number))
        workers.drain()
    return [results[number] for number in range(len(calls))]
