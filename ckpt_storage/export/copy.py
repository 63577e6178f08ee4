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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from ckpt_storage.commit import publishing, slotlog, stockfooter
from ckpt_storage.commit.delete import log_to_extend
from ckpt_storage.commit.publishing import not_published
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    IntegrityError,
    InvalidInputError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.exports import HOLDER_PATH, is_file_record
from ckpt_storage.format.names import INDEX_NAME, PROBE_PREFIX, STOCK_METADATA
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import FileMarks, open_marked, told_from_damage
from ckpt_storage.source.foreign import StockSource
from ckpt_storage.source.model import Source, SourceFormat, gone, read_manifest
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.deadline import Deadline, stalling_deadline
from ckpt_storage.store.store import Store

from .attempt import CopyAttempt, CopyMeans
from .exportcopy import CopiedExports, copy_exports
from .files import FileCopier, FileToCopy, Tally
from .output import Shown, write_record
from .places import is_within, location_beside, place_within
from .plain_folder import PlainFolder
from .run import side_by_side
from .write import Copies, transfer_options

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
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> CopyReport:
    """Copy the checkpoint at `src` to `dst`, on any two storages; one process calls it.

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
            which the copy takes its place; those of others cannot, see the guide.
        copies: "auto" lets the storage itself copy where source and target share one that can;
            "always" also where that does not pay; "never" reads and sends every byte.
        thread_count: requests in flight; default 2 between local disks, 8 elsewhere.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
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
    source = Location.of(src, storage_options)
    target = location_beside(source, dst, destination_storage_options)
    _check_apart(source, target)
    timeouts = Timeouts.of(timeout)
    job = _Copy(
        source=source,
        target=target,
        overwrite=overwrite,
        copies=copies,
        thread_count=thread_count,
        memory_limit_bytes=memory_limit_bytes,
        page_cache=page_cache,
        timeouts=timeouts,
        retry=retry or RetryPolicy(),
        progress=progress,
    )
    with job.stores, job.deadline.governs(f"Copying {source.url} to {target.url}"):
        return job.run()


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


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One call of `copy`."""

    source: Location
    target: Location
    overwrite: bool
    copies: Copies
    thread_count: int | None
    memory_limit_bytes: int | None
    page_cache: PageCache
    timeouts: Timeouts
    retry: RetryPolicy
    progress: Progress
    deadline: Deadline = field(init=False)
    options: TransferOptions = field(init=False)
    source_store: Store = field(init=False)
    target_store: Store = field(init=False)
    start_s: float = field(default_factory=time.monotonic)
    stores: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        what = f"Copying {self.source.url} to {self.target.url}"
        self.deadline, _ = stalling_deadline("write", self.timeouts.write, what)
        opened = partial(open_store, timeouts=self.timeouts, retry=self.retry)
        source, target = opened(self.source), opened(self.target, page_cache=self.page_cache)
        self.stores.callback(source.close)
        self.stores.callback(target.close)
        self.source_store = source.bounded(self.deadline)
        self.target_store = target.bounded(self.deadline)
        self.options = transfer_options(
            source,
            target,
            memory_limit_bytes=self.memory_limit_bytes,
            thread_count=self.thread_count,
        )

    def run(self) -> CopyReport:
        """Copy whatever is there."""
        head = slotlog.read_log(self.source_store).head
        self._check_elsewhere()
        if head is not None:
            stockfooter.check_newest(self.source_store, head)
            return self._committed(head)
        source, marks = open_marked(self.source_store, deadline=self.deadline, options=self.options)
        if marks is None:
            # Saved by us since the log was read.
            return self.run()
        with self._reporting(0, None) as on_bytes:
            copier = self._copier(None, on_bytes)
            total_bytes = self._foreign(source, marks, copier)
        return self._report(copier.tally, format=source.format, total_bytes=total_bytes)

    def _foreign(self, source: Source, marks: FileMarks, copier: FileCopier) -> int:
        """Copy all files below the root of a checkpoint of another writer; return their bytes.

        `marks` are those the source was opened with: what shows the copy to readers is written only
        after they held for all that was read.
        """
        entries = [entry for entry in self.source_store.list("") if _is_content(entry)]
        _check_whole(source, entries)
        sizes = {entry.path: entry.size_bytes for entry in entries}
        last = STOCK_METADATA if source.format == "dcp" else INDEX_NAME
        content: Shown = "metadata"
        if source.format != "dcp":
            content = "index" if last in sizes else "nothing"
        files = [
            FileToCopy(path=path, target=path, size_bytes=size)
            for path, size in sorted(sizes.items())
            if path != last
        ]
        listed = sorted((entry.path, entry.size_bytes, entry.modified_s) for entry in entries)
        whole = copier.plan(files, [self.source.url, listed])
        shows = last if last in sizes else ""
        folder = PlainFolder(self.target_store, whole, self.deadline, shown=content, others=shows)
        is_resumed = folder.take(overwrite=self.overwrite)
        done = copier.there(whole, folder.complete_files(whole)) if is_resumed else {}
        with told_from_damage(partial(marks.check, self.source_store)):
            seal = partial(write_record, self.target_store, whole.identity)
            copier.copy(whole, done=done, seal=seal)
            data = _read_whole(self.source_store, last, sizes[last]) if shows else None
        marks.check(self.source_store)
        folder.publish(None if data is None else (last, data))
        return sum(sizes.values())

    def _check_elsewhere(self) -> None:
        """Refuse a target that is the source by another name; the storages themselves are asked."""
        if place_within(self.source_store, self.target_store) is not None:
            raise InvalidInputError(
                f"{self.target.url} is the same place as {self.source.url}, or lies inside it: "
                "what is written to the one is seen in the other.",
                next_step="Give a folder beside it.",
            )

    def _committed(self, head: SlotRecord) -> CopyReport:
        manifest = read_manifest(self.source_store, head)
        found = log_to_extend(self.target_store)
        save_id, was_there = self._name_at_target(manifest.save_id, found)
        total_bytes = sum(reference.size_bytes for reference, _ in manifest.files)
        record, unpublished = found.head, None
        with self._reporting(total_bytes, save_id) as on_bytes:
            copier = self._copier(manifest.save_id, on_bytes)
            if not was_there:
                means = CopyMeans(
                    overwrite=self.overwrite,
                    commit_timeout_s=self.timeouts.commit,
                )
                attempt = CopyAttempt(means, copier, head, manifest, found, save_id)
                record = attempt.run()
                unpublished = attempt.unpublished
            elif record is not None:
                unpublished = self._publish(record)
            exports = copy_exports(
                self.source_store, self.target_store, copier, manifest.save_id, as_save_id=save_id
            )
        if unpublished is not None and record is not None:
            if record.stock_entries != 0:
                raise unpublished
            # Stock readers would find a note that it is not for them.
            log.warning("%s", unpublished)
        return self._report(
            copier.tally,
            format="ckpt_storage",
            save_id=save_id,
            slot=record.slot if record else None,
            was_there=was_there,
            total_bytes=total_bytes,
            exports=exports,
        )

    def _publish(self, record: SlotRecord) -> CheckpointError | None:
        """Repeat what follows a commit, for a copy that was cut there; return why that failed."""
        try:
            publishing.roll_forward(self.target_store, record.save_id or "")
        except CheckpointError as error:
            return not_published(self.target_store, record, error)
        return None

    def _name_at_target(self, save_id: str, found: CommitLog) -> tuple[str, bool]:
        """Return the id that the copy has at the target, and whether it is the head there."""
        named: set[str] = set()

        def read(slot: int) -> None:
            record = slotlog.read_slot(self.target_store, slot)
            if record is not None:
                named.update((*record.fenced, record.save_id or ""))

        jobs = [partial(read, slot) for slot in range(1, found.last_slot + 1)]
        side_by_side(jobs, "read slots", self.deadline)
        head_id = found.head.save_id if found.head else None
        while save_id != head_id and save_id in named:
            save_id = _derived(save_id)
        return save_id, save_id == head_id

    def _copier(self, save_id: str | None, on_bytes: Callable[[int], None]) -> FileCopier:
        def explain(path: str) -> CheckpointError | None:
            if save_id is None:
                return None
            moved: CheckpointGoneError | None = gone(self.source_store, save_id, path)
            return moved or IntegrityError(
                f"{self.source.url}: {path} is missing.",
                path=path,
                offset=0,
                next_step="Restore the file from a copy, or copy another checkpoint.",
            )

        copier = FileCopier(
            source=self.source_store,
            target=self.target_store,
            options=self.options,
            deadline=self.deadline,
            copies=self.copies,
            on_bytes=on_bytes,
            explain_missing=explain,
        )
        copier.source = self.source_store.bounded(
            self.deadline, throttled=copier.paces.source.slowed_down
        )
        return copier

    def _reporting(
        self, total_bytes: int, save_id: str | None
    ) -> AbstractContextManager[Callable[[int], None]]:
        return reporting(
            self.progress,
            phase="write",
            rank=0,
            total_bytes=total_bytes,
            save_id=save_id,
            with_bar=True,
        )

    def _report(
        self,
        tally: Tally,
        *,
        format: SourceFormat,  # noqa: A002  # the report's word
        total_bytes: int,
        save_id: str | None = None,
        slot: int | None = None,
        was_there: bool = False,
        exports: CopiedExports | None = None,
    ) -> CopyReport:
        exports = exports or CopiedExports()
        return CopyReport(
            source_url=self.source.url,
            url=self.target.url,
            format=format,
            save_id=save_id,
            slot=slot,
            was_there=was_there,
            file_count=tally.file_count,
            total_bytes=total_bytes,
            read_bytes=tally.read_bytes,
            sent_bytes=tally.sent_bytes,
            copied_bytes=tally.copied_bytes,
            kept_count=tally.kept_count,
            kept_bytes=tally.kept_bytes,
            exports=tuple(exports.copied),
            left_out=tuple(exports.left_out),
            failed_exports=dict(exports.failed),
            seconds=time.monotonic() - self.start_s,
        )


