"""Memory that ranks of one host share: words about buffers, buffers used again, the dead named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from descriptors import open_files

from ckpt_storage import hostmemory
from ckpt_storage.deadline import Deadline
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError, RankFailedError
from ckpt_storage.hostmemory import HostMemory, HostMemoryError
from ckpt_storage.namelessmemory import host_identity

BUFFER_BYTES = 8192

pytestmark = pytest.mark.skipif(not host_identity(), reason="needs Linux's memory without a name")


@contextmanager
def two(buffer_count: int = 2) -> Iterator[tuple[HostMemory, HostMemory]]:
    """Give two ranks' memories, both in this process, that have reached one another."""
    first, second = (
        HostMemory(rank, buffer_bytes=BUFFER_BYTES, buffer_count=buffer_count) for rank in (0, 1)
    )
    try:
        first.reach({1: second.offer})
        second.reach({0: first.offer})
        yield first, second
    finally:
        first.close()
        second.close()


def deadline(seconds: float = 20) -> Deadline:
    """Return a deadline that no test should reach."""
    return Deadline("load", seconds)


class Taker:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes, list[tuple[int, int]]]] = []

    def __call__(
        self, rank: int, at: int, view: memoryview, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Keep a copy."""
        assert at % BUFFER_BYTES == 0
        self.seen.append((rank, bytes(view), list(pairs)))


def filled(memory: HostMemory, data: bytes) -> memoryview:
    """Return a buffer that holds `data`."""
    view = memory.borrow(len(data), deadline())
    view[:] = data
    return view


def test_what_one_rank_announces_the_other_sees() -> None:
    """The bytes lie there as they were put, with the numbers and places of units."""
    with two() as (first, second):
        taker = Taker()
        second.takes(taker)
        view = filled(first, b"abcdef" * 100)
        first.announce(view, [(7, 0), (9, 300)], [1], deadline())
        second.pump(5, deadline())
        assert taker.seen == [(0, b"abcdef" * 100, [(7, 0), (9, 300)])]


def test_a_buffer_is_used_again_only_when_all_are_done() -> None:
    """Until the mate has taken it and its owner said done, nobody borrows the only buffer."""
    with two(buffer_count=1) as (first, second):
        second.takes(Taker())
        view = filled(first, b"x" * BUFFER_BYTES)
        first.announce(view, [(0, 0)], [1], deadline())
        with pytest.raises(PhaseTimeoutError, match="other ranks of this host"):
            first.borrow(1, deadline(0.05))
        second.pump(5, deadline())
        with pytest.raises(PhaseTimeoutError, match="other ranks of this host"):
            first.borrow(1, deadline(0.05))
        first.done(view)
        assert len(first.borrow(10, deadline())) == 10


def test_a_buffer_that_nobody_waits_for_is_free_at_once() -> None:
    """An announcement to no mate needs no answer."""
    with two(buffer_count=1) as (first, _):
        for _ in range(3):
            view = filled(first, b"x")
            first.announce(view, [(0, 0)], [], deadline())
            first.done(view)


def test_units_beyond_one_word_arrive_in_several() -> None:
    """A thousand small units in a buffer are all told, each once, and the buffer comes back."""
    with two(buffer_count=1) as (first, second):
        taker = Taker()
        second.takes(taker)
        pairs = [(number, 8 * number) for number in range(1000)]
        view = filled(first, bytes(BUFFER_BYTES))
        first.announce(view, pairs, [1], deadline())
        first.done(view)
        while len([pair for _, _, some in taker.seen for pair in some]) < 1000:
            second.pump(5, deadline())
        assert [pair for _, _, some in taker.seen for pair in some] == pairs
        assert len(taker.seen) > 1
        first.borrow(1, deadline())


def test_full_pipes_tie_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that tell each other more than pipes of a page hold both come to the end."""
    monkeypatch.setattr(hostmemory, "_WANTED_PIPE_BYTES", 4096)
    count = 300
    with two(buffer_count=6) as (first, second):
        takers = [Taker(), Taker()]
        for memory, taker in zip((first, second), takers, strict=True):
            memory.takes(taker)
        errors: list[BaseException] = []

        def talk(memory: HostMemory, taker: Taker, to: int) -> None:
            try:
                for number in range(count):
                    view = filled(memory, b"abc")
                    memory.announce(view, [(number, at) for at in range(240)], [to], deadline())
                    memory.done(view)
                while len(taker.seen) < count:
                    memory.pump(0.2, deadline())
            except BaseException as error:  # noqa: BLE001  # told by the test
                errors.append(error)

        threads = [
            threading.Thread(target=talk, args=args, daemon=True)
            for args in ((first, takers[0], 1), (second, takers[1], 0))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert [len(taker.seen) for taker in takers] == [count, count]


def test_an_answer_that_finds_a_pipe_full_is_given_later() -> None:
    """Who takes waits for nobody: two that waited for each other's pipes would do so for ever."""
    with two(buffer_count=1) as (first, second):
        answer_to_nothing = hostmemory._HEAD.pack(2, 1, -1, 0, 0)  # noqa: SLF001

        def taken(*_: object) -> None:
            with suppress(BlockingIOError):
                while os.write(second._mates[0].inbox_fd, answer_to_nothing):  # noqa: SLF001
                    pass

        second.takes(taken)
        view = filled(first, b"x")
        first.announce(view, [(0, 0)], [1], deadline())
        first.done(view)
        second.pump(5, deadline())
        with pytest.raises(PhaseTimeoutError):
            first.borrow(1, deadline(0.05))
        second.settle(deadline())
        first.borrow(1, deadline())


def test_too_little_memory_is_told_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no room the memory is not made, and nothing stays open."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match="No space left"):
        HostMemory(0, buffer_bytes=BUFFER_BYTES, buffer_count=2)
    assert open_files() <= before


def test_nobody_can_shorten_the_memory() -> None:
    """To cut it, which would kill who looks into it, is refused to all."""
    with two() as (first, _):
        with pytest.raises(PermissionError):
            os.ftruncate(first.offer.memory_fd, 0)
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{first.offer.memory_fd}", 0)


def test_a_stranger_is_not_reached() -> None:
    """What has another name, or belongs to no process, is not opened."""
    one = HostMemory(0, buffer_bytes=BUFFER_BYTES, buffer_count=1)
    other = HostMemory(1, buffer_bytes=BUFFER_BYTES, buffer_count=1)
    try:
        offer = other.offer
        for wrong in (
            replace(offer, name=f"{offer.name}x"),
            replace(offer, inbox_inode=offer.inbox_inode + 1),
            replace(offer, memory_fd=100_000),
            replace(offer, pid=2**22),
        ):
            with pytest.raises(HostMemoryError, match="rank 1"):
                one.reach({1: wrong})
    finally:
        one.close()
        other.close()


def test_nothing_stays_open() -> None:
    """After both have closed the process holds the descriptors that it held before."""
    before = open_files()
    with two():
        assert open_files() - before
    assert open_files() <= before


def test_words_of_nobody_known_are_refused() -> None:
    """A word from no mate, or about bytes beyond its memory, ends the load."""
    for word in (
        hostmemory._HEAD.pack(1, 5, 0, 10, 0),  # noqa: SLF001
        hostmemory._HEAD.pack(9, 1, 0, 10, 0),  # noqa: SLF001
        hostmemory._HEAD.pack(1, 1, 0, 1 << 30, 0),  # noqa: SLF001
        hostmemory._HEAD.pack(1, 1, -4096, 10, 0),  # noqa: SLF001
    ):
        with two() as (first, second):
            first.takes(Taker())
            os.write(second._mates[0].inbox_fd, word)  # noqa: SLF001
            with pytest.raises(CheckpointError, match="was not to say"):
                first.pump(5, deadline())


_CHILD = """
import sys
from ckpt_storage.hostmemory import HostMemory
memory = HostMemory(1, buffer_bytes=4096, buffer_count=1)
print(memory.offer.pack(), flush=True)
sys.stdin.read()
"""


def test_a_mate_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it raises soon, with its rank and process."""
    monkeypatch.setattr(hostmemory, "_WORD_S", 0.0)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    memory = HostMemory(0, buffer_bytes=BUFFER_BYTES, buffer_count=1)
    try:
        assert child.stdout is not None
        memory.reach({1: hostmemory.Offer.unpack(child.stdout.readline())})
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with pytest.raises(RankFailedError, match=f"Rank 1 .process {child.pid}") as caught:
            memory.pump(5, deadline())
        assert caught.value.rank == 1
        # What it is told now goes nowhere, and nobody waits.
        view = memory.borrow(1, deadline())
        memory.announce(view, [(0, 0)], [1], deadline())
    finally:
        memory.close()
        child.communicate()


def test_a_glance_does_not_wait_for_the_thread_that_pumps() -> None:
    """That one may be long about it, and takes what there is to be taken."""
    entered, leave = threading.Event(), threading.Event()

    def slow(_rank: int, _at: int, _view: memoryview, _pairs: Sequence[tuple[int, int]]) -> None:
        entered.set()
        leave.wait(20)

    with two() as (first, second):
        second.takes(slow)
        pumping = threading.Thread(target=second.pump, args=(5, deadline()))
        pumping.start()
        first.announce(filled(first, b"abc"), [(1, 0)], [1], deadline())
        try:
            assert entered.wait(20)
            glancing = threading.Thread(target=second.glance, args=(deadline(),), daemon=True)
            glancing.start()
            glancing.join(10)
            assert not glancing.is_alive()
            assert pumping.is_alive()
        finally:
            leave.set()
            pumping.join(20)


def test_a_glance_takes_what_was_said() -> None:
    """Where nobody else does, it is a pump that does not wait."""
    with two() as (first, second):
        taker = Taker()
        second.takes(taker)
        second.glance(deadline())
        first.announce(filled(first, b"abc"), [(1, 0)], [1], deadline())
        second.glance(deadline())
        assert taker.seen == [(0, b"abc", [(1, 0)])]
