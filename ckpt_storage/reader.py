"""`CheckpointStorageReader`: DCP's load calls become ranged, verified reads.

Knows DCP's `StorageReader` contract as torch really calls it, and tensors as targets; where
bytes lie it learns from `source`. Every rank holds one; all methods but `prepare_global_plan`
run on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from . import agreement, publishing
from .agreement import Hello
from .dcpborder import at_dcp_border
from .deadline import Deadline
from .errors import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from .fetching import run_fetches
from .loads import LoadJob
from .opening import open_source
from .options import (
    LOCAL_READ_BYTES,
    Engine,
    Phase,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
)
from .progress import reporting
from .readplan import plan_reads
from .source import Source, SourceFormat, TensorInfo
from .store import Location, endpoint_of, open_store
from .store.base import Store
from .workers import bounded

log = logging.getLogger("ckpt_storage")

_LOCAL_THREADS = 1


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
        thread_count: parallel reads per rank; default 1 on local disks, 8 elsewhere.
        memory_limit_bytes: ceiling of buffers per rank.
        engine: data plane, see the guide.
        shared_reads: "auto" or "never"; in this release every rank reads for itself either way.
        unsafe_pickle: hand blobs to the planner without checking that unpickling them runs no
            code. Only for checkpoints from people you trust.
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
        engine: Engine = "auto",
        shared_reads: Literal["auto", "never"] = "auto",
        unsafe_pickle: bool = False,
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
        self._engine: Engine = engine
        self._unsafe_pickle = unsafe_pickle
        self._timeouts = Timeouts.of(timeout)
        self._retry = retry or RetryPolicy()
        self._progress = progress
        self._begin: Callable[[Phase], Deadline] = self._timed
        self._rank = 0
        self._is_coordinator = False
        self._store: Store | None = None
        self._source: Source | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._location.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Clients and phases belong to a process; the other side has its own.
        state = {**self.__dict__, "_store": None, "_source": None}
        del state["_begin"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin = self._timed

    def _timed(self, phase: Phase) -> Deadline:
        return Deadline(phase, getattr(self._timeouts, phase))

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
        from . import __version__  # noqa: PLC0415  # the package is complete only by now

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
        self._store = self._source = None

    @at_dcp_border
    def read_metadata(self) -> Metadata:
        """Open the checkpoint anew and return what it holds; all ranks.

        Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
        `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
        """
        self._source = None
        source = self._opened()
        state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            fqn: _tensor_metadata(info) for fqn, info in source.tensors.items()
        }
        state.update((fqn, BytesStorageMetadata()) for fqn in source.blobs)
        planner_data = source.planner_data
        return Metadata(
            state_dict_metadata=state,
            # Planners that build a state dict from metadata alone need a path for every entry.
            planner_data={fqn: (fqn,) for fqn in state}
            if planner_data is None
            else dict(planner_data),
            storage_data={},
            storage_meta=StorageMeta(
                checkpoint_id=self._location.url, save_id=source.save_id, modules=[]
            ),
        )

    def _opened(self) -> Source:
        if self._source is None:
            store = open_store(
                self._location,
                engine=self._engine,
                timeouts=self._timeouts,
                retry=self._retry,
            )
            deadline = self._begin("load")
            self._store = store
            self._source = open_source(
                bounded(store, deadline),
                deadline=deadline,
                options=self._transfer_options(is_remote=store.capabilities.is_remote),
            )
        return self._source

    def _transfer_options(self, *, is_remote: bool) -> TransferOptions:
        return TransferOptions.for_storage(
            is_remote=is_remote,
            local_threads=_LOCAL_THREADS,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=self._thread_count,
            part_bytes=None,
            memory_limit_bytes=self._memory_limit_bytes,
        )

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
        self._rank = kwargs.get("rank") or 0
        source = self._opened()
        if is_coordinator and source.save_id is not None and self._store is not None:
            deadline = self._begin("plan")
            try:
                publishing.roll_forward(bounded(self._store, deadline), source.save_id)
            except CheckpointError as error:
                # A reader may lack the right to write; the next saver publishes.
                log.debug("%s: .metadata was not brought up to date: %s", self._store.url, error)

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

    @at_dcp_border
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read this rank's items into the planner's targets; all ranks.

        Nothing is committed to the planner before all of it was verified. Raises
        `IntegrityError` (file, FQN, offset), `CheckpointGoneError`, `UnsafeContentError`,
        `StorageError`, `PhaseTimeoutError`.
        """
        source, store = self._opened(), self._store
        if store is None:  # pragma: no cover  # _opened sets it
            raise InvalidInputError("The reader is not open.")
        deadline = self._begin("load")
        store = bounded(store, deadline)
        options = self._transfer_options(is_remote=store.capabilities.is_remote)
        source.renew(store, deadline)
        load = LoadJob(source, planner, verify=self._verify)
        with deadline.governs(f"Loading from {store.url}", rank=self._rank):
            self._read(load, plan, store, options, deadline)
        load.commit(unsafe_pickle=self._unsafe_pickle)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read(
        self,
        load: LoadJob,
        plan: LoadPlan,
        store: Store,
        options: TransferOptions,
        deadline: Deadline,
    ) -> None:
        load.plan(plan.items)
        fetches = plan_reads(load.requests, part_bytes=options.part_bytes)
        total_bytes = sum(fetch.stop - fetch.start for fetch in fetches)
        deadline.expect(total_bytes)
        with reporting(
            self._progress,
            phase="load",
            rank=self._rank,
            total_bytes=total_bytes,
            save_id=self._opened().save_id,
            with_bar=self._is_coordinator,
        ) as on_bytes:
            try:
                run_fetches(store, fetches, options=options, deadline=deadline, on_bytes=on_bytes)
                for request in load.wholes():
                    fetches = plan_reads([request], part_bytes=options.part_bytes)
                    run_fetches(
                        store, fetches, options=options, deadline=deadline, on_bytes=on_bytes
                    )
            except (StorageError, IntegrityError) as error:
                raise load.explain(error) from error


def _tensor_metadata(info: TensorInfo) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, info.dtype)),
        size=torch.Size(info.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in info.boxes
        ],
    )
