"""The thread of an operation that waits for keys, so that its caller can watch a deadline."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ckpt_storage.store.threads import halted

from .keyvalue import KeyValues

_FOREVER_S = 30 * 86_400.0


class KeyListener:
    """Waits for one key after another and calls `on_key(key)` for each, in a daemon thread.

    A wait cannot be cancelled: it ends when somebody writes the key. That is why whoever gives an
    operation up writes its release. With a store that does not answer, the thread is left behind.
    """

    def __init__(self, on_key: Callable[[str], None], keys: KeyValues, name: str) -> None:
        self._on_key = on_key
        self._keys = keys
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def listen(self, key: str) -> None:
        """Wait for `key` next; from any thread."""
        self._queue.put(key)

    def close(self) -> None:
        """Call nothing any more; the thread ends with its present wait."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (key := self._queue.get()) is not None and not self._is_closed:
            has_come = self._keys.wait(key, _FOREVER_S, lambda: self._is_closed)
            halted()
            if has_come and not self._is_closed:
                self._on_key(key)
