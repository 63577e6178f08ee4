"""How much may be in flight: bytes for the whole process, requests for one transfer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.options import Phase
from ckpt_storage.store.deadline import Deadline

_NEVER_S = 10 * 365 * 86_400.0
"""No work lasts longer; infinity is no number that clocks and locks take."""


class Stalling:
    """A `Watch` whose work has failed once nothing has moved for `timeout_s` seconds.

    `on_bytes` hears of all that moves. Safe in any thread.
    """

    def __init__(
        self,
        phase: Phase,
        timeout_s: float,
        what: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase: Phase = phase
        self._timeout_s = timeout_s
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._moved_s = clock()
        self._failure: PhaseTimeoutError | None = None
        self.on_bytes: Callable[[int], None] = lambda _: None

    def failure(self) -> CheckpointError | None:
        """Return the error of work that stands still, the same one from then on."""
        with self._lock:
            if self._failure is None and self._clock() - self._moved_s >= self._timeout_s:
                self._failure = PhaseTimeoutError(
                    f"{self._what} has not moved for {self._timeout_s:g} s ({self._phase} phase).",
                    phase=self._phase,
                    timeout_s=self._timeout_s,
                    next_step=f"Check the storage, or raise Timeouts.{self._phase}.",
                )
            return self._failure

    def advanced(self, byte_count: int) -> None:
        """Note that `byte_count` more bytes are done."""
        self._moved()
        self.on_bytes(byte_count)

    def ended_file(self) -> None:
        """Note that one more file is complete."""
        self._moved()

    def expect(self, total_bytes: int) -> None:
        """Nothing depends on how much there is."""

    def failed(self, error: CheckpointError) -> None:
        """Nothing: whoever failed cleans up through the same stores."""

    def _moved(self) -> None:
        with self._lock:
            self._moved_s = self._clock()


def stalling_deadline(phase: Phase, timeout_s: float, what: str) -> tuple[Deadline, Stalling]:
    """Return a deadline that is over once `what` has not moved for `timeout_s`, and its watch."""
    watch = Stalling(phase, timeout_s, what)
    return Deadline(phase, _NEVER_S, watch=watch), watch


_LOOK_S = 0.2

_WORTH = 1.1
"""More requests at a time must bring a tenth more, or the measurement's noise decides."""

_PROBE_ROUNDS = 8
"""Rounds after which one request more is tried again: storages speed up while they are used."""


class Budget:
    """Bytes of buffers in flight, counted for all transfers of the process together.

    Each transfer names its own ceiling for the sum, so the strictest one is kept while it takes
    part. First come, first served: a large claim is not starved by small ones. Safe in any thread.

    A holder must not wait for more: it claims all that one step needs at once, so that what is
    held is always on its way to being released.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what is held, as a child of fork must: it has none of its parent's threads."""
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._held_bytes = 0
        self._peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes claimed and not yet released."""
        return self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held."""
        return self._peak_bytes

    def acquire(self, byte_count: int, *, limit_bytes: int, deadline: Deadline) -> None:
        """Wait until `byte_count` more fit below `limit_bytes`, and claim them.

        A claim beyond the limit waits until nothing else is held. Raises `PhaseTimeoutError`, or
        what `deadline` knows of a failure elsewhere; nothing is claimed then.
        """
        turn = object()
        with self._changed:
            self._queue.append(turn)
            try:
                while not self._fits(turn, byte_count, limit_bytes):
                    self._changed.wait(min(_LOOK_S, deadline.remaining_s() + 0.001))
                    deadline.check("Waiting for memory to send or read with")
                self._held_bytes += byte_count
                self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()

    def release(self, byte_count: int) -> None:
        """Give back bytes that `acquire` claimed."""
        with self._changed:
            self._held_bytes -= byte_count
            self._changed.notify_all()

    def _fits(self, turn: object, byte_count: int, limit_bytes: int) -> bool:
        is_next = self._queue[0] is turn
        return is_next and (not self._held_bytes or self._held_bytes + byte_count <= limit_bytes)


BUDGET = Budget()
"""What all writes of this process share; ranks on one node have one each.

Reads have another (`fetching`): who reads in order to write holds memory already, and must not wait
for more of the same.
"""

os.register_at_fork(after_in_child=BUDGET.reset)


class Pacer:
    """How many requests of one transfer may be under way at a time; safe in any thread.

    The number doubles while that brings more bytes a second, is halved when the storage asks for
    less, and then grows by one in a round (AIMD; Chiu and Jain, "Analysis of the Increase and
    Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989). A round is as many
    answers as requests may be under way.
    """

    def __init__(
        self, most: int, *, start: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._most = max(1, most)
        self._limit = min(self._most, max(1, most if start is None else start))
        self._is_doubling = True
        self._settled_rounds = 0
        self._last_rate = 0.0
        self._typical_s = 0.0
        self._cut_at_s = float("-inf")
        self._begin_round()

    def limit(self) -> int:
        """Return how many requests may be under way now, 1 or more."""
        return self._limit

    def succeeded(self, seconds: float, byte_count: int) -> None:
        """Note a request that moved `byte_count` bytes in `seconds`."""
        with self._lock:
            self._typical_s += (seconds - self._typical_s) / 4 if self._typical_s else seconds
            self._answer_count += 1
            self._byte_count += byte_count
            if self._answer_count >= self._limit:
                self._end_round()

    def slowed_down(self) -> None:
        """Note that the storage asked for fewer requests (SlowDown, 429, 503).

        The answers to requests that were under way together are one such word.
        """
        with self._lock:
            now_s = self._clock()
            if now_s - self._cut_at_s < self._typical_s:
                return
            self._cut_at_s = now_s
            self._limit = max(1, self._limit // 2)
            self._is_doubling = False
            self._begin_round()

    def _begin_round(self) -> None:
        self._round_start_s = self._clock()
        self._answer_count = 0
        self._byte_count = 0

    def _end_round(self) -> None:
        rate = self._byte_count / max(1e-9, self._clock() - self._round_start_s)
        grown = rate > self._last_rate * _WORTH
        self._last_rate = rate
        if self._is_doubling and grown:
            self._limit = min(self._most, 2 * self._limit)
        else:
            after_cut = self._cut_at_s > float("-inf")
            self._is_doubling = False
            self._settled_rounds += 1
            if grown or after_cut or self._settled_rounds % _PROBE_ROUNDS == 0:
                self._limit = min(self._most, self._limit + 1)
        self._begin_round()
