"""Which checkpoints of a run this process reads, writes or deletes now.

Owned by a `CheckpointManager`; asked by its pruner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_storage.errors import PhaseTimeoutError


class Claims:
    """Users and the pruner keep out of each other's way: a name is used by many or deleted by one.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._uses: dict[str, list[str]] = {}
        self._deleting: set[str] = set()

    def take(self, name: str, by: str, *, timeout_s: float) -> Callable[[], None]:
        """Note that `name` is used, and return what ends the use; waits while it is deleted.

        `by` says so in a plan ("it is being saved"). Raises `PhaseTimeoutError`.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while name in self._deleting:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise PhaseTimeoutError(
                        f"{name} is being deleted by this manager, and was for {timeout_s:g} s.",
                        timeout_s=timeout_s,
                        phase="plan",
                        next_step="Look why the storage is slow; then try again.",
                    )
            self._uses.setdefault(name, []).append(by)
        ended = threading.Event()

        def end_use() -> None:
            with self._changed:
                if not ended.is_set():
                    ended.set()
                    self._uses[name].remove(by)
                    if not self._uses[name]:
                        del self._uses[name]

        return end_use

    @contextmanager
    def used(self, name: str, by: str, *, timeout_s: float) -> Iterator[None]:
        """Use `name` inside the block; as `take`."""
        end = self.take(name, by, timeout_s=timeout_s)
        try:
            yield
        finally:
            end()

    @contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Keep `name` from being used inside the block; False, where it is used, gives no leave."""
        with self._changed:
            may = name not in self._uses and name not in self._deleting
            if may:
                self._deleting.add(name)
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._deleting.discard(name)
                    self._changed.notify_all()

    def in_use(self) -> dict[str, str]:
        """Return the names that are used, each with by whom."""
        with self._changed:
            return {name: users[0] for name, users in self._uses.items()}
