"""Reads that ranks share: each owner reads its units and passes them on, in order of number.

It cannot lock up. Take the lowest unit that some rank still misses. All lower ones are delivered,
so a thread of its owner reads it and sends it to the ranks in turn. Each rank that misses it has a
thread that waits for it and for nothing else, since units are taken in order. So it moves.

What arrives is held to the checkpoint's own checksums.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkRead, ChunkReader, bytes_read, put
from ckpt_storage.transfer.pacing import REMOTE_COSTS
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import Workers

from .sharing import Key, ShareOrder, Unit

log = logging.getLogger("ckpt_storage")

_TAG = 11
_RECEIVING = 4
"""Threads that receive: more bring nothing, since checking and copying is what takes time."""

_LINK_S = 60.0
"""Where ranks cannot reach one another within this, each reads for itself."""


class SharedReads:
    """One rank's part of shared reads; at most `window` units are read, and received, at a time."""

    def __init__(
        self,
        order: ShareOrder,
        reads: Mapping[Key, Sequence[ChunkRead]],
        peers: Peers,
        ranges: RangeReader,
        *,
        window: int,
    ) -> None:
        self._order = order
        self._reads = reads
        self._peers = peers
        self._deadline = ranges.deadline
        # Each thread has one request under way.
        options = dataclasses.replace(ranges.options, thread_count=1)
        alone = RangeReader(ranges.store, options, ranges.deadline, pacer=ranges.pacer)
        self._chunks = ChunkReader(alone, REMOTE_COSTS)
        self._window = window
        self._failures: list[BaseException] = []

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank reads or others read for it."""
        return sum(unit.size_bytes for unit in self._order.units)

    def run(self, read_rest: Callable[[], None], *, on_bytes: Callable[[int], None]) -> None:
        """Read and pass on, take what others read, and call `read_rest` meanwhile.

        Raises the first failure, here or elsewhere; nothing is put into a target from then on.
        """
        rank = self._order.rank
        own = [unit for unit in self._order.units if unit.owner == rank]
        awaited = [unit for unit in self._order.units if unit.owner != rank]
        with (
            self._workers("passing on", own, self._window) as passing,
            self._workers("receiving", awaited, min(self._window, _RECEIVING)) as receiving,
        ):
            try:
                # First what others wait for.
                self._submit(passing, own, self._pass_on, on_bytes)
                self._submit(receiving, awaited, self._receive, on_bytes)
                read_rest()
                receiving.drain()
                passing.drain()
            except BaseException as error:
                self._fail(error)
                if self._failures[0] is not error:
                    raise self._failures[0] from error
                raise

    def _workers(self, what: str, units: Sequence[Unit], count: int) -> Workers:
        name = f"shared reads of rank {self._order.rank}, {what}"
        count = min(count, len(units))
        return Workers(count, name=name, deadline=self._deadline, limit=lambda: len(units))

    def _submit(
        self,
        workers: Workers,
        units: Sequence[Unit],
        handle: Callable[[Unit, memoryview], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        # Used again by the next unit, in whatever thread.
        buffers = queue.SimpleQueue[memoryview]()

        def run(unit: Unit) -> None:
            try:
                try:
                    buffer = buffers.get_nowait()
                except queue.Empty:
                    buffer = memoryview(bytearray(self._order.unit_bytes))
                handle(unit, buffer[: unit.size_bytes])
                buffers.put(buffer)
                on_bytes(unit.size_bytes)
            except BaseException as error:
                self._fail(error)
                raise

        for unit in units:
            workers.submit(partial(run, unit))

    def _fail(self, error: BaseException) -> None:
        """Note why this rank gives up, in whatever thread, and tell the others at once."""
        self._failures.append(error)
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"{type(error).__name__}: {error}",
                rank=self._order.rank,
                phase=self._deadline.phase,
                next_step="See the log of that rank.",
            )
        self._deadline.watch.failed(error)

    def _pass_on(self, unit: Unit, buffer: memoryview) -> None:
        parts = list(self._parts(unit, buffer))
        self._chunks.read([bytes_read(reads[0].place, part, start) for reads, start, part in parts])
        self._deliver(parts)
        for rank in unit.ranks:
            if rank != self._order.rank:
                self._peers.send(rank, buffer, _TAG + unit.number, self._deadline)

    def _receive(self, unit: Unit, buffer: memoryview) -> None:
        self._peers.receive(unit.owner, buffer, _TAG + unit.number, self._deadline)
        parts = list(self._parts(unit, buffer))
        for reads, start, part in parts:
            reads[0].place.check(part, start)
        self._deliver(parts)
        self._deadline.watch.advanced(len(buffer))

    def _parts(
        self, unit: Unit, buffer: memoryview
    ) -> Iterator[tuple[Sequence[ChunkRead], int, memoryview]]:
        """Yield who wants each piece, where it begins in its chunk, and its bytes."""
        at = 0
        for key, start, stop in unit.pieces:
            yield self._reads[key], start, buffer[at : at + stop - start]
            at += stop - start

    def _deliver(self, parts: Sequence[tuple[Sequence[ChunkRead], int, memoryview]]) -> None:
        for reads, start, part in parts:
            for read in reads:
                if self._failures:
                    # The caller may use the targets again, though this thread came back late.
                    raise CheckpointError(f"The load of rank {self._order.rank} was given up.")
                put(read, start, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What one rank reads for others and they for it, and the ways between them."""

    order: ShareOrder
    operation: Operation
    peers: Peers

    @contextmanager
    def joined(self, deadline: Deadline, *, can_share: bool) -> Iterator[bool]:
        """Reach one another for the time of a block, all ranks; False on all if any cannot."""
        is_joined = self._all(is_met=can_share) and self._all(is_met=self._has_reached(deadline))
        try:
            yield is_joined
        except BaseException:
            # What is under way between these ranks belongs to nobody now.
            is_joined = False
            raise
        finally:
            if not is_joined:
                self.peers.drop()

    def _all(self, *, is_met: bool) -> bool:
        return all(self.operation.all_gather(is_met))

    def _has_reached(self, deadline: Deadline) -> bool:
        try:
            self.peers.join(self.operation, deadline, limit_s=_LINK_S)
        except CheckpointError as error:
            failure = self.operation.failure()
            if failure is not None:
                raise failure from error
            deadline.check("Joining the ranks that share reads")
            log.warning("Each rank reads for itself: %s", error)
            return False
        return True
