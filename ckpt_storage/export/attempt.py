"""Outputs that are a checkpoint of ours: a save attempt that is filled and then committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.cleaning import abort_uploads, delete_attempt
from ckpt_storage.commit.report import RankReport
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import (
    CheckpointError,
    CommitUnknownError,
    NotPublishedError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import begun_path, rank_manifest_path, save_folder, shard_path
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.model import read_document
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .folder import size_of
from .layout import Layout, OutFile
from .output import Made, Output, Site, Taken
from .plan import Plan
from .shards import Shards, rank_manifest

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger("ckpt_storage")


class NewCheckpoint(Output):
    """One save of one rank, committed as any save is committed."""

    grant: Grant | None = None
    _may_be_committed = False

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

    def take(self) -> Taken:
        """Begin a save; the name is its id."""
        self.grant = commit.begin(self.store, overwrite=self._overwrite)
        return Taken(name=self.grant.save_id)

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files below the save of that id."""
        files = (replace(f, name=shard_path(name, 0, at)) for at, f in enumerate(layout.files))
        return replace(layout, files=tuple(files))

    def publish(self, made: Made) -> None:
        """Put down what describes the files, and commit."""
        from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415  # imports torch

        from ckpt_storage.commit.assembly import commit_save  # noqa: PLC0415  # as above

        setting, grant = self.site.setting, self.grant
        assert grant is not None  # noqa: S101  # `take` was called
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for portion in made.portions:
            spans.setdefault(portion.file, []).extend(portion.spans)
        manifest = rank_manifest(
            replace(self._shards, layout=self.plan.layout),
            [sorted(spans.get(at, ())) for at in range(len(self._shards.tables))],
            save_id=grant.save_id,
            block_bytes=self._block_bytes,
            ties=self._ties,
        )
        reference = _put(self.store, rank_manifest_path(grant.save_id, 0), seal(manifest.to_body()))
        report = RankReport.of(manifest, reference, with_places=True, ties=self._ties)
        metadata = self._metadata()
        self._may_be_committed = True
        try:
            commit_save(
                self.store.bounded(Deadline("commit", setting.timeouts.commit)),
                grant,
                world_size=1,
                metadata=metadata,
                reports=[report],
                storage_meta=StorageMeta(checkpoint_id=setting.target.url),
                user={},
            )
        except CheckpointError as error:
            self._may_be_committed = isinstance(error, CommitUnknownError | NotPublishedError)
            raise

    def give_up(self, error: BaseException) -> None:
        """Delete the attempt, unless it may be committed: nobody could go on with it."""
        if self.grant is None or self._may_be_committed:
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
        """`head` and `manifest` are the source's; `log_there` (coordinator) are the target's."""
        super().__init__(site, plan)
        self._head = head
        self._manifest = manifest
        self._save_id = save_id
        self._log = log_there
        self._overwrite = overwrite
        self._grant: Grant | None = None
        self._ranks: list[FileRef] = []
        there = log_there.head if log_there else None
        self.was_there = there is not None and there.save_id == save_id
        self.record: SlotRecord | None = there if self.was_there else None

    def take(self) -> Taken:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, found, save_id = self.store, self._log, self._save_id
        assert found is not None  # noqa: S101  # the coordinator calls
        if self.was_there:
            return Taken()
        is_resumed = slotlog.is_there(store, begun_path(save_id))
        grant = commit.begin(store, overwrite=self._overwrite, save_id=save_id)
        # The id was chosen by these slots: whoever names it since has given it up.
        previous = found.head.head if found.head else None
        self._grant = replace(grant, last_slot=found.last_slot, previous=previous)
        self._send_ranks()
        done: dict[int, FileRef] = {}

        def look(at: int, file: OutFile) -> None:
            if size_of(store, file.name) == file.size_bytes and file.crc32c is not None:
                done[at] = FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=file.crc32c)

        if is_resumed:
            # Its process is dead, or is ended by this: the later copy goes on.
            abort_uploads(store, save_folder(save_id))
            jobs = [partial(look, *one) for one in enumerate(self.plan.files)]
            self.site.at_once("look for files", jobs)
        return Taken(done=dict(sorted(done.items())))

    def publish(self, made: Made) -> None:
        """Send what describes the files, commit, and show it to stock readers.

        What follows a commit is repeated for a copy that was cut there. Raises `NotPublishedError`
        if stock readers do not find the copy, unless they would find a note that it is not theirs.
        """
        del made
        stock_bytes: bytes | None = None
        if self.record is None:
            assert self._grant is not None  # noqa: S101  # `take` was called
            stock, stock_bytes = self._send_stock()
            self.record = commit.commit(
                self.store.bounded(Deadline("commit", self.site.setting.timeouts.commit)),
                self._grant,
                manifest=self._send_manifest(stock),
                stock=stock,
                stock_entries=self._head.stock_entries,
                user=self._head.user,
            )
        record = self.record
        try:
            if self.was_there:
                publishing.roll_forward(self.store, self._save_id)
            elif record.stock is not None:
                publishing.publish_head(self.store, own=record, own_stock=stock_bytes)
        except CheckpointError as error:
            unpublished = publishing.not_published(self.store, record, error)
            if record.stock_entries != 0:
                raise unpublished from error
            log.warning("%s", unpublished)
            return
        try:
            if self._grant is not None and self._grant.previous is not None:
                cleaning.free_superseded(self.store, known=record)
        except CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def _read(self, reference: FileRef, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
        """Return a document of the source, checked against what names it."""
        save_id = self._manifest.save_id
        return read_document(self.site.source, reference, save_id=save_id, most_bytes=most_bytes)

    def _at(self, path: str) -> str:
        return path.replace(self._manifest.save_id, self._save_id)

    @property
    def _is_renamed(self) -> bool:
        return self._save_id != self._manifest.save_id

    def _send_ranks(self) -> None:
        """Send the documents of all ranks, each held to what names it."""
        sent: dict[int, FileRef] = {}

        def send(rank: int, reference: FileRef) -> None:
            if self._is_renamed:
                body = unseal(self._read(reference), path=reference.path)
                document = RankManifest.from_body(body, where=reference.path)
                files = [replace(file, path=self._at(file.path)) for file in document.files]
                data = seal(replace(document, save_id=self._save_id, files=files).to_body())
            else:
                data = self._read(reference)
            sent[rank] = _put(self.store, self._at(reference.path), data)

        jobs = [partial(send, *one) for one in enumerate(self._manifest.ranks)]
        self.site.at_once("copy rank manifests", jobs)
        self._ranks = [sent[rank] for rank in sorted(sent)]

    def _send_stock(self) -> tuple[FileRef | None, bytes | None]:
        """Send what `.metadata` is made from."""
        reference = self._manifest.stock
        if reference is None:
            return None, None
        data = self._read(reference, MOST_STOCK_BYTES)
        # A save id has a fixed length, so the lengths that the pickle holds stay true.
        data = data.replace(self._manifest.save_id.encode(), self._save_id.encode())
        return _put(self.store, self._at(reference.path), data), data

    def _send_manifest(self, stock: FileRef | None) -> FileRef:
        reference, manifest = self._head.manifest, self._manifest
        assert reference is not None  # noqa: S101  # a commit record names one; decode saw to it
        data = self._read(reference)
        if self._is_renamed:
            files = [(replace(one, path=self._at(one.path)), rank) for one, rank in manifest.files]
            renamed = replace(manifest, files=files, ranks=self._ranks, stock=stock)
            data = seal(replace(renamed, save_id=self._save_id).to_body())
        return _put(self.store, self._at(reference.path), data)


def _put(store: Store, path: str, data: bytes) -> FileRef:
    store.put(path, data)
    return FileRef(path=path, size_bytes=len(data), crc32c=crc32c_of(data))
