"""`thin`: a checkpoint drops values in place, by committing a smaller version of itself.

The smaller version is a copy of a part: another save in the same checkpoint, whose shard files are
links to those of the save that it replaces, or copies that the storage makes. The commit protocol
has no new case: the next slot switches between the two, and the replaced save is freed. Only the
freeing is stricter: the replaced save is not kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, cast

from ckpt_storage import errors
from ckpt_storage.commit import cleaning, deletion
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.options import Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import read_manifest
from ckpt_storage.store import Location, redacted_url

from .copy_base import CopySpec
from .copy_part import CopyOfPart, committed_version
from .output import Copies, ExportContext, SourceVersion, WriteSummary
from .run import run_together

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinReport:
    """What `thin` did; `url` is without credentials.

    save_id: of the checkpoint now. was_thin: there was nothing to drop.
    dropped: the names that were dropped. freed_bytes: of deleted shard files; kept_bytes: of the
    others. sent_bytes: sent by this process; copied_bytes: linked, or copied by the storage itself.
    """

    url: str
    save_id: str
    was_thin: bool
    dropped: Collection[str]
    freed_bytes: int
    kept_bytes: int
    copied_bytes: int
    sent_bytes: int
    seconds: float


def thin(
    url: str | os.PathLike[str],
    *,
    drop: str | Collection[str],
    expected_save_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    copies: Copies = "auto",
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> ThinReport:
    """Drop values of the checkpoint at `url`, and free their space.

    Afterwards it holds the other values, as another save; a load of the whole save that is still
    running raises `CheckpointGoneError`. No byte is read of shard files of which all values stay:
    they are linked on a file system, and S3, Google Cloud Storage and Azure copy them. Elsewhere,
    and in other files, the values that stay are read and written. If it is interrupted, the
    checkpoint is whole or thin; call again to complete it. One process calls it.
    Exports of the whole save stay, and are stale.

    Args:
        url: a checkpoint of ours.
        drop: FQNs and glob patterns; those that match nothing are passed over.
        expected_save_id: thin this save only, and not a save that has replaced it.
        storage_options: passed to the fsspec file system.
        copies: "never" reads and writes what stays.
        thread_count: requests in flight.
        memory_limit_bytes: ceiling of buffers.
        timeout: seconds, `timedelta` or `Timeouts`, as for `copy`.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `CheckpointNotFoundError` (there is none of ours, or not that save),
            `InvalidInputError` (all would be dropped), `CommitConflictError` (another save, or
            another thinning, was faster), `IntegrityError`, `CommitUnknownError`, `StorageError`,
            `PhaseTimeoutError`; after `NotPublishedError` it is thin.

    """
    what = f"the thinning of {redacted_url(url)}"

    def job() -> CopySpec:
        location = Location.of(url, storage_options)
        patterns: Any = [drop] if isinstance(drop, str) else drop
        is_list = isinstance(patterns, Collection) and len(patterns) > 0
        if not is_list or not all(isinstance(text, str) and text for text in patterns):
            raise errors.InvalidInputError(
                f"drop is {drop!r:.80}.", next_step='Give FQNs or patterns, such as "optim*".'
            )
        return CopySpec(
            source=location,
            target=location,
            exclude=sorted(patterns),
            timeouts=Timeouts.of(timeout),
            retry=retry,
            memory_limit_bytes=memory_limit_bytes,
            copies=copies,
            thread_count=thread_count,
            overwrite=True,
            progress=progress,
        )

    def make_export(context: ExportContext, _version: SourceVersion | None) -> _Thinning:
        # This rank is alone, so it has no version of a coordinator.
        return _find(context, expected_save_id)

    return cast(
        "ThinReport", run_together(RankGroup.alone(), "thin", what, timeout, job, make_export)
    )


def _find(context: ExportContext, expected_save_id: str | None) -> _Thinning:
    """Return the thinning of the newest save in the commit log."""
    store, spec = context.target, context.spec
    slots = deletion.log_to_extend(store)
    head = slots.head
    if head is None or head.save_id is None:
        raise errors.CheckpointNotFoundError(
            f"{spec.source.url} holds no checkpoint of this package.",
            path=spec.source.url,
            next_step="Check the path; list_checkpoints(root) shows what is there.",
        )
    if expected_save_id not in {None, head.save_id}:
        raise errors.CheckpointNotFoundError(
            f"{spec.source.url} holds save {head.save_id}, not {expected_save_id}.",
            path=spec.source.url,
            next_step="Look at what is there now, and decide again.",
        )
    assert isinstance(spec, CopySpec)  # noqa: S101  # as `thin` makes it
    manifest = read_manifest(context.source, head)
    values = {*manifest.tensors, *manifest.blobs}
    drop: Any = spec.exclude  # a list, as `thin` makes it
    patterns = [
        text for text in drop if any(fqn == text or fnmatchcase(fqn, text) for fqn in values)
    ]
    # Without any the checkpoint is thin already: the version is that of the target's head.
    context.spec = spec = replace(spec, exclude=patterns or None)
    return _Thinning(context, committed_version(context, spec, head, slots))


class _Thinning(CopyOfPart):
    """A copy of a part of a checkpoint into that checkpoint."""

    def part_record(self) -> dict[str, Any]:
        """Return the `part` of the commit record, with the patterns of earlier thinnings."""
        head = self.source.record
        before = head.part if head.is_thinned else {}
        drop: Any = self.spec.exclude
        return {
            "of": self.source.save_id,
            "exclude": sorted({*(before.get("exclude") or ()), *drop}),
            "created_at": before.get("created_at", head.created_at),
            "slot": before.get("slot", head.slot),
        }

    def publish(self, made: WriteSummary) -> None:
        """Commit, and free the save that was replaced, or that an interrupted call replaced."""
        super().publish(made)
        if self.version.was_there:
            cleaning.free_leftovers(self.context.target, known=self.record)

    def report(self, made: WriteSummary, seconds: float) -> Any:  # noqa: ANN401  # see `thin`
        """Return the report of what was dropped."""
        before = sum(file.size_bytes for file, _ in self.source.manifest.files)
        is_thin = self.version.was_there
        kept_bytes = before if is_thin else self.total_bytes
        moved = made.moved
        return ThinReport(
            url=self.spec.target.url,
            save_id=self.save_id,
            was_thin=is_thin,
            dropped=() if is_thin else tuple(sorted(self.chosen.excluded)),
            freed_bytes=before - kept_bytes,
            kept_bytes=kept_bytes,
            copied_bytes=moved["copied_bytes"],
            sent_bytes=moved["sent_bytes"],
            seconds=seconds,
        )
