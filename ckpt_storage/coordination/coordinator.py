"""The ranks of one group, able to agree, meet and give up together.

A group runs one operation at a time. `coordination_torch` makes Coordinators over process groups.
The protocol is design note 4 (docs/design/0004-coordination.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError, StorageError
from ckpt_storage.options import Timeouts

from .board import Board, BoardError, LocalBoard
from .lifesigns import RankProcess
from .meeting import GivenUp
from .operation import Operation
from .reports import COORDINATOR, locate


class Coordinator:
    """The ranks of one group; runs their operations, one at a time.

    Every rank makes one over the same board and runs the same operations in the same order. One
    process without a group has one of its own (`solo`).

    Args:
        board: memory that all ranks share.
        rank: of this process in the group.
        world_size: number of ranks in the group.
        pid: of the process that speaks for this rank, if it is not this one.
        look_s: longest pause in seconds between two looks for failures of others; by default it
            grows with the world, so that thousands of ranks do not flood the board's server.

    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        pid: int | None = None,
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
        self.debris: list[str] = []
        self.number = 0
        self.given_up: GivenUp | None = None
        self.has_met = False
        self._pid = pid
        self._lock = threading.Lock()

    @property
    def process(self) -> RankProcess | None:
        """The process whose end means that nobody speaks for this rank any more."""
        return None if self.world_size == 1 else RankProcess.of(self._pid or os.getpid())

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == COORDINATOR

    @contextmanager
    def operation(
        self, what: str, *, timeouts: Timeouts, number: int | None = None
    ) -> Iterator[Operation]:
        """Run one operation of all ranks; each calls `Operation.meet` first in the block.

        Operations are counted; `number` is for ranks of several processes that count elsewhere.
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
        self.number = self.number + 1 if number is None else number
        try:
            operation = Operation(self, what, timeouts)
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
    def _told_by_the_board(self, operation: Operation) -> Iterator[None]:
        """Let a failed request say why it was given up, and a lost store whose store it was."""
        try:
            yield
        except BoardError as error:
            # What broke the one connection has perhaps broken the other.
            self._close_spare()
            raise operation.failure() or operation.lost(error) from error
        except StorageError as error:
            failure = operation.failure()
            if failure is None or failure is error:
                raise
            raise failure from error

    def close(self) -> None:
        """Let go of the connections to the board; called after the last operation, idempotent."""
        self._close_spare()
        self.board.close()

    def _close_spare(self) -> None:
        spare, self.spare_board = self.spare_board, None
        if spare is not None:
            spare.close()

    def clear_debris(self, timeout_s: float) -> bool:
        """Remove one thing of those that earlier operations left on the board; False if none is.

        Once all ranks are in a later operation.
        """
        try:
            # Of the threads that wait in one operation each takes its own.
            key = self.debris.pop()
        except IndexError:
            return False
        self.board.delete(key, timeout_s)
        return True


def solo() -> Coordinator:
    """Return the Coordinator of one process without a group."""
    return Coordinator(LocalBoard(), rank=0, world_size=1)
