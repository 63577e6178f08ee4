"""Shared reads that fail: whatever is raised, peers hear of it, and nothing writes afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_stores import local_store

from ckpt_storage.errors import CheckpointError
from ckpt_storage.format.boxes import Box, WindowCopy
from ckpt_storage.format.selections import box_selection
from ckpt_storage.loads.sharedreads import SharedReads
from ckpt_storage.loads.sharing import Key, ShareOrder, SharePolicy, plan_shares
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead
from ckpt_storage.transfer.costs import LOCAL_COSTS
from ckpt_storage.transfer.ranges import RangeReader

MIB = 1 << 20
UNIT_COUNT = 4
CHUNK_BYTES = UNIT_COUNT * 8 * MIB
KEY: Key = ("w", (0,))
OPTIONS = TransferOptions.for_storage(
    is_remote=False,
    local_threads=1,
    local_part_bytes=8 * MIB,
    thread_count=None,
    part_bytes=None,
    memory_limit_bytes=None,
)


POLICY = SharePolicy(unit_bytes=8 * MIB, min_saved_bytes=1, max_gap_bytes=MIB)


class Operation:
    """What a phase is told of its operation: the first failure counts."""

    def __init__(self) -> None:
        self.told: list[CheckpointError] = []

    def failure(self) -> CheckpointError | None:
        """Return the first failure."""
        return self.told[0] if self.told else None

    def failed(self, error: CheckpointError) -> None:
        """Note a failure."""
        self.told.append(error)

    def advanced(self, byte_count: int) -> None:
        """Ignore progress."""

    expect = advanced

    def ended_file(self) -> None:
        """Ignore progress."""


class Wire:
    """Rank 0's end of messages with a rank 1 that sends its units when `open` is set.

    A wait ends soon after the operation failed, as those of the ranks' own group do.
    """

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.open = threading.Event()
        self._messages = list(messages)

    def send(self, to: int, data: memoryview, tag: int, deadline: Deadline) -> None:
        """Swallow what rank 0 sends."""

    def receive(self, source: int, into: memoryview, tag: int, deadline: Deadline) -> None:
        """Fill `into` with the next message."""
        assert (source, tag > 0) == (1, True)
        deadline.check("Receiving")
        into[:] = self._messages.pop(0)

    def receive_any(self, into: memoryview, tag: int, deadline: Deadline) -> int:
        """Wait for rank 1's next unit."""
        while not self.open.wait(0.01):
            deadline.check("Receiving")
        self.receive(1, into, tag, deadline)
        return 1


def orders() -> list[ShareOrder]:
    """Return the orders of two ranks that both want the whole chunk."""
    whole = Box((0,), (CHUNK_BYTES,))
    found = plan_shares(
        {KEY: [(0, whole), (1, whole)]}, lambda _: ((CHUNK_BYTES,), 1), world_size=2, policy=POLICY
    )
    assert found is not None
    return found


def messages_of(order: ShareOrder) -> list[bytes]:
    """Return what rank 1 sends of the units that are its own: zeros."""
    found = []
    for unit in order.units:
        if unit.owner == 1:
            length = unit.stop - unit.start
            found += [numbers(1, length, 1), numbers(unit.number, 0), bytes(length)]
    return found


def numbers(*values: int) -> bytes:
    """Return whole numbers as they travel."""
    return b"".join(value.to_bytes(8, "little") for value in values)


class Sink:
    """A target without memory, of which `put` is given."""

    memory = None

    def __init__(self, put: Callable[[memoryview, Any], None]) -> None:
        self.put = put


class Case:
    """Rank 0's part of a shared read, over a folder, whose sink is `sink`."""

    def __init__(self, folder: Path, sink: Callable[[memoryview, Any], None]) -> None:
        (folder / "f").write_bytes(bytes(CHUNK_BYTES))
        # Two runs: no part of it goes straight into a target.
        region = Box((0, 0), (2, CHUNK_BYTES // 2 - 1))
        place = ChunkPlace(path="f", fqn="w", start=0, size_bytes=CHUNK_BYTES)
        request = ChunkRead(
            place=place,
            item_bytes=1,
            chunk_sizes=(2, CHUNK_BYTES // 2),
            where=box_selection(region),
            target=Sink(sink),
        )
        order = orders()[0]
        self.operation = Operation()
        self.wire = Wire(messages_of(order))
        self.deadline = Deadline("load", 20, watch=self.operation)
        self.shared = SharedReads(order, {KEY: [request]}, self.wire, self.deadline)
        self.store = local_store(str(folder))

    def run(self) -> None:
        """Read and receive."""
        ranges = RangeReader(self.store, OPTIONS, self.deadline)
        self.shared.run(ranges, self.shared.ranges(LOCAL_COSTS), on_bytes=lambda _: None)


def is_receiver() -> bool:
    """Return whether this thread is the one that receives."""
    return threading.current_thread().name.startswith("shared reads")


def receivers() -> list[threading.Thread]:
    """Return the receiving threads that are alive."""
    return [t for t in threading.enumerate() if t.name.startswith("shared reads")]


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyboardInterrupt, CheckpointError])
def test_a_sink_that_raises_ends_the_reads_of_all(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    """The error leaves `run` as it is; peers are told, and the receiver has ended by then."""
    taken: list[bool] = []

    def sink(_window: memoryview, _copies: Sequence[WindowCopy]) -> None:
        taken.append(is_receiver())
        if not is_receiver():
            raise kind("the sink broke")

    case = Case(tmp_path, sink)
    with pytest.raises(kind, match="the sink broke"):
        case.run()
    assert receivers() == []
    assert "the sink broke" in str(case.operation.told[0])
    count = len(taken)
    case.wire.open.set()
    assert len(taken) == count


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, CheckpointError])
def test_a_sink_that_raises_in_the_receiver_ends_the_reads_of_all(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    """The first failure is raised, by the caller's thread; peers are told of it at once."""

    def sink(_window: memoryview, _copies: Sequence[WindowCopy]) -> None:
        if is_receiver():
            raise kind("the sink broke")
        case.wire.open.set()
        # What this rank still reads must not delay the word.
        limit = time.monotonic() + 10
        while not case.operation.told and time.monotonic() < limit:
            time.sleep(0.01)
        told.append(bool(case.operation.told))

    told: list[bool] = []
    case = Case(tmp_path, sink)
    with pytest.raises(kind, match="the sink broke"):
        case.run()
    assert receivers() == []
    assert told
    assert all(told)
    assert "the sink broke" in str(case.operation.told[0])


def test_an_interrupt_while_others_are_awaited_ends_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C that arrives after this rank's own reads is told, too, and leaves no thread."""
    case = Case(tmp_path, lambda _window, _copies: None)
    original = threading.Thread.join
    calls: list[float | None] = []

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name.startswith("shared reads"):
            calls.append(timeout)
            if len(calls) == 1:
                raise KeyboardInterrupt
        original(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        case.run()
    assert receivers() == []
    assert case.operation.told
