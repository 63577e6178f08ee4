"""`CheckpointStorageReader`: DCP's load calls become the steps of one load.

Every rank has a reader; all methods but `prepare_global_plan` run on every rank.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.coordination.terms import check_terms
from ckpt_storage.loads.session import LoadSession, LoadSettings
from ckpt_storage.loads.sharing import ShareOrder, joined
from ckpt_storage.options import Casts, Progress, RetryPolicy, Shared, Timeouts
from ckpt_storage.source.model import SourceFormat
from ckpt_storage.source.renaming import Rename
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .border import (
    PackedLoadPlan,
    PiggybackMessage,
    at_dcp_border,
    is_location,
    rank_of_call,
    received_messages,
)

_ORDER = "shared reads"
"""Key of the message that carries the shared reads of a rank."""


class CheckpointStorageReader(StorageReader):
    """Reads a checkpoint from any storage; pass it to `dcp.load`.

    Opens checkpoints of `CheckpointStorageWriter`, stock DCP checkpoints, torch's sharded
    safetensors and Hugging Face folders (`format` is which). Reads only the bytes that
    the target's sharding needs, concurrently, into the targets' own memory where they allow it.

    Args:
        path: URL or local path of the checkpoint, or of its parent when `checkpoint_id` is
            passed to `dcp.load`: that is joined to it; an absolute path or full URL replaces it.
        storage_options: passed to the fsspec file system (as in pandas and Dask).
        rename: names of the checkpoint's values in the target: a mapping from the stored name to
            the new name, which may omit names, or a function that takes each stored name and
            returns the new name. Two values must not get the same name. Ranks may rename
            differently.
        verify: check every byte read against its checksum (checkpoints of ours have them).
        thread_count: parallel reads per rank; default 1 on local disks, up to 16 elsewhere.
        memory_limit_bytes: ceiling of buffers per rank.
        shared_reads: whether one rank reads what several need (replicated tensors, most of a
            resharding) and sends it to the others. "auto": in `ckpt_storage.load` from remote
            storage, where that spares 64 MiB or more and is not too much to plan. "always": also
            from paths, such as those of a network mount, under `dcp.load` in the default group,
            and however little it spares. "never": every rank reads for itself.
        unsafe_pickle: hand blobs to the planner without checking that unpickling them runs no
            code. Only for checkpoints from people you trust.
        casts: what a target of another dtype may do to values. "checked": a value that does not
            fit (it would wrap, be truncated, become infinite or NaN) raises `InvalidInputError`;
            rounded values are counted in one log line. "exact": rounding raises too. "any": as
            torch, unchecked; also lets targets that share memory take different values.
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
        rename: Rename | None = None,
        verify: bool = True,
        thread_count: int | None = None,
        memory_limit_bytes: int | None = None,
        shared_reads: Shared = "auto",
        unsafe_pickle: bool = False,
        casts: Casts = "checked",
        timeout: float | Timeouts | Any = None,  # timedelta too; Timeouts.of checks
        retry: RetryPolicy | None = None,
        progress: Progress = None,
    ) -> None:
        arguments = locals()
        super().__init__()
        self._path = path
        self._settings = LoadSettings.of(arguments, base=Location.to_read(path, storage_options))
        self.load_id = str(uuid.uuid4())
        self._aim(None)

    def _aim(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        settings = self._settings
        begin = partial(Deadline.of, settings.timeouts)
        self._session = LoadSession(settings, checkpoint_id, begin=begin)
        self._checkpoint_id = checkpoint_id
        self._names: Any = None
        self._order: ShareOrder | None = None
        self._sent: PackedLoadPlan | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # Open files belong to a process; the process that unpickles opens its own.
        del state["_session"], state["_names"], state["_order"], state["_sent"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._aim(self._checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is a path or URL this reader could read from."""
        return is_location(checkpoint_id, Location.to_read)

    @property
    def checkpoint_id(self) -> str:
        """The URL that is read from."""
        return self._session.url

    @property
    def format(self) -> SourceFormat:
        """The checkpoint's format: "ckpt_storage", "dcp", "dcp_safetensors" or "safetensors".

        Opens the checkpoint if `dcp.load` has not yet. Raises as `read_metadata`.
        """
        return self._session.open().format

    @at_dcp_border
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim the next load at `checkpoint_id`; DCP calls it on all ranks."""
        self._aim(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    @at_dcp_border
    def read_metadata(self) -> Metadata:
        """Open the checkpoint again and return its metadata; all ranks.

        Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
        `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
        """
        metadata = self._session.metadata(lazy=False)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
            # As it was passed: a planner may join it to a file name.
            where = self._path if self._checkpoint_id is None else self.checkpoint_id
            metadata.storage_meta.checkpoint_id = where
        return metadata

    @at_dcp_border
    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002  # torch's signature
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ARG002  # torch's signature
        **kwargs: Any,
    ) -> None:
        """Note this rank's role; the coordinator also publishes a commit whose saver crashed."""
        self._session.set_up(is_coordinator=is_coordinator, rank=rank_of_call(kwargs))

    @at_dcp_border
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Attach what this rank is about to read; all ranks."""
        received_messages().clear()
        session = self._session
        self._names = session.stored_names(plan)
        message = PiggybackMessage(session.rank, (session.save_terms(), self._names))
        self._sent = PackedLoadPlan(plan.items, message, plan.planner_data)
        return self._sent

    @at_dcp_border
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plan the shared reads; coordinator only.

        Raises `RankMismatchError` unless all ranks read the same save.
        """
        # Not from the plans: a planner need not keep their storage data.
        session = self._session
        received = {**received_messages(), session.rank: (session.save_terms(), self._names)}
        contents = [content for _, content in sorted(received.items())]
        terms = {rank: save_terms for rank, (save_terms, _) in sorted(received.items())}
        check_terms(terms, phase="load")
        # The ranks meet again in the default group, which must be that of this load.
        is_default_group = dist.is_initialized() and dist.get_world_size() == len(plans)
        if self._settings.shared_reads != "always" or not is_default_group:
            return plans
        orders = session.share_orders(plans, [stored_names for _, stored_names in contents])
        self._order = orders[session.rank]
        for plan, order in zip(plans, orders, strict=True):
            plan.storage_data = PiggybackMessage(_ORDER, order)
        return plans

    @at_dcp_border
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read this rank's items into the planner's targets; all ranks.

        Nothing is committed to the planner before all of it was verified. Raises
        `IntegrityError` (file, FQN, offset), `CheckpointGoneError` (also if another writer has
        saved over its files since they were opened), `UnsafeContentError`,
        `StorageError`, `PhaseTimeoutError`.
        """
        if self._sent is not None:
            plan, self._sent = self._sent.unless_changed(plan), None
        order = self._order or received_messages().get(_ORDER)
        self._order = None
        if order is None:
            self._session.read(plan, planner)
        else:
            self._read_shared(plan, planner, order)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read_shared(self, plan: LoadPlan, planner: LoadPlanner, order: ShareOrder) -> None:
        """Read together with all ranks of the default group, in an operation of its own."""
        session, timeouts = self._session, self._settings.timeouts
        what = f"the load from {session.url}"
        with RankGroup.of(None, lane="load").operation(what, timeouts=timeouts) as operation:
            operation.identify(Identity(kind="the load", url=session.url))
            operation.meet(session.terms())
            with closing(Peers(operation)) as peers:
                links = partial(joined, operation, peers, order)
                session.read(plan, planner, links, begin=operation.phase)
                operation.barrier(is_last=True)
