"""One background save from staging to outcome, in a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, RankMismatchError
from ckpt_storage.saves.saving import SaveOptions, run_save
from ckpt_storage.store.timed import abandoned_thread_count

from .handle import SaveStatus
from .hostbuffers import Lease
from .staging import StagedState, StagingJob
from .workerlink import WorkerLink

log = logging.getLogger("ckpt_storage")


class SaveTask:
    """One save from staging to outcome; lives in a thread of its own."""

    def __init__(
        self,
        coordinator: Ranks,
        link: WorkerLink | None,
        status: SaveStatus,
        options: SaveOptions,
        *,
        url: str | os.PathLike[str],
        number: int,
    ) -> None:
        self.url = url
        self.options = options
        self.previous: SaveTask | None = None
        self.lease: Lease | None = None
        self.staged: StagedState | None = None
        self.staging: StagingJob | None = None
        self._coordinator = coordinator
        self._link = link
        self.status = status
        self._number = number
        self.ended = threading.Event()

    def start(self, *, refusal: CheckpointError | None = None) -> None:
        """Go on in the background; with `refusal`, only to tell the other ranks.

        Raises `CheckpointError` where no thread is to be had, once the other ranks are told.
        """
        name = f"ckpt-storage save {self.status.url}"
        thread = threading.Thread(target=self._run, args=(refusal,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            failure = refusal or CheckpointError(
                f"The save to {self.status.url} was not begun: rank {self.status.rank} has no "
                f"thread for it ({error}).",
                rank=self.status.rank,
                phase="stage",
                next_step="See how many threads the process has and may have (ulimit -u).",
            )
            self.status.take()
            self._run(failure)
            raise failure from error

    def _run(self, refusal: CheckpointError | None) -> None:
        status = self.status
        try:
            what = f"the save to {status.url}"
            with as_checkpoint_errors(what, status.rank, in_background=True):
                refusal = refusal or self._end_staging()
                refusal = self._await_turn() or refusal
                info = self._carry_out(refusal)
                log.info(
                    "save %s to %s is committed, says rank %d",
                    info.save_id,
                    status.url,
                    status.rank,
                )
                status.succeed(info)
        except CheckpointError as error:
            log.warning(
                "save %s to %s failed on rank %d: %s",
                status.save_id or "(without id)",
                status.url,
                status.rank,
                error,
            )
            status.fail(error)
        finally:
            self._end_lease()
            self.ended.set()

    def _end_staging(self) -> CheckpointError | None:
        """Wait until the state is copied; return why it cannot be."""
        if self.staging is not None:
            status = self.status
            try:
                what = f"the staging for {status.url}"
                with as_checkpoint_errors(what, status.rank, in_background=True):
                    self.staged = self.staging.wait(self.options.timeouts.stage)
            except CheckpointError as error:
                error.phase = error.phase or "stage"
                return error
            status.mark_staged()
        return None

    def _carry_out(self, refusal: CheckpointError | None) -> CheckpointInfo:
        staged = self.staged
        if staged is not None and refusal is None and self._link is not None:
            return self._link.save(
                self.status, staged, self.options, url=self.url, number=self._number
            )

        def state() -> dict[str, Any]:
            if refusal is not None:
                raise refusal
            assert staged is not None  # noqa: S101  # there is one or the other
            return dict(staged.state)

        return run_save(
            self._coordinator,
            state,
            self.url,
            lambda: self.options,
            watch=self._attach,
            number=self._number,
            in_background=True,
        )

    def _attach(self, operation: Operation) -> None:
        self.status.follow(lambda: (operation.signs, operation.save_id))
        self.status.on_cancel(operation.give_up)

    def _await_turn(self) -> CheckpointError | None:
        """Wait for the save before this one; return why this one must not be made."""
        previous, self.previous = self.previous, None
        if previous is None:
            return None
        # Not its handle: after a failure it may still be telling the other ranks.
        if not previous.ended.wait(self.status.limit_s):
            return PhaseTimeoutError(
                f"The save to {self.status.url} waited {self.status.limit_s:g} s for the one "
                "before it.",
                timeout_s=self.status.limit_s,
                rank=self.status.rank,
                phase="plan",
                next_step="See what became of that one.",
            )
        error = previous.status.error
        if isinstance(error, RankMismatchError):
            # Ranks have called different saves: those behind would meet the wrong ones, too.
            return CheckpointError(
                f"The save to {self.status.url} was not begun: in the save before it, ranks did "
                f"not mean the same. {error}",
                rank=self.status.rank,
                phase="plan",
                next_step="Make all ranks call the same saves in the same order.",
            )
        return None

    def _end_lease(self) -> None:
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
