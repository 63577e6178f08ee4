"""A bound on the bytes that all processes of a benchmark move in a second."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing.context import SpawnContext
from typing import Any

import torch.multiprocessing as mp

from ckpt_storage.store import Location, Settings
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.registry import register_backend


class Bandwidth:
    """A token bucket that processes share: it holds nothing back from earlier, idle time."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        context: SpawnContext = mp.get_context("spawn")
        self._free_at: Any = context.Value("d", 0.0)

    def take(self, count: int) -> None:
        """Wait until `count` bytes have gone through, behind those of all other callers."""
        now_s = time.monotonic()
        with self._free_at.get_lock():
            end_s = max(now_s, self._free_at.value) + count / self._bytes_per_s
            self._free_at.value = end_s
        time.sleep(max(0.0, end_s - now_s))

    def bound_mount(self) -> None:
        """Bound the local reads of this process, as a network mount does for all its clients."""
        take = self.take

        class Mount(LocalBackend):
            def read(self, path: str, ranges: Iterable[Range]) -> int:
                def counted() -> Iterable[Range]:
                    for start, target in ranges:
                        yield start, target
                        take(target.nbytes)

                return super().read(path, counted())

        def opener(location: Location, settings: Settings) -> LocalBackend:
            return Mount(location, settings)

        register_backend("file", opener, replace=True)
