"""The upkeep of a manager's roots: what follows each commit in the background."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store.deadline import Deadline

from .job import BackgroundJob
from .mirror import Mirror
from .policies import Keep
from .prune import Pruner
from .retention import PruneReport
from .root import Root

_CLOSE_S = 60.0
"""How long closing waits for a prune by default."""


class Upkeep:
    """Prunes the first root and fills its mirror, the second root, if any.

    Only the coordinator does either; the methods of other ranks return at once. `prunes`: prune
    after each commit. `record_save` may be called in any thread.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        *,
        keep: Keep | None,
        mirror_keep: Keep | None,
        prunes: bool,
        is_coordinator: bool,
    ) -> None:
        root, timeouts = roots[0], roots[0].timeouts
        mirror = Mirror(root, roots[1], mirror_keep) if len(roots) > 1 else None
        self._timeouts = timeouts
        self._pruner: Pruner | None = None
        if keep is not None:
            protect = (lambda *_: {}) if mirror is None else mirror.pending
            self._pruner = Pruner(root, keep, protect=protect, sweeps=True)
        self._is_coordinator = is_coordinator
        self._mirror = mirror if is_coordinator else None
        self._prunes = prunes and is_coordinator and keep is not None
        self._prune_job, self._mirror_job = (
            BackgroundJob(
                work,
                name=f"ckpt-storage {name} {root.location.url}",
                timeout_s=timeouts.commit,
            )
            for name, work in (("prune", self._prune), ("mirror", self._fill_mirror))
        )
        if self._mirror is not None:
            # An earlier process may have ended before its copies did.
            self._mirror_job.wake()

    def record_save(self, name: str) -> None:
        """Start the prune and the copy that follow the commit of a checkpoint."""
        if self._pruner is not None:
            self._pruner.record_save(name)
        if self._prunes:
            self._prune_job.wake()
        if self._mirror is not None:
            self._mirror_job.wake()

    def _fill_mirror(self, deadline: Deadline) -> None:
        has_copied = True
        try:
            has_copied = self._mirror is not None and self._mirror.fill(deadline)
        finally:
            if has_copied and self._prunes:
                # A checkpoint that was kept for its copy may be deleted now.
                self._prune_job.wake()

    def _prune(self, deadline: Deadline) -> None:
        if self._pruner is not None:
            self._pruner.prune(deadline)

    def prune(self, *, dry_run: bool) -> PruneReport | None:
        """Prune the first root now; None on other ranks. Raises as `CheckpointManager.prune`."""
        if self._pruner is None:
            raise InvalidInputError(
                "This manager has no policy of retention.",
                next_step="Pass keep=, such as keep=KeepLatest(3).",
            )
        if not self._is_coordinator:
            return None
        return self._pruner.prune(Deadline.of(self._timeouts, "commit"), dry_run=dry_run)

    @property
    def last_prune(self) -> PruneReport | None:
        """The report of the last prune, None before the first."""
        return None if self._pruner is None else self._pruner.last_report

    def wait_pruned(self, timeout_s: float | None) -> bool:
        """Wait until the prune after the last save has ended; return whether it has."""
        return self._prune_job.wait(self._timeouts.commit if timeout_s is None else timeout_s)

    def wait_mirrored(self, timeout_s: float | None) -> bool:
        """Wait until the mirror has all committed saves; return whether it has."""
        limit_s = self._timeouts.commit if timeout_s is None else timeout_s
        return self._mirror_job.wait(limit_s) and self._mirror_job.error is None

    def close(self, timeout_s: float | None) -> None:
        """Wait for the mirror, then for a prune, then stop them. Idempotent."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._prune_job.close, _CLOSE_S if timeout_s is None else timeout_s)
            limit_s = self._timeouts.commit if timeout_s is None else timeout_s
            ending.callback(self._mirror_job.close, limit_s)
