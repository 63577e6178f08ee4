"""The ranks' own gloo group: for bytes between ranks that are too many for their store.

The training group, whatever its backend, takes no part.

Made for one operation and closed after it: every rank holds a socket to every other. Not by
`torch.distributed.new_group`: with `use_local_synchronization=True` its name
depends on how many groups each member has been in, so members of unequal history wait for one
another for ever; without, ranks outside the group would have to call it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ckpt_storage.errors import CheckpointError, RankFailedError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.threads import AbandonedError, TimedPool

from .operation import Operation

_T = TypeVar("_T")

_NOTICE_S = 5.0
"""Beyond `Timeouts.silence`, how long it may take until a silent rank is named on all others."""


class Peers:
    """Point-to-point messages between the ranks of one operation, over a gloo group of its own.

    All ranks `connect` in the same operation before they send. Several threads may send and receive
    at a time, if no two use one tag with one rank. Every wait ends by its deadline, and soon after
    the operation failed on another rank. `close` ends the group and its sockets.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._group: dist.ProcessGroupGloo | None = None
        self._pool = TimedPool("ckpt-storage peers")

    def connect(self, deadline: Deadline, *, limit_s: float) -> None:
        """Connect to all other ranks, in at most `limit_s` seconds; called by all ranks.

        Raises `RankFailedError`, `PhaseTimeoutError`.
        """
        lane = self._operation.lane
        timeout = timedelta(seconds=max(1.0, min(limit_s, deadline.remaining_s())))

        def make() -> dist.ProcessGroupGloo:
            # Over a connection of its own: gloo waits on it.
            prefix = lane.keys.name_of(f"{lane.prefix()}/peers")
            store = dist.PrefixStore(prefix, lane.keys.client.connect())
            return dist.ProcessGroupGloo(store, lane.rank, lane.world_size, timeout)

        self._group = self._run(make, deadline, "Connecting the ranks over gloo")

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`, which receives it under the same `tag`."""
        self._move("send", f"Sending to rank {to}", to, data, tag, deadline)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Receive the data that rank `source` sends under `tag`, as long as `into`, into it."""
        self._move("recv", f"Receiving from {source}", source, into, tag, deadline)

    def _move(
        self, name: str, what: str, rank: int, data: memoryview, tag: int, deadline: Deadline
    ) -> None:
        group, tensor = self._group, torch.frombuffer(data, dtype=torch.uint8)
        if group is None:
            # Another thread's call broke the group; raise the reason for that.
            raise self._broken(deadline, "Reaching the other ranks")
        # A timeout in gloo itself breaks the group; the margin lets our deadline pass first.
        limit = timedelta(seconds=deadline.remaining_s() + 60.0)
        # The call itself fails, too, once the peer is known to be gone.
        self._run(
            lambda: getattr(group, name)([tensor], rank, tag).wait(limit), deadline, what, rank
        )

    def close(self) -> None:
        """Close the group and its sockets; idempotent, never waits."""
        self._group = None

    def _broken(
        self, deadline: Deadline, what: str, rank: int | None = None, error: object = "it broke"
    ) -> RankFailedError:
        """Raise why the operation failed, once that is known; sockets notice first.

        A closed socket does not show which rank died: the ranks that lost it close theirs, too.
        """
        if deadline.is_monitored:
            deadline.sleep(self._operation.timeouts.silence + _NOTICE_S)
        deadline.check(what)
        return RankFailedError(
            f"{what} failed: {error}",
            failures={} if rank is None else {rank: str(error)},
            rank=rank,
            phase=deadline.phase,
            next_step="Look at the log of that rank.",
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
            self.close()
            deadline.check(what)
            raise deadline.error(what) from None
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds when a peer is gone.
            self.close()
            raise self._broken(deadline, what, rank, error) from error
