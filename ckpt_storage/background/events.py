"""An event that a signal handler may use in the middle of another use of it."""

from __future__ import annotations

import threading


class ReentrantEvent:
    """As `threading.Event`, whose lock a thread cannot take twice."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Wake every thread that waits."""
        # Before the lock is taken: a handler that waits in the middle of this call returns.
        self._is_set = True
        with self._condition:
            self._condition.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds until it is set; return whether it is."""
        with self._condition:
            return self._condition.wait_for(self.is_set, timeout_s)
