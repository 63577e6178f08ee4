"""Nameless host memory for copies of states, reused from save to save."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import sys
import tempfile
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ckpt_storage.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("ckpt_storage")

Kind = Literal["private", "shared"]

ROUNDING_BYTES = 2 * 1024 * 1024
"""Arenas are multiples of this, the size of a huge page on the common machines."""

GROWTH_SLACK = 8
"""An arena that grew once gets one part in this many on top, to grow more rarely."""

# mman.h: MADV_WIPEONFORK, which Python's mmap does not name.
_WIPE_ON_FORK = 18

# cuda.h: memory that every CUDA context sees as page-locked.
_REGISTER_PORTABLE = 1


def cuda_runtime() -> Any | None:  # noqa: ANN401  # torch types its CUDA bindings as a module
    """Return torch's binding of the CUDA runtime, or None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Arena:
    """One stretch of host memory, unmapped when the last view of `memory`, its bytes, is gone."""

    def __init__(self, kind: Kind, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.file: int | None = None
        self._was_pinned = False
        try:
            if kind == "shared":
                self.file = _nameless_file()
            self._close_file = weakref.finalize(self, _close, self.file)
            if self.file is None:
                mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                os.ftruncate(self.file, size_bytes)
                mapping = mmap.mmap(self.file, size_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"{size_bytes} bytes of host memory for staging cannot be had: {error}.",
                phase="stage",
                next_step="Free host memory, lower max_pending, or save without staging.",
            ) from error
        if self.file is None and sys.platform == "linux":
            # The mapping itself stays in a child, which would else unmap what came in its place.
            with contextlib.suppress(OSError):
                mapping.madvise(_WIPE_ON_FORK)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)

    def pin(self, device: torch.device | None = None) -> None:
        """Lock the pages for copies from `device`, if that is possible; idempotent."""
        runtime = None if self._was_pinned else cuda_runtime()
        self._was_pinned = True
        if runtime is None:
            return
        address = self.memory.ctypes.data
        with _on(device):
            code = int(runtime.cudaHostRegister(address, self.size_bytes, _REGISTER_PORTABLE))
        if code:
            log.warning(
                "%d bytes of staging memory cannot be page-locked (CUDA error %d); copies from the "
                "GPU will be slower. Check the limit on locked memory (ulimit -l).",
                *(self.size_bytes, code),
            )
            return
        # On the array, not on the mapping: CPython unmaps before it runs a mapping's finalizers.
        unlock = weakref.finalize(self.memory, _unlock, runtime, address, device)
        # At exit CUDA may be gone already, and the kernel unlocks.
        unlock.atexit = False

    def close(self) -> None:
        """Close the descriptor, so that no further process can map the memory; idempotent."""
        self.file = None
        self._close_file()


class Arenas:
    """Arenas that nobody uses now, reused from save to save. Thread-safe."""

    def __init__(self, kind: Kind = "private") -> None:
        self._kind: Kind = kind
        self._lock = threading.Lock()
        self._free: list[Arena] = []
        self._is_closed = False

    def take(self, need_bytes: int) -> Arena:
        """Return an arena of at least `need_bytes`, the one used last first."""
        with self._lock:
            held = self._free.pop() if self._free else None
        if held is not None and held.size_bytes >= need_bytes:
            return held
        if held is not None:
            need_bytes += need_bytes // GROWTH_SLACK
            # Before the new one is made, so that the old memory can go first.
            held.close()
            del held
        rounded = math.ceil(max(1, need_bytes) / ROUNDING_BYTES) * ROUNDING_BYTES
        return Arena(self._kind, rounded)

    def give_back(self, arena: Arena) -> None:
        """Keep an arena for the next `take`; nobody reads or writes there any more."""
        with self._lock:
            if not self._is_closed:
                self._free.append(arena)
                return
        arena.close()

    def close(self) -> None:
        """Let go of all memory, of what is in use when it is given back; idempotent."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for arena in free:
            arena.close()


def map_shared(file: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes of another process' shared arena, and close the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
    finally:
        os.close(file)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckpt_storage")
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def _on(device: torch.device | None) -> AbstractContextManager[object]:
    """Make `device` current: a thread's first call would make a context on device 0 otherwise."""
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


def _unlock(runtime: Any, address: int, device: torch.device | None) -> None:  # noqa: ANN401  # as cuda_runtime
    with _on(device):
        runtime.cudaHostUnregister(address)
