"""`copy`: a checkpoint from one storage to another, verified as it goes, committed there last.

A copy keeps the save id. It is the same save: the same bytes under the same names, vouched for by
the same checksums, so exports, logs and other copies that name it stay true, a repeated copy knows
what it has, and two copies of one checkpoint can be told to be the same. I2 (a name is written
once, by one attempt) is kept in its purpose: whoever writes a name below `saves/<save id>/` writes
the same bytes.

One thing would not hold: a saver's fence or deletion at the target that names this save id allows
somebody, who may have slept since, to delete its files at any later time (I7). So an id that a
record at the target has named, and that is not the head there, is never used again. The copy then
bears an id derived from it, always the same one, and its documents are written anew with that; a
save id has a fixed length, so even the pickle for torch's own readers stays valid.

Until the exclusive create of the next slot, the last of all writes but `.metadata`, no reader sees
the copy, and an older checkpoint at the target stays what it was. Killed at any point, a copy goes
on when it is called again: files that are complete are read back and kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_storage.commit import publishing, slotlog
from ckpt_storage.commit.delete import log_to_extend
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.coordination.failures import place_of
from ckpt_storage.errors import IntegrityError, InvalidInputError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.exports import HOLDER_PATH, is_file_record
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import INDEX_NAME, PROBE_PREFIX, STOCK_METADATA
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.source.filemarks import open_marked
from ckpt_storage.source.model import SourceFormat, read_manifest
from ckpt_storage.store import Location
from ckpt_storage.store.backend import ObjectInfo

from .attempt import CopiedCheckpoint
from .copied import CopiedFiles, check_whole, lay_out_copies
from .exportcopy import CopiedExports, copy_exports
from .layout import Layout
from .output import Made, Output, Setting, Site
from .places import is_within, location_beside, place_within
from .plain_folder import PlainFolder, Shown
from .plan import Plan
from .run import Found, Task, run_together
from .write import Copies

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")

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

    Every block is checked against the checkpoint's checksums on its way, and nothing damaged is
    ever committed. `dst` shows the copy all at once, at the end, or not at all. Calling again
    after a failure or a kill sends only what is missing. Of two calls at the same time, the later
    one ends the earlier. Only the newest save is copied, and those exports directly below it that
    are of that save.

    Checkpoints of other writers carry no checksums: their files, all that lie below `src`, are
    compared by length, and the one that makes them a checkpoint goes last.

    An export that is damaged, or cannot be read, does not undo the copy that is committed by then:
    see `CopyReport.failed_exports`.

    Args:
        src: what to copy.
        dst: the folder or URL that becomes the copy.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        overwrite: replace a checkpoint at `dst`. One of ours stays readable until the instant at
            which the copy takes its place; those of others cannot.
        copies: "auto" lets the storage itself copy where source and target share one that can;
            "always" also where that does not pay; "never" reads and sends every byte.
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
            False), `IntegrityError` naming file, rank, tensor and offset, `CheckpointGoneError`
            (the source was replaced meanwhile), `CommitConflictError`, `CommitUnknownError`,
            `StorageError`, `PhaseTimeoutError`, `InvalidInputError` (`dst` is `src` under another
            name, or one lies inside the other), and what opening `src` raises. After
            `NotPublishedError` the copy is committed, after `CommitUnknownError` it may be.

    """
    what = f"the copy of {place_of(src)}"

    def job() -> tuple[Setting, Mapping[str, str], Callable[[Site], _Copy]]:
        source = Location.of(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        _check_apart(source, target)
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


def _check_apart(source: Location, target: Location) -> None:
    if is_within(source, target):
        raise InvalidInputError(
            f"{target.url} lies inside {source.url}, which is to be copied.",
            next_step="Give a folder beside it.",
        )
    if is_within(target, source):
        raise InvalidInputError(
            f"{source.url}, which is to be copied, lies inside {target.url}: it would become part "
            "of its own copy.",
            next_step="Give a folder beside it.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToCopy(Found):
    """A checkpoint that is copied.

    Of one of ours `save_id` is that of the copy, and `was_there` whether the target's head is that
    save. Of another writer's `format` and, by path, length and time of each file below its root.
    """

    save_id: str | None = None
    was_there: bool = False
    format: SourceFormat = "ckpt_storage"
    files: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)


class _Copy(Task[CopyReport]):
    """One copy on one rank."""

    found: _ToCopy
    source: CopiedFiles

    def __init__(self, site: Site, *, overwrite: bool) -> None:
        super().__init__(site)
        self._overwrite = overwrite
        self._log_there: CommitLog | None = None
        self._head: SlotRecord | None = None
        self._manifest: Manifest | None = None

    def find(self) -> Found:
        """Look whose checkpoint it is; nothing may be missing of one of others."""
        site, setting = self.site, self.site.setting
        head = slotlog.read_log(site.source).head
        if place_within(site.source, site.target) is not None:
            raise InvalidInputError(
                f"{setting.target.url} is the same place as {setting.source.url}, or "
                "lies inside it: what is written to the one is seen in the other.",
                next_step="Give a folder beside it.",
            )
        if head is None:
            source, self.marks = open_marked(
                site.source, deadline=site.deadline, options=site.options
            )
            if self.marks is None:
                # Saved by us since the log was read.
                return self.find()
            entries = [entry for entry in site.source.list("") if _is_content(entry)]
            check_whole(source, entries)
            files = {entry.path: (entry.size_bytes, entry.modified_s) for entry in entries}
            self.open(_ToCopy(format=source.format, files=files))
        else:
            publishing.check_newest(site.source, head)
            self._log_there = log_to_extend(site.target)
            save_id, was_there = self._name_at_target(head.save_id or "", self._log_there)
            record = head.encode()
            self.open(_ToCopy(record=record, slot=head.slot, save_id=save_id, was_there=was_there))
        return self.found

    def open(self, found: Found) -> None:
        """Read the same manifest."""
        assert isinstance(found, _ToCopy)  # noqa: S101  # as `find` returns
        self.found, self.save_id = found, found.save_id
        if found.record:
            self._head = SlotRecord.decode(found.record, slot=found.slot)
            self._manifest = read_manifest(self.site.source, self._head)
        self.source = CopiedFiles(self.site, self._manifest.save_id if self._manifest else None)

    def source_files(self) -> list[str]:
        """Return all files."""
        if self._manifest is not None:
            return sorted(reference.path for reference, _ in self._manifest.files)
        return sorted(self.found.files)

    def content(self) -> object:
        """Return what stands for the files."""
        marks = sorted((path, *mark) for path, mark in self.found.files.items())
        return [self.site.setting.source.url, self.save_id, marks]

    def lay_out(self) -> Layout:
        """Return the files but the one that shows all others; none if they are there."""
        found, manifest = self.found, self._manifest
        if manifest is None:
            last = self._shown()[1]
            files = sorted((path, size) for path, (size, _) in found.files.items() if path != last)
            return lay_out_copies((path, path, size, None) for path, size in files)
        own_id, save_id = manifest.save_id, found.save_id or ""
        return lay_out_copies(
            (file.path, file.path.replace(own_id, save_id), file.size_bytes, file.crc32c)
            for file, _ in (() if found.was_there else manifest.files)
        )

    def _shown(self) -> tuple[Shown, str]:
        """Return what shows the files of another writer, and its name."""
        if self.found.format == "dcp":
            return "metadata", STOCK_METADATA
        return ("index", INDEX_NAME) if INDEX_NAME in self.found.files else ("nothing", "")

    def output(self, plan: Plan) -> Output:
        """Return the attempt, or the folder."""
        found, site = self.found, self.site
        if self._head is not None and self._manifest is not None:
            return CopiedCheckpoint(
                site,
                plan,
                head=self._head,
                manifest=self._manifest,
                save_id=found.save_id or "",
                log_there=self._log_there,
                overwrite=self._overwrite,
            )
        shown, last = self._shown()

        def document() -> bytes:
            size_bytes = found.files[last][0]
            data = site.source.get(last, max_bytes=size_bytes).data
            self.check_unchanged()
            if len(data) != size_bytes:
                raise IntegrityError(
                    f"{last} has changed while the checkpoint was being copied.",
                    path=last,
                    offset=0,
                    next_step="Copy again.",
                )
            return data

        return PlainFolder(
            site, plan, shown=shown, last=last, document=document, overwrite=self._overwrite
        )

    def _name_at_target(self, save_id: str, found: CommitLog) -> tuple[str, bool]:
        """Return the id that the copy has at the target, and whether it is the head there."""
        named: set[str] = set()

        def read(slot: int) -> None:
            record = slotlog.read_slot(self.site.target, slot)
            if record is not None:
                named.update((*record.fenced, record.save_id or ""))

        jobs = [partial(read, slot) for slot in range(1, found.last_slot + 1)]
        self.site.at_once("read slots", jobs)
        head_id = found.head.save_id if found.head else None
        while save_id != head_id and save_id in named:
            save_id = _derived(save_id)
        return save_id, save_id == head_id

    def report(self, output: Output, made: Made, seconds: float) -> CopyReport:
        """Copy the exports; say what was copied."""
        found, site = self.found, self.site
        exports, record = CopiedExports(), None
        total_bytes = sum(size for size, _ in found.files.values())
        if self._manifest is not None:
            assert isinstance(output, CopiedCheckpoint)  # noqa: S101  # as `output` returns
            total_bytes = sum(file.size_bytes for file, _ in self._manifest.files)
            record = output.record
            exports = copy_exports(site, self._manifest.save_id, as_save_id=found.save_id or "")
        whole = [(output.plan, made), *exports.made]
        kept = [plan.files[at].size_bytes for plan, one in whole for at in one.kept]
        return CopyReport(
            source_url=site.setting.source.url,
            url=site.setting.target.url,
            format=found.format,
            save_id=self.save_id,
            slot=record.slot if record else None,
            was_there=found.was_there,
            file_count=sum(len(plan.files) for plan, _ in whole),
            total_bytes=total_bytes,
            read_bytes=sum(one.bytes_of("read_bytes") for _, one in whole) + sum(kept),
            sent_bytes=sum(one.bytes_of("sent_bytes") for _, one in whole),
            copied_bytes=sum(one.bytes_of("copied_bytes") for _, one in whole),
            kept_count=len(kept),
            kept_bytes=sum(kept),
            exports=tuple(exports.copied),
            left_out=tuple(exports.left_out),
            failed_exports=dict(exports.failed),
            seconds=seconds,
        )


def _is_content(entry: ObjectInfo) -> bool:
    name = entry.path.rpartition("/")[2]
    return not (
        entry.path.endswith("/") or _is_of_the_work(entry.path) or name.startswith(PROBE_PREFIX)
    )


def _is_of_the_work(path: str) -> bool:
    """Return whether a path is that of a note of a run, and so no part of a checkpoint."""
    return path == HOLDER_PATH or is_file_record(path)


def _derived(save_id: str) -> str:
    """Return the save id that a copy bears where `save_id` must not be used any more."""
    digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
    return f"{save_id[:_STAMP_CHARS]}{digest[:16]}"
