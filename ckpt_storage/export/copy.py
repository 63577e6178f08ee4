"""`copy`: a checkpoint from one storage to another, verified as it goes, committed there last.

A copy keeps the save id: it is the same save, the same bytes under the same names, so exports, logs
and other copies that name it stay true. Whoever writes a name below `saves/<save id>/` writes the
same bytes (I2).

An id that a record at the target has named, and that is not the head there, is never used again: a
saver's fence or deletion allows somebody to delete its files at any later time (I7). The copy then
bears an id derived from it, always the same one; its documents are written anew with that.

No reader sees the copy until the exclusive create of the next slot. Killed at any point, a copy
goes on when it is called again: files that are complete are read back and kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_storage.commit import publishing, slotlog
from ckpt_storage.commit.cleaning import log_to_extend
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.coordination.failures import place_of
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    IntegrityError,
    InvalidInputError,
)
from ckpt_storage.format import exports
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import COMMITS, INDEX_NAME, PROBE_PREFIX, SAVES, STOCK_METADATA
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.filemarks import listed, open_marked
from ckpt_storage.source.foreign import ForeignSource, StockSource
from ckpt_storage.source.model import Source, SourceFormat, gone, read_manifest, value_keys
from ckpt_storage.store import Location
from ckpt_storage.transfer.chunks import ChunkPlace

from .attempt import CopiedCheckpoint
from .folder import PlainFolder
from .layout import Layout, lay_out_copies
from .output import Made, Output, Setting, Site
from .places import is_within, location_beside, place_within
from .plan import Plan
from .run import Found, Task, run_together
from .write import Copies

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")

_RESTORE = "Restore the file from a copy, or copy another checkpoint."
_OWN = frozenset({f"{COMMITS}/", f"{SAVES}/", STOCK_METADATA})
_SUMS = ("file_count", "read_bytes", "sent_bytes", "copied_bytes", "kept_count", "kept_bytes")
"""What a report says of a checkpoint and its exports together."""
_STAMP_CHARS = 17


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

    def job() -> tuple[Setting, Mapping[str, str], Callable[[Site], _Copy]]:
        source = Location.of(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) or is_within(target, source):
            raise InvalidInputError(
                f"One of {source.url} and {target.url} lies inside the other, or is it.",
                next_step="Give a folder beside what is copied.",
            )
        setting = Setting(
            source=source,
            target=target,
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            copies=copies,
            thread_count=thread_count,
            progress=progress,
        )
        return setting, setting.terms(), partial(_Copy, overwrite=overwrite)

    return run_together(process_group, "copy", what, Timeouts.of(timeout), job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToCopy(Found):
    """A checkpoint that is copied; `was_there`: the target's newest is it.

    Of one of ours `save_id` is that of the copy. Of another writer's `format`, and by path length,
    time and, of an export of ours, CRC-32C of each file below its root.
    """

    save_id: str | None = None
    was_there: bool = False
    format: SourceFormat = "ckpt_storage"
    files: Mapping[str, tuple[int, float | None, int | None]] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Copy(Task[CopyReport]):
    """One copy on one rank; `export`: what the index says of one that lies beside a checkpoint.

    `ours`: of a checkpoint of ours its head; `log_there` (coordinator) are the target's slots.
    """

    overwrite: bool
    export: exports.IndexTag | None = None
    found: _ToCopy = field(init=False)
    ours: tuple[SlotRecord, Manifest] | None = None
    log_there: CommitLog | None = None

    def find(self) -> Found:
        """Look whose checkpoint it is; nothing may be missing of one of others."""
        site, setting = self.site, self.site.setting
        head = slotlog.read_log(site.source).head
        if self.export is None and place_within(site.source, site.target) is not None:
            raise InvalidInputError(
                f"{setting.target.url} is the same place as {setting.source.url}, or "
                "lies inside it: what is written to the one is seen in the other.",
                next_step="Give a folder beside it.",
            )
        if head is not None:
            publishing.check_newest(site.source, head)
            self.log_there = log_to_extend(site.target)
            save_id, was_there = self._name_at_target(head.save_id or "", self.log_there)
            self.open(_ToCopy(record=head, save_id=save_id, was_there=was_there))
            return self.found
        source, marks = open_marked(site.source, deadline=site.deadline, options=site.options)
        if marks is None:
            # Saved by us since the log was read.
            return self.find()
        self.watch = lambda: marks.check(site.source)
        entries = [entry for entry in site.source.list("") if _is_content(entry.path)]
        _check_whole(source, {entry.path: entry.size_bytes for entry in entries})
        crcs, was_there = self._exported(self.export) if self.export else ({}, False)
        files = {e.path: (e.size_bytes, e.modified_s, crcs.get(e.path)) for e in entries}
        if was_there:
            site.target.make_folders(sorted({path.rpartition("/")[0] for path in files} - {""}))
        self.open(_ToCopy(format=source.format, files=files, was_there=was_there))
        return self.found

    def _name_at_target(self, save_id: str, found: CommitLog) -> tuple[str, bool]:
        """Return the id that the copy has at the target, and whether it is the head there."""
        slots = range(1, found.last_slot + 1)
        jobs = [partial(slotlog.read_slot, self.site.target, slot) for slot in slots]
        records = self.site.at_once("read slots", jobs)
        named = {one for r in records if r is not None for one in (*r.fenced, r.save_id)}
        head_id = found.head.save_id if found.head else None
        while save_id != head_id and save_id in named:
            digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
            save_id = f"{save_id[:_STAMP_CHARS]}{digest[:16]}"
        return save_id, save_id == head_id

    def _exported(self, tag: exports.IndexTag) -> tuple[dict[str, int], bool]:
        """Return the checksums of an export's files, and whether the target's index is the same."""
        store, path = self.site.source, exports.export_path(tag.fingerprint)
        index = store.get(INDEX_NAME).data
        data = store.get(path, max_bytes=MOST_DOCUMENT_BYTES).data
        record = exports.ExportRecord.decode(data, path)
        slotlog.check_document(index, record.index)
        there = slotlog.read_if_there(self.site.target, INDEX_NAME)
        is_same = there is not None and there.data == index
        return {one.path: one.crc32c for one in record.files}, is_same

    def open(self, found: Found) -> None:
        assert isinstance(found, _ToCopy)  # noqa: S101  # as `find` returns
        self.found, self.save_id = found, found.save_id
        store, own_id = self.site.source, None
        if (head := found.record) is not None:
            self.ours, own_id = (head, read_manifest(store, head)), head.save_id
        self.source = _Files(store=store, format=found.format, tensors={}, save_id=own_id)

    def content(self) -> object:
        marks = sorted((path, *mark) for path, mark in self.found.files.items())
        return [self.site.setting.source.url, self.save_id, marks]

    def lay_out(self) -> Layout:
        found, last = self.found, self._last()
        if self.ours is not None:
            (_, manifest), save_id = self.ours, self.save_id or ""
            return lay_out_copies(
                (one.path, one.path.replace(manifest.save_id, save_id), one.size_bytes, one.crc32c)
                for one, _ in (() if found.was_there else manifest.files)
            )
        return lay_out_copies(
            (path, path, size_bytes, crc32c)
            for path, (size_bytes, _, crc32c) in sorted(found.files.items())
            # Nothing tells one content of a file that people put beside an export from another.
            if path != last
            and not (found.was_there and (crc32c is not None or path.startswith(exports.DOCUMENTS)))
        )

    def _last(self) -> str:
        """Return the file that shows those of another writer, "" for none."""
        if self.found.format == "dcp":
            return STOCK_METADATA
        return INDEX_NAME if INDEX_NAME in self.found.files else ""

    def output(self, plan: Plan) -> Output:
        if self.ours is not None:
            return CopiedCheckpoint(self, plan)
        if self.found.was_there:
            return Output(self, plan)
        last, overwrite = self._last(), self.overwrite
        return PlainFolder(self, plan, last=last, document=self._document, overwrite=overwrite)

    def _document(self) -> bytes:
        """Return the bytes of the file that goes last."""
        last = self._last()
        size_bytes = self.found.files[last][0]
        data = self.site.source.get(last, max_bytes=size_bytes).data
        self.check_unchanged()
        if len(data) != size_bytes:
            what = f"{last} has changed while the checkpoint was being copied."
            raise IntegrityError(what, path=last, offset=0, next_step="Copy again.")
        return data

    def report(self, output: Output, made: Made, seconds: float) -> CopyReport:
        found, setting, files = self.found, self.site.setting, output.plan.files
        kept = [files[at].size_bytes for at in made.kept]
        sizes, slot = [size_bytes for size_bytes, *_ in found.files.values()], None
        if isinstance(output, CopiedCheckpoint):
            sizes = [file.size_bytes for file, _ in output.manifest.files]
            slot = output.record.slot if output.record else None
        moved = made.moved
        report = CopyReport(
            source_url=setting.source.url,
            url=setting.target.url,
            format=found.format,
            save_id=self.save_id,
            slot=slot,
            was_there=found.was_there,
            file_count=len(files),
            total_bytes=sum(sizes),
            **moved | {"read_bytes": moved["read_bytes"] + sum(kept)},
            kept_count=len(kept),
            kept_bytes=sum(kept),
            exports=(),
            left_out=(),
            failed_exports={},
            seconds=seconds,
        )
        return report if self.ours is None else self._with_exports(report)

    def _with_exports(self, report: CopyReport) -> CopyReport:
        """Copy what lies directly below the source; raises nothing: the copy is committed by now.

        An export stays behind if it is of another save than the copy, or damaged, or if its place
        at the target is taken. Idempotent.
        """
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
            exports=tuple(copied),
            left_out=tuple(left_out),
            failed_exports=failed,
        )

    def _copy_export(self, folder: str) -> CopyReport | None:
        """Copy a folder, or what is missing of it; None if it is no export of the save."""
        setting = self.site.setting
        index = slotlog.read_if_there(self.site.source, f"{folder}/{INDEX_NAME}")
        tag = None if index is None else exports.IndexTag.of(index.data)
        if tag is None or not tag.save_id == self.save_id == self.source.save_id:
            return None
        source, target = setting.source.child(folder), setting.target.child(folder)
        inner = replace(setting, source=source, target=target, progress=None)
        task = partial(_Copy, overwrite=False, export=tag)
        what = f"the copy of {source.url}"
        return run_together(None, "copy", what, inner.timeouts, lambda: (inner, {}, task))


@dataclass(slots=True, kw_only=True)
class _Files(ForeignSource):
    """Files as a source of bytes: there are no tensors; `save_id` is that of one of ours."""

    def explain_missing(self, place: ChunkPlace) -> Exception:
        moved = None if self.save_id is None else gone(self.store, self.save_id, place.path)
        what = f"{self.store.url}: {place.path} is missing."
        return moved or IntegrityError(what, path=place.path, offset=0, next_step=_RESTORE)


def _check_whole(source: Source, sizes: Mapping[str, int]) -> None:
    """Refuse a checkpoint of which a file is missing, or shorter than what it must hold."""
    if isinstance(source, StockSource):
        # Whole items, with what stands behind a tensor's bytes.
        items = source.metadata.items.items()
        ends = [(fqn, one.relative_path, one.offset + one.length) for (fqn, _), one in items]
    else:
        places = source.places(value_keys(source.tensors, source.blobs))
        ends = [(one.fqn, one.path, one.start + one.size_bytes) for one in places]
    for fqn, path, end in ends:
        size_bytes = sizes.get(path)
        if size_bytes is None or size_bytes < end:
            what = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise IntegrityError(
                f"{path} {what}; {fqn} ends at its byte {end}.",
                path=path,
                fqn=fqn,
                offset=size_bytes or 0,
                next_step=_RESTORE,
            )


def _is_content(path: str) -> bool:
    """Return whether a path is part of a checkpoint; notes of runs and probes are none."""
    if path.endswith("/") or path.rpartition("/")[2].startswith(PROBE_PREFIX):
        return False
    return path != exports.HOLDER_PATH and not exports.is_file_record(path)
