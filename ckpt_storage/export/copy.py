"""`copy`: a checkpoint from one storage to another, verified as it goes, committed there last.

A copy keeps the save id, so exports, logs and other copies that name it stay true. Whoever writes a
name below `saves/<save id>/` writes the same bytes (I2). But an id that a record at the target has
named, and that is not the head there, is never used again: a saver's fence or deletion allows
somebody to delete its files at any later time (I7). The copy then bears an id derived from it,
always the same one; its documents are written anew with that.
"""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_storage.commit import publishing, slotlog
from ckpt_storage.commit.cleaning import log_to_extend
from ckpt_storage.coordination.failures import place_of
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    IntegrityError,
    InvalidInputError,
)
from ckpt_storage.format import exports
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES
from ckpt_storage.format.names import COMMITS, INDEX_NAME, PROBE_PREFIX, SAVES, STOCK_METADATA
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.filemarks import listed
from ckpt_storage.source.foreign import StockSource
from ckpt_storage.source.model import CommittedSource, Source, SourceFormat
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location

from .attempt import RESTORE, CopiedAttempt, Files, ToCopy, name_at_target
from .folder import PlainFolder
from .output import Copies, Found, Made, Setting, Site, Taken, Task
from .places import is_within, location_beside, place_within
from .plan import OutFile, Stored
from .run import run_together

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")

_OWN = frozenset({f"{COMMITS}/", f"{SAVES}/", STOCK_METADATA})
_SUMS = ("file_count", "read_bytes", "sent_bytes", "copied_bytes", "kept_count", "kept_bytes")
"""What a report says of a checkpoint and its exports together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What `copy` did; both URLs are without credentials.

    format: of the source. save_id, slot: of the copy; None for formats of others.
    was_there: the target's newest checkpoint was this save before, and nothing of it was sent.
    file_count, total_bytes: of the checkpoint's files, documents not counted.
    sent_bytes: went through this process. copied_bytes: copied by the storage itself.
    kept_count, kept_bytes: files of an earlier, unfinished copy that were sound.
    exports: folders of exports that were copied. left_out: what lies in the source's folder and
    is no part of the checkpoint, or was not copied for the reason that the log tells.
    failed_exports: those of `left_out` that an error kept from being copied, damage most often,
    and what it was; the copy of the checkpoint itself is whole.
    """

    source_url: str
    url: str
    format: SourceFormat
    save_id: str | None
    slot: int | None
    was_there: bool
    file_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int
    kept_count: int
    kept_bytes: int
    exports: Sequence[str]
    left_out: Sequence[str]
    failed_exports: Mapping[str, str]
    seconds: float


