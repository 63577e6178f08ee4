"""One save attempt that holds the files of another checkpoint: sent, then committed.

Why the save id is kept, and when not, is told in `copy`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.publishing import not_published
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.commit.stockfooter import is_foreign
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitConflictError,
    IntegrityError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal, unseal
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import COMMITS, begun_path, ranks_folder, save_folder
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.model import read_document
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create

from .files import FileCopier, FileToCopy
from .layout import OutFile
from .output import abort_uploads
from .run import side_by_side

log = logging.getLogger("ckpt_storage")

_BATCH_COUNT = 64
"""Rank manifests in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMeans:
    """What an attempt works with."""

    overwrite: bool
    commit_timeout_s: float


class CopyAttempt:
    """One save attempt at the target that holds the files of the source's head."""

    def __init__(
        self,
        means: CopyMeans,
        copier: FileCopier,
        head: SlotRecord,
        manifest: Manifest,
        found: CommitLog,
        save_id: str,
    ) -> None:
        self._means = means
        self._source, self._target = copier.source, copier.target
        self._copier = copier
        self._head = head
        self._manifest = manifest
        self._found = found
        self._save_id = save_id
        self._began_s = time.time()
        self.unpublished: CheckpointError | None = None
        """Why stock readers do not find the copy, once it is committed."""

    def run(self) -> SlotRecord:
        """Send, commit, publish; return the record of the commit."""
        grant, is_resumed = self._begin()
        references = list(self._send_ranks())
        self._send_files(is_resumed=is_resumed)
        stock, stock_bytes = self._send_stock()
        manifest = self._send_manifest(references, stock)
        record = self._commit(grant, manifest, stock)
        self._after_commit(grant, record, stock_bytes)
        return record

    def _send_files(self, *, is_resumed: bool) -> None:
        """Send the shard files; those of an earlier copy are read back, and kept if sound."""
        copier = self._copier
        whole = copier.plan(
            [
                FileToCopy(
                    path=file.path,
                    target=self._renamed_path(file.path),
                    size_bytes=file.size_bytes,
                    crc32c=file.crc32c,
                )
                for file, _ in self._manifest.files
            ]
        )
        done = copier.there(whole) if is_resumed else {}
        copier.copy(whole, done=done, damage=self._damage)

    def _damage(self, file: OutFile) -> CheckpointError:
        """Return what is wrong with a file that was copied to other bytes than it was written."""
        reference, rank = self._manifest.files[file.number - 1]
        (data,) = self._fetched([self._manifest.ranks[rank]])
        where = self._manifest.ranks[rank].path
        document = RankManifest.from_body(unseal(data, path=where), where=where)
        (shard,) = (one for one in document.files if one.path == reference.path)
        return self._copier.damage_of(file, FileChecks.of_shard(document, shard))

    def _begin(self) -> tuple[Grant, bool]:
        """Check what is at the target and make the folders; return whether a copy began before."""
        means, store, found, save_id = self._means, self._target, self._found, self._save_id
        holds_other = found.head is not None or is_foreign(store, found)
        if holds_other and not means.overwrite:
            what = f"save {found.head.save_id}" if found.head else "one of another writer"
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint ({what}).",
                path=store.url,
                phase="plan",
                next_step="Copy to another folder, or pass overwrite=True to replace it.",
            )
        is_resumed = slotlog.is_there(store, begun_path(save_id))
        folders = [COMMITS, save_folder(save_id), ranks_folder(save_id)]
        store.make_folders(folders)
        probed = probe_exclusive_create(store)
        if not probed.exclusive:
            log.warning("%s is single-writer: %s", store.url, probed.reason)
        if is_resumed:
            # Its process is dead, or is ended by this: the later copy goes on.
            abort_uploads(store, save_folder(save_id))
        else:
            begun = {"format": "ckpt_storage.begun/1", "save_id": save_id, **slotlog.stamp()}
            store.put(begun_path(save_id), seal(begun))
        grant = Grant(
            save_id=save_id,
            last_slot=found.last_slot,
            previous=found.head.head if found.head else None,
            began_s=self._began_s,
        )
        return grant, is_resumed

    def _send_ranks(self) -> Iterator[FileRef]:
        """Send the documents of all ranks, some at a time, each held to what names it."""
        ranks = self._manifest.ranks
        listed: dict[int, dict[str, FileRef]] = {}
        for reference, rank in self._manifest.files:
            listed.setdefault(rank, {})[reference.path] = reference
        for first in range(0, len(ranks), _BATCH_COUNT):
            numbers = range(first, min(first + _BATCH_COUNT, len(ranks)))
            sent: list[tuple[str, bytes]] = []
            batch = self._fetched([ranks[rank] for rank in numbers])
            for rank, data in zip(numbers, batch, strict=True):
                where = ranks[rank].path
                document = RankManifest.from_body(unseal(data, path=where), where=where)
                self._check_rank(rank, document, listed.get(rank, {}))
                sent.append((self._renamed_path(where), self._renamed(document, data)))
            jobs = [partial(self._target.put, path, data) for path, data in sent]
            side_by_side(jobs, "write rank manifests", self._copier.deadline)
            yield from itertools.starmap(_reference, sent)

    def _check_rank(self, rank: int, document: RankManifest, listed: Mapping[str, FileRef]) -> None:
        """Refuse a rank manifest that is not what the manifest says: files would be left behind."""
        held = {file.path: file.ref() for file in document.files}
        named = (document.rank, document.save_id)
        if named != (rank, self._manifest.save_id) or held != dict(listed):
            path = self._manifest.ranks[rank].path
            raise IntegrityError(
                f"{path} and the manifest do not describe the same files.",
                path=path,
                rank=rank,
                offset=0,
                next_step="Restore the file from a copy, or copy another checkpoint.",
            )

    def _fetched(self, references: Sequence[FileRef]) -> list[bytes]:
        """Return documents of the source, each checked against what names it."""
        found: dict[str, bytes] = {}

        def fetch(reference: FileRef) -> None:
            found[reference.path] = read_document(
                self._source, reference, save_id=self._manifest.save_id
            )

        jobs = [partial(fetch, reference) for reference in references]
        side_by_side(jobs, "read rank manifests", self._copier.deadline)
        return [found[reference.path] for reference in references]

    def _send_stock(self) -> tuple[FileRef | None, bytes | None]:
        """Send what `.metadata` is made from."""
        reference = self._manifest.stock
        if reference is None:
            return None, None
        data = read_document(
            self._source,
            reference,
            save_id=self._manifest.save_id,
            most_bytes=MOST_STOCK_BYTES,
        )
        # A save id has a fixed length, so the lengths that the pickle holds stay true.
        data = data.replace(self._manifest.save_id.encode(), self._save_id.encode())
        path = self._renamed_path(reference.path)
        self._target.put(path, data)
        return _reference(path, data), data

    def _send_manifest(self, ranks: Sequence[FileRef], stock: FileRef | None) -> FileRef:
        reference = self._head.manifest
        assert reference is not None  # noqa: S101  # a commit record names one; decode saw to it
        data = read_document(self._source, reference, save_id=self._manifest.save_id)
        if self._save_id != self._manifest.save_id:
            renamed = dataclasses.replace(
                self._manifest,
                save_id=self._save_id,
                files=[
                    (dataclasses.replace(file, path=self._renamed_path(file.path)), rank)
                    for file, rank in self._manifest.files
                ],
                ranks=list(ranks),
                stock=stock,
            )
            data = seal(renamed.to_body())
        path = self._renamed_path(reference.path)
        self._target.put(path, data)
        return _reference(path, data)

    def _renamed_path(self, path: str) -> str:
        return path.replace(self._manifest.save_id, self._save_id)

    def _renamed(self, document: RankManifest, data: bytes) -> bytes:
        """Return a rank manifest, whose bytes are `data`, with the copy's save id."""
        if self._save_id == self._manifest.save_id:
            return data
        files = [
            dataclasses.replace(file, path=self._renamed_path(file.path)) for file in document.files
        ]
        renamed = dataclasses.replace(document, save_id=self._save_id, files=files)
        return seal(renamed.to_body())

    def _commit(self, grant: Grant, manifest: FileRef, stock: FileRef | None) -> SlotRecord:
        try:
            record = commit.commit(
                self._target.bounded(Deadline("commit", self._means.commit_timeout_s)),
                grant,
                manifest=manifest,
                stock=stock,
                stock_entries=self._head.stock_entries,
                user=self._head.user,
            )
        except CommitConflictError as error:
            if error.winner.get("save_id") != grant.save_id:
                raise
            # Another copy of the same save was faster: it committed these very files.
            head = slotlog.read_log(self._target).head
            if head is None or head.save_id != grant.save_id:
                raise
            record = head
        log.info(
            "copy of %s to %s committed in slot %d", grant.save_id, self._target.url, record.slot
        )
        return record

    def _after_commit(self, grant: Grant, record: SlotRecord, stock: bytes | None) -> None:
        """Publish and clean up; what cannot be deleted is deleted by the next save."""
        try:
            if record.stock is not None:
                publishing.publish(self._target, own=record, own_stock=stock)
        except CheckpointError as error:
            self.unpublished = not_published(self._target, record, error)
            return
        try:
            if grant.previous is not None:
                cleaning.free_superseded(self._target, known=record)
        except CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)


def _reference(path: str, data: bytes) -> FileRef:
    return FileRef(path=path, size_bytes=len(data), crc32c=crc32c_of(data))
