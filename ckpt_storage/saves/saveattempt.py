"""One save attempt on one rank: how it begins, what it was granted and writes, how it commits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_storage._version import __version__
from ckpt_storage.commit.attempt import Grant, begin
from ckpt_storage.commit.cleaning import delete_attempt, free_dead
from ckpt_storage.commit.committing import commit_save
from ckpt_storage.coordination import agreement
from ckpt_storage.coordination.agreement import Granted, Refused
from ckpt_storage.errors import (
    CheckpointError,
    CommitConflictError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.format import integrity, layout
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.manifest import RankManifest
from ckpt_storage.format.rankreport import RankReport
from ckpt_storage.format.slots import SlotRecord
from ckpt_storage.options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    TransferOptions,
    UnsafeValues,
)
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.base import Capabilities, Store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.transfer.workers import bounded

from .shards import ShardJob, write_shards

__all__ = ["SaveAttempt", "SaveSettings"]

_DISCARD_S = 2.0

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """The arguments of a `CheckpointStorageWriter`, checked.

    `commit_base` is where `commit_url` leads to. `transfer_options` says how bytes go to a storage.
    """

    commit_base: Location | None
    overwrite: bool
    page_cache: PageCache
    sync_files: bool
    stock_metadata: StockMetadata
    unsafe_values: UnsafeValues
    transfer_options: Callable[[Capabilities], TransferOptions]
    timeouts: Timeouts
    retry: RetryPolicy
    progress: Progress

    def open(self, location: Location, checkpoint_id: str | os.PathLike[str] | None) -> Store:
        """Open the store at `location`, which `checkpoint_id` has led to. Raises `StorageError`."""
        return open_store(
            location,
            commit_location=self.commit_base.join(checkpoint_id) if self.commit_base else None,
            page_cache=self.page_cache,
            sync_files=self.sync_files,
            timeouts=self.timeouts,
            retry=self.retry,
        )

    def terms(self, location: Location) -> dict[str, str]:
        """Return what all ranks must have in common for a save to `location`."""
        return {
            "the checkpoint's URL": location.normalised,
            "overwrite": str(self.overwrite),
            "sync_files": str(self.sync_files),
            "the storage's endpoint": endpoint_of(location),
            "stock_metadata": self.stock_metadata,
            "commit_url": self.commit_base.normalised if self.commit_base else "None",
            "the version of ckpt_storage": __version__,
        }


class SaveAttempt:
    """One save as this rank sees it; belongs to one thread.

    `answer` is what the coordinator said, once it is known. A front door knows besides, and puts
    here: `item_count`, of all ranks' plans, before `prepare_global_plan`; `candidates`, names that
    the ranks' states may tie, before `write_data`; and before `finish` `settled_ties`, which maps
    each of these to what it is tied to, or to itself.
    """

    def __init__(
        self,
        settings: SaveSettings,
        location: Location,
        checkpoint_id: str | os.PathLike[str] | None,
        *,
        is_coordinator: bool,
        rank: int,
    ) -> None:
        """Take up a save to `location`, which `checkpoint_id` has led to."""
        self.location = location
        self.is_coordinator = is_coordinator
        self.rank = rank
        self.nonce = os.urandom(16).hex()
        self.answer: Granted | Refused | None = None
        self.item_count = 0
        self.candidates: Sequence[str] = ()
        self.settled_ties: Mapping[str, str] = {}
        self._settings = settings
        self._checkpoint_id = checkpoint_id

    @cached_property
    def _store(self) -> Store:
        return self._settings.open(self.location, self._checkpoint_id)

    def begin(self, rank_count: int, *, replaces: frozenset[str], deadline: Deadline) -> Grant:
        """Open the attempt on the storage and return the leave to save; coordinator only.

        `replaces` are ids of saves that may be replaced in any case. Raises as `commit.begin`.
        """
        with deadline.governs(f"Beginning a save to {self.location.url}", rank=self.rank):
            store = bounded(self._store, deadline)
            if rank_count > 1 and not store.capabilities.shared:
                raise InvalidInputError(
                    f"{store.url} is seen by one process only; this save runs on {rank_count} "
                    "ranks.",
                    phase="plan",
                    next_step="Save to a storage that all ranks share.",
                )
            grant = begin(
                store,
                overwrite=self._settings.overwrite,
                probe=self._probe,
                replaces=replaces,
            )
        previous = grant.previous
        if previous is not None and previous.save_id in replaces:
            log.warning(
                "%s: save %s is damaged, and save %s is to replace it",
                store.url,
                previous.save_id,
                grant.save_id,
            )
        log.info("save %s to %s begins on %d ranks", grant.save_id, store.url, rank_count)
        return grant

    def _probe(self, store: Store) -> bool:
        location = self._settings.commit_base or self.location
        result = probe_exclusive_create(store, key=location.scope())
        if not result.exclusive:
            log.warning(
                "%s is single-writer: %s. Two jobs that save to one id at the same time are "
                "not told apart there.",
                store.url,
                result.reason,
            )
        return result.exclusive

    def granted(self) -> Granted:
        """Return the coordinator's leave. Raises what it refused the save for."""
        answer = self.answer or agreement.inbox().answers.get(self.nonce)
        if answer is None:
            raise InvalidInputError(
                f"Rank {self.rank} got no save id for this save; it writes nothing.",
                rank=self.rank,
                phase="write",
                next_step="Use a planner that keeps SavePlan objects, or turn plan caching off "
                "(enable_plan_caching=False).",
            )
        self.answer = answer
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def write(
        self, plan: SavePlan, planner: SavePlanner, *, deadline: Deadline
    ) -> list[WriteResult]:
        """Write this rank's shard file and rank manifest; durable on return.

        Where the storage is full it first frees what dead attempts left, and tries once more. After
        an error nothing of this rank is left there. Raises as `write_data`.
        """
        granted = self.granted()
        try:
            try:
                return self._write(granted, plan, planner, deadline)
            except StorageError as error:
                if error.kind != "no-space" or not self._has_freed(granted.grant, deadline):
                    raise
            return self._write(granted, plan, planner, deadline)
        except CheckpointError as error:
            # Without this rank's report the coordinator cannot commit.
            if not isinstance(error, PhaseTimeoutError):
                self.discard(is_whole=False)
            raise

    def _has_freed(self, grant: Grant, deadline: Deadline) -> bool:
        self.discard(is_whole=False)
        freed = free_dead(
            bounded(self._store, deadline),
            besides=grant.save_id,
            exclusive=grant.exclusive,
            deadline=deadline,
            retry=self._settings.retry,
        )
        return bool(freed)

    def discard(self, *, is_whole: bool) -> None:
        """Delete what this rank wrote, or all ranks did, for a save that can never commit.

        Takes two seconds at most, and raises nothing: what stays is freed as that of a dead save.
        """
        if not isinstance(self.answer, Granted):
            return
        save_id = self.answer.grant.save_id
        store = bounded(self._store, Deadline("write", _DISCARD_S))
        try:
            if is_whole:
                delete_attempt(store, save_id)
            else:
                own = layout.shard_path(save_id, self.rank, 0)
                store.delete([own, layout.rank_manifest_path(save_id, self.rank)])
        except CheckpointError as error:
            log.warning("%s: files of failed save %s stay for now: %s", store.url, save_id, error)

    def _write(
        self, granted: Granted, plan: SavePlan, planner: SavePlanner, deadline: Deadline
    ) -> list[WriteResult]:
        store = bounded(self._store, deadline)
        with deadline.governs(f"Writing to {store.url}", rank=self.rank):
            job = ShardJob(
                save_id=granted.grant.save_id,
                rank=self.rank,
                world_size=granted.world_size,
                options=self._settings.transfer_options(store.capabilities),
                unsafe_values=self._settings.unsafe_values,
                deadline=deadline,
                progress=self._settings.progress,
                with_bar=self.is_coordinator,
            )
            manifest = write_shards(store, plan, planner, job)
            document = integrity.seal(manifest.to_body())
            path = layout.rank_manifest_path(manifest.save_id, self.rank)
            store.write(path, document)
        return [self._result(granted, manifest, path, document)]

    def commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        *,
        user: Mapping[str, Any],
        deadline: Deadline,
    ) -> SlotRecord:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `results[i]` is what rank i's `write` returned. Raises as `finish`.
        """
        try:
            return self._commit(metadata, results, user, deadline)
        except (CommitConflictError, IntegrityError, StorageError):
            # These say that it is not committed, and nobody will try again.
            self.discard(is_whole=True)
            raise

    def _commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        user: Mapping[str, Any],
        deadline: Deadline,
    ) -> SlotRecord:
        granted = self.granted()
        with deadline.governs(f"Committing to {self.location.url}", rank=self.rank):
            return commit_save(
                bounded(self._store, deadline),
                granted.grant,
                world_size=granted.world_size,
                metadata=metadata,
                results=results,
                storage_meta=StorageMeta(checkpoint_id=self.location.url),
                settled_ties=self.settled_ties,
                user=user,
                deadline=deadline,
                retry=self._settings.retry,
                must_publish=self._settings.stock_metadata != "never",
            )

    def _result(
        self, granted: Granted, manifest: RankManifest, path: str, document: bytes
    ) -> WriteResult:
        ref = FileRef(path=path, size_bytes=len(document), crc32c=integrity.crc32c_of(document))
        report = RankReport.of(
            manifest,
            ref,
            document,
            with_places=granted.with_places,
            candidates=self.candidates,
        )
        return WriteResult(
            index=MetadataIndex(f"ckpt_storage.rank.{self.rank}"),
            size_in_bytes=sum(file.size_bytes for file in manifest.files),
            storage_data=report,
        )
