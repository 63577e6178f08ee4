"""`copy`: a checkpoint from one storage to another, verified while it is sent, committed last.

A copy keeps the save id, so exports, logs and other copies that name it stay valid; every writer of
a name below `saves/<save id>/` writes the same bytes (I2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ckpt_storage import errors
from ckpt_storage.commit import deletion, slotlog
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import CommittedSource
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location, redacted_url

from .copy_base import Copy, CopyReport, CopySource, CopySpec
from .copy_committed import CopyOfCommitted
from .copy_foreign import CopyOfFolder, open_foreign
from .copy_part import CopyOfPart, committed_version
from .options import Selection, is_within, location_beside
from .output import Copies, ExportContext, ExportSpec, SourceVersion, place_within
from .run import group_of, run_together

if TYPE_CHECKING:
    import torch.distributed as dist


def copy(  # the public surface, all keyword-only
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    overwrite: bool = False,
    copies: Copies = "auto",
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> CopyReport:
    """Copy the checkpoint at `src`, or chosen values of it, to `dst`, on any two storages.

    Every block is checked against the checkpoint's checksums, and nothing damaged is committed.
    `dst` shows the copy all at once, at the end, or not at all. Calling again after a failure or a
    kill sends only what is missing. Of two calls at the same time, the later call ends the earlier.
    Only the newest save is copied. What else is in the folder stays behind, and is named in
    `CopyReport.left_out`; an export is copied by its own URL.

    With `include` or `exclude` the copy is a checkpoint of a part, with a save id of its own. Shard
    files of which everything is wanted the storage copies by itself, in buckets, or they are linked
    in file systems: no byte of them is read, so `verify` the source if it may be damaged. Linked
    files take no space, and lose their write permissions.

    `src` may be the folder of an export of ours: its weight files and documents are checked against
    its record. Other files below such a folder, and all files of checkpoints of other writers, have
    no checksums: they are copied and compared by length. The file that makes the others a
    checkpoint is written last.

    Args:
        src: what to copy.
        dst: the folder or URL that becomes the copy.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        include: which values go over: FQNs and glob patterns, or a function of the FQN. Of a
            checkpoint of ours only.
        exclude: which of them do not.
        overwrite: replace a checkpoint at `dst`. A checkpoint of ours stays readable until the
            copy replaces it; those of other writers do not.
        copies: "auto" lets the storage itself copy, if both lie on the same storage and it can;
            "never" reads and sends every byte, and links nothing.
        thread_count: requests in flight; default 2 between local disks, 8 elsewhere.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        process_group: the ranks that share the work, all of which call; default: this process
            alone.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is the time without progress, not that of the whole.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `CheckpointExistsError` (there is another checkpoint and `overwrite` is
            False), `IntegrityError` naming the file, `CheckpointGoneError`
            (the source was replaced meanwhile), `CommitConflictError`, `CommitUnknownError`,
            `StorageError`, `PhaseTimeoutError`, `InvalidInputError` (`dst` is `src` under another
            name, or one lies inside the other), and what opening `src` raises. After
            `NotPublishedError` the copy is committed, after `CommitUnknownError` it may be.

    """
    what, group = f"the copy of {redacted_url(src)}", group_of(process_group, "copy")

    def job() -> ExportSpec:
        source = Location.to_read(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) or is_within(target, source):
            raise errors.InvalidInputError(
                f"One of {source.url} and {target.url} lies inside the other, or is it.",
                next_step="Give a folder beside what is copied.",
            )
        return CopySpec(
            source=source,
            target=target,
            include=include,
            exclude=exclude,
            timeouts=Timeouts.of(timeout),
            retry=retry,
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            copies=copies,
            thread_count=thread_count,
            overwrite=overwrite,
            progress=progress,
        )

    return run_together(group, "copy", what, timeout, job, _make_copy)


def _make_copy(context: ExportContext, version: SourceVersion | None) -> Copy:
    """Return the copy of one rank; the coordinator, without a version, looks for the checkpoint."""
    if version is None:
        return _find(context)
    assert isinstance(version, CopySource)  # noqa: S101  # as `_find` makes it
    if version.record is None:
        return CopyOfFolder(context, version)
    return (CopyOfPart if version.is_part else CopyOfCommitted)(context, version)


def _find(context: ExportContext) -> Copy:
    """Find the checkpoint and its writer; return the coordinator's copy."""
    spec, head = context.spec, slotlog.read_log(context.source).head
    assert isinstance(spec, CopySpec)  # noqa: S101  # as `copy` makes it
    if place_within(context.source, context.target) is not None:
        raise errors.InvalidInputError(
            f"{spec.target.url} is the same place as {spec.source.url}, or "
            "lies inside it: what is written there is seen in both.",
            next_step="Give a folder beside it.",
        )
    if head is not None:
        target_log = deletion.log_to_extend(context.target)
        return _make_copy(context, committed_version(context, spec, head, target_log))
    if spec.selects:
        raise errors.InvalidInputError(
            f"{spec.source.url} holds no checkpoint of ours, so no part of it can be copied.",
            next_step="Use ckpt_storage.convert, which takes include= and exclude= too.",
        )
    source = open_source(context.source, context.options)
    if isinstance(source, CommittedSource):
        # A save was committed after the log was read.
        return _find(context)
    return open_foreign(context, source)
