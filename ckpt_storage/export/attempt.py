"""Outputs that are a checkpoint of ours: a save attempt that is filled and then committed."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.delete import delete_attempt
from ckpt_storage.commit.publishing import not_published
from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.commit.stockfooter import is_foreign
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitConflictError,
    CommitUnknownError,
    IntegrityError,
    NotPublishedError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal, unseal
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import (
    COMMITS,
    begun_path,
    rank_manifest_path,
    ranks_folder,
    save_folder,
    shard_path,
)
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.model import read_document
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store

from .folder import abort_uploads, files_there
from .layout import Layout, OutFile, Stored
from .output import Made, Output, Site, Taken
from .plan import Plan
from .shards import Shards, rank_manifest
from .work import side_by_side

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger("ckpt_storage")

_BATCH_COUNT = 64
"""Rank manifests in memory at a time."""


class NewCheckpoint(Output):
    """One save of one rank, committed as any save is committed."""

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        shards: Shards,
        block_bytes: int,
        metadata: Callable[[], Metadata],
        ties: Mapping[str, str],
        overwrite: bool,
    ) -> None:
        """`metadata` gives what DCP's global plan would have said of the values."""
        super().__init__(site, plan)
        self._shards = shards
        self._block_bytes = block_bytes
        self._metadata = metadata
        self._ties = ties
        self._overwrite = overwrite
        self.grant: Grant | None = None
        # What proves that it is not committed, but for two that say something else.
        self._not_committed: tuple[type[BaseException], ...] = (BaseException,)

    def take(self) -> Taken:
        """Begin a save; the name is its id."""
        self.grant = commit.begin(self.store, overwrite=self._overwrite)
        return Taken(name=self.grant.save_id)

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files below the save of that id."""
        files = [
            dataclasses.replace(file, name=shard_path(name, 0, at))
            for at, file in enumerate(layout.files)
        ]
        return dataclasses.replace(layout, files=tuple(files))

    def publish(self, made: Made) -> None:
        """Put down what describes the files, and commit."""
        from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415  # imports torch

        from ckpt_storage.commit.committing import commit_save  # noqa: PLC0415  # as above

        setting, grant = self.site.setting, self.grant
        assert grant is not None  # noqa: S101  # `take` was called
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for portion in made.portions:
            spans.setdefault(portion.file, []).extend(portion.spans)
        manifest = rank_manifest(
            dataclasses.replace(self._shards, layout=self.plan.layout),
            [sorted(spans.get(at, ())) for at in range(len(self._shards.items))],
            save_id=grant.save_id,
            block_bytes=self._block_bytes,
            ties=self._ties,
        )
        reference = _put(self.store, rank_manifest_path(grant.save_id, 0), seal(manifest.to_body()))
        report = RankReport.of(manifest, reference, with_places=True, ties=self._ties)
        self._not_committed = (CheckpointError,)
        commit_save(
            self.store.bounded(Deadline("commit", setting.timeouts.commit)),
            grant,
            world_size=1,
            metadata=self._metadata(),
            reports=[report],
            storage_meta=StorageMeta(checkpoint_id=setting.target.url),
            user={},
        )
        self._not_committed = ()

    def give_up(self, error: BaseException) -> None:
        """Delete the attempt, unless it may be committed: nobody could go on with it."""
        if self.grant is None or not isinstance(error, self._not_committed):
            return
        if isinstance(error, CommitUnknownError | NotPublishedError):
            return
        try:
            delete_attempt(self.store, self.grant.save_id)
        except CheckpointError as failure:
            error.add_note(f"Removing what was written failed too: {failure}")


class CopiedCheckpoint(Output):
    """The attempt of another checkpoint, with its save id, or `save_id` in place of it.

    Why the save id is kept, and when not, is told in `copy`.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        head: SlotRecord,
        manifest: Manifest,
        save_id: str,
        log_there: CommitLog | None,
        overwrite: bool,
    ) -> None:
        """`head` and `manifest` are the source's; `log_there` is what the target's slots say.

        Only the coordinator has that.
        """
        super().__init__(site, plan)
        self._head = head
        self._manifest = manifest
        self._save_id = save_id
        self._log = log_there
        self._overwrite = overwrite
        self._began_s = time.time()
        self._grant: Grant | None = None
        self._ranks: list[FileRef] = []
        self.record: SlotRecord | None = None
        self.unpublished: CheckpointError | None = None
        """Why stock readers do not find the copy, once it is committed."""

    def take(self) -> Taken:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, found, save_id = self.store, self._log, self._save_id
        assert found is not None  # noqa: S101  # the coordinator calls
        holds_other = found.head is not None or is_foreign(store, found)
        if holds_other and not self._overwrite:
            what = f"save {found.head.save_id}" if found.head else "one of another writer"
            raise CheckpointExistsError(
                f"{store.url} holds a checkpoint ({what}).",
                path=store.url,
                phase="plan",
                next_step="Copy to another folder, or pass overwrite=True to replace it.",
            )
        is_resumed = slotlog.is_there(store, begun_path(save_id))
        store.make_folders([COMMITS, save_folder(save_id), ranks_folder(save_id)])
        probed = probe_exclusive_create(store)
        if not probed.exclusive:
            log.warning("%s is single-writer: %s", store.url, probed.reason)
        if is_resumed:
            # Its process is dead, or is ended by this: the later copy goes on.
            abort_uploads(store, save_folder(save_id))
        else:
            begun = {"format": "ckpt_storage.begun/1", "save_id": save_id, **slotlog.stamp()}
            store.put(begun_path(save_id), seal(begun))
        self._grant = Grant(
            save_id=save_id,
            last_slot=found.last_slot,
            previous=found.head.head if found.head else None,
            began_s=self._began_s,
        )
        self._ranks = list(self._send_ranks())
        return Taken(done=files_there(self.site, self.plan, Taken()) if is_resumed else {})

    def publish(self, made: Made) -> None:
        """Send what describes the files, commit, and show it to stock readers."""
        del made
        assert self._grant is not None  # noqa: S101  # `take` was called
        stock, stock_bytes = self._send_stock()
        self.record = self._commit(self._grant, self._send_manifest(stock), stock)
        try:
            if stock is not None:
                publishing.publish(self.store, own=self.record, own_stock=stock_bytes)
        except CheckpointError as error:
            self.unpublished = not_published(self.store, self.record, error)
            return
        try:
            if self._grant.previous is not None:
                cleaning.free_superseded(self.store, known=self.record)
        except CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def damage(self, file: OutFile) -> CheckpointError:
        """Return what is wrong with a file that was copied to other bytes than it was written."""
        reference, rank = self._manifest.files[file.number - 1]
        document, _ = self._rank_manifest(rank)
        (shard,) = (one for one in document.files if one.path == reference.path)
        return damage_of(self.site, file, FileChecks.of_shard(document, shard))

    def _rank_manifest(self, rank: int) -> tuple[RankManifest, bytes]:
        """Return a document of the source, checked against what names it."""
        reference = self._manifest.ranks[rank]
        data = read_document(self.site.source, reference, save_id=self._manifest.save_id)
        where = reference.path
        return RankManifest.from_body(unseal(data, path=where), where=where), data

    def _send_ranks(self) -> Iterator[FileRef]:
        """Send the documents of all ranks, some at a time, each held to what names it."""
        listed: dict[int, dict[str, FileRef]] = {}
        for reference, rank in self._manifest.files:
            listed.setdefault(rank, {})[reference.path] = reference
        count = len(self._manifest.ranks)
        for first in range(0, count, _BATCH_COUNT):
            batch = range(first, min(first + _BATCH_COUNT, count))
            sent: dict[int, FileRef] = {}

            def send(rank: int, sent: dict[int, FileRef] = sent) -> None:
                path = self._manifest.ranks[rank].path
                document, data = self._rank_manifest(rank)
                held = {file.path: file.ref() for file in document.files}
                named = (document.rank, document.save_id)
                if named != (rank, self._manifest.save_id) or held != listed.get(rank, {}):
                    raise IntegrityError(
                        f"{path} and the manifest do not describe the same files.",
                        path=path,
                        rank=rank,
                        offset=0,
                        next_step="Restore the file from a copy, or copy another checkpoint.",
                    )
                if self._save_id != self._manifest.save_id:
                    files = [dataclasses.replace(f, path=self._at(f.path)) for f in document.files]
                    own = dataclasses.replace(document, save_id=self._save_id, files=files)
                    data = seal(own.to_body())
                sent[rank] = _put(self.store, self._at(path), data)

            jobs = [partial(send, rank) for rank in batch]
            side_by_side(jobs, "copy rank manifests", self.site.deadline)
            yield from (sent[rank] for rank in batch)

    def _send_stock(self) -> tuple[FileRef | None, bytes | None]:
        """Send what `.metadata` is made from."""
        reference = self._manifest.stock
        if reference is None:
            return None, None
        data = read_document(
            self.site.source,
            reference,
            save_id=self._manifest.save_id,
            most_bytes=MOST_STOCK_BYTES,
        )
        # A save id has a fixed length, so the lengths that the pickle holds stay true.
        data = data.replace(self._manifest.save_id.encode(), self._save_id.encode())
        return _put(self.store, self._at(reference.path), data), data

    def _send_manifest(self, stock: FileRef | None) -> FileRef:
        reference = self._head.manifest
        assert reference is not None  # noqa: S101  # a commit record names one; decode saw to it
        data = read_document(self.site.source, reference, save_id=self._manifest.save_id)
        if self._save_id != self._manifest.save_id:
            renamed = dataclasses.replace(
                self._manifest,
                save_id=self._save_id,
                files=[
                    (dataclasses.replace(file, path=self._at(file.path)), rank)
                    for file, rank in self._manifest.files
                ],
                ranks=self._ranks,
                stock=stock,
            )
            data = seal(renamed.to_body())
        return _put(self.store, self._at(reference.path), data)

    def _at(self, path: str) -> str:
        return path.replace(self._manifest.save_id, self._save_id)

    def _commit(self, grant: Grant, manifest: FileRef, stock: FileRef | None) -> SlotRecord:
        deadline = Deadline("commit", self.site.setting.timeouts.commit)
        try:
            record = commit.commit(
                self.store.bounded(deadline),
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
            head = slotlog.read_log(self.store).head
            if head is None or head.save_id != grant.save_id:
                raise
            record = head
        url, slot = self.store.url, record.slot
        log.info("copy of %s to %s committed in slot %d", grant.save_id, url, slot)
        return record


def damage_of(site: Site, file: OutFile, checks: FileChecks) -> CheckpointError:
    """Return what is wrong with the source of a copied file, or with how it was copied."""
    segment = file.segments[0]
    assert isinstance(segment, Stored)  # noqa: S101  # it was copied
    path = segment.path

    def pieces() -> Iterator[memoryview]:
        window = memoryview(bytearray(min(site.options.part_bytes, max(1, file.size_bytes))))
        for start in range(0, file.size_bytes, len(window)):
            view = window[: file.size_bytes - start]
            site.source.read(path, [(start, view)], size_bytes=file.size_bytes)
            site.deadline.advanced(len(view))
            yield view

    return checks.first_damage(pieces()) or IntegrityError(
        f"The storage copied {path} to other bytes, while the source reads as it was written.",
        path=file.name,
        offset=0,
        next_step="Copy again, with copies='never' so that every byte is read and sent.",
    )


def _put(store: Store, path: str, data: bytes) -> FileRef:
    store.put(path, data)
    return FileRef(path=path, size_bytes=len(data), crc32c=crc32c_of(data))
