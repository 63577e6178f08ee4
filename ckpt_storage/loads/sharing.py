"""Reads that ranks share, so that remote storage sends once what several of them need.

It is cut into numbered units of a few MiB. One of the ranks reads each and passes it on, in order
of number. What arrives is held to the checkpoint's own checksums.

It cannot lock up. Take the lowest unit that some rank still misses. All lower ones are delivered,
so a thread of its owner reads it and sends it to the ranks in turn. Each rank that misses it has a
thread that waits for it and for nothing else, since units are taken in order. So it moves.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.peers import Peers
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.format.boxes import Box, box_selection, touched_spans
from ckpt_storage.options import KIB, MIB
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkRead, ChunkReader, bytes_read, put
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.read_costs import REMOTE_COSTS
from ckpt_storage.transfer.workers import Workers

log = logging.getLogger("ckpt_storage")

_MOST_MEMBERS = 1_000_000
"""The most pairs of a unit and a rank that wants it; with more, each rank reads for itself.

The coordinator plans them while all others wait: about a second for so many."""

_WORTH = 1.5
"""Sharing must spare a third of what ranks would read of a chunk."""

_MOST_UNIT_BYTES = 8 * MIB
_LEAST_UNIT_BYTES = MIB

_LEAST_SAVED_BYTES = 64 * MIB
"""Sharing pays if it spares so many."""

_MOST_GAP_BYTES = 512 * KIB
"""A rank alone reads over gaps of a region up to this."""

_TAG = 11
_RECEIVING = 4
"""Threads that receive: more bring nothing, since checking and copying is what takes time."""

_LINK_S = 60.0
"""Where ranks cannot reach one another within this, each reads for itself."""

Key = tuple[str, tuple[int, ...]]
"""FQN and offsets of a chunk."""

Piece = tuple[Key, int, int]
"""Bytes [start, stop) of the payload of a chunk."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces of chunks that `owner` reads in one request and sends to the other `ranks`."""

    number: int
    owner: int
    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """The length of all pieces together."""
        return sum(stop - start for _, start, stop in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrder:
    """The units that concern one rank, in the order of their numbers."""

    rank: int
    units: tuple[Unit, ...]
    unit_bytes: int

    @property
    def keys(self) -> frozenset[Key]:
        """The chunks that are shared."""
        return frozenset(key for unit in self.units for key, _, _ in unit.pieces)


def unit_for(part_bytes: int) -> int | None:
    """Return the longest unit for reads in parts of at most `part_bytes`; None: do not share."""
    unit_bytes = 1 << min(part_bytes, _MOST_UNIT_BYTES).bit_length() - 1
    return None if unit_bytes < _LEAST_UNIT_BYTES else unit_bytes


def can_plan(member_count: int) -> bool:
    """Return whether so many pairs of a unit and a rank may be planned; log if not."""
    if member_count <= _MOST_MEMBERS:
        return True
    log.info(
        "Each rank reads for itself: to share what ranks have in common, one rank would have to "
        "plan more than %d reads.",
        _MOST_MEMBERS,
    )
    return False


def plan_shares(
    wants: Mapping[Key, Sequence[tuple[int, Box]]],
    shape_of: Callable[[Key], tuple[tuple[int, ...], int]],
    *,
    world_size: int,
    unit_bytes: int,
    is_forced: bool = False,
) -> list[ShareOrder] | None:
    """Return the order for each rank, None if it does not pay; pure.

    `wants` has the regions of each chunk by rank, `shape_of` its sizes and the bytes of an element.
    Pieces begin at multiples of `unit_bytes`, the longest unit: so a block lies in one unit only.
    `is_forced`: any saving pays.
    """
    common = {key: users for key, users in wants.items() if len({rank for rank, _ in users}) > 1}
    if not can_plan(sum(map(len, common.values()))):
        return None
    drafts: list[tuple[tuple[int, ...], list[Piece]]] = []
    held_bytes = saved_bytes = member_count = 0
    alike: dict[object, list[tuple[int, int, tuple[int, ...]]]] = {}
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, users in common.items():
        # Tensors that are cut alike, as most of a model's are, are looked at once.
        sizes, item_bytes = shape_of(key)
        like = (sizes, item_bytes, tuple(users))
        if like not in alike:
            alike[like] = list(_cells(sizes, item_bytes, users, unit_bytes))
        for start, stop, ranks in alike[like]:
            # Small pieces that follow one another stay together.
            if not drafts or drafts[-1][0] != ranks or held_bytes + stop - start > unit_bytes:
                # One object for equal ranks: pickled as one.
                drafts.append((groups.setdefault(ranks, ranks), []))
                held_bytes = 0
            drafts[-1][1].append((key, start, stop))
            held_bytes += stop - start
            saved_bytes += (len(ranks) - 1) * (stop - start)
            member_count += len(ranks)
        if not can_plan(member_count):
            return None
    if saved_bytes < (1 if is_forced else _LEAST_SAVED_BYTES):
        return None
    mine: list[list[Unit]] = [[] for _ in range(world_size)]
    load_bytes = [0] * world_size
    for number, (ranks, pieces) in enumerate(drafts):
        owner = min(ranks, key=load_bytes.__getitem__)
        unit = Unit(number, owner, ranks, tuple(pieces))
        load_bytes[owner] += unit.size_bytes
        for rank in ranks:
            mine[rank].append(unit)
    return [
        ShareOrder(rank=rank, units=tuple(units), unit_bytes=unit_bytes)
        for rank, units in enumerate(mine)
    ]


def _cells(
    sizes: tuple[int, ...], item_bytes: int, users: Sequence[tuple[int, Box]], unit: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield start, stop and ranks of parts of a chunk; none if it is not to be shared."""
    total = math.prod(sizes) * item_bytes
    reach: dict[int, tuple[int, int]] = {}
    is_same = all(region == users[0][1] for _, region in users)
    for rank, region in users:
        if region.is_empty:
            continue
        runs = touched_spans(sizes, box_selection(region), item_bytes)
        extent, count = runs.hull, len(runs)
        gap_bytes = len(extent) - region.volume * item_bytes
        if count > 1 and not is_same and gap_bytes / (count - 1) > _MOST_GAP_BYTES:
            return
        low, high = reach.get(rank, (extent.start, extent.stop))
        reach[rank] = min(low, extent.start), max(high, extent.stop)
    if len(reach) < 2:  # noqa: PLR2004  # nobody else
        return
    low, high = min(start for start, _ in reach.values()), max(stop for _, stop in reach.values())
    if sum(stop - start for start, stop in reach.values()) < _WORTH * (high - low):
        return
    # Who wants a cell changes only where somebody's reach begins or ends.
    edges = {low - low % unit}
    for start, stop in reach.values():
        edges |= {start - start % unit, stop + -stop % unit}
    for start, stop in pairwise(sorted(edges)):
        ranks = tuple(sorted(r for r, (a, b) in reach.items() if a < stop and start < b))
        if ranks:
            for at in range(start, min(stop, total), unit):
                yield at, min(at + unit, total), ranks


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
        self._deadline = ranges.store.deadline
        # Each thread has one request under way.
        options = dataclasses.replace(ranges.options, thread_count=1)
        alone = RangeReader(ranges.store, options, pacer=ranges.pacer)
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
        own = [unit for unit in self._order.units if unit.owner == self._order.rank]
        awaited = [unit for unit in self._order.units if unit.owner != self._order.rank]
        with (
            self._workers("passing on", own, self._window) as passing,
            self._workers("receiving", awaited, min(self._window, _RECEIVING)) as receiving,
        ):
            try:
                # First what others wait for.
                for workers, units in ((passing, own), (receiving, awaited)):
                    # Used again by the next unit, in whatever thread.
                    buffers = queue.SimpleQueue[memoryview]()
                    for unit in units:
                        workers.submit(partial(self._run, unit, buffers, on_bytes))
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

    def _run(
        self, unit: Unit, buffers: queue.SimpleQueue[memoryview], on_bytes: Callable[[int], None]
    ) -> None:
        try:
            try:
                buffer = buffers.get_nowait()
            except queue.Empty:
                buffer = memoryview(bytearray(self._order.unit_bytes))
            self._move(unit, buffer[: unit.size_bytes])
            buffers.put(buffer)
            on_bytes(unit.size_bytes)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Record why this rank gives up, from any thread, and report it to the others at once."""
        self._failures.append(error)
        # Other threads give up from here on, and may report first.
        error = self._failures[0]
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"{type(error).__name__}: {error}",
                rank=self._order.rank,
                phase=self._deadline.phase,
                next_step="See the log of that rank.",
            )
        self._deadline.monitor.failed(error)

    def _move(self, unit: Unit, buffer: memoryview) -> None:
        """Read a unit, put it into targets and pass it on; or receive, check and put it."""
        parts: list[tuple[Sequence[ChunkRead], int, memoryview]] = []
        at, tag, is_own = 0, _TAG + unit.number, unit.owner == self._order.rank
        for key, start, stop in unit.pieces:
            parts.append((self._reads[key], start, buffer[at : at + stop - start]))
            at += stop - start
        if is_own:
            reads = [bytes_read(wants[0].place, part, start) for wants, start, part in parts]
            self._chunks.read(reads)
        else:
            self._peers.receive(unit.owner, buffer, tag, self._deadline)
            for wants, start, part in parts:
                self._check_received(unit.owner, wants[0], start, part)
        for wants, start, part in parts:
            for read in wants:
                if self._failures:
                    # The caller may use the targets again, though this thread came back late.
                    raise CheckpointError(f"The load of rank {self._order.rank} was given up.")
                put(read, start, part)
        if is_own:
            for rank in unit.ranks:
                if rank != self._order.rank:
                    self._peers.send(rank, buffer, tag, self._deadline)
        else:
            self._deadline.monitor.advanced(len(buffer))

    def _check_received(self, owner: int, want: ChunkRead, start: int, part: memoryview) -> None:
        """Check a piece that a peer sent; one that does not match is read from the storage."""
        try:
            want.place.check(part, start)
        except IntegrityError as error:
            log.warning("A piece that rank %d sent is read from the storage: %s", owner, error)
            self._chunks.read([bytes_read(want.place, part, start)])


_Split = tuple[Sequence[ChunkRead], Mapping[Key, Sequence[ChunkRead]]]
Links = Callable[
    [RangeReader, Callable[[ShareOrder], _Split | None] | None],
    AbstractContextManager[tuple[Sequence[ChunkRead], SharedReads] | None],
]
"""Opens the shared reads of one rank: `joined`, bound to its operation."""


@contextmanager
def joined(
    operation: Operation,
    peers: Peers,
    order: ShareOrder,
    ranges: RangeReader,
    split: Callable[[ShareOrder], _Split | None] | None,
) -> Iterator[tuple[Sequence[ChunkRead], SharedReads] | None]:
    """Yield the reads of this rank alone and the shared ones; None if any rank cannot share.

    `split` returns the reads of a rank in these two groups; None: this rank shares nothing.
    """
    options, parts = ranges.options, None
    # A unit goes through one buffer, which must not be more than a part may be.
    most_bytes = min(options.part_bytes, options.memory_limit_bytes // 2)
    if split is not None and order.unit_bytes <= most_bytes:
        parts = split(order)
    gather, deadline = operation.all_gather, ranges.store.deadline
    is_joined = all(gather(parts is not None)) and all(gather(_connect(operation, peers, deadline)))
    try:
        if parts is None or not is_joined:
            yield None
        else:
            # With what a client holds of each; the rest is for this rank's own reads.
            window = options.memory_limit_bytes // (4 * order.unit_bytes)
            window = max(1, min(window, options.thread_count))
            yield parts[0], SharedReads(order, parts[1], peers, ranges, window=window)
    except BaseException:
        # No rank waits for messages in flight any more.
        is_joined = False
        raise
    finally:
        if not is_joined:
            peers.close()


def _connect(operation: Operation, peers: Peers, deadline: Deadline) -> bool:
    try:
        peers.connect(deadline, limit_s=_LINK_S)
    except CheckpointError as error:
        failure = operation.failure()
        if failure is not None:
            raise failure from error
        deadline.check("Connecting the ranks that share reads")
        log.warning("Each rank reads for itself: %s", error)
        return False
    return True
