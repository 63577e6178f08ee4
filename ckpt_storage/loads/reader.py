"""`CheckpointStorageReader`: DCP's load calls become ranged, verified reads.

Every rank holds one; all methods but `prepare_global_plan` and `share_orders` run on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ckpt_storage._version import __version__
from ckpt_storage.commit import publishing
from ckpt_storage.coordination import agreement
from ckpt_storage.coordination.agreement import Hello
from ckpt_storage.errors import CheckpointError, FormatError, InvalidInputError, StorageError
from ckpt_storage.format.tensorfile import DTYPES
from ckpt_storage.options import (
    LOCAL_READ_BYTES,
    Phase,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
)
from ckpt_storage.source.filemarks import FileMarks, open_marked, told_from_damage
from ckpt_storage.source.model import Source, SourceFormat
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.base import Store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.costs import REMOTE_READ_BYTES
from ckpt_storage.transfer.workers import bounded

from .dcpborder import at_dcp_border, rank_of_call
from .lazychunks import lazy_metadata_of, metadata_of
from .loadreads import LoadReads, Sharing
from .sharing import Key, ShareOrder, SharePolicy, can_plan, plan_shares, share_policy
from .targets import LoadJob, wanted_regions

log = logging.getLogger("ckpt_storage")

_LOCAL_THREADS = 1

_PUBLISH_S = 10.0
"""So long a load looks at most whether stock readers find what it reads."""

_REMOTE_THREADS = 16
"""At most: how many requests are under way follows what the storage bears."""


class CheckpointStorageReader(StorageReader):
    """Reads a checkpoint from any storage; give it to `dcp.load`.

    Opens checkpoints of `CheckpointStorageWriter`, stock DCP checkpoints, torch's sharded
    safetensors and Hugging Face folders, and says which (`format`). Reads only the bytes that
    the target's sharding needs, concurrently, into the targets' own memory where they allow it.

    Args:
        path: URL or local path of the checkpoint, or of its parent when `checkpoint_id` is
            passed to `dcp.load`: that is joined to it; an absolute path or full URL replaces it.
        storage_options: passed to the fsspec file system (pandas' and Dask's word).
        verify: check every byte read against its checksum (checkpoints of ours have them).
        thread_count: parallel reads per rank; default 1 on local disks, up to 16 elsewhere.
        memory_limit_bytes: ceiling of buffers per rank.
        shared_reads: for `ckpt_storage.load` from remote storage; under `dcp.load`, and from
            paths, every rank reads for itself. "auto": what several ranks need (replicated
            tensors, most of a resharding) is read by one of them and passed to the others, where
            that spares 64 MiB or more and is not too much to plan; "never": it is not.
        unsafe_pickle: hand blobs to the planner without checking that unpickling them runs no
            code. Only for checkpoints from people you trust.
        allow_lossy: load floats into integers, complex numbers into reals and anything into
            booleans; and two different values into targets of one memory.
        timeout: seconds, `timedelta` or `Timeouts`; `load` bounds the reads of one rank.
        retry: how failed storage requests are repeated.
        progress: called with a `ProgressEvent` after each read; True: a bar on the coordinator.

    Raises (from `dcp.load`): subclasses of `CheckpointError`, inside torch's
    `CheckpointException`. After a failed load the targets hold undefined values.

    """

    def __init__(  # the public surface, all keyword-only
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        thread_count: int | None = None,
        memory_limit_bytes: int | None = None,
        shared_reads: Literal["auto", "never"] = "auto",
        unsafe_pickle: bool = False,
        allow_lossy: bool = False,
        timeout: float | Timeouts | Any = None,  # timedelta too; Timeouts.of checks
        retry: RetryPolicy | None = None,
        progress: Progress = None,
    ) -> None:
        super().__init__()
        if shared_reads not in {"auto", "never"}:
            raise InvalidInputError(
                f"shared_reads is {shared_reads!r}.", next_step="Give 'auto' or 'never'."
            )
        self._base = self._location = Location.of(path, storage_options)
        self._verify = verify
        self._thread_count = thread_count
        self._memory_limit_bytes = memory_limit_bytes
        self._transfer_options(is_remote=True)  # refuses what cannot be
        self._shared_reads: Literal["auto", "never"] = shared_reads
        self._unsafe_pickle = unsafe_pickle
        self._allow_lossy = allow_lossy
        self._timeouts = Timeouts.of(timeout)
        self._retry = retry or RetryPolicy()
        self._progress = progress
        self._begin: Callable[[Phase], Deadline] = partial(Deadline.of, self._timeouts)
        self._catching_up: threading.Thread | None = None
        self._newer: FormatError | None = None
        self._rank = 0
        self._is_coordinator = False
        self._store: Store | None = None
        self._source: Source | None = None
        self._marks: FileMarks | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._location.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Clients and phases belong to a process; the other side has its own.
        dropped = ("_store", "_source", "_marks", "_catching_up")
        state = {**self.__dict__, **dict.fromkeys(dropped)}
        del state["_begin"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin = partial(Deadline.of, self._timeouts)

    def attend(self, begin: Callable[[Phase], Deadline]) -> None:
        """Let `begin` start the phases of the loads to come, in place of our own clock.

        For the front doors, whose deadlines know of other ranks' failures.
        """
        self._begin = begin

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is a path or URL this reader could read from."""
        try:
            Location.of(checkpoint_id)
        except CheckpointError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The URL that is read from."""
        return self._location.url

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common for a load."""
        return {
            "the checkpoint's URL": self._location.normalised,
            "the storage's endpoint": endpoint_of(self._location),
            "the version of ckpt_storage": __version__,
        }

    @property
    def format(self) -> SourceFormat:
        """What was found: "ckpt_storage", "dcp", "dcp_safetensors" or "safetensors".

        Opens the checkpoint if `dcp.load` has not yet. Raises as `read_metadata`.
        """
        return self._opened().format

    @at_dcp_border
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim the next load at `checkpoint_id`; DCP calls it on all ranks."""
        self._location = self._base.join(checkpoint_id)
        self._store = self._source = self._marks = None

    @at_dcp_border
    def read_metadata(self) -> Metadata:
        """Open the checkpoint anew and return what it holds; all ranks.

        Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
        `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
        """
        self._source = None
        return metadata_of(self._opened(), url=self._location.url)

    def read_lazily(self) -> Metadata:
        """Do as `read_metadata` for a planner of ours, which asks for entries one by one."""
        self._source = None
        return lazy_metadata_of(self._opened(), url=self._location.url)

    def _opened(self) -> Source:
        if self._source is None:
            store = self._open_store()
            deadline = self._begin("load")
            self._store = store
            self._source, self._marks = open_marked(
                bounded(store, deadline),
                deadline=deadline,
                options=self._transfer_options(is_remote=store.capabilities.is_remote),
            )
        return self._source

    def _open_store(self) -> Store:
        return open_store(self._location, timeouts=self._timeouts, retry=self._retry)

    def _transfer_options(self, *, is_remote: bool) -> TransferOptions:
        options = TransferOptions.for_storage(
            is_remote=is_remote,
            local_threads=_LOCAL_THREADS,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=_REMOTE_THREADS
            if is_remote and self._thread_count is None
            else self._thread_count,
            part_bytes=None,
            memory_limit_bytes=self._memory_limit_bytes,
        )
        share = options.part_bytes
        if is_remote:
            # Most reads go into place, and take one copy beside it, the client's.
            share = max(options.memory_limit_bytes // options.thread_count, share)
        return dataclasses.replace(options, part_bytes=min(share, REMOTE_READ_BYTES))

    @at_dcp_border
    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002  # torch passes it; we keep a better one
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ARG002  # torch's signature
        **kwargs: Any,
    ) -> None:
        """Note this rank's part; the coordinator also finishes what a crashed saver left undone."""
        self._is_coordinator = is_coordinator
        self._rank = rank_of_call(kwargs)
        source = self._opened()
        if is_coordinator and source.save_id is not None and self._store is not None:
            # No step of the load: its phases and their time are left alone.
            store, limit_s = self._store, min(_PUBLISH_S, self._timeouts.load / 2)
            narrowed = bounded(store, Deadline("load", limit_s))
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

    @at_dcp_border
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Attach what this rank is about to read; all ranks."""
        agreement.clear_inbox()
        return dataclasses.replace(plan, storage_data=self._hello())

    def _hello(self) -> Hello:
        source = self._opened()
        terms = {
            "the checkpoint's URL": self._location.normalised,
            "the save to read": f"{source.format} {source.save_id}",
        }
        return Hello(nonce="", rank=self._rank, host=socket.gethostname(), terms=terms)

    @at_dcp_border
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise `RankMismatchError` unless all ranks read one save; coordinator only."""
        # Taken from the inbox: a planner need not keep what the plans carry.
        hellos = {**agreement.inbox().hellos, self._rank: self._hello()}
        agreement.check_agreement([hellos[rank] for rank in sorted(hellos)], phase="load")
        return plans

    def may_share(self, world_size: int) -> bool:
        """Return whether so many ranks may share reads; if not, plans need not travel."""
        return self._share_policy(world_size) is not None

    def _share_policy(self, world_size: int) -> SharePolicy | None:
        """Return when sharing pays among so many ranks; None: never."""
        source, store = self._opened(), self._store
        if (
            self._shared_reads == "never"
            or world_size == 1
            or store is None
            # From the page cache every rank has the bytes.
            or not store.capabilities.is_remote
            or source.format == "dcp"  # where payloads lie is known only to who reads their heads
        ):
            return None
        return share_policy(part_bytes=self._transfer_options(is_remote=True).part_bytes)

    def share_orders(self, plans: list[LoadPlan]) -> Sequence[ShareOrder | None]:
        """Return who reads what of that which several ranks need; None for all: each for itself.

        Coordinator only.
        """
        source, policy = self._opened(), self._share_policy(len(plans))
        orders = None
        if policy is not None and can_plan(sum(len(plan.items) for plan in plans)):
            orders = plan_shares(
                wanted_regions(plans),
                partial(_shape_of, source),
                world_size=len(plans),
                policy=policy,
            )
        return orders or [None] * len(plans)

    @at_dcp_border
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read this rank's items into the planner's targets; all ranks.

        Nothing is committed to the planner before all of it was verified. Raises
        `IntegrityError` (file, FQN, offset), `CheckpointGoneError` (also if another writer has
        saved over its files since they were opened), `UnsafeContentError`,
        `StorageError`, `PhaseTimeoutError`.
        """
        self.read(plan, planner)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def read(self, plan: LoadPlan, planner: LoadPlanner, sharing: Sharing | None = None) -> None:
        """Do as `read_data`; with `sharing`, which all ranks then give, together with others."""
        source, opened = self._opened(), self._store
        if opened is None:  # pragma: no cover  # _opened sets it
            raise InvalidInputError("The reader is not open.")
        deadline = self._begin("load")
        store = bounded(opened, deadline)
        with (
            deadline.governs(f"Loading from {store.url}", rank=self._rank),
            self._unchanged(store) as paths,
        ):
            source.renew(store, deadline)
            load = LoadJob(source, planner, verify=self._verify, allow_lossy=self._allow_lossy)
            load.plan(plan.items)
            paths.update(load.paths)
            reads = LoadReads(
                load=load,
                store=opened,
                options=self._transfer_options(is_remote=store.capabilities.is_remote),
                rank=self._rank,
                progress=self._progress,
                save_id=source.save_id,
                with_bar=self._is_coordinator,
            )
            if sharing is None:
                reads.alone(deadline)
            else:
                reads.together(sharing, deadline, is_willing=self._shared_reads != "never")
        load.commit(unsafe_pickle=self._unsafe_pickle)
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
