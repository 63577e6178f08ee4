"""`CheckpointStorageReader`: DCP's load calls become the steps of one load.

Every rank holds one; all methods but `prepare_global_plan` run on every rank.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ckpt_storage.coordination.failures import check_terms
from ckpt_storage.errors import CheckpointError
from ckpt_storage.loads.session import LoadSession, LoadSettings
from ckpt_storage.options import Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import SourceFormat
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline

from .border import FoldedPlan, Rider, at_dcp_border, inbox, rank_of_call


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
        given = locals()
        super().__init__()
        self._path = path
        self._settings = LoadSettings.of(given, base=Location.of(path, storage_options))
        self.load_id = str(uuid.uuid4())
        self._aim(None)

    def _aim(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        settings = self._settings
        begin = partial(Deadline.of, settings.timeouts)
        self._session = LoadSession(settings, checkpoint_id, begin=begin)
        self._checkpoint_id = checkpoint_id
        self._sent: FoldedPlan | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # What is open belongs to a process; the other side opens its own.
        del state["_session"], state["_sent"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._aim(self._checkpoint_id)

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
        return self._session.url

    @property
    def format(self) -> SourceFormat:
        """What was found: "ckpt_storage", "dcp", "dcp_safetensors" or "safetensors".

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
        """Open the checkpoint anew and return what it holds; all ranks.

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
        metadata: Metadata,  # noqa: ARG002  # torch passes it; we keep a better one
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ARG002  # torch's signature
        **kwargs: Any,
    ) -> None:
        """Note this rank's part; the coordinator also finishes what a crashed saver left undone."""
        self._session.set_up(is_coordinator=is_coordinator, rank=rank_of_call(kwargs))

    @at_dcp_border
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Attach what this rank is about to read; all ranks."""
        inbox().clear()
        hello = Rider(self._session.rank, self._session.found())
        self._sent = FoldedPlan(plan.items, hello, plan.planner_data)
        return self._sent

    @at_dcp_border
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise `RankMismatchError` unless all ranks read one save; coordinator only."""
        # Taken from the inbox: a planner need not keep what the plans carry.
        terms = {**inbox(), self._session.rank: self._session.found()}
        check_terms(dict(sorted(terms.items())), phase="load")
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
        self._session.read(plan, planner)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future
