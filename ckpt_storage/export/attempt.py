"""Outputs that are a checkpoint of ours: a save attempt that is filled and then committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.cleaning import abort_uploads, delete_attempt
from ckpt_storage.commit.report import RankReport
from ckpt_storage.errors import CheckpointError, CommitUnknownError, NotPublishedError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.names import begun_path, rank_manifest_path, save_folder, shard_path
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import read_document
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .layout import Layout
from .output import Made, Output, Taken
from .shards import rank_manifest
from .write import spans_of

if TYPE_CHECKING:
    from .convert import _Conversion
    from .copy import _Copy

log = logging.getLogger("ckpt_storage")


@dataclass
class NewCheckpoint(Output):
    """One save of one rank, committed as any save is committed."""

    task: _Conversion
    grant: Grant | None = None
    _may_be_committed: bool = False

    def take(self) -> Taken:
        """Begin a save; the name is its id."""
        self.grant = commit.begin(self.store, overwrite=self.task.overwrite)
        return Taken(name=self.grant.save_id)

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files below the save of that id."""
        files = (replace(f, name=shard_path(name, 0, at)) for at, f in enumerate(layout.files))
        return replace(layout, files=tuple(files))

    def publish(self, made: Made) -> None:
        """Put down what describes the files, and commit."""
        from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: PLC0415  # imports torch

        from ckpt_storage.commit.assembly import commit_save  # noqa: PLC0415  # as above

        setting, grant, shards = self.site.setting, self.grant, self.task.shards
        assert grant is not None  # noqa: S101  # `take` was called
        ties = self.task.chosen.ties
        manifest = rank_manifest(
            replace(shards, layout=self.plan.layout),
            [sorted(spans_of(made.results, at)) for at in range(len(shards.tables))],
            save_id=grant.save_id,
            block_bytes=TransferOptions().block_bytes,
            ties=ties,
        )
        reference = _put(self.store, rank_manifest_path(grant.save_id, 0), seal(manifest.to_body()))
        metadata = self.task.metadata()
        self._may_be_committed = True
        try:
            commit_save(
                self.store.bounded(Deadline("commit", setting.timeouts.commit)),
                grant,
                world_size=1,
                metadata=metadata,
                reports=[RankReport.of(manifest, reference, with_places=True, ties=ties)],
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


@dataclass
class CopiedCheckpoint(Output):
    """The attempt of another checkpoint, with its save id or the one that the copy has.

    Why the save id is kept, and when not, is told in `copy`.
    """

    task: _Copy
    record: SlotRecord | None = None
    _grant: Grant | None = None
    _ranks: Sequence[FileRef] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.task.ours is not None  # noqa: S101  # else it is no attempt
        self._head, self.manifest = self.task.ours
        self._save_id = self.task.save_id or ""

    def take(self) -> Taken:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, before, save_id = self.store, self.task.log_there, self._save_id
        assert before is not None  # noqa: S101  # the coordinator calls
        if self.task.found.was_there:
            self.record = before.head
            return Taken()
        is_resumed = slotlog.is_there(store, begun_path(save_id))
        grant = commit.begin(store, overwrite=self.task.overwrite, save_id=save_id)
        # The id was chosen by these slots: whoever names it since has given it up.
        previous = before.head.head if before.head else None
        self._grant = replace(grant, last_slot=before.last_slot, previous=previous)
        sends = [partial(self._send_rank, one) for one in self.manifest.ranks]
        self._ranks = self.site.at_once("copy rank manifests", sends)
        if not is_resumed:
            return Taken()
        # Its process is dead, or is ended by this: the later copy goes on.
        abort_uploads(store, save_folder(save_id))
        looks = [partial(slotlog.stat_if_there, store, file.name) for file in self.plan.files]
        there = self.site.at_once("look for files", looks)
        done = {
            at: FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=file.crc32c)
            for at, (file, found) in enumerate(zip(self.plan.files, there, strict=True))
            if file.crc32c is not None and found and found.size_bytes == file.size_bytes
        }
        return Taken(done=done)

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
        publish = partial(publishing.publish_head, self.store, own=record, own_stock=stock_bytes)
        if self._grant is None:
            publish = partial(publishing.roll_forward, self.store, self._save_id)
        if record.stock is not None and not publishing.publish_commit(
            self.store, record, publish, is_needed=record.stock_entries != 0
        ):
            return
        try:
            if self._grant is not None and self._grant.previous is not None:
                cleaning.free_superseded(self.store, known=record)
        except CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def _send(
        self,
        reference: FileRef,
        renamed: Callable[[bytes], bytes],
        most_bytes: int = MOST_DOCUMENT_BYTES,
    ) -> tuple[FileRef, bytes]:
        """Send a document of the source, checked against what names it, under the copy's id."""
        own_id, save_id = self.manifest.save_id, self._save_id
        data = read_document(self.site.source, reference, save_id=own_id, most_bytes=most_bytes)
        data = data if save_id == own_id else renamed(data)
        return _put(self.store, reference.path.replace(own_id, save_id), data), data

    def _send_rank(self, one: FileRef) -> FileRef:
        new_id = {"save_id": self._save_id}
        return self._send(one, lambda data: seal(unseal(data, path=one.path) | new_id))[0]

    def _send_stock(self) -> tuple[FileRef | None, bytes | None]:
        """Send what `.metadata` is made from."""
        own_id, save_id = self.manifest.save_id.encode(), self._save_id.encode()
        if self.manifest.stock is None:
            return None, None
        # A save id has a fixed length, so the lengths that the pickle holds stay true.
        return self._send(
            self.manifest.stock, lambda data: data.replace(own_id, save_id), MOST_STOCK_BYTES
        )

    def _send_manifest(self, stock: FileRef | None) -> FileRef:
        reference, own = self._head.manifest, self.manifest
        assert reference is not None  # noqa: S101  # a commit record names one; decode saw to it

        def renamed(_: bytes) -> bytes:
            files = [
                (replace(one, path=one.path.replace(own.save_id, self._save_id)), rank)
                for one, rank in own.files
            ]
            named = replace(own, save_id=self._save_id, files=files)
            return seal(replace(named, ranks=self._ranks, stock=stock).to_body())

        return self._send(reference, renamed)[0]


def _put(store: Store, path: str, data: bytes) -> FileRef:
    store.put(path, data)
    return FileRef.of(path, data)
