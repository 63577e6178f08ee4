"""Copies of checkpoints of ours, which keep the save id, and of the exports beside them.

A save id that a record at the target has named, and that is not the head there, is never used
again: the fence or the deletion of a saver allows anybody to delete its files at any later time
(I7). Such a copy has an id that is derived from the save id, always the same; its documents are
rewritten with the derived id.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckpt_storage import errors
from ckpt_storage.commit import attempt, attempt_files, cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.format import exports, names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.source.file_versions import listed
from ckpt_storage.source.model import CommittedSource, read_document
from ckpt_storage.store.deadline import Deadline

from .copy_base import Copy, CopyReport, CopySource, CopySpec, whole_file
from .output import ExportContext, ResumeState, WriteSummary
from .plan import OutFile

log = logging.getLogger("ckpt_storage")

_CHECKPOINT_ENTRIES = frozenset({f"{names.COMMITS}/", f"{names.SAVES}/", names.STOCK_METADATA})
_SUMS = ("file_count", "read_bytes", "sent_bytes", "copied_bytes", "kept_count", "kept_bytes")

ExportCopier = Callable[[CopySpec, exports.IndexTag], CopyReport]
"""Copies one export beside the checkpoint, which its index describes."""


class CopyOfCommitted(Copy):
    """A copy of a checkpoint of ours, with its save id or another one, and of its exports."""

    source: CommittedSource
    record: SlotRecord | None = None
    _ticket: SaveTicket | None = None
    _ranks: Sequence[FileRef] = ()

    def __init__(
        self,
        context: ExportContext,
        version: CopySource,
        export_copier: ExportCopier | None = None,
    ) -> None:
        """Open the checkpoint; without `export_copier` no exports are copied."""
        super().__init__(context, version)
        self._export_copier = export_copier

    @property
    def save_id(self) -> str:
        """The save id of the copy."""
        return self.found.save_id or ""

    def lay_out(self) -> list[OutFile]:
        """Return the shard files, under the save id of the copy."""
        files = [] if self.found.was_there else self.source.manifest.files
        return [whole_file(self._renamed(f.path), f.path, f.size_bytes, f.crc32c) for f, _ in files]

    def take(self) -> ResumeState:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, target_log, manifest = (
            self.context.target,
            self.found.target_log,
            self.source.manifest,
        )
        assert target_log is not None  # noqa: S101  # the coordinator found it
        if self.found.was_there:
            self.record = target_log.head
            return ResumeState()
        is_resumed = slotlog.is_there(store, names.begun_path(self.save_id))
        ticket = attempt.begin(store, overwrite=self.spec.overwrite, save_id=self.save_id)
        # The id was chosen by these slots: a record that has named it since gave it up.
        previous = target_log.head.head if target_log.head else None
        self._ticket = replace(ticket, last_slot=target_log.last_slot, previous=previous)
        sends = [partial(self._send_rank, reference) for reference in manifest.ranks]
        self._ranks = self.context.at_once("copy rank manifests", sends)
        files = {at: self._renamed_ref(file) for at, (file, _) in enumerate(manifest.files)}
        done, whole = dict[int, FileRef](), dict[int, str]()
        if is_resumed:
            # The process of the earlier copy is dead, or the abort ends it: the later copy resumes.
            attempt_files.abort_uploads(store, names.save_folder(self.save_id))
            done = self.context.there(files)
        is_checked = self.spec.copies == "auto" and store.capabilities.copies_with_checksum
        if is_checked and store.can_copy_objects_of(self.context.source):
            whole = {at: manifest.files[at][0].path for at in files.keys() - done.keys()}
        return ResumeState(done=done, whole=whole)

    def publish(self, made: WriteSummary) -> None:
        """Commit, and publish `.metadata`, also for a copy that was interrupted between the two."""
        del made
        store, ticket = self.context.target, self._ticket
        publish: Callable[[], bool] = partial(publishing.roll_forward, store, self.save_id)
        if ticket is not None:
            publish = self._commit(ticket)
        record = self.record
        assert record is not None  # noqa: S101  # it is committed by now
        if record.stock is not None and not publishing.publish_commit(
            store, record, publish, is_needed=record.stock_entries != 0
        ):
            return
        try:
            if ticket is not None and ticket.previous is not None:
                cleaning.free_leftovers(store, known=record)
        except errors.CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def _commit(self, ticket: SaveTicket) -> Callable[[], bool]:
        """Write manifest and stock document, commit, and return what publishes `.metadata`."""
        head, manifest, stock, stock_bytes = self.source.record, self.source.manifest, None, None
        assert head.manifest is not None  # noqa: S101  # a commit record names one; decode saw to it
        if manifest.stock is not None:
            # A save id has a fixed length, so the lengths that the pickle holds stay true.
            stock_bytes = self._read(manifest.stock, MAX_STOCK_BYTES)
            stock_bytes = stock_bytes.replace(manifest.save_id.encode(), self.save_id.encode())
            stock = self._put(manifest.stock, stock_bytes)
        data = self._read(head.manifest)
        if manifest.save_id != self.save_id:
            files = [(self._renamed_ref(file), rank) for file, rank in manifest.files]
            data = seal(
                replace(
                    manifest, save_id=self.save_id, files=files, ranks=self._ranks, stock=stock
                ).to_body()
            )
        self.record = attempt.commit(
            self.context.target.bounded(Deadline("commit", self.spec.timeouts.commit)),
            ticket,
            manifest=self._put(head.manifest, data),
            stock=stock,
            stock_entries=head.stock_entries,
            user=head.user,
            part=head.part,
            stats=head.stats,
        )
        store = self.context.target
        return partial(publishing.publish_head, store, own=self.record, own_stock=stock_bytes)

    def _send_rank(self, reference: FileRef) -> FileRef:
        data = self._read(reference)
        if self.source.save_id != self.save_id:
            data = seal(unseal(data, path=reference.path) | {"save_id": self.save_id})
        return self._put(reference, data)

    def _read(self, reference: FileRef, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return a document of the source, checked against its reference."""
        save_id = self.source.manifest.save_id
        return read_document(self.context.source, reference, save_id=save_id, max_bytes=max_bytes)

    def _put(self, reference: FileRef, data: bytes) -> FileRef:
        """Write a document under the copy's id."""
        path = self._renamed(reference.path)
        self.context.target.put(path, data)
        return FileRef.of(path, data)

    def _renamed_ref(self, reference: FileRef) -> FileRef:
        return replace(reference, path=self._renamed(reference.path))

    def _renamed(self, path: str) -> str:
        return path.replace(self.source.manifest.save_id, self.save_id)

    def report(self, made: WriteSummary, seconds: float) -> CopyReport:
        """Copy the exports of this save, too; raises nothing: the copy is committed by now."""
        copied: dict[str, CopyReport] = {}
        left_out: list[str] = []
        failed: dict[str, str] = {}
        paths: list[str] = []
        try:
            paths = [entry.path for entry in listed(self.context.source, "")]
        except errors.CheckpointError as error:
            left_out, failed = ["."], {".": str(error)}
        for path in paths:
            if path in _CHECKPOINT_ENTRIES or path.startswith(names.PROBE_PREFIX):
                continue
            folder = path.rstrip("/")
            try:
                export_report = self._copy_export(folder) if path.endswith("/") else None
            except errors.CheckpointError as error:
                log.warning("the export %s is not copied: %s", folder, error)
                export_report = None
                if not isinstance(error, errors.CheckpointExistsError):
                    failed[folder] = str(error)
            if export_report is not None:
                copied[folder] = export_report
            else:
                left_out.append(folder if folder in failed else path)
        report = super().report(made, seconds)
        reports = [report, *copied.values()]
        return replace(
            report,
            **{name: sum(getattr(each, name) for each in reports) for name in _SUMS},
            slot=self.record.slot if self.record else None,
            total_bytes=self.total_bytes,
            exports=tuple(copied),
            left_out=tuple(left_out),
            failed_exports=failed,
        )

    @property
    def total_bytes(self) -> int:
        """The bytes of the shard files."""
        return sum(file.size_bytes for file, _ in self.source.manifest.files)

    def _copy_export(self, folder: str) -> CopyReport | None:
        """Copy a folder, or what is missing of it; None if it is no export of the save."""
        spec, tag = self.spec, self._tag_of(folder)
        if tag is None or not tag.save_id == self.save_id == self.source.save_id:
            return None
        if self._export_copier is None:
            return None
        source, target = spec.source.child(folder), spec.target.child(folder)
        if target.is_local:
            # The folder becomes the root of a store, and a store follows the link of its root.
            _check_below(target.path, spec.target.path)
        export_spec = replace(
            spec,
            source=source,
            target=target,
            include=None,
            exclude=None,
            overwrite=False,
            progress=None,
        )
        return self._export_copier(export_spec, tag)

    def _tag_of(self, folder: str) -> exports.IndexTag | None:
        """Return what an index says; it has no checksum, so it is read twice unless it fits."""
        store, path = self.context.source, f"{folder}/{names.INDEX_NAME}"
        for _ in range(2):
            index = slotlog.read_or_none(store, path)
            tag = None if index is None else exports.IndexTag.of(index.data)
            if index is None or (tag is not None and tag.save_id == self.source.save_id):
                return tag
            store.drop_caches(path)
        return tag


def id_at_target(context: ExportContext, save_id: str, target_log: CommitLog) -> str:
    """Return the save id that the copy has at the target."""
    slots = range(1, target_log.last_slot + 1)
    reads = [partial(slotlog.read_slot, context.target, slot) for slot in slots]
    records = filter(None, context.at_once("read slots", reads))
    named = {name for record in records for name in (*record.fenced, record.save_id)}
    head_id = target_log.head.save_id if target_log.head else None
    while save_id != head_id and save_id in named:
        digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
        # The time of the save stays.
        save_id = f"{save_id[:17]}{digest[:16]}"
    return save_id


def _check_below(folder: str, root: str) -> None:
    """Refuse a folder below a local root that a symbolic link moves out of it."""
    if not os.path.realpath(folder).startswith(f"{os.path.realpath(root).rstrip('/')}/"):
        raise errors.UnsafeContentError(
            f"{folder} is a symbolic link that leads out of {root}.",
            path=folder,
            next_step="Replace the link by a folder, or copy to what it leads to.",
        )
