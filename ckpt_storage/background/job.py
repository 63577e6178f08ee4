"""One background save: what it is told, its state, and how it is carried out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.planning import LocalPlan
from ckpt_storage.saves.running import run_save
from ckpt_storage.store.timed import abandoned_thread_count

from .arena import Lease
from .handle import SaveStatus
from .staging import Staged, StagingJob, local_plan

if TYPE_CHECKING:
    from .link import Worker


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """One save: what it is told, and its state once that is copied.

    `number` counts the saves of a saver, the same on every rank. `packed` are the options as a
    worker gets them. With `refusal` nothing is saved and the other ranks are told why. `staging`
    is a copy under way.
    """

    status: SaveStatus
    options: SaveOptions
    url: str | os.PathLike[str]
    number: int
    packed: bytes = b""
    lease: Lease | None = None
    staged: Staged | None = None
    staging: StagingJob | None = None
    refusal: CheckpointError | None = None

    def refuse(self, error: BaseException) -> None:
        """Save nothing, and tell the other ranks of what was raised here."""
        status = self.status
        if isinstance(error, CheckpointError):
            error.phase = error.phase or "stage"
            error.rank = status.rank if error.rank is None else error.rank
            self.refusal = error
            return
        self.refusal = CheckpointError(
            f"The save to {status.url} was not begun: rank {status.rank} was interrupted while it "
            f"copied its state ({type(error).__name__}).",
            rank=status.rank,
            phase="stage",
        )

    def plan(self) -> LocalPlan:
        """Return what was staged as a part of the save."""
        staged, planner = self.staged, self.options.planner or DefaultSavePlanner()
        assert staged is not None  # noqa: S101  # or it were refused
        return local_plan(staged.local, staged.places, staged.ties, staged.arena.memory, planner)

    def end_staging(self) -> None:
        """Wait until the state is copied; one that cannot be is a refusal."""
        if self.staging is None or self.refusal is not None:
            return
        try:
            what = f"the staging for {self.status.url}"
            with as_checkpoint_errors(what, self.status.rank, in_background=True):
                self.staged = self.staging.wait(self.options.timeouts.stage)
        except CheckpointError as error:
            error.phase = error.phase or "stage"
            self.refusal = error
        else:
            self.status.mark_staged()

    def end_lease(self) -> None:
        """Give the memory back once nobody reads or writes there."""
        if self.lease is None:
            return
        # A thread that was left behind may still read the state, and must not read the next one;
        # copies that came too late must not go on into it.
        is_read = self.status.error is not None and abandoned_thread_count() > 0
        if is_read or (self.staging is not None and not self.staging.done()):
            self.lease.abandon()
        else:
            self.lease.release()
        self.lease = self.staging = self.staged = None


def carry_out(ranks: Ranks, worker: Worker | None, job: SaveJob) -> CheckpointInfo:
    """Carry a job out, in the worker if there is one; a refusal is told to the other ranks."""
    status = job.status
    with ranks.operation(f"the save to {status.url}", timeouts=job.options.timeouts) as operation:
        if job.refusal is not None:
            raise job.refusal
        status.follow(lambda: (operation.signs, operation.save_id))
        status.on_cancel(operation.give_up)
        if worker is not None:
            return worker.run(operation, job)
        return run_save(operation, job.url, job.options, job.plan, in_background=True)
