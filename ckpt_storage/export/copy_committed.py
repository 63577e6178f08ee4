"""Copies of checkpoints of ours, which keep the save id.

A save id that a record at the target has named, and that is not the head there, is never used
again: the fence or the deletion of a saver allows anybody to delete its files at any later time
(I7). Such a copy has an id that is derived from the save id, always the same; its documents are
rewritten with the derived id.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckpt_storage import errors
from ckpt_storage.commit import attempt, attempt_files, cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.source.file_versions import listed
from ckpt_storage.source.model import CommittedSource, read_document
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer import objects

from .copy_base import Copy, CopyReport, whole_file
from .output import ExportContext, ResumeState, WriteSummary
from .plan import OutFile

log = logging.getLogger("ckpt_storage")

_CHECKPOINT_ENTRIES = frozenset({f"{names.COMMITS}/", f"{names.SAVES}/", names.STOCK_METADATA})


class CopyOfCommitted(Copy):
    """A copy of a checkpoint of ours, with its save id or another."""

    source: CommittedSource
    record: SlotRecord | None = None
    ticket: SaveTicket | None = None
    _ranks: Sequence[FileRef] = ()

    @property
    def save_id(self) -> str:
        """The save id of the copy."""
        return self.version.save_id or ""

    def lay_out(self) -> list[OutFile]:
        """Return the shard files, under the save id of the copy."""
        files = [] if self.version.was_there else self.source.manifest.files
        return [whole_file(self._renamed(f.path), f.path, f.size_bytes, f.crc32c) for f, _ in files]

    def claim(self) -> ResumeState:
        """Begin, send the rank manifests, and find the files that an earlier copy has sent."""
        is_resumed = self.begin()
        if self.version.was_there:
            return ResumeState()
        manifest = self.source.manifest
        sends = [partial(self._send_rank, reference) for reference in manifest.ranks]
        self._ranks = self.context.run_parallel("copy rank manifests", sends)
        files = {at: self._renamed_ref(file) for at, (file, _) in enumerate(manifest.files)}
        done = self.context.find_complete(files) if is_resumed else {}
        store, whole = self.context.target, dict[int, str]()
        is_checked = self.spec.copies == "auto" and store.capabilities.copies_with_checksum
        if is_checked and store.can_copy_objects_of(self.context.source):
            whole = {at: manifest.files[at][0].path for at in files.keys() - done.keys()}
        return ResumeState(done=done, whole=whole)

    def begin(self) -> bool:
        """Begin the attempt, unless the target has the copy; return whether it had begun before."""
        store, target_log = self.context.target, self.version.target_log
        assert target_log is not None  # noqa: S101  # the coordinator found it
        if self.version.was_there:
            self.record = target_log.head
            return False
        is_resumed = objects.is_there(store, names.begun_path(self.save_id))
        ticket = attempt.begin(store, overwrite=self.spec.overwrite, save_id=self.save_id)
        # The id was chosen by these slots: a record that has named it since gave it up.
        self.ticket = replace(
            ticket,
            last_slot=target_log.last_slot,
            previous=target_log.head.head if target_log.head else None,
            world_size=self.source.manifest.world_size,
            with_places=self.source.record.stock_entries != 0,
        )
        if is_resumed:
            # The process of the earlier copy is dead, or the abort ends it: this copy resumes.
            attempt_files.abort_uploads(store, names.save_folder(self.save_id))
        return is_resumed

    def publish(self, made: WriteSummary) -> None:
        """Commit, and publish `.metadata`, also for a copy that was interrupted between the two."""
        del made
        store, ticket = self.context.target, self.ticket
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
        path = self._renamed(reference.path)
        self.context.target.put(path, data)
        return FileRef.of(path, data)

    def _renamed_ref(self, reference: FileRef) -> FileRef:
        return replace(reference, path=self._renamed(reference.path))

    def _renamed(self, path: str) -> str:
        return path.replace(self.source.manifest.save_id, self.save_id)

    def report(self, made: WriteSummary, seconds: float) -> CopyReport:
        """Return the report; raises nothing: the copy is committed by now."""
        slot = self.record.slot if self.record else None
        try:
            paths = [entry.path for entry in listed(self.context.source)]
            others = [
                path
                for path in paths
                if path not in _CHECKPOINT_ENTRIES and not path.startswith(names.PROBE_PREFIX)
            ]
        except errors.CheckpointError as error:
            log.warning("what lies beside the checkpoint cannot be listed: %s", error)
            others = ["."]
        return replace(super().report(made, seconds), slot=slot, left_out=tuple(others))

    @property
    def total_bytes(self) -> int:
        """The bytes of the shard files."""
        return sum(file.size_bytes for file, _ in self.source.manifest.files)


def id_at_target(context: ExportContext, save_id: str, target_log: CommitLog) -> str:
    """Return the save id that the copy has at the target."""
    slots = range(1, target_log.last_slot + 1)
    reads = [partial(slotlog.read_slot, context.target, slot) for slot in slots]
    records = filter(None, context.run_parallel("read slots", reads))
    named = {name for record in records for name in (*record.fenced, record.save_id)}
    head_id = target_log.head.save_id if target_log.head else None
    while save_id != head_id and save_id in named:
        digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
        # The time of the save stays.
        save_id = f"{save_id[:17]}{digest[:16]}"
    return save_id
