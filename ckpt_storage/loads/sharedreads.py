"""Reads that ranks share: each fetches its part of what several need, and sends it on.

A message is three transfers under consecutive tags: how many units and bytes; which unit lies
where; the bytes as they are in the file. One thread of each rank takes messages as they come, from
anyone, and waits for nothing else: it sends nothing, and delivering needs no other rank. So no
order of sending can tie ranks up. What it takes is held to the checkpoint's own checksums (I9),
where there are any and the reader verifies. Without, as with the safetensors of others, messages
are checked for form alone, and a bit turned on the way is TCP's to find.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.boxes import coalesce
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, put
from ckpt_storage.transfer.costs import ReadCosts
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

from .sharing import Key, ShareOrder, Unit

log = logging.getLogger("ckpt_storage")

_TAG = 11
_WORDS = 3
"""Whole numbers of the first transfer: units, bytes, and the sender's rank as it knows itself."""

_JOIN_S = 30.0
_LOOK_S = 0.2


class Transport(Protocol):
    """Messages between the ranks of a load; every wait ends by the deadline."""

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Send `data` to rank `to`."""

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` with what rank `source` sends under `tag`."""

    def receive_any(self, into: memoryview, tag: int, deadline: Deadline) -> int:
        """Fill `into` with what any rank sends under `tag`; return which."""


def fits_units(place: ChunkPlace, unit_bytes: int) -> bool:
    """Return whether no block of the chunk lies in two units."""
    return unit_bytes % place.block_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes `[start, stop)` of a payload, both ends between blocks; `token` is the caller's."""

    place: ChunkPlace
    start: int
    stop: int
    token: int


def plan_spans(
    spans: Sequence[Span],
    taken: Callable[[Sequence[tuple[int, Span]], memoryview], None],
    *,
    part_bytes: int,
    costs: ReadCosts,
) -> list[RangeRead]:
    """Return reads of whole spans, neighbours together; `taken` gets where each lies in one."""
    by_path: dict[str, list[Span]] = {}
    for span in spans:
        by_path.setdefault(span.place.path, []).append(span)
    reads = []
    for path in sorted(by_path):
        held = sorted(by_path[path], key=lambda span: span.place.start + span.start)
        intervals = [(s.place.start + s.start, s.place.start + s.stop) for s in held]
        for extent in coalesce(intervals, costs.gap_bytes, part_bytes):
            members = [(intervals[at][0] - extent.start, held[at]) for at in extent.members]
            reads.append(
                RangeRead(
                    path=path,
                    start=extent.start,
                    stop=extent.stop,
                    done=partial(_verify_spans, members, taken),
                    file_bytes=held[extent.members[0]].place.file_bytes,
                )
            )
    return reads


def _verify_spans(
    members: Sequence[tuple[int, Span]],
    taken: Callable[[Sequence[tuple[int, Span]], memoryview], None],
    view: memoryview,
) -> None:
    for at, span in members:
        span.place.check(view[at : at + span.stop - span.start], span.start)
    taken(members, view)


