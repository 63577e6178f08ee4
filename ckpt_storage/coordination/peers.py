"""The ranks' own gloo group: for bytes between ranks that are too many for their store.

The training group, whatever its backend, takes no part.

Made on first use, and anew after an operation failed: a gloo group is of no use after one wait
that timed out. Not by `torch.distributed.new_group`: with `use_local_synchronization=True` its name
depends on how many groups each member has been in, so members of unequal history wait for one
another for ever; without, ranks outside the group would have to call it, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ckpt_storage.errors import CheckpointError, RankFailedError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.threads import AbandonedError, TimedPool

from .group import RankGroup
from .operation import Operation

_T = TypeVar("_T")

_WORD_S = 2.0
"""Within this every live rank hears of a failure."""

_NOTICE_S = 5.0
"""Beyond `Timeouts.silence`, how long it may take until a silent rank is named on all others."""


class Peers:
    """Point-to-point messages between the ranks of one group.

    All ranks `join` in the same operation before they send. Several threads may send and receive
    at a time, if no two use one tag with one rank. Every wait ends by its deadline, and
    soon after the operation failed on another rank. `key` is what the present group is known by
    among its ranks; empty without one.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.key = ""
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._keys = ranks.keys
        self._group: dist.ProcessGroupGloo | None = None
        self._word_s = _WORD_S
        self._pool = TimedPool("ckpt-storage peers")

    def join(self, operation: Operation, deadline: Deadline, *, limit_s: float = math.inf) -> None:
        """Make the group if any rank has none; all ranks, as one step of `operation`.

        Making it takes at most `limit_s` seconds.

        Raises `RankFailedError`, `PhaseTimeoutError`.
        """
        if self._world_size == 1:
            return
        keys = set(operation.gather(self.key))
        same = len(keys) == 1 and keys != {""}
        key = operation.broadcast(keys.pop() if same else os.urandom(8).hex())
        if key != self.key:
            self.drop()
            timeout = timedelta(seconds=max(1.0, min(limit_s, deadline.remaining_s())))

            def make() -> dist.ProcessGroupGloo:
                # Over a connection of its own: gloo waits on it.
                store = dist.PrefixStore(f"ckpt_storage/peers/{key}", self._keys.connect())
                return dist.ProcessGroupGloo(store, self._rank, self._world_size, timeout)

            self._word_s = _WORD_S
            self._group = self._run(make, deadline, "The ranks' own gloo group was not made")
            self.key = key
        # What is found dead is found by its silence; sockets tell only that somebody is gone.
        self._word_s = operation.timeouts.silence + _NOTICE_S

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`, which receives it under the same `tag`."""
        self._move("send", f"Sending to rank {to}", to, data, tag, deadline)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` (writable) with what rank `source` sends under `tag`, of that length."""
        self._move("recv", f"Receiving from {source}", source, into, tag, deadline)

    def _move(
        self, name: str, what: str, rank: int, data: memoryview, tag: int, deadline: Deadline
    ) -> None:
        group, tensor = self._group, torch.frombuffer(data, dtype=torch.uint8)
        if group is None:
            # Another thread found the group broken; what broke it is what is to be told.
            raise self._broken(deadline, "Reaching the other ranks")
        # One that times out in gloo itself breaks the group; the margin lets ours be first.
        limit = timedelta(seconds=deadline.remaining_s() + 60.0)
        # The beginning fails, too, once the peer is known to be gone.
        self._run(
            lambda: getattr(group, name)([tensor], rank, tag).wait(limit), deadline, what, rank
        )

    def drop(self) -> None:
        """Forget the group; called after a failed operation, idempotent, never waits."""
        self._group, self.key = None, ""

    def _broken(
        self, deadline: Deadline, what: str, rank: int | None = None, error: object = "it broke"
    ) -> RankFailedError:
        """Raise why the operation failed, once that is known: words are slower than sockets.

        A socket's end does not tell who died: a rank that lost another one closes all of its own.
        """
        if deadline.is_watched:
            deadline.sleep(self._word_s)
        deadline.check(what)
        return RankFailedError(
            f"{what} failed: {error}",
            failures={} if rank is None else {rank: str(error)},
            rank=rank,
            phase=deadline.phase,
            next_step="See what became of that rank.",
        )

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
        except CheckpointError as error:
            if not isinstance(error, AbandonedError):
                raise
            self.drop()
            deadline.check(what)
            raise deadline.error(what) from None
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds when a peer is gone.
            self.drop()
            raise self._broken(deadline, what, rank, error) from error
