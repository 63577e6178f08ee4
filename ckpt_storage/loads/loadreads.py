"""The reads of one load on one rank: each for itself, or shared with other ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.options import Progress, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkReader
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.ranges import RangeReader

from .sharedreads import SharedReads
from .sharing import ShareOrder
from .targets import LoadJob

log = logging.getLogger("ckpt_storage")

_JOIN_S = 60.0
"""Where ranks cannot reach one another within this, each reads for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What one rank reads for others and they for it, and the ways between them."""

    order: ShareOrder
    operation: Operation
    peers: Peers

    @contextmanager
    def joined(self, deadline: Deadline, *, can_share: bool) -> Iterator[bool]:
        """Reach one another for the time of a block; False on all ranks if any cannot.

        All ranks, as steps of the operation, whose deadline it is. Raises what that failed with.
        """
        is_joined = False
        if self._all(can_share):
            is_joined = self._all(self._has_reached(deadline))
            if not is_joined:
                self.peers.drop()
        if not is_joined:
            yield False
            return
        try:
            yield True
        except BaseException:
            # What is under way between these ranks belongs to nobody now.
            self.peers.drop()
            raise

    def _all(self, answer: bool) -> bool:  # noqa: FBT001  # a vote
        return set(self.operation.all_gather(b"yes" if answer else b"no")) == {b"yes"}

    def _has_reached(self, deadline: Deadline) -> bool:
        try:
            self.peers.join(self.operation, deadline, limit_s=_JOIN_S)
        except CheckpointError as error:
            failure = self.operation.failure()
            if failure is not None:
                raise failure from error
            deadline.check("Joining the ranks that share reads")
            log.warning("Each rank reads for itself: %s", error)
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReads:
    """What one rank reads in one load.

    Both methods return when all bytes that `load` wants are verified and in its targets. Raise
    `IntegrityError`, `StorageError` and what the deadline raises; targets are then undefined.

    Args:
        load: what is wanted, planned.
        store: of the checkpoint.
        options: of the transfers.
        rank: of the process in the load.
        progress: who is told of it, with a bar if `with_bar`.
        save_id: of the save that is read, None where there is none.

    """

    load: LoadJob
    store: Store
    options: TransferOptions
    rank: int
    progress: Progress
    save_id: str | None
    with_bar: bool

    def alone(self, deadline: Deadline) -> None:
        """Read everything here."""
        self._read(deadline, None)

    def together(self, sharing: Sharing, deadline: Deadline, *, is_willing: bool) -> None:
        """Read what the coordinator's order says, and take what others read; all ranks of it.

        If any is not willing, or cannot, each reads alone.
        """
        load, order = self.load, sharing.order
        load.share(order.keys)
        # A unit goes through one buffer, which must not be more than a part may be.
        can_share = (
            is_willing
            and load.can_share(order.unit_bytes)
            and order.unit_bytes <= self.options.part_bytes
            and 2 * order.unit_bytes <= self.options.memory_limit_bytes
        )
        with sharing.joined(deadline, can_share=can_share) as is_joined:
            if is_joined:
                self._read(deadline, SharedReads(order, load.shared, sharing.peers, deadline))
                return
        load.share_nothing()
        self._read(deadline, None)

    def _read(self, deadline: Deadline, shared: SharedReads | None) -> None:
        load, options = self.load, self.options
        is_remote = self.store.capabilities.is_remote
        costs = costs_for(is_remote=is_remote)
        ranges = RangeReader(self.store.bounded(deadline), options, deadline)
        chunks = ChunkReader(ranges, costs)
        # First what others wait for.
        reads = [] if shared is None else shared.ranges(costs)
        # A disk likes order; servers like to be asked for several things at a time.
        reads += chunks.plan(load.requests, turn=self.rank if is_remote else None)
        total_bytes = sum(read.stop - read.start for read in reads)
        total_bytes += 0 if shared is None else shared.awaited_bytes
        deadline.expect(total_bytes)
        with reporting(
            self.progress,
            phase="load",
            rank=self.rank,
            total_bytes=total_bytes,
            save_id=self.save_id,
            with_bar=self.with_bar,
        ) as on_bytes:
            try:
                if shared is None:
                    ranges.run(reads, on_bytes=on_bytes)
                else:
                    shared.run(ranges, reads, on_bytes=on_bytes)
                for request in load.wholes():
                    chunks.read([request], on_bytes=on_bytes)
            except (StorageError, IntegrityError) as error:
                raise load.explain(error) from error
