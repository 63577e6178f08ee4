"""One load on one rank: what is opened, which of it the ranks share, and how it is read."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckpt_storage._version import __version__
from ckpt_storage.commit import publishing
from ckpt_storage.coordination import agreement
from ckpt_storage.coordination.agreement import Hello
from ckpt_storage.errors import CheckpointError, FormatError, InvalidInputError, StorageError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import (
    LOCAL_READ_BYTES,
    Phase,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
)
from ckpt_storage.source.filemarks import FileMarks, open_marked, told_from_damage
from ckpt_storage.source.model import Source
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.costs import REMOTE_READ_BYTES

from .loadplanner import lazy_metadata_of, metadata_of
from .loadreads import LoadReads, Sharing
from .sharing import Key, ShareOrder, SharePolicy, can_plan, plan_shares, share_policy
from .targets import LoadJob, wanted_regions

log = logging.getLogger("ckpt_storage")

_LOCAL_THREADS = 1

_PUBLISH_S = 10.0
"""So long a load looks at most whether stock readers find what it reads."""

_REMOTE_THREADS = 16
"""At most: how many requests are under way follows what the storage bears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What a load is told besides state and ranks, checked."""

    base: Location
    verify: bool
    thread_count: int | None
    memory_limit_bytes: int | None
    shared_reads: Literal["auto", "never"]
    unsafe_pickle: bool
    allow_lossy: bool
    timeouts: Timeouts
    retry: RetryPolicy
    progress: Progress

    @classmethod
    def of(  # as `CheckpointStorageReader`
        cls,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None,
        verify: bool,
        thread_count: int | None,
        memory_limit_bytes: int | None,
        shared_reads: Literal["auto", "never"],
        unsafe_pickle: bool,
        allow_lossy: bool,
        timeout: float | timedelta | Timeouts | None,
        retry: RetryPolicy | None,
        progress: Progress,
    ) -> LoadSettings:
        """Return the settings that these arguments mean. Raises `InvalidInputError`."""
        if shared_reads not in {"auto", "never"}:
            raise InvalidInputError(
                f"shared_reads is {shared_reads!r}.", next_step="Give 'auto' or 'never'."
            )
        settings = cls(
            base=Location.of(url, storage_options),
            verify=verify,
            thread_count=thread_count,
            memory_limit_bytes=memory_limit_bytes,
            shared_reads=shared_reads,
            unsafe_pickle=unsafe_pickle,
            allow_lossy=allow_lossy,
            timeouts=Timeouts.of(timeout),
            retry=retry or RetryPolicy(),
            progress=progress,
        )
        settings.transfer_options(is_remote=True)  # refuses what cannot be
        return settings

    def transfer_options(self, *, is_remote: bool) -> TransferOptions:
        """Return how bytes are read. Raises `InvalidInputError`."""
        options = TransferOptions.for_storage(
            is_remote=is_remote,
            local_threads=_LOCAL_THREADS,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=_REMOTE_THREADS
            if is_remote and self.thread_count is None
            else self.thread_count,
            part_bytes=None,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        share = options.part_bytes
        if is_remote:
            # Most reads go into place, and take one copy beside it, the client's.
            share = max(options.memory_limit_bytes // options.thread_count, share)
        return dataclasses.replace(options, part_bytes=min(share, REMOTE_READ_BYTES))


class LoadSession:
    """One load as this rank sees it, step by step; belongs to one thread.

    `begin` starts the phases of the load; a front door's know of other ranks' failures.
    """

    def __init__(
        self,
        settings: LoadSettings,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        begin: Callable[[Phase], Deadline],
    ) -> None:
        """Take up a load from the place that `checkpoint_id` leads to."""
        self._settings = settings
        self._location = settings.base.join(checkpoint_id)
        self._begin = begin
        self._catching_up: threading.Thread | None = None
        self._newer: FormatError | None = None
        self._rank = 0
        self._is_coordinator = False
        self._store: Store | None = None
        self._source: Source | None = None
        self._marks: FileMarks | None = None

    @property
    def url(self) -> str:
        """The URL that is read from."""
        return self._location.url

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common for a load."""
        return {
            "the checkpoint's URL": self._location.url,
            "the storage's endpoint": endpoint_of(self._location),
            "the version of ckpt_storage": __version__,
        }

    def read_metadata(self) -> Metadata:
        """Open the checkpoint anew and return what it holds; all ranks.

        Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
        `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
        """
        self._source = None
        return metadata_of(self.opened(), url=self.url)

    def read_lazily(self) -> Metadata:
        """Do as `read_metadata` for a planner of ours, which asks for entries one by one."""
        self._source = None
        return lazy_metadata_of(self.opened(), url=self.url)

    def opened(self) -> Source:
        """Return the checkpoint, opened if it was not yet. Raises as `read_metadata`."""
        if self._source is None:
            settings = self._settings
            store = open_store(self._location, timeouts=settings.timeouts, retry=settings.retry)
            deadline = self._begin("load")
            self._store = store
            self._source, self._marks = open_marked(
                store.bounded(deadline),
                deadline=deadline,
                options=settings.transfer_options(is_remote=store.capabilities.is_remote),
            )
        return self._source

    def set_up(self, *, is_coordinator: bool, rank: int) -> None:
        """Note this rank's part; the coordinator also finishes what a crashed saver left undone."""
        self._is_coordinator = is_coordinator
        self._rank = rank
        source = self.opened()
        if is_coordinator and source.save_id is not None and self._store is not None:
            # No step of the load: its phases and their time are left alone.
            store, limit_s = self._store, min(_PUBLISH_S, self._settings.timeouts.load / 2)
            narrowed = store.bounded(Deadline("load", limit_s))
            catch_up = partial(self._roll_forward, narrowed, source.save_id)
            if store.capabilities.is_remote:
                # Two round trips at least, which no byte of the load has to wait for.
                self._catching_up = threading.Thread(
                    target=catch_up, name=f"publish {store.url}", daemon=True
                )
                self._catching_up.start()
            else:
                catch_up()
                self._check_newest()

    def propose(self, plan: LoadPlan) -> LoadPlan:
        """Attach what this rank is about to read; all ranks."""
        agreement.clear_inbox()
        return dataclasses.replace(plan, storage_data=self._hello())

    def _hello(self) -> Hello:
        source = self.opened()
        terms = {
            "the checkpoint's URL": self._location.url,
            "the save to read": f"{source.format} {source.save_id}",
        }
        return Hello(nonce="", rank=self._rank, host=socket.gethostname(), terms=terms)

    def check(self) -> None:
        """Raise `RankMismatchError` unless all ranks read one save; coordinator only.

        What they proposed has arrived.
        """
        # Taken from the inbox: a planner need not keep what the plans carry.
        hellos = {**agreement.inbox().hellos, self._rank: self._hello()}
        agreement.check_agreement([hellos[rank] for rank in sorted(hellos)], phase="load")

    def may_share(self, world_size: int) -> bool:
        """Return whether so many ranks may share reads; if not, plans need not travel."""
        return self._share_policy(world_size) is not None

    def _share_policy(self, world_size: int) -> SharePolicy | None:
        """Return when sharing pays among so many ranks; None: never."""
        source, store = self.opened(), self._store
        if (
            self._settings.shared_reads == "never"
            or world_size == 1
            or store is None
            # From the page cache every rank has the bytes.
            or not store.capabilities.is_remote
            or source.format == "dcp"  # where payloads lie is known only to who reads their heads
        ):
            return None
        return share_policy(part_bytes=self._settings.transfer_options(is_remote=True).part_bytes)

    def share_orders(self, plans: list[LoadPlan]) -> Sequence[ShareOrder | None]:
        """Return who reads what of that which several ranks need; None for all: each for itself.

        Coordinator only.
        """
        source, policy = self.opened(), self._share_policy(len(plans))
        orders = None
        if policy is not None and can_plan(sum(len(plan.items) for plan in plans)):
            orders = plan_shares(
                wanted_regions(plans),
                partial(_shape_of, source),
                world_size=len(plans),
                policy=policy,
            )
        return orders or [None] * len(plans)

    def read(self, plan: LoadPlan, planner: LoadPlanner, sharing: Sharing | None = None) -> None:
        """Read this rank's items into the planner's targets; all ranks.

        With `sharing`, which all ranks then give, together with others. Nothing is committed to
        the planner before all of it was verified. Raises `IntegrityError` (file, FQN, offset),
        `CheckpointGoneError` (also if another writer has saved over its files since they were
        opened), `UnsafeContentError`, `StorageError`, `PhaseTimeoutError`.
        """
        source, opened = self.opened(), self._store
        if opened is None:  # pragma: no cover  # opened() sets it
            raise InvalidInputError("The checkpoint is not open.")
        deadline = self._begin("load")
        store = opened.bounded(deadline)
        with (
            deadline.governs(f"Loading from {store.url}", rank=self._rank),
            self._unchanged(store) as paths,
        ):
            source.renew(store, deadline)
            settings = self._settings
            load = LoadJob(
                source, planner, verify=settings.verify, allow_lossy=settings.allow_lossy
            )
            load.plan(plan.items)
            paths.update(load.paths)
            reads = LoadReads(
                load=load,
                store=opened,
                options=self._settings.transfer_options(is_remote=store.capabilities.is_remote),
                rank=self._rank,
                progress=self._settings.progress,
                save_id=source.save_id,
                with_bar=self._is_coordinator,
            )
            if sharing is None:
                reads.alone(deadline)
            else:
                reads.together(sharing, deadline, is_willing=self._settings.shared_reads != "never")
        load.commit(unsafe_pickle=self._settings.unsafe_pickle)
        catching_up, self._catching_up = self._catching_up, None
        if catching_up is not None:
            catching_up.join(min(_PUBLISH_S + 1, deadline.remaining_s()))
            if catching_up.is_alive():
                log.warning("%s: .metadata may not be up to date: no answer in time.", opened.url)
            self._check_newest()

    def _roll_forward(self, store: Store, save_id: str) -> None:
        """Finish what a crashed saver left undone, where that is allowed."""
        try:
            publishing.roll_forward(store, save_id)
        except FormatError as error:
            self._newer = error
        except CheckpointError as error:
            # The next saver publishes.
            is_denied = isinstance(error, StorageError) and error.kind == "permission"
            level = logging.DEBUG if is_denied else logging.WARNING
            log.log(level, "%s: .metadata was not brought up to date: %s", store.url, error)

    def _check_newest(self) -> None:
        """Raise what `_roll_forward` found of a newer save."""
        newer, self._newer = self._newer, None
        if newer is not None:
            raise newer

    @contextmanager
    def _unchanged(self, store: Store) -> Iterator[set[str]]:
        """Raise `CheckpointGoneError` if another save touched another writer's files meanwhile.

        Gives a set for the paths that are read.
        Ours are written once, and have checksums: nothing is asked of the storage then.
        """
        marks, paths = self._marks, set[str]()
        if marks is None:
            yield paths
            return
        with told_from_damage(partial(marks.check, store)):
            yield paths
        marks.check(store, paths)


def _shape_of(source: Source, key: Key) -> tuple[tuple[int, ...], int]:
    info = source.tensors[key[0]]
    chunk = info.chunk_at(key[1])
    if chunk is None:
        raise InvalidInputError(f"A plan asks for {key[0]} at {list(key[1])}, which is no chunk.")
    return chunk.sizes, DTYPES[info.dtype].item_bytes
