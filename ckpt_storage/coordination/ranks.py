"""The ranks of one group, able to agree, meet and give up together.

A group runs one operation at a time on each channel. The protocol is decision 4
(docs/decisions/0004-coordination.md).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Timeouts

from .board import Board, BoardError, LocalBoard
from .boardoperation import BoardOperation
from .failures import COORDINATOR, locate, lost_board
from .meeting import GivenUp
from .signs import RankProcess

if TYPE_CHECKING:
    import torch.distributed as dist

_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Ranks]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


class Ranks:
    """The ranks of one group on one channel; runs their operations, one at a time.

    Every rank has one over the same board and runs the same operations in the same order.
    `Ranks.of` and `Ranks.alone` make them.

    Args:
        board: memory that all ranks share.
        rank: of this process in the group.
        world_size: number of ranks in the group.
        look_s: longest pause in seconds between two looks for failures of others; by default it
            grows with the world, so that thousands of ranks do not flood the board's server.

    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        look_s: float | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidInputError(
                f"This process is not one of the {world_size} ranks of the group.",
                next_step="Call this on the ranks of process_group only.",
            )
        self.rank = rank
        self.world_size = world_size
        self.look_s = min(1.0, 0.1 + world_size / 20_000) if look_s is None else look_s
        self.board = board
        # The twin of the board that the last operation's watcher used and the next one's will.
        self.spare_board: Board | None = None
        # Keys that this rank left in earlier operations.
        self.debris: list[str] = []
        self.number = 0
        self.given_up: GivenUp | None = None
        self.siblings: Mapping[int, RankProcess] = {}
        self._is_taken = False
        self._lock = threading.Lock()

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only rank."""
        return cls(LocalBoard(), rank=0, world_size=1)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, *, lane: str = "main") -> Ranks:
        """Return the ranks of a group (None: of the default group, or this process alone).

        The same object each time for the same group and `lane`, also after `close`: it counts the
        operations of that name. Operations in different lanes may run at the same time. Talks to
        nobody. Raises `InvalidInputError` on a rank outside the group.
        """
        group = group_of(process_group)
        if group is None or group.size() == 1:
            return cls.alone()
        from .storeboard import StoreBoard, store_of  # noqa: PLC0415  # imports torch

        with _lock:
            lanes = _by_group.setdefault(group, {})
            if lane not in lanes:
                # Torch's stub of a store leaves `clone` out.
                board = StoreBoard(store_of(group).clone, f"ckpt_storage/{lane}")  # type: ignore[attr-defined]
                lanes[lane] = cls(board, rank=group.rank(), world_size=group.size())
            return lanes[lane]

    @classmethod
    def taken(cls, process_group: dist.ProcessGroup | None, *, lane: str) -> Ranks:
        """Return as `of`, for one user until `close`. Raises `InvalidInputError` for a second."""
        ranks = cls.of(process_group, lane=lane)
        with _lock:
            if ranks._is_taken:  # noqa: SLF001  # one of these
                raise InvalidInputError(
                    f"An AsyncSaver named {lane.rpartition('/')[2]!r} is open in this group.",
                    next_step="Close it first, or give the second one a name of its own (name=).",
                )
            ranks._is_taken = True  # noqa: SLF001  # as above
        return ranks

    @property
    def process(self) -> RankProcess | None:
        """The process whose end means that nobody speaks for this rank any more."""
        return None if self.world_size == 1 else RankProcess.of(os.getpid())

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == COORDINATOR

    @contextmanager
    def operation(self, what: str, *, timeouts: Timeouts) -> Iterator[BoardOperation]:
        """Run one operation of all ranks; each calls `Operation.meet` first in the block.

        `what` names it in messages ("the save to s3://..."). An exception that leaves the block
        is reported to all ranks, which raise within seconds wherever they are.
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
        self.number += 1
        try:
            operation = BoardOperation(self, what, timeouts)
            try:
                with self._told_by_the_board(operation), operation:
                    yield operation
            except CheckpointError as error:
                if self.world_size > 1:
                    locate(error, operation.what, rank=self.rank, phase=operation.current_phase)
                raise
        finally:
            self._lock.release()

    @contextmanager
    def _told_by_the_board(self, operation: BoardOperation) -> Iterator[None]:
        """Let a failed request say why it was given up, and a lost store whose store it was."""
        try:
            yield
        except BoardError as error:
            # What broke the one connection has perhaps broken the other.
            self._close_spare()
            lost = lost_board(error, operation.deadline, operation.what)
            raise operation.failure() or lost from error
        except CheckpointError as error:
            if isinstance(error.__cause__, BoardError):
                self._close_spare()
            failure = operation.failure()
            if not isinstance(error, StorageError) or failure is None or failure is error:
                raise
            raise failure from error

    def close(self) -> None:
        """Let go of the connections to the board; called after the last operation, idempotent."""
        self._is_taken = False
        self._close_spare()
        self.board.close()

    def _close_spare(self) -> None:
        spare, self.spare_board = self.spare_board, None
        if spare is not None:
            spare.close()


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that is meant: the given one or the default one; None: this process alone.

    Raises `InvalidInputError` on a rank outside the group.
    """
    if process_group is None and "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist  # noqa: PLC0415  # a process without ranks needs no torch

    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    # Outside of its members, `new_group` returns a mark of another type.
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise InvalidInputError(
            "This process is not a member of process_group.",
            next_step="Call this on the ranks of process_group only.",
        )
    return process_group
