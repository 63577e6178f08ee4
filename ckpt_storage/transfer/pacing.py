"""How many requests of one transfer may be under way at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_WORTH = 1.1
"""More requests at a time must bring a tenth more, or the measurement's noise decides."""

_PROBE_ROUNDS = 8
"""Rounds after which one request more is tried again: storages speed up while they are used."""


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
            was_cut = self._cut_at_s > float("-inf")
            self._is_doubling = False
            self._settled_rounds += 1
            if grown or was_cut or self._settled_rounds % _PROBE_ROUNDS == 0:
                self._limit = min(self._most, self._limit + 1)
        self._begin_round()
