"""A link of so many bytes a second, shared by all connections of the test server."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ckpt_storage.errors import InvalidInputError

__all__ = ["PIECE_BYTES", "Link"]

PIECE_BYTES = 256 * 1024
"""What one connection is given at a time, so that all of them have their turns."""


class Link:
    """One way of a link, which carries `bytes_s` bytes a second, one after the other.

    What it did not carry while nobody asked is lost, as on a wire. Raises `InvalidInputError` for
    a link that would carry nothing.
    """

    def __init__(
        self,
        bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if not (bytes_s > 0 and math.isfinite(bytes_s)):
            raise InvalidInputError(
                f"A link of {bytes_s!r} bytes a second carries nothing, or anything at once.",
                next_step="Give a positive number, or None for no bound.",
            )
        self._bytes_s = bytes_s
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._free_s = 0.0

    def carry(self, count: int) -> None:
        """Return once `count` more bytes have had their time."""
        with self._lock:
            end_s = max(self._free_s, self._clock()) + count / self._bytes_s
            self._free_s = end_s
        left_s = end_s - self._clock()
        if left_s > 0:
            self._wait(left_s)
