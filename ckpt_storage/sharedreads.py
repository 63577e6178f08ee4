"""Reads that ranks share: each fetches its part of what several need, and sends it on.

Knows requests, units and messages between ranks; knows no tensor and no planner. Called by
`reader` for a load whose coordinator planned shares (`sharing`).

Between ranks of one host nothing is sent: what is fetched lies in memory that they share
(`hostmemory`), verified by its reader, and each copies what it wants of it straight into its
targets. Nobody writes there meanwhile, so it is not checked again.

To other hosts a message is three transfers under consecutive tags: how many units and bytes; which
unit lies where; the bytes as they are in the file. One thread of each rank takes messages as they
come, from anyone, and waits for nothing else: it sends nothing, and delivering needs no other rank.
So no order of sending can tie ranks up. What it takes is held to the checkpoint's own checksums
(I9), where there are any and the reader verifies. Without, as with the safetensors of others,
messages are checked for form alone, and a bit turned on the way is TCP's to find.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from .costs import ReadCosts
from .deadline import Deadline
from .errors import CheckpointError
from .fetching import Fetch, run_fetches
from .hostmemory import HostMemory
from .options import TransferOptions
from .readplan import Put, Request, Span, deliver, plan_spans
from .sharing import Key, ShareOrder, Unit
from .source import Place
from .store.base import Store

__all__ = ["Links", "SharedReads", "Sharers", "Transport", "Wish", "fits_units"]

log = logging.getLogger("ckpt_storage")

_TAG = 11
_WORDS = 3
"""Whole numbers of the first transfer: units, bytes, and the sender's rank as it knows itself."""

_JOIN_S = 30.0
_LOOK_S = 0.2

_FILLED_AT_ONCE = 4
"""Buffers that are filled by copying answers: few, as fresh memory costs more than the copy."""

_MEMORY_SHARE = 2
"""Buffers take at most this part of the memory that a load may use: the rest is for requests."""


class Transport(Protocol):
    """Messages between the ranks of a load; every wait ends by the deadline."""

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`."""

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` with what rank `source` sends under `tag`."""

    def receive_any(self, into: memoryview, tag: int, deadline: Deadline) -> int:
        """Fill `into` with what any rank sends under `tag`; return which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How a rank reaches the others that it shares reads with.

    Those of `memory` through that; all others, if there are any, by `transport`. Reads have this
    `deadline`, which knows of other ranks' failures. With `ends_together` some ranks map files;
    `claims` offers what those of this host claim checks in.
    """

    transport: Transport | None
    memory: HostMemory | None
    deadline: Deadline
    ends_together: bool = False
    claims: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a rank needs to share reads: buffers of memory, and to reach its `partners`.

    `among` tells whether they may be on other hosts, `verifies` whether this rank holds bytes to
    the checkpoint's checksums: what lies in memory is checked by its reader only. With `maps` it
    needs no buffers: all of what is shared lies in the memory of its host's kernel; `claims` offers
    a table for who checks what of it. None: there is nothing that it shares. With `is_last` nothing
    of its load can fail once these reads have ended.
    """

    buffer_bytes: int
    buffer_count: int
    partners: frozenset[int]
    among: Literal["all", "host"]
    verifies: bool
    maps: bool | None = False
    claims: str | None = None
    is_last: bool = False


class Sharers(Protocol):
    """Ranks that may share reads; all of them ask in the same load."""

    def joined(
        self, wish: Wish | None, deadline: Deadline, *, otherwise: Callable[[], Wish | None]
    ) -> AbstractContextManager[Links | None]:
        """Reach one another for the time of a block.

        Who wishes to map is asked `otherwise` where mates cannot.

        A rank that cannot take part has no wish. None on all ranks if any cannot take part, or
        if they do not reach one another. Where ranks map files, who leaves the block without an
        error has heard that all have.
        """


def fits_units(place: Place, unit_bytes: int) -> bool:
    """Return whether no block of the chunk lies in two units."""
    return unit_bytes % place.block_bytes == 0


