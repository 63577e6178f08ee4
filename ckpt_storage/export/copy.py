"""`copy`: a checkpoint from one storage to another, verified as it goes, committed there last.

A copy keeps the save id, so exports, logs and other copies that name it stay true; every writer of
a name below `saves/<save id>/` writes the same bytes (I2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_storage import errors
from ckpt_storage.commit import deletion, publishing, slotlog
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.format import exports
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import CommittedSource, read_manifest
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location, redacted_url

from .copy_base import Copy, CopyReport, CopySource, CopySpec
from .copy_committed import CopyOfCommitted, id_at_target
from .copy_foreign import copy_of_foreign, open_foreign
from .copy_part import CopyOfPart, part_id, part_of
from .options import Selection, is_within, location_beside
from .output import Copies, ExportContext, ExportSpec, SourceVersion, place_within
from .run import run_together
from .select import Selected

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
    kill sends only what is missing. Of two calls at the same time, the later one ends the earlier.
    Only the newest save is copied, and those exports directly below it that are of that save; one
    that is damaged does not undo the copy, see `CopyReport.failed_exports`.

    With `include` or `exclude` the copy is a checkpoint of a part, with a save id of its own. Shard
    files of which everything is wanted the storage copies by itself, in buckets, or they are linked
    in file systems: no byte of them is read, so `verify` the source if it may be damaged. Linked
    files take no space, and lose their write permissions.

    Checkpoints of other writers carry no checksums: their files, all that lie below `src`, are
    compared by length, and the one that makes them a checkpoint goes last.

    Args:
        src: what to copy.
        dst: the folder or URL that becomes the copy.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        include: which values go over: FQNs and glob patterns, or a function of the FQN. Of a
            checkpoint of ours only.
        exclude: which of them do not.
        overwrite: replace a checkpoint at `dst`. One of ours stays readable until the instant at
            which the copy takes its place; those of others cannot.
        copies: "auto" lets the storage itself copy where source and target share one that can;
            "never" reads and sends every byte, and links nothing.
        thread_count: requests in flight; default 2 between local disks, 8 elsewhere.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        process_group: the ranks that share the work, all of which call; default: this process
            alone. Exports beside the checkpoint its first rank copies.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is how long nothing may move, however long the whole takes.
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
    what = f"the copy of {redacted_url(src)}"

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

    return run_together(process_group, "copy", what, Timeouts.of(timeout), job, _make_copy)


def _make_copy(
    context: ExportContext, version: SourceVersion | None, tag: exports.IndexTag | None = None
) -> Copy:
    """Return the copy of one rank; the coordinator, without a version, looks for the checkpoint.

    tag: the index's entry for an export beside a checkpoint.
    """
    if version is None:
        return _find(context, tag)
    assert isinstance(version, CopySource)  # noqa: S101  # as `_find` makes it
    if version.record is None:
        return copy_of_foreign(context, version)
    if version.is_part:
        return CopyOfPart(context, version)
    return CopyOfCommitted(context, version, _copy_export)


def _copy_export(spec: CopySpec, tag: exports.IndexTag) -> CopyReport:
    """Copy an export beside a checkpoint on this rank alone."""
    what, make_copy = f"the copy of {spec.source.url}", partial(_make_copy, tag=tag)
    return run_together(None, "copy", what, spec.timeouts, lambda: spec, make_copy)


def _find(context: ExportContext, tag: exports.IndexTag | None) -> Copy:
    """Find out whose checkpoint it is, and return the coordinator's copy."""
    spec, head = context.spec, slotlog.read_log(context.source).head
    if tag is None and place_within(context.source, context.target) is not None:
        raise errors.InvalidInputError(
            f"{spec.target.url} is the same place as {spec.source.url}, or "
            "lies inside it: what is written to the one is seen in the other.",
            next_step="Give a folder beside it.",
        )
    if head is not None:
        return _make_copy(context, _committed_version(context, head), tag)
    if isinstance(spec, CopySpec) and spec.selects:
        raise errors.InvalidInputError(
            f"{spec.source.url} holds no checkpoint of ours, so no part of it can be copied.",
            next_step="Use ckpt_storage.convert, which takes include= and exclude= too.",
        )
    source = open_source(context.source, context.options)
    if isinstance(source, CommittedSource):
        # A save was committed after the log was read.
        return _find(context, tag)
    return open_foreign(context, source, tag)


def _committed_version(context: ExportContext, head: SlotRecord) -> CopySource:
    """Return what is copied of a checkpoint of ours, and whether the target has it already."""
    spec, source_id = context.spec, head.save_id or ""
    chosen: Selected | None = None
    publishing.check_newest(context.source, CommitLog.ending_with(head))
    target_log = deletion.log_to_extend(context.target)
    assert isinstance(spec, CopySpec)  # noqa: S101  # as `copy` makes it
    if spec.selects:
        manifest = read_manifest(context.source, head)
        source = CommittedSource(context.source, head, manifest, context.options)
        chosen = part_of(source, spec)
    if chosen is None:
        save_id = id_at_target(context, source_id, target_log)
    else:
        save_id = part_id(context, source_id, chosen, target_log)
    return CopySource(
        record=head,
        save_id=save_id,
        was_there=target_log.head is not None and target_log.head.save_id == save_id,
        is_part=chosen is not None,
        target_log=target_log,
    )
