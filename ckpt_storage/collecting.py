"""A pause of Python's cyclic garbage collector, for steps that make many objects and no cycles.

Knows the collector only. Called by `source`, `reader`, `loads`, `loading` and `planpack`. Thousands
of plan items that live until the end of a load make the collector believe that it should look
through everything, which in a process with torch takes 0.3 s each time; what ends while it is young
is not counted. Only for steps of our own, which wait for nothing: meanwhile no thread's cycles are
collected.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let the collector rest during the block; in several threads at once, until the last leaves.

    Where it rested before, it rests afterwards.
    """
    global _pauses, _was_enabled  # noqa: PLW0603  # the collector is the process's, too
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
