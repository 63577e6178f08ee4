"""What is done for a root besides saving and loading: pruning, in the background or when told.

Imports no torch. Owned by a `CheckpointManager`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Timeouts
from ckpt_storage.store.deadline import Deadline

from .census import Census
from .claims import Claims
from .pruneplan import Soundness
from .pruning import Pruner, PruneReport

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


Pruning = Literal["background", "manual"]
"""When a manager prunes: after each save on a thread of its own, or by its method only."""


class Upkeep:
    """Keeps one root; all methods do so on the coordinator only, where `is_coordinator`.

    `pruner` is None where nothing is ever deleted. Until `begin`, nothing is done.
    """

    def __init__(
        self,
        census: Census,
        soundness: Soundness,
        pruner: Pruner | None,
        *,
        claims: Claims,
        pruning: Pruning,
        timeouts: Timeouts,
    ) -> None:
        self._census = census
        self._claims = claims
        self._soundness = soundness
        self._pruner = pruner
        self._is_background = pruner is not None and pruning == "background"
        self._timeouts = timeouts
        self._is_coordinator = False
        self._highest_saved = -1
        self._has_looked_above = False
        self._housekeeper = Housekeeper(
            self._run,
            name=f"ckpt-storage prune {census.location.url}",
            timeout_s=timeouts.commit,
        )

    def begin(self, *, is_coordinator: bool) -> None:
        """Say whether this rank cleans up; before anything is saved."""
        self._is_coordinator = is_coordinator

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
        """Wait for what the last save asked for; return whether it is done."""
        return self._housekeeper.wait(self._timeouts.commit if timeout_s is None else timeout_s)

    def committed(self, name: str, save_id: str | None) -> None:
        """Note a commit of this process; from any thread."""
        # Every file was looked at before the commit.
        self._soundness.found_sound(name, save_id)
        self._highest_saved = max(self._highest_saved, self._census.names.step_of(name) or 0)
        if self._pruner is not None:
            # Its step may be lower than those of a run that was given up.
            self._pruner.protect(name, "it is what this manager saved last")

    def wake(self) -> None:
        """Let the background do what a save asks for; from any thread."""
        if (self._is_background or not self._has_looked_above) and self._is_coordinator:
            self._housekeeper.wake()

    def close(self, timeout_s: float) -> None:
        """End the background; as `Housekeeper.close`."""
        self._housekeeper.close(timeout_s)

    def _run(self, deadline: Deadline) -> None:
        if not self._has_looked_above:
            try:
                self._has_looked_above = self._look_above(deadline)
            except CheckpointError as error:  # what is saved and pruned does not depend on it
                self._has_looked_above = True
                url = self._census.location.url
                log.info("%s: what lies above was not looked at: %s", url, error)
        if self._pruner is not None and self._is_background:
            self._pruner.prune(deadline)

    def _look_above(self, deadline: Deadline) -> bool:
        """Warn if what is resumed from is above what is saved: training went back, or anew.

        Returns False where that may be a save of this manager: its end wakes this one once more.
        """
        newest = self._census.newest(deadline, besides=self._soundness.damaged)
        # A commit can be seen before this manager notes it, which it does before the claim ends.
        if newest is not None and newest.name in self._claims.in_use():
            return False
        step, saved = newest.step if newest is not None else None, self._highest_saved
        if newest is not None and step is not None and step > saved:
            log.warning(
                "Step %d was saved below step %d of %s. restore() and latest() go by step, so they "
                "still choose step %d, and KeepLatest counts the higher ones. If those are given "
                "up, move their folders out of %s or delete them; or save to another root.",
                saved,
                step,
                newest.url,
                step,
                self._census.location.url,
            )
        return True
