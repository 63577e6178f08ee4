"""How many bytes may be in flight, for the whole process."""

from __future__ import annotations

import os
import threading
from collections import deque

from ckpt_storage.store.deadline import Deadline

_LOOK_S = 0.2


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
        most_bytes = max(0, limit_bytes - byte_count)
        with self._changed:
            self._queue.append(turn)
            try:
                while self._queue[0] is not turn or self._held_bytes > most_bytes:
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


BUDGET = Budget()
"""What all writes of this process share. Reads have another: who reads in order to write holds
memory already, and must not wait for more of the same."""

os.register_at_fork(after_in_child=BUDGET.reset)
