"""The ranks of a group on one lane of operations."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Timeouts

from .failures import add_context, as_checkpoint_errors
from .heartbeats import Heartbeats, heartbeat_keys
from .keyvalue import KeyValues, LostStoreError, StoreClient
from .lane import Lane
from .operation import Operation

if TYPE_CHECKING:
    import torch.distributed as dist


_COMMON_LANES = ("main", "load", "async/save_async", "async/default")
"""Lanes that another rank may use and this rank has never used."""

_MAX_LOOKUPS = 8
"""How many missing ranks are looked up."""


class _Lanes:
    """The lanes of one group in this process, over one client of its store."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

        self.client = StoreClient.of_group(process_group)
        self.rank = process_group.rank()
        self.global_ranks = dist.get_process_group_ranks(process_group)
        self.by_name: dict[str, RankGroup] = {}

    def find_elsewhere(self, own: str, ranks: Sequence[int], timeout_s: float) -> str:
        """Describe which of `ranks` were last in an operation of another lane than `own`.

        For example, one rank calls `save` and another `save_async`. It may have ended since.
        """
        heartbeats = heartbeat_keys(self.client)
        with suppress(LostStoreError):
            for name in sorted({*self.by_name, *_COMMON_LANES} - {own}):
                here = self.by_name.get(name)
                keys = KeyValues(self.client, f"ckpt_storage/{name}")
                token = None if here else keys.get_awaited("session", timeout_s)
                session = here.lane.session if here else (token or b"").decode()
                if not session:
                    continue
                number = (here.lane.number if here else 0) + 1
                for rank in ranks[:_MAX_LOOKUPS]:
                    beat = heartbeats.get(f"{session}/{rank}", timeout_s)
                    if beat is not None and Heartbeats.number_of(beat) == number:
                        return (
                            f"; rank {self.global_ranks[rank]} was last in another operation of "
                            f"this group ({name}): all ranks must make the same calls"
                        )
        return ""


_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, _Lanes] = weakref.WeakKeyDictionary()
# A finalizer of a saver may run in the middle of a call.
_lock = threading.RLock()


class RankGroup:
    """The ranks of one group on one lane; runs their operations, one at a time.

    Every rank has such an object over the same store and runs the same operations in the same
    order. `of` and `alone` create it.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.keys = lane.keys
        self.rank = lane.rank
        self.global_rank = lane.global_ranks[lane.rank]
        self.world_size = lane.world_size
        self.is_coordinator = lane.is_coordinator
        self._is_owned = False
        self._lock = threading.Lock()

    @classmethod
    def alone(cls) -> RankGroup:
        """Return this process as the only rank."""
        return cls(Lane(KeyValues(StoreClient(_no_store), ""), rank=0, global_ranks=range(1)))

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None, *, lane: str = "main", is_owned: bool = False
    ) -> RankGroup:
        """Return the ranks of a group (None: of the default group, or this process alone).

        The same object each time for the same group and `lane`, also after `close`: it counts the
        operations of that lane. Operations in different lanes may run at the same time. Sends
        nothing. Raises `InvalidInputError` on a rank outside the group, and if a lane that
        `is_owned` has an owner already; an owner holds it until `close`.
        """
        group = group_of(process_group)
        if group is None or group.size() == 1:
            return cls.alone()
        with _lock:
            lanes = _by_group.get(group)
            if lanes is None:
                lanes = _by_group[group] = _Lanes(group)
            ranks = lanes.by_name.get(lane)
            if ranks is None:
                keys = KeyValues(lanes.client, f"ckpt_storage/{lane}")
                state = Lane(keys, rank=lanes.rank, global_ranks=lanes.global_ranks)
                state.find_elsewhere = partial(lanes.find_elsewhere, lane)
                ranks = lanes.by_name[lane] = cls(state)
            if is_owned and ranks._is_owned:  # an object of this class
                raise InvalidInputError(
                    f"An AsyncSaver named {lane.rpartition('/')[2]!r} is open in this group.",
                    next_step="Close it first, or pass another name (name=).",
                )
            ranks._is_owned |= is_owned  # as above
            return ranks

    @contextmanager
    def operation(self, what: str, *, timeouts: Timeouts) -> Iterator[Operation]:
        """Run one operation of all ranks; each calls `Operation.meet` first in the block.

        `what` names it in messages ("the save to s3://..."). An exception raised in the block is
        reported to all ranks, which raise within seconds wherever they are. It becomes a
        `CheckpointError`, unless it is an interrupt.
        """
        if not self._lock.acquire(timeout=timeouts.plan):
            raise PhaseTimeoutError(
                f"Another operation of rank {self.global_rank} blocked {what} for "
                f"{timeouts.plan:g} s in the plan phase.",
                rank=self.global_rank,
                phase="plan",
                timeout_s=timeouts.plan,
                next_step="Wait for that operation to end, or raise Timeouts.plan.",
            )
        try:
            operation = Operation(self.lane, what, timeouts)
            with operation.reported(), self._finishing(operation):
                yield operation
        finally:
            self._lock.release()

    @contextmanager
    def _finishing(self, operation: Operation) -> Iterator[None]:
        """Finish the operation at the end of the block; raise what this rank's user needs."""
        try:
            with as_checkpoint_errors(operation.what, self.global_rank):
                yield
        except CheckpointError as caught:
            operation.finish(caught)
            # A request that was cancelled raises that; the user needs the reason for it.
            failure = operation.failure()
            is_effect = isinstance(caught, StorageError | LostStoreError)
            error = failure if failure is not None and is_effect else caught
            if self.world_size > 1:
                phase = operation.deadline.phase
                add_context(error, operation.what, rank=self.global_rank, phase=phase)
            if isinstance(error, LostStoreError):
                error = error.public()
            if error is caught:
                raise
            raise error from error.__cause__ or caught
        except BaseException as error:
            operation.finish(error)
            raise
        operation.finish()

    def close(self) -> None:
        """Release the ownership of the lane; called after the last operation, idempotent."""
        self._is_owned = False


def _no_store() -> dist.Store:
    raise InvalidInputError("This process shares no store with other ranks.")


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return `process_group` or the default group; None: this process is alone."""
    if process_group is None and "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    # On other ranks than its members, `new_group` returns a marker of another type.
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        what = "This process is not a member of process_group."
        raise InvalidInputError(what, next_step="Call this on the ranks of process_group only.")
    return process_group
