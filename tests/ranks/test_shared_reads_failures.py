"""Shared reads end: with every rank's values, whatever the windows; or with an error on each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from dcp_cases import raw_bytes, seeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_stores import local_store

from ckpt_storage.coordination.peers import Peers
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.format.boxes import Box, WindowCopy, box_selection
from ckpt_storage.loads import sharing
from ckpt_storage.loads.exchange import SharedReads
from ckpt_storage.loads.sharing import Key, plan_shares
from ckpt_storage.loads.targets import TensorRead
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead
from ckpt_storage.transfer.ranges import RangeReader

KIB = 1024
UNIT_BYTES = 64 * KIB


@pytest.fixture(autouse=True, scope="module")
def eager() -> Iterator[None]:
    """Sharing anything at all is enough, and gaps are not read over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST_SAVED_BYTES", 1)
        patch.setattr(sharing, "_MOST_GAP_BYTES", KIB)
        yield


class Operation:
    """What the phases of all ranks are told of their operation: the first failure counts."""

    def __init__(self) -> None:
        self.told: list[CheckpointError] = []
        self.failed = self.told.append
        self.advanced = self.expect = lambda _: None
        self.ended_file = lambda: None

    def failure(self) -> CheckpointError | None:
        """Return the first failure."""
        return self.told[0] if self.told else None


Way = queue.SimpleQueue[tuple[memoryview, queue.SimpleQueue[None]]]


def wait_for(found: Callable[[], Any], deadline: Deadline) -> Any:
    """Return what a queue gives; raise what the deadline raises."""
    while True:
        try:
            return found()
        except queue.Empty:
            deadline.check("Waiting for a rank")


