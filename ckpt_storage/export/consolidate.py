"""`consolidate`: one bounded, collective consolidation to Hugging Face safetensors.

Imports torch only where a process group is involved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.coordination.failures import as_checkpoint_errors, place_of
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.exports import DEFAULT_FOLDER
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.progress import reporting
from ckpt_storage.store import Location

from .consolidation import ConsolidateJob, ConsolidationReport, run_consolidate
from .options import DEFAULT_MAX_FILE_BYTES, ConsolidateOptions, Selection
from .places import location_beside

if TYPE_CHECKING:
    import torch.distributed as dist


def consolidate(  # the public surface, all keyword-only
    url: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    dtype: object | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    tied: Literal["drop", "keep"] | Mapping[str, str] = "drop",
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    progress: Progress = None,
    storage_options: Mapping[str, Any] | None = None,
    output_storage_options: Mapping[str, Any] | None = None,
    retry: RetryPolicy | None = None,
) -> ConsolidationReport:
    """Write the checkpoint at `url` as Hugging Face safetensors; all ranks of the group call.

    The ranks divide the bytes evenly, several of them in one file where the storage can. No
    collective runs on any process group and no GPU takes part, so it is safe beside training.
    Every byte is checked against the checkpoint's checksums. The export becomes visible only
    complete; a call after a failure goes on with the files that are missing, also with other
    ranks. An earlier export of other content stays readable until the new index is published,
    and is deleted then.

    Args:
        url: what to consolidate: a checkpoint of ours, of stock DCP, or torch's sharded
            safetensors, on any storage; the same on every rank.
        output: folder or URL of the export; default: `hf` below `url`.
        process_group: the ranks that take part; default: the default group; without one, this
            process. All must reach both storages.
        timeout: seconds, `timedelta` or `Timeouts` (`plan` and `consolidate` count); default
            ten minutes and an hour.
        max_file_bytes: as for `ConsolidateOptions`, like all up to `memory_limit_bytes`.
        fqn_to_index_mapping: which file each tensor goes into.
        dtype: what to cast floating-point tensors to.
        rename: names in the weight files.
        include: which tensors go out, instead of the model's.
        exclude: which of them do not.
        tied: what happens to tied tensors.
        memory_limit_bytes: ceiling of buffers per rank.
        page_cache: whether the kernel keeps a copy of local weight files that are on the disk.
        progress: True: a bar on rank 0; or a callable that takes each `ProgressEvent`.
        storage_options: passed to the fsspec file system of `url`.
        output_storage_options: passed to that of `output`; default: `storage_options` where
            both are of one kind.
        retry: how failed storage requests are repeated.

    Raises:
        CheckpointError: on every live rank, naming rank, file and tensor where they are known.
            Before anything was written: `InvalidInputError`, `RankMismatchError`,
            `CheckpointNotFoundError`, `CheckpointExistsError` (the folder holds weight files of
            another program). Later: `IntegrityError`, `StorageError`, `PhaseTimeoutError`,
            `RankFailedError`, `ConsolidationError`. Then the earlier export counts, unless the
            new index was being put at that moment: whichever the index names is whole, and
            calling again brings the new one to its end.

    """
    # A lane of its own: a background thread may consolidate while another one saves.
    coordinator = Ranks.of(process_group, lane="consolidate")

    def job() -> ConsolidateJob:
        source = Location.of(url, storage_options)
        return ConsolidateJob(
            source=source,
            output=output_location(source, output, output_storage_options),
            options=ConsolidateOptions(
                max_file_bytes=max_file_bytes,
                fqn_to_index_mapping=fqn_to_index_mapping,
                dtype=dtype,
                rename=rename,
                include=include,
                exclude=exclude,
                tied=tied,
                memory_limit_bytes=memory_limit_bytes,
                page_cache=page_cache,
            ),
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            track=partial(track, progress, coordinator.rank),
        )

    try:
        with as_checkpoint_errors("The call of consolidate", coordinator.rank):
            chosen, refusal = job(), None
    except CheckpointError as error:
        # The other ranks are waiting to be told.
        chosen, refusal = None, error
    what = f"the consolidation of {place_of(url)}"
    timeouts = chosen.timeouts if chosen else Timeouts()
    with (
        coordinator.operation(what, timeouts=timeouts) as operation,
        as_checkpoint_errors(what, operation.rank),
    ):
        if chosen is None:
            assert refusal is not None  # noqa: S101  # one of the two is there
            raise refusal
        operation.what = f"the consolidation of {chosen.source.url}"
        operation.meet(chosen.terms())
        return run_consolidate(operation, chosen)


def output_location(
    source: Location,
    output: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None = None,
) -> Location:
    """Return where the export of `source` goes. Raises `InvalidInputError`."""
    if output is None:
        return source.child(DEFAULT_FOLDER)
    return location_beside(source, output, storage_options)


def track(
    progress: Progress, rank: int, total_bytes: int, save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    """Show how far a consolidation is on this rank, as `progress` says."""
    return reporting(
        progress,
        phase="consolidate",
        rank=rank,
        total_bytes=total_bytes,
        save_id=save_id,
        with_bar=rank == 0,
    )
