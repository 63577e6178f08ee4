"""How many bytes may be in flight, for the whole process."""

from __future__ import annotations

import os
import threading
from collections import deque

from ckpt_storage.store.deadline import Deadline

_LOOK_S = 0.2


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
