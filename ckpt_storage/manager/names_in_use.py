"""Which names below a root this process uses, so that its own pruner deletes none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ckpt_storage.errors import PhaseTimeoutError

_DELETING = "it is being deleted"


class NamesInUse:
    """Names in use: a name has any number of users, or one deletion. Safe in any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reasons: dict[object, tuple[str, str]] = {}  # by use: the name and the reason

    def acquire(self, name: str, reason: str, *, timeout_s: float) -> Callable[[], None]:
        """Record a use of `name`, and return the function that ends it; wait while it is deleted.

        Raises `PhaseTimeoutError`.
        """
        use = object()
        with self._changed:
            if not self._changed.wait_for(lambda: self.reasons().get(name) != _DELETING, timeout_s):
                raise PhaseTimeoutError(
                    f"{name} is being deleted by this manager, and was for {timeout_s:g} s.",
                    timeout_s=timeout_s,
                    phase="plan",
                    next_step="Find out why the storage is slow; then try again.",
                )
            self._reasons[use] = (name, reason)
        return partial(self._release, use)

    def _release(self, use: object) -> None:
        with self._changed:
            self._reasons.pop(use, None)
            self._changed.notify_all()

    @contextmanager
    def reserved_for_deletion(self, name: str) -> Iterator[bool]:
        """Keep others from using `name` inside the block; yield False if it is in use."""
        with self._changed:
            is_free = name not in self.reasons()
            release = self.acquire(name, _DELETING, timeout_s=0.0) if is_free else lambda: None
        try:
            yield is_free
        finally:
            release()

    def reasons(self) -> dict[str, str]:
        """Return the names in use, each with the reason."""
        with self._changed:
            return dict(self._reasons.values())