class SharedReads:
    """One rank's part of the shared reads of one load.

    `requests` has what this rank wants, by chunk; those of the order's chunks are served here
    and by nobody else. `link` comes before `run`.
    """

    def __init__(self, order: ShareOrder, requests: Mapping[Key, Sequence[Request]]) -> None:
        self._order = order
        self._rank = order.rank
        self._requests = requests
        self._links: Links | None = None
        self._mates: frozenset[int] = frozenset()
        # Of the ranks that wait for a unit, those reached through memory and the others.
        self._sides: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._failures: list[BaseException] = []
        self._spans: dict[int, Span] = {}
        self._awaited: dict[int, Unit] = {}
        self._receivers: dict[int, tuple[int, ...]] = {}
        self._own: list[Span] = []
        self._keys: dict[int, Key] = {}
        others: dict[tuple[int, ...], tuple[int, ...]] = {}
        for unit in order.units:
            self._keys[unit.number] = unit.key
            span = Span(
                place=requests[unit.key][0].place,
                start=unit.start,
                stop=unit.stop,
                token=unit.number,
            )
            self._spans[unit.number] = span
            if unit.owner == order.rank:
                self._own.append(span)
                if unit.ranks not in others:
                    others[unit.ranks] = tuple(r for r in unit.ranks if r != order.rank)
                self._receivers[unit.number] = others[unit.ranks]
            else:
                self._awaited[unit.number] = unit
        self._known_takers: dict[tuple[int | None, Key], list[tuple[Request, Put | None]]] = {}
        ranks = {rank for receivers in self._receivers.values() for rank in receivers}
        self._lanes = {rank: threading.Lock() for rank in ranks}
        self._on_bytes: Callable[[int], None] = lambda _: None

    @property
    def awaited_bytes(self) -> int:
        """Bytes that others read for this rank."""
        return sum(self._spans[n].stop - self._spans[n].start for n in self._awaited)

    def fetches(self, costs: ReadCosts) -> list[Fetch]:
        """Return the reads of what this rank owns; each is delivered and passed on when it came."""
        groups: dict[tuple[int, ...], list[Span]] = {}
        for span in self._own:
            groups.setdefault(self._receivers[span.token], []).append(span)
        part_bytes = self._order.unit_bytes
        return [
            fetch
            for spans in groups.values()
            for fetch in plan_spans(spans, self._take, part_bytes=part_bytes, costs=costs)
        ]

    def wish(
        self,
        fetches: Sequence[Fetch],
        options: TransferOptions,
        *,
        verifies: bool,
        lends_reads: bool,
    ) -> Wish | None:
        """Return what this rank needs for `fetches`; None where it may not use so much memory."""
        buffer_bytes = max((fetch.stop - fetch.start for fetch in fetches), default=0)
        affordable = options.memory_limit_bytes // _MEMORY_SHARE // max(1, buffer_bytes)
        if not affordable:
            return None
        filled_count = options.thread_count
        if lends_reads:
            filled_count = min(filled_count, _FILLED_AT_ONCE)
        return Wish(
            buffer_bytes=buffer_bytes,
            # Beside those that are being filled, one that mates have not taken yet.
            buffer_count=min(len(fetches), affordable, filled_count + 1),
            partners=self._order.partners,
            among=self._order.among,
            verifies=verifies,
            maps=False if self._order.runs else None,
        )

    def link(self, links: Links) -> None:
        """Take over the links to the other ranks."""
        self._links = links
        if links.memory is not None:
            links.memory.takes(self._found)
            self._mates = links.memory.mates
        for receivers in set(self._receivers.values()):
            near = tuple(rank for rank in receivers if rank in self._mates)
            far = tuple(rank for rank in receivers if rank not in self._mates)
            self._sides[receivers] = near, far

    @property
    def _linked(self) -> Links:
        assert self._links is not None  # noqa: S101  # `link` came first
        return self._links

    def run(
        self,
        store: Store,
        own: Sequence[Fetch],
        others: Sequence[Fetch],
        *,
        options: TransferOptions,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Do the `own` reads and `others`, and take what ranks read for this one, to the end.

        Raises the first failure, here or of the operation that the deadline belongs to, whatever
        its kind, after the other ranks were told; no thread of this rank writes into a target
        then, unless the error says so.
        """
        memory, deadline = self._linked.memory, self._linked.deadline
        self._on_bytes = on_bytes
        receivers = self._receivers_for(options)
        if memory is not None:
            limit_bytes = options.memory_limit_bytes - memory.size_bytes
            options = dataclasses.replace(
                options, memory_limit_bytes=max(options.part_bytes, limit_bytes)
            )
            own = [dataclasses.replace(fetch, borrow=self._borrow) for fetch in own]
        for receiver in receivers:
            receiver.start()
        try:
            # First what others wait for.
            fetches = [*own, *others]
            run_fetches(store, fetches, options=options, deadline=deadline, on_bytes=on_bytes)
            # Each wait ends by the deadline, or soon after the operation failed.
            if memory is not None and options.thread_count == 1:
                self._pump_all()
            for receiver in receivers:
                receiver.join()
            if memory is not None and not self._failures:
                memory.settle(deadline)
        except BaseException as error:
            self._give_up(error, receivers)
            raise
        if self._failures:
            raise self._failures[0]

    def _receivers_for(self, options: TransferOptions) -> list[threading.Thread]:
        """Return the threads that take what others read.

        With one thread there is none for what lies in memory: it is taken between reads. Two
        threads a rank would wait for one another's turn of the interpreter.
        """
        receivers = []
        if any(unit.owner not in self._mates for unit in self._awaited.values()):
            receivers.append(self._thread("shared reads", self._receive_all))
        if self._linked.memory is not None and options.thread_count > 1:
            receivers.append(self._thread("shared reads in memory", self._pump_all))
        return receivers

    def _give_up(self, error: BaseException, receivers: Sequence[threading.Thread]) -> None:
        """Tell the others of `error` and wait for the threads; raise what came before it."""
        self._fail(error)
        for receiver in receivers:
            receiver.join(_JOIN_S)
            if receiver.is_alive():
                log.warning("%s has not ended yet; it writes into no target.", receiver.name)
        if self._failures[0] is not error:
            raise self._failures[0] from error

    def _thread(self, what: str, task: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001  # raised by the caller's thread
                # Ends the reads of this rank, too: it waits for nobody's bytes any more.
                self._fail(error)

        return threading.Thread(target=run, name=f"{what} of rank {self._rank}", daemon=True)

    def _fail(self, error: BaseException) -> None:
        """Note why this rank gives up, in either thread, and tell the others at once."""
        self._failures.append(error)
        deadline = self._linked.deadline
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"{type(error).__name__}: {error}",
                rank=self._rank,
                phase=deadline.phase,
                next_step="See the log of that rank.",
            )
        deadline.failed(error)

    def _borrow(self, length: int) -> memoryview:
        memory, deadline = self._linked.memory, self._linked.deadline
        assert memory is not None  # noqa: S101  # who has none borrows none
        return memory.borrow(length, deadline)

    def _take(self, members: Sequence[tuple[int, Span]], view: memoryview) -> None:
        """Deliver verified bytes to this rank's own targets, and pass them to who waits."""
        memory, deadline = self._linked.memory, self._linked.deadline
        near, far = self._sides[self._receivers[members[0][1].token]]
        if memory is not None:
            # First of all: they copy while this rank does.
            pairs = [(span.token, at) for at, span in members]
            memory.announce(view, pairs, near, deadline)
        begin = None if memory is None else memory.place_of(view)
        for at, span in members:
            part = view[at : at + span.stop - span.start]
            self._deliver(span, part, None if begin is None else (self._rank, begin + at))
        if far:
            self._send(far, members, view)
        if memory is not None:
            memory.done(view)
            memory.glance(deadline)

    def _send(
        self, ranks: Sequence[int], members: Sequence[tuple[int, Span]], view: memoryview
    ) -> None:
        table = array("q", [word for at, span in members for word in (span.token, at)])
        head = array("q", [len(members), len(view), self._rank])
        for rank in ranks:
            # One message to a rank at a time: its three transfers must not mix with another's.
            with self._turn(rank):
                for tag, data in enumerate((memoryview(head), memoryview(table), view), _TAG):
                    self._transport.send(rank, data.cast("B"), tag, self._linked.deadline)

    @property
    def _transport(self) -> Transport:
        transport = self._linked.transport
        assert transport is not None  # noqa: S101  # ranks of other hosts are reached by one
        return transport

    @contextmanager
    def _turn(self, rank: int) -> Iterator[None]:
        lane = self._lanes[rank]
        while not lane.acquire(timeout=_LOOK_S):
            self._linked.deadline.check(f"Sending to rank {rank}")
        try:
            yield
        finally:
            lane.release()

    def _pump_all(self) -> None:
        """Take what mates read until that is all."""
        memory, deadline = self._linked.memory, self._linked.deadline
        assert memory is not None  # noqa: S101  # the caller looked
        mates = self._mates
        left = {number for number, unit in self._awaited.items() if unit.owner in mates}
        while left:
            deadline.check("Waiting for what other ranks of this host read")
            if self._failures:
                return
            memory.pump(_LOOK_S, deadline)
            left &= self._awaited.keys()

    def _found(
        self, source: int, begin: int, view: memoryview, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Take what lies in a mate's memory from `begin` on, verified by that."""
        self._accept(source, view, pairs, begin=begin)

    def _receive_all(self) -> None:
        """Take what ranks of other hosts send until that is all."""
        transport, deadline = self._transport, self._linked.deadline
        mates = self._mates
        left_count = sum(unit.owner not in mates for unit in self._awaited.values())
        body = memoryview(bytearray(0))
        head = array("q", [0] * _WORDS)
        while left_count:
            source = transport.receive_any(memoryview(head).cast("B"), _TAG, deadline)
            count, length, rank = head
            if rank != source or not 0 < count <= left_count or length <= 0:
                raise self._nonsense(source)
            table = array("q", [0] * (2 * count))
            transport.receive(source, memoryview(table).cast("B"), _TAG + 1, deadline)
            if length > len(body):
                body = memoryview(bytearray(length))
            transport.receive(source, body[:length], _TAG + 2, deadline)
            pairs = list(zip(table[::2], table[1::2], strict=True))
            self._accept(source, body[:length], pairs)
            left_count -= count

    def _accept(
        self,
        source: int,
        view: memoryview,
        pairs: Sequence[tuple[int, int]],
        *,
        begin: int | None = None,
    ) -> None:
        """Deliver the units that `pairs` finds in `view`.

        Unless that begins at `begin` of memory that `source` shares and has verified, they are
        verified here.
        """
        for number, at in pairs:
            unit = self._awaited.get(number)
            if unit is None or unit.owner != source:
                raise self._nonsense(source)
            span = self._spans[number]
            stop = at + span.stop - span.start
            if at < 0 or stop > len(view):
                raise self._nonsense(source)
            part = view[at:stop]
            if begin is None:
                span.place.check(part, span.start)
            self._deliver(span, part, None if begin is None else (source, begin + at))
            # Only now: who waits for the last unit waits for its delivery.
            del self._awaited[number]
            self._linked.deadline.advanced(len(part))
            self._on_bytes(len(part))

    def _deliver(self, span: Span, part: memoryview, place: tuple[int, int] | None) -> None:
        """Put verified bytes where they belong; `place` is whose memory they lie in, and where."""
        source, at = (None, 0) if place is None else place
        for request, put in self._takers(source, self._keys[span.token]):
            if self._failures:
                # The caller may use the targets again, though this thread came back late.
                raise CheckpointError(f"The load of rank {self._rank} was given up.")
            if put is None or not put(at, span.start, len(part)):
                deliver(request, span.start, part)

    def _takers(self, source: int | None, key: Key) -> list[tuple[Request, Put | None]]:
        """Return who wants a chunk, and what copies it to them out of the memory of `source`."""
        takers = self._known_takers.get((source, key))
        if takers is None:
            memory = None
            if source is not None and self._linked.memory is not None:
                memory = self._linked.memory.memory_of(source)
            takers = [
                (request, None if memory is None or request.puts is None else request.puts(memory))
                for request in self._requests[key]
            ]
            self._known_takers[source, key] = takers
        return takers

    def _nonsense(self, source: int) -> CheckpointError:
        return CheckpointError(
            f"Rank {source} sent rank {self._rank} what it was not to send.",
            rank=source,
            phase="load",
            next_step="Check that all ranks run one version; or pass shared_reads='never'.",
        )
