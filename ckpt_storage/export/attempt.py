"""The attempt of a checkpoint of ours that is copied."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.names import begun_path, save_folder
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.foreign import ForeignSource
from ckpt_storage.source.model import SourceFormat, gone, read_document, read_manifest
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkPlace

from .output import Found, Made, R, Site, Taken, Task
from .plan import OutFile, Stored

log = logging.getLogger("ckpt_storage")

RESTORE = "Restore the file from a copy, or copy another checkpoint."
_STAMP_CHARS = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCopy(Found):
    """A checkpoint that is copied; `was_there`: the target's newest is it.

    Of one of ours `save_id` is that of the copy; `there` are the target's slots. Of another
    writer's `format`, and by path length, time and, of an export of ours, CRC-32C of each file.
    """

    save_id: str | None = None
    was_there: bool = False
    there: CommitLog | None = None
    format: SourceFormat = "ckpt_storage"
    files: Mapping[str, tuple[int, float | None, int | None]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Files(ForeignSource):
    """Files as a source of bytes: there are no tensors; `save_id` is that of one of ours."""

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error for a file that is not there."""
        moved = None if self.save_id is None else gone(self.store, self.save_id, place.path)
        what = f"{self.store.url}: {place.path} is missing."
        return moved or IntegrityError(what, path=place.path, offset=0, next_step=RESTORE)


def name_at_target(site: Site, save_id: str, there: CommitLog) -> str:
    """Return the id that the copy has at the target."""
    slots = range(1, there.last_slot + 1)
    jobs = [partial(slotlog.read_slot, site.target, slot) for slot in slots]
    records = site.at_once("read slots", jobs)
    named = {one for r in records if r is not None for one in (*r.fenced, r.save_id)}
    head_id = there.head.save_id if there.head else None
    while save_id != head_id and save_id in named:
        digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
        save_id = f"{save_id[:_STAMP_CHARS]}{digest[:16]}"
    return save_id


class CopiedAttempt(Task[R]):
    """The attempt of another checkpoint, with its save id or another one; `copy` tells why."""

    found: ToCopy
    record: SlotRecord | None = None
    _grant: Grant | None = None
    _ranks: Sequence[FileRef] = ()

    @property
    def save_id(self) -> str | None:
        """The save that the copy is."""
        return self.found.save_id

    def open(self, found: Found) -> None:
        """Open what the coordinator found."""
        assert found.record is not None  # noqa: S101  # else it is of others
        self._head, self.manifest = found.record, read_manifest(self.site.source, found.record)
        self._own_id, self._new_id = self.manifest.save_id, self.save_id or ""
        store = self.site.source
        self.source = Files(store=store, format="ckpt_storage", tensors={}, save_id=self._own_id)

    def lay_out(self) -> tuple[OutFile, ...]:
        """Return the files under the copy's id."""
        files = [] if self.found.was_there else self.manifest.files
        return tuple(
            OutFile(
                name=self._renamed(one.path),
                segments=[Stored(path=one.path, size_bytes=one.size_bytes)],
                crc32c=one.crc32c,
            )
            for one, _ in files
        )

    def take(self) -> Taken:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, before, save_id = self.site.target, self.found.there, self._new_id
        assert before is not None  # noqa: S101  # the coordinator found it
        if self.found.was_there:
            self.record = before.head
            return Taken()
        is_resumed = slotlog.is_there(store, begun_path(save_id))
        grant = commit.begin(store, overwrite=self.setting.overwrite, save_id=save_id)
        # The id was chosen by these slots: whoever names it since has given it up.
        previous = before.head.head if before.head else None
        self._grant = replace(grant, last_slot=before.last_slot, previous=previous)
        sends = [partial(self._send_rank, one) for one in self.manifest.ranks]
        self._ranks = self.site.at_once("copy rank manifests", sends)
        if not is_resumed:
            return Taken()
        # Its process is dead, or is ended by this: the later copy goes on.
        cleaning.abort_uploads(store, save_folder(save_id))
        files = (one for one, _ in self.manifest.files)
        named = {at: replace(one, path=self._renamed(one.path)) for at, one in enumerate(files)}
        return Taken(done=self.site.there(named))

    def publish(self, made: Made) -> None:
        """Send what describes the files, commit, and show it to stock readers.

        What follows a commit is repeated for a copy that was cut there.
        """
        del made
        store, record, grant = self.site.target, self.record, self._grant
        publish: Callable[[], bool] = partial(publishing.roll_forward, store, self._new_id)
        if record is None:
            assert grant is not None  # noqa: S101  # `take` was called
            record, stock_bytes = self._commit(grant)
            publish = partial(publishing.publish_head, store, own=record, own_stock=stock_bytes)
            self.record = record
        if record.stock is not None and not publishing.publish_commit(
            store, record, publish, is_needed=record.stock_entries != 0
        ):
            return
        try:
            if grant is not None and grant.previous is not None:
                cleaning.free_leftovers(store, known=record)
        except CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def _commit(self, grant: Grant) -> tuple[SlotRecord, bytes | None]:
        """Send the manifest and what `.metadata` is made from, and commit; return that, too."""
        head, own, stock, stock_bytes = self._head, self.manifest, None, None
        assert head.manifest is not None  # noqa: S101  # a commit record names one; decode saw to it
        if own.stock is not None:
            # A save id has a fixed length, so the lengths that the pickle holds stay true.
            stock_bytes = self._read(own.stock, MOST_STOCK_BYTES)
            stock_bytes = stock_bytes.replace(self._own_id.encode(), self._new_id.encode())
            stock = self._put(own.stock, stock_bytes)
        data = self._read(head.manifest)
        if self._own_id != self._new_id:
            files = [(replace(f, path=self._renamed(f.path)), rank) for f, rank in own.files]
            new = replace(own, save_id=self._new_id, files=files, ranks=self._ranks, stock=stock)
            data = seal(new.to_body())
        record = commit.commit(
            self.site.target.bounded(Deadline("commit", self.setting.timeouts.commit)),
            grant,
            manifest=self._put(head.manifest, data),
            stock=stock,
            stock_entries=head.stock_entries,
            user=head.user,
        )
        return record, stock_bytes

    def _send_rank(self, one: FileRef) -> FileRef:
        data = self._read(one)
        if self._own_id != self._new_id:
            data = seal(unseal(data, path=one.path) | {"save_id": self._new_id})
        return self._put(one, data)

    def _read(self, one: FileRef, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
        """Return a document of the source, checked against what names it."""
        return read_document(self.site.source, one, save_id=self._own_id, most_bytes=most_bytes)

    def _put(self, one: FileRef, data: bytes) -> FileRef:
        """Put a document down under the copy's id."""
        path = self._renamed(one.path)
        self.site.target.put(path, data)
        return FileRef.of(path, data)

    def _renamed(self, path: str) -> str:
        return path.replace(self._own_id, self._new_id)
