"""How much one transfer does at a time: bytes in flight, requests under way, the cost of a read."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from ckpt_storage.options import KIB, MIB
from ckpt_storage.store.deadline import LOOK_S, Deadline
from ckpt_storage.store.store import Store

REMOTE_READ_BYTES = 16 * MIB
"""One ranged read of a remote file: the wait for its first byte is an eighth of its time."""


class Budget:
    """Bytes of buffers in flight, counted for all transfers of the process together.

    Each transfer names its own ceiling for the sum. First come, first served: a large claim is not
    starved by small ones. A holder must not wait for more: it claims all that one step needs at
    once. Safe in any thread.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what is held, as a child of fork must: it has none of its parent's threads."""
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.held_bytes = 0
        # The most that was ever held.
        self.peak_bytes = 0

    def acquire(self, byte_count: int, *, limit_bytes: int, deadline: Deadline) -> None:
        """Wait until `byte_count` more fit below `limit_bytes`, and claim them.

        A claim beyond the limit waits until nothing else is held. Raises `PhaseTimeoutError`, or
        what `deadline` knows of a failure elsewhere; nothing is claimed then.
        """
        turn = object()
        most_bytes = max(0, limit_bytes - byte_count)
        with self._changed:
            self._queue.append(turn)
            try:
                while self._queue[0] is not turn or self.held_bytes > most_bytes:
                    self._changed.wait(min(LOOK_S, deadline.remaining_s() + 0.001))
                    deadline.check("Waiting for memory to send or read with")
                self.held_bytes += byte_count
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()

    def release(self, byte_count: int) -> None:
        """Give back bytes that `acquire` claimed."""
        with self._changed:
            self.held_bytes -= byte_count
            self._changed.notify_all()


BUDGET = Budget()
"""What all writes of this process share."""

READ_BUDGET = Budget()
"""And all reads: who reads in order to write holds memory already, and must not wait for more."""

os.register_at_fork(after_in_child=BUDGET.reset)
os.register_at_fork(after_in_child=READ_BUDGET.reset)


class Pacer:
    """How many requests of one transfer may be under way at a time; safe in any thread.

    The number is halved when the storage asks for less, and then grows by one in a round (AIMD;
    Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in
    Computer Networks", 1989). A round is as many answers as requests may be under way.
    """

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._most = self._limit = max(1, most)
        self._answer_count = 0
        # Answers still to come to what was under way at the last cut.
        self._late_count = 0

    def limit(self) -> int:
        """Return how many requests may be under way now, 1 or more."""
        return self._limit

    def succeeded(self) -> None:
        """Note a request that was answered."""
        with self._lock:
            if self._late_count:
                self._late_count -= 1
                return
            self._answer_count += 1
            if self._answer_count >= self._limit:
                self._answer_count = 0
                self._limit = min(self._most, self._limit + 1)

    def slowed_down(self) -> None:
        """Note that the storage asked for fewer requests (SlowDown, 429, 503).

        The answers to requests that were in flight together count once.
        """
        with self._lock:
            if self._late_count:
                self._late_count -= 1
                return
            self._late_count = self._limit - 1
            self._answer_count = 0
            self._limit = max(1, self._limit // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """What reads are planned by: neighbours share a request where that takes less time than two.

    gap_bytes: the longest gap that is read rather than skipped by another request.
    copy_bytes: what is copied from a buffer to where it belongs in the time of a request.
    part_min_bytes, window_bytes: bound one request, from below where a load is split over several
        streams, from above where it goes through a buffer.
    """

    gap_bytes: int
    copy_bytes: int
    part_min_bytes: int
    window_bytes: int


# A call with its thread and the opening of the file takes 50 us, and copies run at 5 GB/s; windows
# stay in a processor's caches between read, check and copy. Each window takes 0.1 ms of Python.
LOCAL_COSTS = ReadCosts(
    gap_bytes=128 * KIB, copy_bytes=250_000, part_min_bytes=8 * MIB, window_bytes=4 * MIB
)

# Object stores: 30 ms to the first byte, as Amazon's guide to S3 performance has it. Where the
# network is the limit, gaps cost in full, so they are less than what a connection carries in that.
REMOTE_COSTS = ReadCosts(
    gap_bytes=512 * KIB, copy_bytes=150_000_000, part_min_bytes=2 * MIB, window_bytes=16 * MIB
)


def costs_for(store: Store) -> ReadCosts:
    """Return the costs of a store."""
    return REMOTE_COSTS if store.capabilities.is_remote else LOCAL_COSTS
