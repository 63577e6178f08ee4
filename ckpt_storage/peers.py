"""The ranks' own gloo group: for bytes between ranks that are too many for the board.

Knows gloo and operations; knows nothing of what is sent. Called by consolidation, for ranks that
cannot read one another's files. The training group, whatever its backend, takes no part.

Made on first use, and anew after an operation failed: a gloo group is of no use after one wait
that timed out. Not by `torch.distributed.new_group`: with `use_local_synchronization=True` its name
depends on how many groups each member has been in, so members of unequal history wait for one
another for ever; without, ranks outside the group would have to call it, too.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .coordination import Coordinator
from .coordination_torch import StoreBoard
from .deadline import Deadline
from .errors import CheckpointError, InvalidInputError, RankFailedError
from .operation import Operation
from .store.timed import AbandonedError, TimedPool

__all__ = ["Peers"]

_T = TypeVar("_T")


class Peers:
    """Point-to-point messages between the ranks of a Coordinator; used by one thread at a time.

    All ranks `join` in the same operation before they send. Every wait ends by its deadline, and
    soon after the operation failed on another rank.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._group: dist.ProcessGroupGloo | None = None
        self._key = ""
        self._pool = TimedPool("ckpt-storage peers")

    @property
    def key(self) -> str:
        """What the present group is known by among its ranks; empty without one."""
        return self._key

    def join(self, operation: Operation, deadline: Deadline) -> None:
        """Make the group if any rank has none; all ranks, as one step of `operation`.

        Raises `RankFailedError`, `PhaseTimeoutError`, `InvalidInputError` (a Coordinator whose
        ranks share no store).
        """
        if self._coordinator.world_size == 1:
            return
        board = self._coordinator.board
        if not isinstance(board, StoreBoard):
            raise InvalidInputError(
                "These ranks have no store over which they could find one another.",
                next_step="Use a Coordinator of a process group.",
            )
        keys = operation.gather(self._key.encode())
        fresh = os.urandom(8).hex()
        same = len(set(keys)) == 1 and keys[0] != b""
        key: str = pickle.loads(  # noqa: S301  # our own ranks
            operation.broadcast(pickle.dumps(keys[0].decode() if same else fresh))
        )
        if key == self._key:
            return
        self.drop()
        twin = board.twin()
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        timeout = timedelta(seconds=max(1.0, deadline.remaining_s()))
        self._group = self._run(
            lambda: dist.ProcessGroupGloo(
                dist.PrefixStore(f"ckpt_storage/peers/{key}", twin.root()),
                rank,
                world_size,
                timeout,
            ),
            deadline,
            "The ranks' own gloo group was not made",
        )
        self._key = key

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`, which receives it under the same `tag`."""
        group, tensor = self._joined(), _tensor(data)
        work: dist.Work = group.send([tensor], to, tag)  # type: ignore[attr-defined]  # a stub
        self._wait(work, deadline, f"Sending to rank {to}", to)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` (writable) with what rank `source` sends under `tag`, of that length."""
        group, tensor = self._joined(), _tensor(into)
        work: dist.Work = group.recv([tensor], source, tag)  # type: ignore[attr-defined]  # a stub
        self._wait(work, deadline, f"Receiving from {source}", source)

    def drop(self) -> None:
        """Forget the group; called after a failed operation, idempotent, never waits."""
        self._group, self._key = None, ""

    def _joined(self) -> dist.ProcessGroupGloo:
        if self._group is None:
            raise InvalidInputError("The ranks have not joined.", next_step="Call join first.")
        return self._group

    def _wait(self, work: dist.Work, deadline: Deadline, what: str, rank: int) -> None:
        # One that times out in gloo itself breaks the group; the margin lets ours be first.
        limit = timedelta(seconds=deadline.remaining_s() + 60.0)
        self._run(lambda: work.wait(limit), deadline, what, rank)

    def _run(
        self, call: Callable[[], _T], deadline: Deadline, what: str, rank: int | None = None
    ) -> _T:
        try:
            return self._pool.run(
                call,
                timeout_s=deadline.remaining_s(),
                what=what,
                repeatable=False,
                cancelled=deadline.has_failed,
            )
        except AbandonedError:
            self.drop()
            deadline.check(what)
            raise deadline.error(what) from None
        except CheckpointError:
            raise
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds when a peer is gone.
            self.drop()
            deadline.check(what)
            raise RankFailedError(
                f"{what} failed: {error}",
                failures={} if rank is None else {rank: str(error)},
                rank=rank,
                phase=deadline.phase,
                next_step="See what became of that rank.",
            ) from error


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
