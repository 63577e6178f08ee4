"""A save that goes on with a consolidation: what that is to be, and how its failure is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, ConsolidationError, InvalidInputError, StorageError
from ckpt_storage.export.consolidate import (
    ConsolidateJob,
    ConsolidationReport,
    output_location,
    run_consolidate,
    track,
)
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.options import PageCache, Phase, Progress, RetryPolicy, Timeouts
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

Chained = bool | str | os.PathLike[str] | ConsolidateOptions | None
"""What `save(consolidate=...)` takes: whether, where to, or all options."""


def chained_job(
    chained: Chained,
    source: Location,
    *,
    commits: Location | None,
    rank: int,
    page_cache: PageCache,
    timeouts: Timeouts,
    retry: RetryPolicy | None,
    progress: Progress,
) -> ConsolidateJob | None:
    """Return the consolidation that a save to `source` goes on with; None: none.

    All but `chained` is as the save has it, which may have its commit records at `commits`.
    `page_cache` counts where the options do not say. Raises `InvalidInputError`, before anything
    is saved.
    """
    if chained is None or chained is False:
        return None
    options = chained if isinstance(chained, ConsolidateOptions) else ConsolidateOptions()
    output = chained if isinstance(chained, str | os.PathLike) else options.output
    if not (chained is True or output is not None or isinstance(chained, ConsolidateOptions)):
        raise InvalidInputError(
            f"consolidate is {chained!r:.80}.",
            next_step="Give True, the URL of the output, or ConsolidateOptions.",
        )
    return ConsolidateJob(
        source=source,
        commits=commits,
        output=output_location(source, output, options.output_storage_options),
        options=replace(options, page_cache=options.page_cache or page_cache),
        timeouts=timeouts,
        retry=retry or RetryPolicy(),
        track=partial(track, progress, rank),
    )


class _InOnePhase:
    """An operation in which all that a consolidation does is one phase: the save is over."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.rank = operation.rank
        self.world_size = operation.world_size
        self.is_coordinator = operation.is_coordinator

    def phase(
        self,
        phase: Phase,  # noqa: ARG002  # planning is part of it
        timeout_s: float | None = None,
        *,
        total_bytes: int = 0,
    ) -> Deadline:
        return self._operation.phase("consolidate", timeout_s, total_bytes=total_bytes)

    def gather(self, payload: bytes) -> list[bytes]:
        return self._operation.gather(payload)

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        return self._operation.scatter(payloads)

    def broadcast(self, payload: bytes) -> bytes:
        return self._operation.broadcast(payload)


def consolidate_committed(
    operation: Operation, job: ConsolidateJob, info: CheckpointInfo, *, in_background: bool
) -> ConsolidationReport:
    """Consolidate what the operation has just committed; all ranks, in the same operation.

    Raises `ConsolidationError` with `info`: the checkpoint stays committed.
    """
    try:
        what = f"the consolidation of {info.url}"
        with as_checkpoint_errors(what, operation.rank, in_background=in_background):
            return run_consolidate(_InOnePhase(operation), job)
    except CheckpointError as caught:
        error = caught
        failure = operation.failure()
        if failure is not None and isinstance(caught, StorageError):
            # Requests that were given up say so; what matters is why.
            error = failure
        # Another rank's error says all of this already.
        told = error.__cause__ if isinstance(error.__cause__, ConsolidationError) else None
        raise ConsolidationError(
            f"Rank {error.rank}: {told}"
            if told is not None
            else f"The save to {info.url} is committed, but its consolidation failed: {error}",
            info=info,
            rank=error.rank,
            phase=error.phase or "consolidate",
            path=error.path,
            next_step=None
            if told is not None
            else "The checkpoint can be loaded; call consolidate again to go on with it.",
        ) from error
