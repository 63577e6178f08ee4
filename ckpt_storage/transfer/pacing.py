"""How many requests of one transfer are in flight."""

from __future__ import annotations

import threading


class Pacer:
    """Limit of the requests of one transfer that are in flight; safe in any thread.

    It is halved when the storage throttles, and then grows by one per round (AIMD; Chiu and Jain,
    "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance in Computer
    Networks", 1989). A round has as many responses as the limit.
    """

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._most = self._limit = max(1, most)
        self._response_count = 0
        # Responses still to come to requests that were in flight at the last decrease.
        self._late_count = 0

    def limit(self) -> int:
        """Return how many requests may be in flight now, 1 or more."""
        return self._limit

    def succeeded(self) -> None:
        """Count a request that succeeded."""
        with self._lock:
            if self._late_count:
                self._late_count -= 1
                return
            self._response_count += 1
            if self._response_count >= self._limit:
                self._response_count = 0
                self._limit = min(self._most, self._limit + 1)

    def slowed_down(self) -> None:
        """Count a response that asks for fewer requests (SlowDown, 429, 503).

        Responses to requests that were in flight together count once.
        """
        with self._lock:
            if self._late_count:
                self._late_count -= 1
                return
            self._late_count = self._limit - 1
            self._response_count = 0
            self._limit = max(1, self._limit // 2)
