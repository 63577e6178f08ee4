"""Shared reads: bytes that several ranks need are read from remote storage once.

These bytes are divided into numbered units of a few MiB. Each unit has an owner, a rank that reads
it and sends it to the others, in order of number. Receivers verify the checkpoint's checksums.

There is no deadlock. Consider the lowest unit that some rank still lacks. All lower units are
delivered, so a thread of its owner reads this unit and sends it to one rank after another. Units
are processed in order, so each rank that lacks it has a thread that waits for this unit alone.
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

_MAX_MEMBERS = 1_000_000
"""The most pairs of a unit and a rank that needs it; with more, each rank reads for itself.

The coordinator plans this many in about a second, while all other ranks wait."""

_MIN_GAIN = 1.5
"""Bytes that ranks would read of a chunk by themselves, over those read if it is shared."""

_MAX_UNIT_BYTES = 8 * MIB
_MIN_UNIT_BYTES = MIB

_MIN_SAVED_BYTES = 64 * MIB
"""Sharing pays if it saves at least this many bytes of reads."""

_MAX_GAP_BYTES = 512 * KIB
"""A rank that reads for itself reads through gaps of a region up to this length."""

_TAG = 11
_MAX_RECEIVERS = 4
"""Threads that receive; more are of no use, as most of the time goes to checksums and copies."""

_CONNECT_S = 60.0
"""If ranks cannot connect to each other within this time, each reads for itself."""

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
    """Return the maximum unit for reads of at most `part_bytes`; None: do not share."""
    unit_bytes = 1 << min(part_bytes, _MAX_UNIT_BYTES).bit_length() - 1
    return None if unit_bytes < _MIN_UNIT_BYTES else unit_bytes


def can_plan(member_count: int) -> bool:
    """Return whether this many pairs of a unit and a rank may be planned; log it if not."""
    if member_count <= _MAX_MEMBERS:
        return True
    log.info(
        "Each rank reads for itself: to share reads, the coordinator would have to plan more than "
        "%d of them.",
        _MAX_MEMBERS,
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
    """Return the order for each rank, None if sharing does not pay; pure.

    `wants` has the regions of each chunk by rank; `shape_of` returns its sizes and bytes per
    element. Pieces begin at multiples of `unit_bytes`, the maximum unit, so no block spans two
    units. `is_forced`: any saving pays.
    """
    common = {key: users for key, users in wants.items() if len({rank for rank, _ in users}) > 1}
    if not can_plan(sum(map(len, common.values()))):
        return None
    drafts: list[tuple[tuple[int, ...], list[Piece]]] = []
    held_bytes = saved_bytes = member_count = 0
    cells: dict[object, list[tuple[int, int, tuple[int, ...]]]] = {}
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, users in common.items():
        # Most tensors of a model are sharded alike: their cells are computed once.
        sizes, item_bytes = shape_of(key)
        sharding = (sizes, item_bytes, tuple(users))
        if sharding not in cells:
            cells[sharding] = list(_cells(sizes, item_bytes, users, unit_bytes))
        for start, stop, ranks in cells[sharding]:
            # Small consecutive pieces of the same ranks make a unit.
            if not drafts or drafts[-1][0] != ranks or held_bytes + stop - start > unit_bytes:
                # Equal tuples are the same object, which pickle writes once.
                drafts.append((groups.setdefault(ranks, ranks), []))
                held_bytes = 0
            drafts[-1][1].append((key, start, stop))
            held_bytes += stop - start
            saved_bytes += (len(ranks) - 1) * (stop - start)
            member_count += len(ranks)
        if not can_plan(member_count):
            return None
    if saved_bytes < (1 if is_forced else _MIN_SAVED_BYTES):
        return None
    by_rank: list[list[Unit]] = [[] for _ in range(world_size)]
    load_bytes = [0] * world_size
    for number, (ranks, pieces) in enumerate(drafts):
        owner = min(ranks, key=load_bytes.__getitem__)
        unit = Unit(number, owner, ranks, tuple(pieces))
        load_bytes[owner] += unit.size_bytes
        for rank in ranks:
            by_rank[rank].append(unit)
    return [
        ShareOrder(rank=rank, units=tuple(units), unit_bytes=unit_bytes)
        for rank, units in enumerate(by_rank)
    ]


def _cells(
    sizes: tuple[int, ...], item_bytes: int, users: Sequence[tuple[int, Box]], unit: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield start, stop and ranks of pieces of a chunk; nothing if it is not worth sharing."""
    total = math.prod(sizes) * item_bytes
    reach: dict[int, tuple[int, int]] = {}
    is_same = all(region == users[0][1] for _, region in users)
    for rank, region in users:
        if region.is_empty:
            continue
        runs = touched_spans(sizes, box_selection(region), item_bytes)
        extent, count = runs.hull, len(runs)
        gap_bytes = len(extent) - region.volume * item_bytes
        if count > 1 and not is_same and gap_bytes / (count - 1) > _MAX_GAP_BYTES:
            return
        low, high = reach.get(rank, (extent.start, extent.stop))
        reach[rank] = min(low, extent.start), max(high, extent.stop)
    if len(reach) < 2:  # noqa: PLR2004  # a single reader
        return
    low, high = min(start for start, _ in reach.values()), max(stop for _, stop in reach.values())
    if sum(stop - start for start, stop in reach.values()) < _MIN_GAIN * (high - low):
        return
    # The set of ranks changes only where the reach of a rank begins or ends.
    edges = {low - low % unit}
    for start, stop in reach.values():
        edges |= {start - start % unit, stop + -stop % unit}
    for start, stop in pairwise(sorted(edges)):
        ranks = tuple(sorted(r for r, (a, b) in reach.items() if a < stop and start < b))
        if ranks:
            for at in range(start, min(stop, total), unit):
                yield at, min(at + unit, total), ranks


