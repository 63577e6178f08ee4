"""One save of one rank on the storage: it begins, is written and commits.

Communicates with no other rank.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage._version import __version__
from ckpt_storage.commit.assembly import commit_save
from ckpt_storage.commit.attempt import SaveTicket, begin, find_conflict
from ckpt_storage.commit.attempt_files import delete_attempt
from ckpt_storage.commit.cleaning import free_dead
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.report import RankReport
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointError,
    CommitConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    PhaseTimeoutError,
    RankMismatchError,
    StorageError,
)
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.names import rank_manifest_path, shard_path
from ckpt_storage.format.rank_manifest import RankManifest, Vocabulary
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import Phase, RetryPolicy
from ckpt_storage.progress import reporting
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import ObjectWriter

from .base import OWN_SAVES, read_base, warn_useless
from .groups import choose_groups, split_plan
from .items import Items, planned_bytes
from .options import SaveOptions
from .replicas import Difference, settle_differences
from .reuse import Noted, Reuse, plain_files
from .shardfile import Item, ReusedShard, Shard, ShardFileWriter, WrittenShard
from .shards import ShardsWriter

_DISCARD_S = 2.0
_OUTCOME_S = 1.5
_MAX_NAMED = 8

log = logging.getLogger("ckpt_storage")


class SaveSession:
    """One save of one rank, in one thread: rank 0 `begin`s, all `write`, rank 0 `finish`es."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: SaveOptions,
        rank: int,
        begin: Callable[[Phase], Deadline],
        *,
        is_coordinator: bool,
        checkpoint_id: str | os.PathLike[str] | None = None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """Prepare a save to `url`, or where `checkpoint_id` leads; `begin` begins a phase.

        `rank` is the rank in the group, which names files; `global_ranks` are those of the group's
        members, which errors name. Raises `InvalidInputError`.
        """
        self.location = options.place(url).join(checkpoint_id)
        self.rank = rank
        self.global_ranks = global_ranks
        self._error_rank = rank if global_ranks is None else global_ranks[rank]
        self.is_coordinator = is_coordinator
        self.options = options
        self._phase = begin
        self._ticket: SaveTicket | None = None

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self.location.url

    @cached_property
    def _store(self) -> Store:
        return self._open(self.location)

    def _open(self, location: Location) -> Store:
        options = self.options
        return open_store(
            location,
            page_cache=options.page_cache,
            sync_files=options.sync_files,
            timeouts=options.timeouts,
            retry=options.retry or RetryPolicy(),
        )

    def terms(self) -> dict[str, str]:
        """Return the values that all ranks must share in this save."""
        return {
            "the checkpoint's URL": self.url,
            "overwrite": str(self.options.overwrite),
            "sync_files": str(self.options.sync_files),
            "the storage's endpoint": endpoint_of(self.location),
            "stock_metadata": self.options.stock_metadata,
            "replicas": self.options.replicas,
            "groups": str(list(self.options.groups)),
            "the version of ckpt_storage": __version__,
        }

    @property
    def world_size(self) -> int:
        """How many ranks save; 1 if `global_ranks` is not known."""
        return 1 if self.global_ranks is None else len(self.global_ranks)

    def settle(self, differences: Sequence[Difference]) -> None:
        """Decide about replicated values that differ; coordinator only.

        Raises `RankMismatchError` for those that fail the save.
        """
        options = self.options
        settle_differences(
            differences, options.replicas, url=self.url, is_preemption=options.is_preemption
        )

    def settle_written(self, differences: Sequence[Difference]) -> None:
        """Decide as `settle` where all ranks have written; an error discards what they wrote."""
        try:
            settle_differences(
                differences,
                self.options.replicas,
                url=self.url,
                is_preemption=False,
                stored="which rank's are stored is up to the planner",
                effect="Nothing is committed.",
            )
        except RankMismatchError:
            if self._ticket is not None:
                self.discard(self._ticket.save_id, is_whole=True)
            raise

    def begin(
        self, world_size: int, item_count: int, sizes: Iterable[tuple[str, int]]
    ) -> SaveTicket:
        """Open the attempt; coordinator only. `item_count` is that of all ranks' plans.

        `sizes` are the names and bytes of the global plan.
        Raises `CheckpointExistsError`, `StorageError`, `InvalidInputError` (not a shared storage).
        """
        deadline, replaces = self._phase("plan"), self.options.replaces
        with deadline.annotate_errors(f"Beginning a save to {self.url}", rank=self._error_rank):
            store = self._store.bounded(deadline)
            if world_size > 1 and not store.capabilities.shared:
                raise InvalidInputError(
                    f"{store.url} is seen by one process only; this save runs on {world_size} "
                    "ranks.",
                    phase="plan",
                    next_step="Save to a storage that all ranks share.",
                )
            ticket = begin(store, overwrite=self.options.overwrite, replaces=replaces)
            base_url, base_id = self._find_base(deadline)
        previous = ticket.previous
        if previous is not None and previous.save_id in replaces:
            log.warning(
                "%s: save %s is damaged, and save %s is to replace it",
                store.url,
                previous.save_id,
                ticket.save_id,
            )
        log.debug("save %s to %s begins on %d ranks", ticket.save_id, store.url, world_size)
        return replace(
            ticket,
            world_size=world_size,
            with_places=self.options.is_stock_wanted(item_count),
            groups=choose_groups(sizes, self.options.groups, world_size=world_size),
            base_url=base_url,
            base_id=base_id,
        )

    def _find_base(self, deadline: Deadline) -> tuple[str, str]:
        """Return the target and the save id of the base; empty without a usable one."""
        base = self.options.base_of(self.location)
        if base is None or not self._can_reuse:
            return "", ""
        try:
            head = read_log(self._open(base).bounded(deadline)).head
        except (FormatError, IntegrityError, StorageError) as error:
            warn_useless(base.url, error)
            return "", ""
        if head is None:
            warn_useless(base.url, "it holds no checkpoint")
        return base.target, "" if head is None or head.save_id is None else head.save_id

    @property
    def _can_reuse(self) -> bool:
        """Whether files are to be reused, and the storage can link or copy them."""
        able = self._store.capabilities
        return self.options.has_reuse and (able.copies_objects or able.copy_min_bytes is not None)

    def write(
        self, ticket: SaveTicket, plan: SavePlan, items: Items, ties: Mapping[str, str]
    ) -> RankReport:
        """Write this rank's shard files and rank manifest; all ranks; durable on return.

        If the storage is full, files of dead attempts are deleted first. After an error nothing is
        committed.
        """
        self._ticket, deadline = ticket, self._phase("write")
        try:
            try:
                return self._write(ticket, plan, items, ties, deadline)
            except StorageError as error:
                if error.kind != "no-space" or not self._has_freed(ticket, deadline):
                    raise
            return self._write(ticket, plan, items, ties, deadline)
        except CheckpointError as error:
            # Without this rank's report the coordinator cannot commit.
            if not isinstance(error, PhaseTimeoutError):
                self.discard(ticket.save_id, is_whole=False)
                self._raise_conflict(ticket, error)
            raise

    def _has_freed(self, ticket: SaveTicket, deadline: Deadline) -> bool:
        """Delete files of dead attempts on a full storage; return whether there were any."""
        self.discard(ticket.save_id, is_whole=False)
        try:
            return bool(free_dead(self._store.bounded(deadline), besides=ticket.save_id))
        except StorageError as error:
            log.warning("%s: files of dead attempts stay: %s", self.url, error)
            return False

    def _write(
        self,
        ticket: SaveTicket,
        plan: SavePlan,
        items: Items,
        ties: Mapping[str, str],
        deadline: Deadline,
    ) -> RankReport:
        store, options = self._store.bounded(deadline), self.options
        with deadline.annotate_errors(f"Writing to {store.url}", rank=self._error_rank):
            save_id, byte_count = ticket.save_id, planned_bytes(plan)
            shards, unsafe = list[Shard](), dict[str, str]()
            plans = split_plan(plan, ticket.groups)

            def noted(some: SavePlan) -> Iterator[Item]:
                return self._noted(items(some), unsafe)

            reuse = self._reuse(ticket, noted, deadline) if self._can_reuse and plans else None
            files = plain_files(plans) if reuse is None else reuse.files(plans, deadline)
            if files:
                deadline.monitor.expect(byte_count)
                with reporting(
                    options.progress,
                    phase="write",
                    rank=self.rank,
                    total_bytes=byte_count,
                    save_id=save_id,
                    with_bar=self.is_coordinator,
                ) as on_bytes:
                    writer = ShardsWriter(
                        store=store,
                        save_id=save_id,
                        rank=self.rank,
                        transfer=options.transfer(store.capabilities),
                        base=None if reuse is None else reuse.base,
                        items=noted,
                        on_bytes=on_bytes,
                        deadline=deadline,
                    )
                    shards = writer.write(files)
            self._warn_of(unsafe, save_id)
            has_linked = any(isinstance(shard, ReusedShard) for shard in shards)
            OWN_SAVES.append(save_id)
            return self._put_manifest(
                store,
                ticket,
                shards,
                unsafe=unsafe,
                ties=ties,
                groups=tuple(file.group for file in files) if ticket.groups else (),
                unlinked_count=reuse.unlinked_count(has_linked=has_linked) if reuse else 0,
            )

    def _reuse(self, ticket: SaveTicket, noted: Noted, deadline: Deadline) -> Reuse:
        """Read what this rank wrote of the base, if there is a base."""
        options, base = self.options, None
        if ticket.base_id:
            location = Location.of(ticket.base_url, options.storage_options)
            store = self._open(location).bounded(deadline)
            base = read_base(store, ticket.base_id, rank=self.rank)
        return Reuse(base, options.stable_patterns, options.full_every, noted=noted)

    def _put_manifest(
        self,
        store: Store,
        ticket: SaveTicket,
        shards: Sequence[Shard],
        *,
        unsafe: Mapping[str, str] = MappingProxyType({}),
        ties: Mapping[str, str] = MappingProxyType({}),
        groups: tuple[str, ...] = (),
        unlinked_count: int = 0,
    ) -> RankReport:
        """Write the rank manifest of shard files; return the report of this rank."""
        known = Vocabulary()
        files = [shard.numbered(known) for shard in shards]
        manifest = RankManifest(
            save_id=ticket.save_id,
            rank=self.rank,
            world_size=ticket.world_size,
            fqns=list(known.fqns),
            dtypes=list(known.dtypes),
            boxes=list(known.boxes),
            files=files,
            unsafe=unsafe,
            host=socket.gethostname(),
            pid=os.getpid(),
            unlinked_count=unlinked_count,
        )
        document = seal(manifest.to_body())
        path = rank_manifest_path(manifest.save_id, self.rank)
        store.put(path, document)
        ref = FileRef.of(path, document)
        with_places = ticket.with_places
        return RankReport.of(manifest, ref, with_places=with_places, ties=ties, groups=groups)

    # Files that are written piece by piece.

    def begin_writing(self, ticket: SaveTicket) -> Deadline:
        """Begin to write shard files in place of `write`; return the deadline of the phase."""
        self._ticket = ticket
        return self._phase("write")

    def open_shard(
        self, ticket: SaveTicket, number: int, deadline: Deadline, *, planned_bytes: int
    ) -> tuple[str, ShardFileWriter]:
        """Return the path of this rank's shard file of a number, and its writer."""
        store = self._store.bounded(deadline)
        options = self.options.transfer(store.capabilities)
        path = shard_path(ticket.save_id, self.rank, number)
        writer = ObjectWriter(
            store,
            path,
            options=options,
            planned_bytes=planned_bytes,
            deadline=deadline,
            on_bytes=lambda _: None,
        )
        return path, ShardFileWriter(writer, options.block_bytes)

    def end_writing(
        self, ticket: SaveTicket, shards: Sequence[WrittenShard], deadline: Deadline
    ) -> RankReport:
        """Write the rank manifest of shard files; durable on return."""
        store = self._store.bounded(deadline)
        with deadline.annotate_errors(f"Writing to {store.url}", rank=self._error_rank):
            return self._put_manifest(store, ticket, shards)

    def _noted(self, items: Iterable[Item], unsafe: dict[str, str]) -> Iterator[Item]:
        """Yield the items; note the values that `load` will refuse, or raise at them."""
        for item in items:
            if item.unsafe is not None:
                unsafe[item.fqn] = item.unsafe
                if self.options.unsafe_values == "refuse":
                    raise InvalidInputError(
                        f"{item.fqn} is a value ({item.unsafe}) that only pickle can hold; load "
                        "refuses it.",
                        phase="write",
                        next_step="Save plain values in its place, or save with "
                        "unsafe_values='warn'.",
                    )
            yield item

    def _warn_of(self, unsafe: Mapping[str, str], save_id: str) -> None:
        if unsafe:
            named = [f"{fqn} ({name})" for fqn, name in unsafe.items()]
            more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
            log.warning(
                "save %s to %s: load will refuse values that only pickle can hold: %s%s. Save "
                "plain values in their place, or load with unsafe_pickle=True.",
                save_id,
                self.url,
                ", ".join(named[:_MAX_NAMED]),
                more,
            )

    def finish(
        self,
        metadata: Metadata,
        reports: Sequence[RankReport | None],
        stats: OperationStats | None,
    ) -> CheckpointInfo:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `reports[i]` is what rank i's `write` returned; `stats` are recorded. Raises as
        `CheckpointStorageWriter.finish`.
        """
        ticket, options, deadline = self._ticket, self.options, self._phase("commit")
        assert ticket is not None  # noqa: S101  # it has written its files
        try:
            with deadline.annotate_errors(f"Committing to {self.url}", rank=self._error_rank):
                record = commit_save(
                    self._store.bounded(deadline),
                    ticket,
                    metadata=metadata,
                    reports=reports,
                    user=options.user,
                    stats=stats,
                    must_publish=options.stock_metadata != "never",
                )
        except (CommitConflictError, IntegrityError, StorageError) as error:
            # It is not committed, and no rank tries again.
            self.discard(ticket.save_id, is_whole=True)
            self._raise_conflict(ticket, error)
            raise
        return CheckpointInfo.of(self.url, record)

    def _raise_conflict(self, ticket: SaveTicket, error: CheckpointError) -> None:
        """Raise `CommitConflictError` if `error` is due to a process that deleted this attempt."""
        is_missing = isinstance(error, StorageError) and error.kind in {"not-found", "other"}
        if not is_missing and not isinstance(error, IntegrityError):
            return
        try:
            conflict = find_conflict(self._store.bounded(Deadline("commit", _OUTCOME_S)), ticket)
        except CheckpointError as failure:
            error.add_note(f"Reading the commit log failed too: {failure}")
            return
        if conflict is not None:
            conflict.rank, conflict.phase = self._error_rank, error.phase
            raise conflict from error

    def outcome(self, save_id: str) -> CheckpointInfo | None:
        """Return the committed save if the head is `save_id`, else None; any rank."""
        store = self._store.bounded(Deadline("commit", _OUTCOME_S))
        head = read_log(store).head
        return CheckpointInfo.of(self.url, head) if head and head.save_id == save_id else None

    def discard(self, save_id: str, *, is_whole: bool) -> None:
        """Delete the files of this rank, or of all, of a save that cannot commit; never raises."""
        try:
            store = self._store.bounded(Deadline("write", _DISCARD_S))
            if is_whole:
                delete_attempt(store, save_id)
            else:
                # The rest, and each group, and a stable file of each.
                file_count = 2 * (1 + len(self._ticket.groups if self._ticket else ()))
                own = [shard_path(save_id, self.rank, index) for index in range(file_count)]
                store.delete([*own, rank_manifest_path(save_id, self.rank)])
        except CheckpointError as error:
            log.warning("%s: files of failed save %s stay for now: %s", self.url, save_id, error)