class Wire:
    """One rank's end of the ways: a message is taken over when both sides are there."""

    def __init__(self, ways: dict[tuple[int, int, int], Way], rank: int) -> None:
        self._ways = ways
        self._rank = rank

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Wait for the receiver, and fill its memory."""
        way = self._ways.setdefault((self._rank, to, tag), queue.SimpleQueue())
        into, arrived = wait_for(lambda: way.get(timeout=0.05), deadline)
        into[:] = data
        arrived.put(None)

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Wait until the sender has filled `into`."""
        arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        way = self._ways.setdefault((source, self._rank, tag), queue.SimpleQueue())
        way.put((into, arrived))
        wait_for(lambda: arrived.get(timeout=0.05), deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedRead(TensorRead):
    """A read that tells of the elements it gets, piece by piece."""

    note: Callable[[], None]

    @property
    def memory(self) -> None:
        """None of it is filled at once."""

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy."""
        self.note()
        TensorRead.put(self, window, copies)


class Ranks:
    """Some ranks that want regions of chunks, in one process, over a folder."""

    def __init__(
        self,
        folder: Path,
        wants: dict[Key, list[tuple[int, Box]]],
        shapes: dict[Key, tuple[int, int]],
        world_size: int,
        window: int,
        note: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.operation = Operation()
        self.expected: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.parts: list[SharedReads] = []
        orders = plan_shares(
            wants, lambda key: (shapes[key], 1), world_size=world_size, unit_bytes=UNIT_BYTES
        )
        ways: dict[tuple[int, int, int], Way] = {}
        arrays: dict[Key, torch.Tensor] = {}
        for number, (key, shape) in enumerate(shapes.items()):
            arrays[key] = seeded(number, *shape, dtype=torch.uint8)
            (folder / key[0]).write_bytes(raw_bytes(arrays[key]))
        for order in orders or ():
            reads: dict[Key, list[ChunkRead]] = {key: [] for key in order.keys}
            for key, found in reads.items():
                size_bytes = arrays[key].numel()
                place = ChunkPlace(path=key[0], fqn=key[0], start=0, size_bytes=size_bytes)
                for region in (box for rank, box in wants[key] if rank == order.rank):
                    target = torch.zeros(tuple(region.sizes), dtype=torch.uint8)
                    where = box_selection(region)
                    cut = arrays[key][tuple(slice(r.start, r.stop) for r in where)]
                    self.expected.append((target, cut))
                    found.append(
                        NotedRead(
                            place=place,
                            item_bytes=1,
                            chunk_sizes=shapes[key],
                            where=where,
                            tensor=target,
                            dtype=torch.uint8,
                            note=partial(note, order.rank),
                        )
                    )
            deadline = Deadline("load", 20, watch=self.operation)
            options = TransferOptions(part_bytes=UNIT_BYTES, block_bytes=KIB)
            ranges = RangeReader(local_store(str(folder)), options, deadline)
            wire = cast("Peers", Wire(ways, order.rank))
            self.parts.append(SharedReads(order, reads, wire, ranges, window=window))

    def run(self, rest: Callable[[], None] = lambda: None) -> list[BaseException | None]:
        """Run all ranks at a time; return what each raised."""
        errors: list[BaseException | None] = [None] * len(self.parts)

        def one(number: int) -> None:
            try:
                self.parts[number].run(rest, on_bytes=lambda _: None)
            except BaseException as error:  # noqa: BLE001  # returned
                errors[number] = error

        threads = [
            threading.Thread(target=one, args=(n,), name=f"of {n}") for n in range(len(self.parts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return errors


def whole(*sizes: int) -> Box:
    """Return the region of a whole chunk."""
    return Box((0,) * len(sizes), sizes)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), world_size=st.integers(2, 8), window=st.sampled_from([1, 2]))
def test_every_rank_gets_what_it_wants(
    tmp_path: Path, data: st.DataObject, world_size: int, window: int
) -> None:
    """Whatever up to 8 ranks want, with windows of 1 and 2: each gets it, and none waits."""
    shapes: dict[Key, tuple[int, int]] = {}
    wants: dict[Key, list[tuple[int, Box]]] = {}
    for number in range(data.draw(st.integers(1, 4))):
        key: Key = (f"t{number}", (0, 0))
        shape = shapes[key] = data.draw(st.sampled_from([(4, 9), (700, 300), (40, 5000)]))
        for rank in data.draw(st.sets(st.integers(0, world_size - 1), min_size=2)):
            top = data.draw(st.integers(0, shape[0] - 1))
            part = Box((top, 1), (shape[0] - top, shape[1] - 1))
            wants.setdefault(key, []).append(
                (rank, data.draw(st.sampled_from([part, whole(*shape)])))
            )
    ranks = Ranks(tmp_path, wants, shapes, world_size, window)
    assert not any(ranks.run())
    assert all(torch.equal(found, expected) for found, expected in ranks.expected)


KEY: Key = ("w", (0, 0))


def replicated(folder: Path, note: Callable[[int], None]) -> Ranks:
    """Return two ranks that both want a chunk of eight units."""
    shape = (8, UNIT_BYTES)
    return Ranks(folder, {KEY: [(r, whole(*shape)) for r in range(2)]}, {KEY: shape}, 2, 2, note)


def left() -> list[str]:
    """Return the names of the threads of shared reads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("shared reads")]


@pytest.mark.parametrize("where", ["passing on", "receiving", "own"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, CheckpointError])
def test_what_raises_on_one_rank_ends_the_reads_of_all(
    tmp_path: Path, kind: type[BaseException], where: str
) -> None:
    """The error leaves `run` of its rank as it is; the other is told; no thread is left."""

    def note(rank: int) -> None:
        if rank == 1 and where in threading.current_thread().name:
            raise kind("it broke")

    def rest() -> None:
        if where == "own" and threading.current_thread().name.startswith("of 1"):
            raise kind("it broke")

    ranks = replicated(tmp_path, note)
    begin = time.monotonic()
    errors = ranks.run(rest)
    assert time.monotonic() - begin < 10
    assert type(errors[1]) is kind
    assert "it broke" in str(errors[0])
    assert "it broke" in str(ranks.operation.told[0])
    assert left() == []


def test_a_rank_that_never_comes_is_no_wait_for_ever(tmp_path: Path) -> None:
    """Who waits for a unit of one that reads nothing raises by the deadline of the reads."""
    ranks = replicated(tmp_path, lambda _: None)
    deadline = ranks.parts[0]._deadline  # noqa: SLF001  # shorter than that of the others
    deadline.at_monotonic_s = time.monotonic() + 0.5
    del ranks.parts[1]
    assert isinstance(ranks.run()[0], PhaseTimeoutError)
    assert left() == []
