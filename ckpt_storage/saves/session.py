"""One save attempt on one rank: how it begins, what it was granted and writes, how it commits."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_storage._version import __version__
from ckpt_storage.commit.attempt import Grant, begin
from ckpt_storage.commit.cleaning import delete_attempt, free_dead
from ckpt_storage.commit.committing import commit_save
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.reporttable import RankReport
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.coordination import agreement
from ckpt_storage.coordination.agreement import Granted, Hello, Refused
from ckpt_storage.errors import (
    CheckpointError,
    CommitConflictError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import rank_manifest_path, shard_path
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.options import (
    STOCK_ENTRY_LIMIT,
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    TransferOptions,
    UnsafeValues,
)
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import write_options

from .refusals import check_plan
from .shards import ShardJob, write_shards

_DISCARD_S = 2.0

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """What a save is told besides state and ranks, checked.

    `commit_base` is where `commit_url` leads to. `transfer_options` says how bytes go to a storage.
    """

    base: Location
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

    @classmethod
    def of(  # as `CheckpointStorageWriter`
        cls,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None,
        overwrite: bool,
        thread_count: int | None,
        part_bytes: int | None,
        memory_limit_bytes: int | None,
        page_cache: PageCache,
        sync_files: bool,
        commit_url: str | None,
        stock_metadata: StockMetadata,
        unsafe_values: UnsafeValues,
        timeout: float | timedelta | Timeouts | None,
        retry: RetryPolicy | None,
        progress: Progress,
    ) -> SaveSettings:
        """Return the settings that these arguments mean. Raises `InvalidInputError`."""
        base = Location.of(url, storage_options)
        transfer_options = partial(
            write_options,
            thread_count=thread_count,
            part_bytes=part_bytes,
            memory_limit_bytes=memory_limit_bytes,
        )
        transfer_options(None)  # refuses what cannot be, now and on every rank
        commit_base = Location.of(commit_url, storage_options) if commit_url else None
        if stock_metadata not in {"auto", "always", "never"}:
            raise InvalidInputError(
                f"stock_metadata is {stock_metadata!r}.",
                next_step="Give 'auto', 'always' or 'never'.",
            )
        if unsafe_values not in {"warn", "refuse"}:
            raise InvalidInputError(
                f"unsafe_values is {unsafe_values!r}.", next_step="Give 'warn' or 'refuse'."
            )
        return cls(
            base=base,
            commit_base=commit_base,
            overwrite=overwrite,
            page_cache=page_cache,
            sync_files=sync_files,
            stock_metadata=stock_metadata,
            unsafe_values=unsafe_values,
            transfer_options=transfer_options,
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            progress=progress,
        )

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
            "the checkpoint's URL": location.url,
            "overwrite": str(self.overwrite),
            "sync_files": str(self.sync_files),
            "the storage's endpoint": endpoint_of(location),
            "stock_metadata": self.stock_metadata,
            "commit_url": self.commit_base.url if self.commit_base else "None",
            "the version of ckpt_storage": __version__,
        }

    def record_of(self, save_id: str, deadline: Deadline) -> SlotRecord | None:
        """Return the commit record at the head if it is that of `save_id`, else None."""
        head = read_log(self.open(self.base, None).bounded(deadline)).head
        return head if head is not None and head.save_id == save_id else None


class SaveSession:
    """One save as this rank sees it, step by step; belongs to one thread.

    All ranks `propose`, the coordinator `decide`s, all ranks `write`, and the coordinator
    `commit`s. A front door knows besides, and puts here: `item_count`, of all ranks' plans, before
    `decide`; `candidates`, names that the ranks' states may tie, before `write`; and before
    `commit` `settled_ties`, which maps each of these to what it is tied to, or to itself.
    """

    def __init__(
        self,
        settings: SaveSettings,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        is_coordinator: bool,
        rank: int,
        user: Mapping[str, Any] | None = None,
        replaces: frozenset[str] = frozenset(),
    ) -> None:
        """Take up a save to the place that `checkpoint_id` leads to.

        `user` goes into the commit record; plain JSON. `replaces` are ids of saves, known to be
        damaged, that are replaced even without `overwrite`. Of both the coordinator's count.
        """
        self.location = settings.base.join(checkpoint_id)
        self.is_coordinator = is_coordinator
        self.rank = rank
        self.item_count = 0
        self.candidates: Sequence[str] = ()
        self.settled_ties: Mapping[str, str] = {}
        self._nonce = os.urandom(16).hex()
        self._items: Sequence[WriteItem] = ()
        self._answer: Granted | Refused | None = None
        self._settings = settings
        self._checkpoint_id = checkpoint_id
        self._user = user or {}
        self._replaces = replaces

    @property
    def url(self) -> str:
        """Where the save goes to."""
        return self.location.url

    @property
    def save_id(self) -> str | None:
        """The id that the coordinator gave to this save, once this rank has read it."""
        return self._answer.grant.save_id if isinstance(self._answer, Granted) else None

    def propose(self, plan: SavePlan) -> SavePlan:
        """Attach this rank's hello to its plan; all ranks. Raises `InvalidInputError`."""
        check_plan(plan)
        agreement.clear_inbox()
        self._items = plan.items
        return dataclasses.replace(plan, storage_data=self._hello())

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common for this save."""
        return self._settings.terms(self.location)

    def record_of(self, save_id: str, deadline: Deadline) -> SlotRecord | None:
        """Return the commit record at the head if it is that of `save_id`, else None."""
        return self._settings.record_of(save_id, deadline)

    def _hello(self) -> Hello:
        return Hello(
            nonce=self._nonce,
            rank=self.rank,
            host=socket.gethostname(),
            terms=self.terms(),
            items=self._items,
        )

    def decide(
        self, plans: Sequence[SavePlan], deadline: Deadline, *, world_size: int | None = None
    ) -> list[SavePlan]:
        """Check that all ranks agree and open the attempt on the storage; coordinator only.

        Raises `InvalidInputError` if a rank has no writer of ours. Any other refusal
        (`RankMismatchError`, `CheckpointExistsError`, `InvalidInputError`, `StorageError`) is
        answered to all ranks and raised by their `write`; no byte was written then. It is refused
        also if `world_size` is given and is not the number of plans.
        """
        hellos = agreement.hellos_of_all(self._hello(), len(plans))
        # The items of all ranks are many: nobody keeps them.
        agreement.inbox().hellos.clear()
        self._items = ()
        answers: Sequence[Granted | Refused]
        try:
            _check_world(len(hellos), world_size)
            agreement.check_agreement(hellos, phase="plan")
            agreement.check_alike(hellos)
            grant = self._begin(len(hellos), deadline)
        except CheckpointError as error:
            answers = agreement.refuse_all(hellos, error)
        else:
            planned_count = sum(len(plan.items) for plan in plans)
            with_places = self.is_stock_wanted(max(planned_count, self.item_count))
            answers = agreement.grant_all(hellos, grant, with_places=with_places)
        self._answer = answers[self.rank]
        return [
            dataclasses.replace(plan, storage_data=answer)
            for plan, answer in zip(plans, answers, strict=True)
        ]

    def is_stock_wanted(self, item_count: int) -> bool:
        """Return whether `.metadata` is to be written; plans that a planner dropped count as 0."""
        if self._settings.stock_metadata == "auto":
            return item_count <= STOCK_ENTRY_LIMIT
        return self._settings.stock_metadata == "always"

    @cached_property
    def _store(self) -> Store:
        return self._settings.open(self.location, self._checkpoint_id)

    def _begin(self, rank_count: int, deadline: Deadline) -> Grant:
        with deadline.governs(f"Beginning a save to {self.location.url}", rank=self.rank):
            store = self._store.bounded(deadline)
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
                replaces=self._replaces,
            )
        previous = grant.previous
        if previous is not None and previous.save_id in self._replaces:
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
        result = probe_exclusive_create(store, scope=location.scope)
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
        answer = self._answer or agreement.inbox().answers.get(self._nonce)
        if answer is None:
            raise InvalidInputError(
                f"Rank {self.rank} got no save id for this save; it writes nothing.",
                rank=self.rank,
                phase="write",
                next_step="Use a planner that keeps SavePlan objects, or turn plan caching off "
                "(enable_plan_caching=False).",
            )
        self._answer = answer
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def write(self, plan: SavePlan, planner: SavePlanner, deadline: Deadline) -> list[WriteResult]:
        """Write this rank's shard file and rank manifest; all ranks; durable on return.

        Where the storage is full it first frees what dead attempts left, and tries once more. After
        any error no upload stays open, and what became visible is an attempt's that never will be
        committed. Raises what the coordinator refused the save for, `StorageError`,
        `PhaseTimeoutError`, `InvalidInputError` (a value that cannot be stored, naming its FQN).
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
            self._store.bounded(deadline),
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
        save_id = self.save_id
        if save_id is None:
            return
        store = self._store.bounded(Deadline("write", _DISCARD_S))
        try:
            if is_whole:
                delete_attempt(store, save_id)
            else:
                own = shard_path(save_id, self.rank, 0)
                store.delete([own, rank_manifest_path(save_id, self.rank)])
        except CheckpointError as error:
            log.warning("%s: files of failed save %s stay for now: %s", store.url, save_id, error)

    def _write(
        self, granted: Granted, plan: SavePlan, planner: SavePlanner, deadline: Deadline
    ) -> list[WriteResult]:
        store = self._store.bounded(deadline)
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
            document = seal(manifest.to_body())
            path = rank_manifest_path(manifest.save_id, self.rank)
            store.put(path, document)
        return [self._result(granted, manifest, path, document)]

    def commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        deadline: Deadline,
    ) -> CheckpointInfo:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `results[i]` is what rank i's `write` returned. Raises `IntegrityError`, `RankFailedError`
        (not committed), `CommitConflictError` (not committed), `CommitUnknownError`,
        `NotPublishedError` (committed).
        """
        try:
            return CheckpointInfo.of(self.url, self._commit(metadata, results, deadline))
        except (CommitConflictError, IntegrityError, StorageError):
            # These say that it is not committed, and nobody will try again.
            self.discard(is_whole=True)
            raise

    def _commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        deadline: Deadline,
    ) -> SlotRecord:
        granted = self.granted()
        with deadline.governs(f"Committing to {self.location.url}", rank=self.rank):
            return commit_save(
                self._store.bounded(deadline),
                granted.grant,
                world_size=granted.world_size,
                metadata=metadata,
                results=results,
                storage_meta=StorageMeta(
                    checkpoint_id=self.location.url, save_id=granted.grant.save_id
                ),
                settled_ties=self.settled_ties,
                user=self._user,
                deadline=deadline,
                retry=self._settings.retry,
                must_publish=self._settings.stock_metadata != "never",
            )

    def _result(
        self, granted: Granted, manifest: RankManifest, path: str, document: bytes
    ) -> WriteResult:
        ref = FileRef(path=path, size_bytes=len(document), crc32c=crc32c_of(document))
        report = RankReport.of(
            manifest,
            ref,
            with_places=granted.with_places,
            candidates=self.candidates,
        )
        return WriteResult(
            index=MetadataIndex(f"ckpt_storage.rank.{self.rank}"),
            size_in_bytes=sum(file.size_bytes for file in manifest.files),
            storage_data=report,
        )


def _check_world(found: int, expected: int | None) -> None:
    if expected is not None and expected != found:
        raise InvalidInputError(
            f"The save runs on {found} ranks; the writer's process_group has {expected}.",
            phase="plan",
            next_step="Pass the same process_group to dcp.save and to the writer.",
        )
