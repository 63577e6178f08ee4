"""One background save from staging to outcome, in a thread of its own.

Knows the order of what a save does in the background, and who must be told of what; what a save
is, it learns from `saving`, how a worker runs it, from `workerlink`. Called by `saver`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from .coordination import Coordinator
from .errors import CheckpointError, PhaseTimeoutError, RankMismatchError
from .handle import SaveHandle
from .hostbuffers import Lease
from .info import CheckpointInfo
from .operation import Operation
from .reports import as_checkpoint_errors
from .saving import SaveOptions, run_save
from .staging import StagedState, StagingJob
from .store.timed import abandoned_thread_count
from .workerlink import WorkerLink

__all__ = ["SaveTask"]

log = logging.getLogger("ckpt_storage")


class SaveTask:
    """One save from staging to outcome; lives in a thread of its own."""

    def __init__(
        self,
        coordinator: Coordinator,
        link: WorkerLink | None,
        handle: SaveHandle,
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
        self._handle = handle
        self._number = number
        self.ended = threading.Event()

    def start(self, *, refusal: CheckpointError | None = None) -> None:
        """Go on in the background; with `refusal`, only to tell the other ranks."""
        threading.Thread(
            target=self._run,
            args=(refusal,),
            name=f"ckpt-storage save {self._handle.url}",
            daemon=True,
        ).start()

    def _run(self, refusal: CheckpointError | None) -> None:
        handle = self._handle
        try:
            with as_checkpoint_errors(f"the save to {handle.url}", handle.rank):
                refusal = refusal or self._end_staging()
                refusal = self._await_turn() or refusal
                info = self._carry_out(refusal)
                log.info(
                    "save %s to %s is committed, says rank %d",
                    info.save_id,
                    handle.url,
                    handle.rank,
                )
                handle.succeed(info)
        except CheckpointError as error:
            log.warning(
                "save %s to %s failed on rank %d: %s",
                handle.save_id or "(without id)",
                handle.url,
                handle.rank,
                error,
            )
            handle.fail(error)
        finally:
            self._end_lease()
            self.ended.set()

    def _end_staging(self) -> CheckpointError | None:
        """Wait until the state is copied; return why it cannot be."""
        if self.staging is not None:
            handle = self._handle
            try:
                with as_checkpoint_errors(f"the staging for {handle.url}", handle.rank):
                    self.staged = self.staging.wait(self.options.timeouts.stage)
            except CheckpointError as error:
                error.phase = error.phase or "stage"
                return error
            handle.mark_staged()
        return None

    def _carry_out(self, refusal: CheckpointError | None) -> CheckpointInfo:
        staged = self.staged
        if staged is not None and refusal is None and self._link is not None:
            return self._link.save(
                self._handle, staged, self.options, url=self.url, number=self._number
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
        )

    def _attach(self, operation: Operation) -> None:
        self._handle.follow(lambda: (operation.signs, operation.save_id))
        self._handle.on_cancel(operation.give_up)

    def _await_turn(self) -> CheckpointError | None:
        """Wait for the save before this one; return why this one must not be made."""
        previous, self.previous = self.previous, None
        if previous is None:
            return None
        # Not its handle: after a failure it may still be telling the other ranks.
        if not previous.ended.wait(self._handle.limit_s):
            return PhaseTimeoutError(
                f"The save to {self._handle.url} waited {self._handle.limit_s:g} s for the one "
                "before it.",
                timeout_s=self._handle.limit_s,
                rank=self._handle.rank,
                phase="plan",
                next_step="See what became of that one.",
            )
        error = previous._handle.error  # noqa: SLF001  # the same class
        if isinstance(error, RankMismatchError):
            # Ranks have called different saves: those behind would meet the wrong ones, too.
            return CheckpointError(
                f"The save to {self._handle.url} was not begun: in the save before it, ranks did "
                f"not mean the same. {error}",
                rank=self._handle.rank,
                phase="plan",
                next_step="Make all ranks call the same saves in the same order.",
            )
        return None

    def _end_lease(self) -> None:
        if self.lease is None:
            return
        # A thread that was left behind may still read the state, and must not read the next one;
        # copies that came too late must not go on into it.
        is_read = self._handle.error is not None and abandoned_thread_count() > 0
        if is_read or (self.staging is not None and not self.staging.done()):
            self.lease.abandon()
        else:
            self.lease.release()
        self.lease = self.staging = self.staged = None
