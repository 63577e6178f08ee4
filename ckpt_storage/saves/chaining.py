"""A save that goes on with a consolidation: what that is to be, and how its failure is told."""

from __future__ import annotations

import os
from dataclasses import replace

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.coordination.failures import as_checkpoint_errors
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, ConsolidationError, InvalidInputError, StorageError
from ckpt_storage.export.consolidate import (
    ConsolidateJob,
    ConsolidationReport,
    run_consolidate,
)
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.store import Location

Chained = bool | str | os.PathLike[str] | ConsolidateOptions | None
"""What `save(consolidate=...)` takes: whether, where to, or all options."""


def chained_job(
    chained: Chained,
    source: Location,
    *,
    commits: Location | None,
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
    return ConsolidateJob.of(
        source,
        replace(options, output=output, page_cache=options.page_cache or page_cache),
        timeouts=timeouts,
        retry=retry,
        progress=progress,
        commits=commits,
    )


def consolidate_committed(
    operation: Operation, job: ConsolidateJob, info: CheckpointInfo, *, in_background: bool
) -> ConsolidationReport:
    """Consolidate what the operation has just committed; all ranks, in the same operation.

    Raises `ConsolidationError` with `info`: the checkpoint stays committed.
    """
    try:
        what = f"the consolidation of {info.url}"
        with as_checkpoint_errors(what, operation.rank, in_background=in_background):
            return run_consolidate(operation, job, as_one_phase=True)
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
