"""The memory that transfers of this process use together."""

from __future__ import annotations

import os
import threading
from collections import deque

from ckpt_storage.store.deadline import LOOK_S, Deadline


class Budget:
    """Bytes of buffers in flight, counted for all transfers of the process together.

    Each transfer passes its own limit of the sum. Claims are served in the order in which they are
    made, so that small claims do not starve a large one. A step claims all its bytes at once: two
    steps that hold memory and wait for more would block each other. Safe in any thread.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Release everything, in a child of fork, which has none of its parent's threads."""
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.held_bytes = 0
        self.peak_bytes = 0

    def acquire(self, byte_count: int, *, limit_bytes: int, deadline: Deadline) -> None:
        """Wait until `byte_count` more bytes fit below `limit_bytes`, and claim them.

        A claim above the limit waits until nothing else is held. Raises, without a claim,
        `PhaseTimeoutError` or the failure of the deadline's operation.
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
        """Release bytes that `acquire` claimed."""
        with self._changed:
            self.held_bytes -= byte_count
            self._changed.notify_all()


BUDGET = Budget()
"""Shared by all writes of this process."""

READ_BUDGET = Budget()
"""Shared by all reads of this process, such as those of a load.

Apart from `BUDGET`: a copy claims memory to write, and then reads into it. With one budget for both
it would wait for memory that it holds itself.
"""

os.register_at_fork(after_in_child=BUDGET.reset)
os.register_at_fork(after_in_child=READ_BUDGET.reset)