def copy(  # the public surface, all keyword-only
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
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
    """Copy the checkpoint at `src` to `dst`, on any two storages.

    Every block is checked against the checkpoint's checksums, and nothing damaged is committed.
    `dst` shows the copy all at once, at the end, or not at all. Calling again after a failure or a
    kill sends only what is missing. Of two calls at the same time, the later one ends the earlier.
    Only the newest save is copied, and those exports directly below it that are of that save; one
    that is damaged does not undo the copy, see `CopyReport.failed_exports`.

    Checkpoints of other writers carry no checksums: their files, all that lie below `src`, are
    compared by length, and the one that makes them a checkpoint goes last.

    Args:
        src: what to copy.
        dst: the folder or URL that becomes the copy.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        overwrite: replace a checkpoint at `dst`. One of ours stays readable until the instant at
            which the copy takes its place; those of others cannot.
        copies: "auto" lets the storage itself copy where source and target share one that can;
            "never" reads and sends every byte.
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
    what = f"the copy of {place_of(src)}"

    def job() -> Setting:
        source = Location.of(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) or is_within(target, source):
            raise InvalidInputError(
                f"One of {source.url} and {target.url} lies inside the other, or is it.",
                next_step="Give a folder beside what is copied.",
            )
        return Setting(
            source=source,
            target=target,
            timeouts=Timeouts.of(timeout),
            retry=retry,
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            copies=copies,
            thread_count=thread_count,
            overwrite=overwrite,
            progress=progress,
        )

    return run_together(process_group, "copy", what, Timeouts.of(timeout), job, _copying)


def _copying(site: Site, found: Found | None, tag: exports.IndexTag | None = None) -> _Copy:
    """Return the task of a copy; `tag`: what the index says of an export beside a checkpoint."""
    source: Source | None = None
    if found is None:
        found, source = _find(site, tag)
    assert isinstance(found, ToCopy)  # noqa: S101  # as `_find` returns
    kind = _CopyBeside if found.was_there else _CopyOfOthers
    task = (kind if found.record is None else _CopyOfOurs)(site, found)
    if (opened := source) is not None:
        task.watch = lambda: opened.check_unchanged(site.source)
    return task


def _find(site: Site, tag: exports.IndexTag | None) -> tuple[ToCopy, Source | None]:
    """Look whose checkpoint it is; nothing may be missing of one of others."""
    setting, head = site.setting, slotlog.read_log(site.source).head
    if tag is None and place_within(site.source, site.target) is not None:
        raise InvalidInputError(
            f"{setting.target.url} is the same place as {setting.source.url}, or "
            "lies inside it: what is written to the one is seen in the other.",
            next_step="Give a folder beside it.",
        )
    if head is not None:
        publishing.check_newest(site.source, head)
        there = log_to_extend(site.target)
        save_id = name_at_target(site, head.save_id or "", there)
        was_there = there.head is not None and there.head.save_id == save_id
        return ToCopy(record=head, save_id=save_id, was_there=was_there, there=there), None
    source = open_source(site.source, site.options)
    if isinstance(source, CommittedSource):
        # Saved by us since the log was read.
        return _find(site, tag)
    entries = [entry for entry in site.source.list("") if _is_content(entry.path)]
    _check_whole(source, {entry.path: entry.size_bytes for entry in entries})
    crcs, was_there = _exported(site, tag) if tag else ({}, False)
    files = {e.path: (e.size_bytes, e.modified_s, crcs.get(e.path)) for e in entries}
    return ToCopy(format=source.format, files=files, was_there=was_there), source


def _exported(site: Site, tag: exports.IndexTag) -> tuple[dict[str, int], bool]:
    """Return the checksums of an export's files, and whether the target's index is the same."""
    path = exports.export_path(tag.fingerprint)
    index = site.source.get(INDEX_NAME).data
    data = site.source.get(path, max_bytes=MOST_DOCUMENT_BYTES).data
    record = exports.ExportRecord.decode(data, path)
    slotlog.check_document(index, record.index)
    there = slotlog.read_if_there(site.target, INDEX_NAME)
    is_same = there is not None and there.data == index
    return {one.path: one.crc32c for one in record.files}, is_same


class _Copy(Task[CopyReport]):
    """One copy on one rank."""

    found: ToCopy

    def content(self) -> object:
        marks = sorted((path, *mark) for path, mark in self.found.files.items())
        return [self.setting.source.url, self.save_id, marks]

    def report(self, made: Made, seconds: float) -> CopyReport:
        found, setting, files = self.found, self.setting, self.plan.files
        kept = [files[at].size_bytes for at in made.kept]
        moved = made.moved
        return CopyReport(
            source_url=setting.source.url,
            url=setting.target.url,
            format=found.format,
            save_id=self.save_id,
            slot=None,
            was_there=found.was_there,
            file_count=len(files),
            total_bytes=sum(size_bytes for size_bytes, *_ in found.files.values()),
            **moved | {"read_bytes": moved["read_bytes"] + sum(kept)},
            kept_count=len(kept),
            kept_bytes=sum(kept),
            exports=(),
            left_out=(),
            failed_exports={},
            seconds=seconds,
        )


class _CopyOfFiles(_Copy):
    """A copy of what others wrote, or of an export of ours, file by file."""

    def open(self, found: Found) -> None:
        del found
        self.source = Files(store=self.site.source, format=self.found.format, tensors={})

    def lay_out(self) -> tuple[OutFile, ...]:
        return tuple(
            OutFile(name=path, segments=[Stored(path=path, size_bytes=size_bytes)], crc32c=crc32c)
            for path, (size_bytes, _, crc32c) in sorted(self.found.files.items())
            if self.sends(path, crc32c)
        )

    @abc.abstractmethod
    def sends(self, path: str, crc32c: int | None) -> bool:
        """Return whether a file is one of those that are made side by side."""


class _CopyBeside(_CopyOfFiles):
    """What people put beside an export that was copied before, and that stays as it is."""

    def sends(self, path: str, crc32c: int | None) -> bool:
        # Nothing tells one content of such a file from another.
        return crc32c is None and path != INDEX_NAME and not path.startswith(exports.DOCUMENTS)

    def take(self) -> Taken:
        folders = {file.name.rpartition("/")[0] for file in self.plan.files} - {""}
        self.site.target.make_folders(sorted(folders))
        return Taken()


class _CopyOfOthers(_CopyOfFiles, PlainFolder[CopyReport]):
    """A copy of a whole folder."""

    @property
    def last(self) -> str:
        if self.found.format == "dcp":
            return STOCK_METADATA
        return INDEX_NAME if INDEX_NAME in self.found.files else ""

    def sends(self, path: str, crc32c: int | None) -> bool:
        del crc32c
        return path != self.last

    def document(self) -> bytes:
        size_bytes = self.found.files[self.last][0]
        data = self.site.source.get(self.last, max_bytes=size_bytes).data
        self.check_unchanged()
        if len(data) != size_bytes:
            what = f"{self.last} has {len(data)} bytes; {size_bytes} were listed."
            raise IntegrityError(what, path=self.last, offset=0, next_step="Copy again.")
        return data


class _CopyOfOurs(_Copy, CopiedAttempt[CopyReport]):
    """A copy of a checkpoint of ours, and of what lies directly below it."""

    def report(self, made: Made, seconds: float) -> CopyReport:
        """Copy what lies directly below the source; raises nothing: the copy is committed by now.

        An export stays behind if it is of another save than the copy, or damaged, or if its place
        at the target is taken. Idempotent.
        """
        report = super().report(made, seconds)
        copied: dict[str, CopyReport] = {}
        left_out: list[str] = []
        failed: dict[str, str] = {}
        paths: list[str] = []
        try:
            paths = [entry.path for entry in listed(self.site.source, "")]
        except CheckpointError as error:
            left_out, failed = ["."], {".": str(error)}
        for path in paths:
            folder = path.rstrip("/")
            if path in _OWN or path.startswith(PROBE_PREFIX):
                continue
            try:
                one = self._copy_export(folder) if path.endswith("/") else None
            except CheckpointError as error:
                log.warning("the export %s is not copied: %s", folder, error)
                one = None
                if not isinstance(error, CheckpointExistsError):
                    failed[folder] = str(error)
            if one is not None:
                copied[folder] = one
            else:
                left_out.append(folder if folder in failed else path)
        whole = [report, *copied.values()]
        return replace(
            report,
            **{name: sum(getattr(one, name) for one in whole) for name in _SUMS},
            slot=self.record.slot if self.record else None,
            total_bytes=sum(file.size_bytes for file, _ in self.manifest.files),
            exports=tuple(copied),
            left_out=tuple(left_out),
            failed_exports=failed,
        )

    def _copy_export(self, folder: str) -> CopyReport | None:
        """Copy a folder, or what is missing of it; None if it is no export of the save."""
        setting = self.setting
        index = slotlog.read_if_there(self.site.source, f"{folder}/{INDEX_NAME}")
        tag = None if index is None else exports.IndexTag.of(index.data)
        if tag is None or not tag.save_id == self.save_id == self.source.save_id:
            return None
        source, target = setting.source.child(folder), setting.target.child(folder)
        inner = replace(setting, source=source, target=target, overwrite=False, progress=None)
        task_of = partial(_copying, tag=tag)
        what = f"the copy of {source.url}"
        return run_together(None, "copy", what, inner.timeouts, lambda: inner, task_of)


def _check_whole(source: Source, sizes: Mapping[str, int]) -> None:
    """Refuse a stock checkpoint that lacks a file, or a part of one; others' were read by now."""
    items = source.items if isinstance(source, StockSource) else {}
    for (fqn, _), one in items.items():
        # The whole item, with what stands behind a tensor's bytes.
        path, end = one.relative_path, one.offset + one.length
        size_bytes = sizes.get(path)
        if size_bytes is None or size_bytes < end:
            what = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise IntegrityError(
                f"{path} {what}; {fqn} ends at its byte {end}.",
                path=path,
                fqn=fqn,
                offset=size_bytes or 0,
                next_step=RESTORE,
            )


def _is_content(path: str) -> bool:
    """Return whether a path is part of a checkpoint; notes of runs and probes are none."""
    if path.endswith("/") or path.rpartition("/")[2].startswith(PROBE_PREFIX):
        return False
    return path != exports.HOLDER_PATH and not exports.is_file_record(path)