def _is_content(entry: ObjectInfo) -> bool:
    name = entry.path.rpartition("/")[2]
    return not (
        entry.path.endswith("/") or _is_of_the_work(entry.path) or name.startswith(PROBE_PREFIX)
    )


def _is_of_the_work(path: str) -> bool:
    """Return whether a path is that of a note of a run, and so no part of a checkpoint."""
    return path == HOLDER_PATH or is_file_record(path)


def _read_whole(store: Store, path: str, size_bytes: int) -> bytes:
    data = store.get(path, max_bytes=size_bytes).data
    if len(data) != size_bytes:
        raise IntegrityError(
            f"{path} has changed while the checkpoint was being copied.",
            path=path,
            offset=0,
            next_step="Copy again.",
        )
    return data


def _check_whole(source: Source, entries: Sequence[ObjectInfo]) -> None:
    """Refuse a checkpoint of which a file is missing, or shorter than what it must hold."""
    sizes = {entry.path: entry.size_bytes for entry in entries}
    if isinstance(source, StockSource):
        # Whole items, with what stands behind a tensor's bytes.
        for (fqn, _), item in source.metadata.items.items():
            _check_end(sizes, item.relative_path, fqn, item.offset + item.length)
        return
    keys = value_keys(source)
    source.require(keys)
    for key in keys:
        place = source.place(*key)
        _check_end(sizes, place.path, place.fqn, place.start + place.size_bytes)


def _check_end(sizes: Mapping[str, int], path: str, fqn: str, end: int) -> None:
    size_bytes = sizes.get(path)
    if size_bytes is None or size_bytes < end:
        what = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
        raise IntegrityError(
            f"{path} {what}; {fqn} ends at its byte {end}.",
            path=path,
            fqn=fqn,
            offset=size_bytes or 0,
            next_step="Restore the file from a copy, or copy another checkpoint.",
        )


def _derived(save_id: str) -> str:
    """Return the save id that a copy bears where `save_id` must not be used any more."""
    digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
    return f"{save_id[:_STAMP_CHARS]}{digest[:16]}"
