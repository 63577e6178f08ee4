"""The ranks of one group, on one lane of operations."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Timeouts

from .failures import as_checkpoint_errors, locate
from .keyvalue import COORDINATOR, KeyValues, LostStoreError, store_of
from .liveness import RankProcess
from .operation import Operation

if TYPE_CHECKING:
    import torch.distributed as dist

    from .meeting import Answer
    from .peers import Peers

_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, RankGroup]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


class RankGroup:
    """The ranks of one group on one lane; runs their operations, one at a time.

    Every rank has one over the same store and runs the same operations in the same order. `of` and
    `alone` make them. `look_s` is the longest pause between two looks for failures of others; by
    default it grows with the world, so that thousands of ranks do not flood the store's server.
    """

    def __init__(
        self, keys: KeyValues, *, rank: int, world_size: int, look_s: float | None = None
    ) -> None:
        self.keys = keys
        self.rank = rank
        self.world_size = world_size
        self.is_coordinator = rank == COORDINATOR
        self.look_s = min(1.0, 0.1 + world_size / 20_000) if look_s is None else look_s
        # Keys that this rank left in earlier operations.
        self.debris: list[str] = []
        self.number = 0
        # Our own answer in the last operation that began without a rank that did not come.
        self.given_up: Answer | None = None
        self.siblings: Mapping[int, RankProcess] = {}
        self.peers: Peers | None = None
        self._is_taken = False
        self._lock = threading.Lock()

    @classmethod
    def alone(cls, rank: int = 0, world_size: int = 1) -> RankGroup:
        """Return this process as the only rank, or as one that has no store with the others."""
        return cls(KeyValues(_no_store, ""), rank=rank, world_size=world_size)

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None, *, lane: str = "main", is_owned: bool = False
    ) -> RankGroup:
        """Return the ranks of a group (None: of the default group, or this process alone).

        The same object each time for the same group and `lane`, also after `close`: it counts the
        operations of that name. Operations in different lanes may run at the same time. Talks to
        nobody. Raises `InvalidInputError` on a rank outside the group, and if two users at a time
        want to own a lane: `is_owned` holds until `close`.
        """
        group = group_of(process_group)
        if group is None or group.size() == 1:
            return cls.alone()
        with _lock:
            lanes = _by_group.setdefault(group, {})
            if lane not in lanes:
                # Over a connection of our own: torch waits on its own. Its stub leaves `clone` out.
                keys = KeyValues(store_of(group).clone, f"ckpt_storage/{lane}")  # type: ignore[attr-defined]
                lanes[lane] = cls(keys, rank=group.rank(), world_size=group.size())
            found = lanes[lane]
            if is_owned and found._is_taken:  # noqa: SLF001  # one of these
                raise InvalidInputError(
                    f"An AsyncSaver named {lane.rpartition('/')[2]!r} is open in this group.",
                    next_step="Close it first, or give the second one a name of its own (name=).",
                )
            found._is_taken |= is_owned  # noqa: SLF001  # as above
            return found

    @contextmanager
    def operation(self, what: str, *, timeouts: Timeouts) -> Iterator[Operation]:
        """Run one operation of all ranks; each calls `Operation.meet` first in the block.

        `what` names it in messages ("the save to s3://..."). An exception that leaves the block is
        reported to all ranks, which raise within seconds wherever they are. It is one of ours, but
        for interrupts.
        """
        if not self._lock.acquire(timeout=timeouts.plan):
            raise PhaseTimeoutError(
                f"Another operation of rank {self.rank} kept {what} waiting for "
                f"{timeouts.plan:g} s in the plan phase.",
                rank=self.rank,
                phase="plan",
                timeout_s=timeouts.plan,
                next_step="Wait for the other to end, or raise Timeouts.plan.",
            )
        try:
            self.number += 1
            operation = Operation(self, what, timeouts)
            try:
                with as_checkpoint_errors(what, self.rank):
                    yield operation
            except CheckpointError as caught:
                operation.leave(caught)
                # Requests that were given up say so; what matters is why.
                failure = operation.failure()
                is_effect = isinstance(caught, StorageError | LostStoreError)
                error = failure if failure is not None and is_effect else caught
                if self.world_size > 1:
                    phase = operation.deadline.phase
                    locate(error, operation.what, rank=self.rank, phase=phase)
                if error is caught:
                    raise
                raise error from error.__cause__ or caught
            except BaseException as error:
                operation.leave(error)
                raise
            operation.leave()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let go of the connection to the store; called after the last operation, idempotent."""
        self._is_taken = False
        self.keys.close()


def _no_store() -> dist.Store:
    raise InvalidInputError("This process shares no store with other ranks.")


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that is meant, the given or the default one; None: this process alone."""
    if process_group is None and "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    # Outside of its members, `new_group` returns a mark of another type.
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        what = "This process is not a member of process_group."
        raise InvalidInputError(what, next_step="Call this on the ranks of process_group only.")
    return process_group
