"""What the facts of the store suite are checked with."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.store.base import Capabilities, Store, Upload

__all__ = ["WAIT_S", "fill", "kind_of", "paths_of", "pattern", "send", "together"]

T = TypeVar("T")

WAIT_S = 60.0
"""Longest wait for another thread, in seconds; reached only when something hangs."""


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that repeat nowhere, so that a shifted or swapped part is seen."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311  # test data


def fill(capabilities: Capabilities) -> int:
    """Return the smallest legal size (bytes) of a part, but 64 KiB where any is legal."""
    multiple = capabilities.part_multiple_bytes
    return -(-max(capabilities.min_part_bytes, 64 * 1024) // multiple) * multiple


def send(upload: Upload, parts: Sequence[bytes], *, order: Iterable[int] | None = None) -> None:
    """Write parts to an upload, in `order` if given, each as two buffers."""
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    for i in range(len(parts)) if order is None else order:
        view = memoryview(parts[i])
        middle = len(view) // 3
        upload.write_part(i, starts[i], [view[:middle], view[middle:]], last=i == len(parts) - 1)


def kind_of(call: Callable[[], object]) -> str:
    """Return the kind of the `StorageError` that a call raises."""
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value.kind


def paths_of(store: Store, folder: str = "") -> list[str]:
    return sorted(entry.path for entry in store.list(folder))


def together(jobs: Sequence[Callable[[], T]]) -> list[T | CheckpointError]:
    """Run jobs in threads that start at one moment; return what each returned or raised."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], T]) -> T | CheckpointError:
        barrier.wait(WAIT_S)
        try:
            return job()
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))
