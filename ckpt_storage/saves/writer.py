"""`CheckpointStorageWriter`: DCP's save calls become one save attempt.

Every rank holds one; which methods run where is said at each. All state of a save belongs to the
thread that runs it, so one writer may serve overlapping saves (`dcp.async_save` runs each in a
thread of its own).
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.coordination import agreement
from ckpt_storage.coordination.agreement import Granted, Hello, Refused
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.slots import SlotRecord
from ckpt_storage.loads.dcpborder import at_dcp_border, rank_of_call
from ckpt_storage.options import (
    STOCK_ENTRY_LIMIT,
    PageCache,
    Phase,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    UnsafeValues,
)
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.filewriter import write_options
from ckpt_storage.transfer.workers import bounded

from .saveattempt import SaveAttempt, SaveSettings


class CheckpointStorageWriter(StorageWriter):
    """Writes a checkpoint to any storage; give it to `dcp.save` or `dcp.async_save`.

    Every rank makes one with equal arguments. Data lands under names of this attempt alone; the
    checkpoint exists once rank 0 (the coordinator) created its commit record, and not before.
    May be used for many saves, one after another or overlapping, and pickles (without
    `process_group`).

    Args:
        path: URL or local path of the checkpoint, or of its parent when `checkpoint_id` is
            passed to `dcp.save`: that is joined to it; an absolute path or full URL replaces it.
        storage_options: passed to the fsspec file system (pandas' and Dask's word).
        overwrite: replace a committed checkpoint; there is no instant without a readable one.
        thread_count: parallel uploads per rank; default 1 on local disks, 8 elsewhere.
        part_bytes: bytes per upload request.
        memory_limit_bytes: ceiling of bytes in flight per rank beyond the state itself.
        page_cache: "drop" lets the kernel keep no copy of what is on the disk (local only), so that
            saves do not displace what else is cached.
        sync_files: make files and folders durable before they are referenced (local only).
        commit_url: where commit records go if not below `path`: for mounts without rename or
            exclusive create, the native URL of the same place.
        stock_metadata: whether `.metadata`, by which torch's own readers load, is written; it has
            some 200 bytes for each item of each rank. "auto": up to 200,000 items. Without it a
            note lies in its place, and `CheckpointInfo.stock_metadata` is False.
        unsafe_values: what is done about values that only pickle can hold, and that `load`
            therefore refuses: "warn" logs their names and types, "refuse" fails the save.
        process_group: if given, the save is refused unless it runs over exactly this many ranks.
        timeout: seconds, `timedelta` or `Timeouts`. Bounds this library's own work; under
            `dcp.save` torch's collectives keep the timeout of the group that they run on.
        retry: how failed storage requests are repeated.
        progress: called with a `ProgressEvent` after each part; True: a bar on the coordinator.

    Raises (from `dcp.save`, inside torch's `CheckpointException`): subclasses of `CheckpointError`.

    """

    def __init__(  # the public surface, all keyword-only
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        thread_count: int | None = None,
        part_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        page_cache: PageCache = "keep",
        sync_files: bool = True,
        commit_url: str | None = None,
        stock_metadata: StockMetadata = "auto",
        unsafe_values: UnsafeValues = "warn",
        process_group: dist.ProcessGroup | None = None,
        timeout: float | Timeouts | Any = None,  # timedelta too; Timeouts.of checks
        retry: RetryPolicy | None = None,
        progress: Progress = None,
    ) -> None:
        super().__init__()
        self._base = Location.of(path, storage_options)
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
        timeouts = Timeouts.of(timeout)
        self._settings = SaveSettings(
            commit_base=commit_base,
            overwrite=overwrite,
            page_cache=page_cache,
            sync_files=sync_files,
            stock_metadata=stock_metadata,
            unsafe_values=unsafe_values,
            transfer_options=transfer_options,
            timeouts=timeouts,
            retry=retry or RetryPolicy(),
            progress=progress,
        )
        self._process_group = process_group
        self._threads = threading.local()
        self._begin_phase: Callable[[Phase], Deadline] = partial(Deadline.of, timeouts)
        self._user: Mapping[str, Any] = {}
        self._replaces: frozenset[str] = frozenset()

    # For the front doors; of what they say, the coordinator's counts.

    def attend(self, begin: Callable[[Phase], Deadline]) -> None:
        """Let `begin` start the phases of the saves to come, in place of our own clock."""
        self._begin_phase = begin

    def annotate(self, user: Mapping[str, Any]) -> None:
        """Put `user` into the commit records of the saves to come; plain JSON."""
        self._user = user

    def let_replace(self, save_ids: frozenset[str]) -> None:
        """Let the saves to come replace these saves, known to be damaged, without `overwrite`."""
        self._replaces = save_ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._base.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # Neither can travel; a child process has its own default group and its own threads.
        del state["_process_group"], state["_threads"], state["_begin_phase"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process_group = None
        self._threads = threading.local()
        self._begin_phase = partial(Deadline.of, self._settings.timeouts)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is a path or URL this writer could save to."""
        try:
            Location.of(checkpoint_id)
        except CheckpointError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The URL that the save of the calling thread goes to."""
        save: SaveAttempt | None = getattr(self._threads, "save", None)
        if save is not None:
            return save.location.url
        return self._base.join(getattr(self._threads, "pending", None)).url

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners may know of the target; DCP asks once before each save."""
        if getattr(self._threads, "asked", False):
            # The save that `reset` announced failed before it reached us.
            self._threads.pending = None
        self._threads.asked = True
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @at_dcp_border
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Aim the calling thread's next save at `checkpoint_id`; DCP calls it on all ranks."""
        self._threads.save = None
        self._base.join(checkpoint_id)  # refuses what cannot be joined
        self._threads.asked = False
        self._threads.pending = checkpoint_id

    @at_dcp_border
    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ARG002  # torch's signature
        **kwargs: Any,
    ) -> None:
        """Begin a save in the calling thread; all ranks. Raises `InvalidInputError`."""
        if not kwargs.get("use_collectives", True):
            raise InvalidInputError(
                "CheckpointStorageWriter cannot save with use_collectives=False: without "
                "collectives ranks cannot agree on one save.",
                phase="plan",
                next_step="Leave use_collectives at True.",
            )
        rank = rank_of_call(kwargs)
        checkpoint_id = getattr(self._threads, "pending", None)
        self._threads.pending = None
        self._threads.asked = False
        location = self._base.join(checkpoint_id)
        self._threads.save = SaveAttempt(
            self._settings, location, checkpoint_id, is_coordinator=is_coordinator, rank=rank
        )

    @at_dcp_border
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attach this rank's hello to its plan; all ranks."""
        save = self.attempt
        agreement.clear_inbox()
        return dataclasses.replace(plan, storage_data=self._hello(save))

    def _hello(self, save: SaveAttempt) -> Hello:
        terms = self._settings.terms(save.location)
        return Hello(nonce=save.nonce, rank=save.rank, host=socket.gethostname(), terms=terms)

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common for the calling thread's next save."""
        return self._settings.terms(self._base.join(getattr(self._threads, "pending", None)))

    @at_dcp_border
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks agree and open the save attempt; coordinator only.

        Raises `InvalidInputError` if a rank has no writer of ours. Any other refusal
        (`RankMismatchError`, `CheckpointExistsError`, `InvalidInputError`, `StorageError`) is
        answered to all ranks and raised by their `write_data`; no byte was written then.
        """
        save = self.attempt
        hellos = agreement.hellos_of_all(self._hello(save), len(plans))
        answers: Sequence[Granted | Refused]
        try:
            grant = self._grant(save, hellos)
        except CheckpointError as error:
            answers = agreement.refuse_all(hellos, error)
        else:
            planned_count = sum(len(plan.items) for plan in plans)
            with_places = self.is_stock_wanted(max(planned_count, save.item_count))
            answers = agreement.grant_all(hellos, grant, with_places=with_places)
        save.answer = answers[save.rank]
        return [
            dataclasses.replace(plan, storage_data=answer)
            for plan, answer in zip(plans, answers, strict=True)
        ]

    def is_stock_wanted(self, item_count: int) -> bool:
        """Return whether `.metadata` is to be written; plans that a planner dropped count as 0."""
        if self._settings.stock_metadata == "auto":
            return item_count <= STOCK_ENTRY_LIMIT
        return self._settings.stock_metadata == "always"

    def _grant(self, save: SaveAttempt, hellos: Sequence[Hello]) -> commit.Grant:
        self._check_world(len(hellos))
        agreement.check_agreement(hellos, phase="plan")
        deadline = self._begin_phase("plan")
        return save.begin(len(hellos), replaces=self._replaces, deadline=deadline)

    def _check_world(self, world_size: int) -> None:
        if self._process_group is not None:
            expected = dist.get_world_size(self._process_group)
            if expected != world_size:
                raise InvalidInputError(
                    f"The save runs on {world_size} ranks; the writer's process_group has "
                    f"{expected}.",
                    phase="plan",
                    next_step="Pass the same process_group to dcp.save and to the writer.",
                )

    @property
    def attempt(self) -> SaveAttempt:
        """The save that is under way in the calling thread. Raises `InvalidInputError`."""
        save: SaveAttempt | None = getattr(self._threads, "save", None)
        if save is None:
            raise InvalidInputError(
                "No save is under way in this thread.",
                next_step="Pass the writer to dcp.save or dcp.async_save.",
            )
        return save

    def _check_granted(self, save: SaveAttempt) -> None:
        """Note the save's id. Raises what the coordinator refused the save for."""
        self._threads.save_id = save.granted().grant.save_id

    @at_dcp_border
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's shard file and rank manifest; all ranks; durable on return.

        After any error no upload stays open, and what became visible is an attempt's that never
        will be committed. Raises what the coordinator refused the save for, `StorageError`,
        `PhaseTimeoutError`, `InvalidInputError` (a value that cannot be stored, naming its FQN).
        """
        save = self.attempt
        self._check_granted(save)
        results = save.write(plan, planner, deadline=self._begin_phase("write"))
        if not save.is_coordinator:
            self._threads.save = None  # its `finish` is on the coordinator
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    @at_dcp_border
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `results[i]` is rank i's list. Raises `IntegrityError`, `RankFailedError` (not
        committed), `CommitConflictError` (not committed), `CommitUnknownError`,
        `NotPublishedError` (committed).
        """
        save = self.attempt
        self._check_granted(save)
        deadline = self._begin_phase("commit")
        record = save.commit(metadata, results, user=self._user, deadline=deadline)
        self._threads.save = None
        self._threads.committed = CheckpointInfo.of(save.location.url, record)

    @property
    def committed(self) -> CheckpointInfo | None:
        """What the calling thread committed last; None on ranks that do not commit."""
        return getattr(self._threads, "committed", None)

    def record_of(self, save_id: str, deadline: Deadline) -> SlotRecord | None:
        """Return the commit record at the head if it is that of `save_id`, else None."""
        head = read_log(bounded(self._settings.open(self._base.join(None), None), deadline)).head
        return head if head is not None and head.save_id == save_id else None

    @property
    def save_id(self) -> str | None:
        """The id that the coordinator gave to the calling thread's save, once it did."""
        return getattr(self._threads, "save_id", None)