class SharedReads:
    """The shared reads of one rank; at most `window` units are read, and received, at a time."""

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
        # Each thread has a single request in flight.
        options = dataclasses.replace(ranges.options, thread_count=1)
        alone = RangeReader(ranges.store, options, pacer=ranges.pacer)
        self._chunks = ChunkReader(alone, REMOTE_COSTS)
        self._window = window
        self._failures: list[BaseException] = []

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank reads or receives."""
        return sum(unit.size_bytes for unit in self._order.units)

    def run(self, read_rest: Callable[[], None], *, on_bytes: Callable[[int], None]) -> None:
        """Read and send the own units, receive the others, and call `read_rest` meanwhile.

        Raises the first failure of any rank; targets are not written to after it.
        """
        own = [unit for unit in self._order.units if unit.owner == self._order.rank]
        awaited = [unit for unit in self._order.units if unit.owner != self._order.rank]
        with (
            self._workers("sending", own, self._window) as senders,
            self._workers("receiving", awaited, min(self._window, _MAX_RECEIVERS)) as receivers,
        ):
            try:
                # Own units first: other ranks wait for them.
                for workers, units in ((senders, own), (receivers, awaited)):
                    # Buffers are reused by the next unit, in any thread.
                    buffers = queue.SimpleQueue[memoryview]()
                    for unit in units:
                        workers.submit(partial(self._run, unit, buffers, on_bytes))
                read_rest()
                receivers.drain()
                senders.drain()
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
        """Record a failure of this rank and report it to the others at once; thread-safe."""
        self._failures.append(error)
        # From here on other threads fail, too; the first failure is reported.
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
        """Read an own unit, copy it to the targets and send it; or receive, check and copy it."""
        pieces: list[tuple[Sequence[ChunkRead], int, memoryview]] = []
        at, tag, is_own = 0, _TAG + unit.number, unit.owner == self._order.rank
        for key, start, stop in unit.pieces:
            pieces.append((self._reads[key], start, buffer[at : at + stop - start]))
            at += stop - start
        if is_own:
            reads = [bytes_read(wants[0].place, view, start) for wants, start, view in pieces]
            self._chunks.read(reads)
        else:
            self._peers.receive(unit.owner, buffer, tag, self._deadline)
            for wants, start, view in pieces:
                self._check_received(unit.owner, wants[0], start, view)
        for wants, start, view in pieces:
            for read in wants:
                if self._failures:
                    # The load has failed, and its caller may use the targets again.
                    raise CheckpointError(f"The load of rank {self._order.rank} has failed.")
                put(read, start, view)
        if is_own:
            for rank in unit.ranks:
                if rank != self._order.rank:
                    self._peers.send(rank, buffer, tag, self._deadline)
        else:
            self._deadline.monitor.advanced(len(buffer))

    def _check_received(self, owner: int, want: ChunkRead, start: int, view: memoryview) -> None:
        """Check a piece that a peer sent; read it from the storage if its checksum differs."""
        try:
            want.place.check(view, start)
        except IntegrityError as error:
            log.warning("A piece that rank %d sent is read from the storage: %s", owner, error)
            self._chunks.read([bytes_read(want.place, view, start)])


_Split = tuple[Sequence[ChunkRead], Mapping[Key, Sequence[ChunkRead]]]
Links = Callable[
    [RangeReader, Callable[[ShareOrder], _Split | None] | None],
    AbstractContextManager[tuple[Sequence[ChunkRead], SharedReads] | None],
]
"""Opens the shared reads of a rank: `joined`, bound to its operation."""


@contextmanager
def joined(
    operation: Operation,
    peers: Peers,
    order: ShareOrder,
    ranges: RangeReader,
    split: Callable[[ShareOrder], _Split | None] | None,
) -> Iterator[tuple[Sequence[ChunkRead], SharedReads] | None]:
    """Yield the unshared reads and the shared ones; None if any rank cannot share.

    `split` returns the reads of this rank in these two groups; None: it cannot share.
    """
    options, reads = ranges.options, None
    # A unit needs a buffer, whose size is limited like that of a ranged read.
    max_bytes = min(options.part_bytes, options.memory_limit_bytes // 2)
    if split is not None and order.unit_bytes <= max_bytes:
        reads = split(order)
    gather, deadline = operation.all_gather, ranges.store.deadline
    is_joined = all(gather(reads is not None)) and all(gather(_connect(operation, peers, deadline)))
    try:
        if reads is None or not is_joined:
            yield None
        else:
            # Half of the memory, and half of that for the client's copies.
            window = options.memory_limit_bytes // (4 * order.unit_bytes)
            window = max(1, min(window, options.thread_count))
            yield reads[0], SharedReads(order, reads[1], peers, ranges, window=window)
    except BaseException:
        # No rank waits for the messages in flight any longer.
        is_joined = False
        raise
    finally:
        if not is_joined:
            peers.close()


def _connect(operation: Operation, peers: Peers, deadline: Deadline) -> bool:
    try:
        peers.connect(deadline, limit_s=_CONNECT_S)
    except CheckpointError as error:
        failure = operation.failure()
        if failure is not None:
            raise failure from error
        deadline.check("Connecting the ranks that share reads")
        log.warning("Each rank reads for itself: %s", error)
        return False
    return True
