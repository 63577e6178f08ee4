"""The ranks' own gloo group: for bytes between ranks that are too many for their store.

The training group, whatever its backend, takes no part.

Made on first use, and anew after an operation failed: a gloo group is of no use after one wait
that timed out. Not by `torch.distributed.new_group`: with `use_local_synchronization=True` its name
depends on how many groups each member has been in, so members of unequal history wait for one
another for ever; without, ranks outside the group would have to call it, too.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ckpt_storage.errors import CheckpointError, InvalidInputError, RankFailedError
from ckpt_storage.store.calls import AbandonedError, TimedPool
from ckpt_storage.store.deadline import Deadline

from .group import RankGroup
from .operation import Operation

log = logging.getLogger("ckpt_storage")

_T = TypeVar("_T")

_WORD_S = 2.0
"""Within this every live rank hears of a failure."""

_NOTICE_S = 5.0
"""Beyond `Timeouts.silence`, how long it may take until a silent rank is named on all others."""


class Peers:
    """Point-to-point messages between the ranks of one group.

    All ranks `join` in the same operation before they send. Several threads may send and receive
    at a time, if no two use one tag with one rank. Every wait ends by its deadline, and
    soon after the operation failed on another rank.
    """

    def __init__(self, coordinator: RankGroup) -> None:
        # Weakly: `peers_of` keeps one for as long as there are the `RankGroup`.
        self._coordinator = weakref.ref(coordinator)
        self._group: dist.ProcessGroupGloo | None = None
        self._was_lost = False
        self._word_s = _WORD_S
        self._key = ""
        self._pool = TimedPool("ckpt-storage peers")

    @property
    def key(self) -> str:
        """What the present group is known by among its ranks; empty without one."""
        return self._key

    def join(self, operation: Operation, deadline: Deadline, *, limit_s: float = math.inf) -> None:
        """Make the group if any rank has none; all ranks, as one step of `operation`.

        Making it takes at most `limit_s` seconds.

        Raises `RankFailedError`, `PhaseTimeoutError`.
        """
        coordinator = self._coordinator()
        if coordinator is None or coordinator.world_size == 1:
            return
        # What is found dead is found by its silence; sockets tell only that somebody is gone.
        self._word_s = operation.timeouts.silence + _NOTICE_S
        keys = operation.gather(self._key.encode())
        fresh = os.urandom(8).hex()
        same = len(set(keys)) == 1 and keys[0] != b""
        key: str = pickle.loads(  # noqa: S301  # our own ranks
            operation.broadcast(pickle.dumps(keys[0].decode() if same else fresh))
        )
        if key == self._key:
            return
        self.drop()
        # Over a connection of its own: gloo waits on it.
        connect = coordinator.keys.connect
        rank, world_size = coordinator.rank, coordinator.world_size
        seconds = max(1.0, min(limit_s, deadline.remaining_s()))
        timeout = timedelta(seconds=seconds)
        self._group = self._run(
            lambda: dist.ProcessGroupGloo(
                dist.PrefixStore(f"ckpt_storage/peers/{key}", connect()),
                rank,
                world_size,
                timeout,
            ),
            deadline,
            "The ranks' own gloo group was not made",
            word_s=_WORD_S,
        )
        self._key = key

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`, which receives it under the same `tag`."""
        group, tensor = self._joined(deadline), _tensor(data)

        def begin() -> dist.Work:
            return group.send([tensor], to, tag)  # type: ignore[attr-defined,no-any-return]  # a stub

        self._await(begin, deadline, f"Sending to rank {to}", to)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` (writable) with what rank `source` sends under `tag`, of that length."""
        group, tensor = self._joined(deadline), _tensor(into)

        def begin() -> dist.Work:
            return group.recv([tensor], source, tag)  # type: ignore[attr-defined,no-any-return]  # a stub

        self._await(begin, deadline, f"Receiving from {source}", source)

    def drop(self) -> None:
        """Forget the group; called after a failed operation, idempotent, never waits."""
        self._group, self._key, self._was_lost = None, "", False

    def _joined(self, deadline: Deadline) -> dist.ProcessGroupGloo:
        group = self._group
        if group is None and self._was_lost:
            # Another thread found the group broken; what broke it is what is to be told.
            self._hear(deadline, "Reaching the other ranks", self._word_s)
            raise RankFailedError(
                "The ranks' own gloo group broke.",
                failures={},
                phase=deadline.phase,
                next_step="See what became of the other ranks.",
            )
        if group is None:
            raise InvalidInputError("The ranks have not joined.", next_step="Call join first.")
        return group

    def _lose(self) -> None:
        self._was_lost = True
        self._group, self._key = None, ""

    def _hear(self, deadline: Deadline, what: str, seconds: float) -> None:
        """Raise why the operation failed, once that is known: words are slower than sockets.

        A socket's end does not tell who died: a rank that lost another one closes all of its own.
        Returns if nothing is known after `seconds`.
        """
        if deadline.is_watched:
            deadline.sleep(seconds)
        deadline.check(what)

    def _await(
        self, begin: Callable[[], dist.Work], deadline: Deadline, what: str, rank: int
    ) -> None:
        # One that times out in gloo itself breaks the group; the margin lets ours be first.
        limit = timedelta(seconds=deadline.remaining_s() + 60.0)
        # The beginning fails, too, once the peer is known to be gone.
        self._run(lambda: begin().wait(limit), deadline, what, rank)

    def _run(
        self,
        call: Callable[[], _T],
        deadline: Deadline,
        what: str,
        rank: int | None = None,
        *,
        word_s: float | None = None,
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
            self._lose()
            deadline.check(what)
            raise deadline.error(what) from None
        except CheckpointError:
            raise
        except Exception as error:
            # Torch raises RuntimeErrors of several kinds when a peer is gone.
            self._lose()
            self._hear(deadline, what, self._word_s if word_s is None else word_s)
            raise RankFailedError(
                f"{what} failed: {error}",
                failures={} if rank is None else {rank: str(error)},
                rank=rank,
                phase=deadline.phase,
                next_step="See what became of that rank.",
            ) from error


_peers: weakref.WeakKeyDictionary[RankGroup, Peers] = weakref.WeakKeyDictionary()


def peers_of(coordinator: RankGroup) -> Peers:
    """Return the messages between ranks, the same each time."""
    found = _peers.get(coordinator)
    if found is None:
        found = _peers[coordinator] = Peers(coordinator)
    return found


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
