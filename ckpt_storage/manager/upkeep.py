"""What a manager does for its root besides saving and loading, on threads of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Timeouts
from ckpt_storage.store.deadline import Deadline

from .mirror import Mirror
from .prune import Pruner, PruneReport
from .resume import newest_of
from .root import Root

log = logging.getLogger("ckpt_storage")

Pruning = Literal["background", "manual"]
"""When a manager prunes: after each save on a thread of its own, or by its method only."""

_CLOSE_S = 60.0

_STOP_S = 10.0
"""How long a job that was told to stop may take; a request that hangs is then left behind."""


class Job:
    """Runs `work(deadline)` in a named daemon thread, once for any number of wishes meanwhile.

    What it raises is logged and kept as `error`: nobody waits for it. The thread starts with the
    first wish and ends with `close`.
    """

    def __init__(self, work: Callable[[Deadline], object], *, name: str, timeout_s: float) -> None:
        self._work = work
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._wish_count = 0
        self._done_count = 0
        self._is_closing = False
        self._stop: CheckpointError | None = None
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
            self._stop = CheckpointError(f"{self._name} was stopped; the next one goes on.")
            thread.join(_STOP_S)
        if thread.is_alive():
            log.warning("%s hangs in a storage request and is left behind.", self._name)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._done_count < self._wish_count or self._is_closing
                )
                if self._done_count >= self._wish_count or self._stop is not None:
                    self._done_count = self._wish_count
                    self._changed.notify_all()
                    return
                wished = self._wish_count
            error: BaseException | None = None
            try:
                self._work(Deadline("commit", self._timeout_s, watch=_Stop(self)))
            except CheckpointError as failure:
                error = failure
                if self._stop is None:
                    log.warning("%s failed and is tried again later: %s", self._name, failure)
            except Exception as failure:  # the next run may do better, and training goes on
                error = failure
                log.exception("%s failed.", self._name)
            with self._changed:
                self.error = error
                self._done_count = wished
                self._changed.notify_all()


class _Stop:
    """A `Watch` that ends a job's requests once it was told to stop."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def failure(self) -> CheckpointError | None:
        """Return why the job cannot go on."""
        return self._job._stop  # noqa: SLF001  # its own

    def advanced(self, byte_count: int) -> None:
        """Take no note."""

    def expect(self, total_bytes: int) -> None:
        """Take no note."""

    def failed(self, error: CheckpointError) -> None:
        """Take no note: it is raised as well."""

    def ended_file(self) -> None:
        """Take no note."""


class Upkeep:
    """Prunes one root and fills its mirror; does so on the coordinator only.

    `pruner` is None where nothing is ever deleted.
    """

    def __init__(
        self,
        root: Root,
        pruner: Pruner | None,
        mirror: Mirror | None,
        *,
        is_background: bool,
        is_coordinator: bool,
        timeouts: Timeouts,
    ) -> None:
        self._root = root
        self._pruner = pruner
        self._mirror = mirror
        self._is_background = is_background and pruner is not None
        self._is_coordinator = is_coordinator
        self._timeouts = timeouts
        self._highest_begun = -1
        self._has_looked_above = False
        url = root.location.url
        self._tidying = Job(self._tidy, name=f"ckpt-storage prune {url}", timeout_s=timeouts.commit)
        self._copying = Job(
            self._copy, name=f"ckpt-storage mirror {url}", timeout_s=timeouts.commit
        )
        if mirror is not None and is_coordinator:
            # What an earlier process has left.
            self._copying.wake()

    def begun(self, step: int) -> None:
        """Note that a save begins."""
        self._highest_begun = max(self._highest_begun, step)

    def committed(self, name: str, save_id: str | None) -> None:
        """Note a commit of this process, before its name is free; from any thread."""
        # Every file was looked at before the commit.
        self._root.found_sound(name, save_id)
        if self._pruner is not None:
            # Its step may be lower than those of a run that was given up.
            self._pruner.last_saved = name

    def wake(self) -> None:
        """Let the background do what a commit asks for; from any thread."""
        if self._is_coordinator and (self._is_background or not self._has_looked_above):
            self._tidying.wake()
        if self._is_coordinator and self._mirror is not None:
            self._copying.wake()

    def prune(self, *, dry_run: bool) -> PruneReport | None:
        """Prune now; as `CheckpointManager.prune`."""
        if self._pruner is None:
            raise InvalidInputError(
                "This manager has no policy of retention.",
                next_step="Pass keep=, such as keep=KeepLatest(3).",
            )
        if not self._is_coordinator:
            return None
        return self._pruner.prune(Deadline("commit", self._timeouts.commit), dry_run=dry_run)

    def sweep(self) -> PruneReport | None:
        """Sweep now; as `CheckpointManager.sweep`."""
        if self._pruner is None or not self._is_coordinator:
            return None
        return self._pruner.sweep(Deadline("commit", self._timeouts.commit))

    @property
    def last(self) -> PruneReport | None:
        """What the last prune did."""
        return None if self._pruner is None else self._pruner.last

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the prune that the last save asked for; return whether it has ended."""
        return self._tidying.wait(self._timeouts.commit if timeout_s is None else timeout_s)

    def wait_mirrored(self, timeout_s: float | None) -> bool:
        """Wait until the mirror has what was saved; return whether it has."""
        is_done = self._copying.wait(self._timeouts.commit if timeout_s is None else timeout_s)
        return is_done and self._copying.error is None

    def close(self, timeout_s: float | None) -> None:
        """Let mirror and prune end, each in this time at most; then stop them."""
        self._copying.close(self._timeouts.commit if timeout_s is None else timeout_s)
        self._tidying.close(_CLOSE_S if timeout_s is None else timeout_s)

    def _copy(self, deadline: Deadline) -> None:
        may_go = True
        try:
            may_go = self._mirror is not None and self._mirror.fill(deadline)
        finally:
            if may_go and self._is_background:
                # What waited for its copy, or is found to be damaged, may go now.
                self._tidying.wake()

    def _tidy(self, deadline: Deadline) -> None:
        if not self._has_looked_above and self._highest_begun >= 0:
            self._has_looked_above = True
            try:
                self._warn_of_higher_steps(deadline)
            except CheckpointError as error:  # what is saved and pruned does not depend on it
                log.info("%s: higher steps were not looked for: %s", self._root.location.url, error)
        if self._pruner is not None and self._is_background:
            self._pruner.prune(deadline)

    def _warn_of_higher_steps(self, deadline: Deadline) -> None:
        """Warn if what is resumed from is above what is saved: training went back, or anew."""
        newest, saved = newest_of([self._root], deadline), self._highest_begun
        step = newest.step if newest is not None else None
        if newest is not None and step is not None and step > saved:
            log.warning(
                "Step %d was saved below step %d of %s. restore() and latest() go by step, so they "
                "still choose step %d, and KeepLatest counts the higher ones. If those are given "
                "up, move their folders out of %s or delete them; or save to another root.",
                saved,
                step,
                newest.url,
                step,
                self._root.location.url,
            )