class SharedReads:
    """One rank's part of the shared reads of one load.

    `requests` has what this rank wants, by chunk; those of the order's chunks are served here
    and by nobody else. The `deadline` of the reads knows of other ranks' failures.
    """

    def __init__(
        self,
        order: ShareOrder,
        requests: Mapping[Key, Sequence[ChunkRead]],
        transport: Transport,
        deadline: Deadline,
    ) -> None:
        self._rank = order.rank
        self._unit_bytes = order.unit_bytes
        self._requests = requests
        self._transport = transport
        self._deadline = deadline
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
        ranks = {rank for receivers in self._receivers.values() for rank in receivers}
        self._lanes = {rank: threading.Lock() for rank in ranks}
        self._on_bytes: Callable[[int], None] = lambda _: None

    @property
    def awaited_bytes(self) -> int:
        """Bytes that others read for this rank."""
        return sum(self._spans[n].stop - self._spans[n].start for n in self._awaited)

    def ranges(self, costs: ReadCosts) -> list[RangeRead]:
        """Return the reads of what this rank owns; each is delivered and passed on when it came."""
        groups: dict[tuple[int, ...], list[Span]] = {}
        for span in self._own:
            groups.setdefault(self._receivers[span.token], []).append(span)
        return [
            read
            for spans in groups.values()
            for read in plan_spans(spans, self._take, part_bytes=self._unit_bytes, costs=costs)
        ]

    def run(
        self,
        ranges: RangeReader,
        reads: Sequence[RangeRead],
        *,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Do the `reads`, and take what ranks read for this one, to the end.

        Raises the first failure, here or of the operation that the deadline belongs to, whatever
        its kind, after the other ranks were told; no thread of this rank writes into a target
        then, unless the error says so.
        """
        self._on_bytes = on_bytes
        receiver = None
        if self._awaited:
            name = f"shared reads of rank {self._rank}"
            receiver = threading.Thread(target=self._receive, name=name, daemon=True)
            receiver.start()
        try:
            ranges.run(reads, on_bytes=on_bytes)
            # Each wait ends by the deadline, or soon after the operation failed.
            if receiver is not None:
                receiver.join()
        except BaseException as error:
            self._give_up(error, receiver)
            raise
        if self._failures:
            raise self._failures[0]

    def _give_up(self, error: BaseException, receiver: threading.Thread | None) -> None:
        """Tell the others of `error` and wait for the thread; raise what came before it."""
        self._fail(error)
        if receiver is not None:
            receiver.join(_JOIN_S)
            if receiver.is_alive():
                log.warning("%s has not ended yet; it writes into no target.", receiver.name)
        if self._failures[0] is not error:
            raise self._failures[0] from error

    def _receive(self) -> None:
        try:
            self._receive_all()
        except BaseException as error:  # noqa: BLE001  # raised by the caller's thread
            # Ends the reads of this rank, too: it waits for nobody's bytes any more.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Note why this rank gives up, in either thread, and tell the others at once."""
        self._failures.append(error)
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"{type(error).__name__}: {error}",
                rank=self._rank,
                phase=self._deadline.phase,
                next_step="See the log of that rank.",
            )
        self._deadline.failed(error)

    def _take(self, members: Sequence[tuple[int, Span]], view: memoryview) -> None:
        """Deliver verified bytes to this rank's own targets, and pass them to who waits."""
        for at, span in members:
            self._deliver(span, view[at : at + span.stop - span.start])
        table = array("q", [word for at, span in members for word in (span.token, at)])
        head = array("q", [len(members), len(view), self._rank])
        for rank in self._receivers[members[0][1].token]:
            # One message to a rank at a time: its three transfers must not mix with another's.
            with self._turn(rank):
                for tag, data in enumerate((memoryview(head), memoryview(table), view), _TAG):
                    self._transport.send(rank, data.cast("B"), tag, self._deadline)

    @contextmanager
    def _turn(self, rank: int) -> Iterator[None]:
        lane = self._lanes[rank]
        while not lane.acquire(timeout=_LOOK_S):
            self._deadline.check(f"Sending to rank {rank}")
        try:
            yield
        finally:
            lane.release()

    def _receive_all(self) -> None:
        """Take what other ranks send until that is all."""
        transport, deadline = self._transport, self._deadline
        body = memoryview(bytearray(0))
        head = array("q", [0] * _WORDS)
        while self._awaited:
            source = transport.receive_any(memoryview(head).cast("B"), _TAG, deadline)
            count, length, rank = head
            if rank != source or not 0 < count <= len(self._awaited) or length <= 0:
                raise self._nonsense(source)
            table = array("q", [0] * (2 * count))
            transport.receive(source, memoryview(table).cast("B"), _TAG + 1, deadline)
            if length > len(body):
                body = memoryview(bytearray(length))
            transport.receive(source, body[:length], _TAG + 2, deadline)
            for number, at in zip(table[::2], table[1::2], strict=True):
                self._accept(source, body[:length], number, at)

    def _accept(self, source: int, view: memoryview, number: int, at: int) -> None:
        """Verify and deliver the unit that begins at `at` of what `source` sent."""
        unit = self._awaited.get(number)
        if unit is None or unit.owner != source:
            raise self._nonsense(source)
        span = self._spans[number]
        stop = at + span.stop - span.start
        if at < 0 or stop > len(view):
            raise self._nonsense(source)
        part = view[at:stop]
        span.place.check(part, span.start)
        self._deliver(span, part)
        del self._awaited[number]
        self._deadline.advanced(len(part))
        self._on_bytes(len(part))

    def _deliver(self, span: Span, part: memoryview) -> None:
        """Put verified bytes where they belong."""
        for request in self._requests[self._keys[span.token]]:
            if self._failures:
                # The caller may use the targets again, though this thread came back late.
                raise CheckpointError(f"The load of rank {self._rank} was given up.")
            put(request, span.start, part)

    def _nonsense(self, source: int) -> CheckpointError:
        return CheckpointError(
            f"Rank {source} sent rank {self._rank} what it was not to send.",
            rank=source,
            phase="load",
            next_step="Check that all ranks run one version; or pass shared_reads='never'.",
        )
