"""Arenas: the host memory that states are staged in, reused from save to save."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import sys
import tempfile
import weakref
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt_storage.errors import CheckpointError
from ckpt_storage.saves.devices import clear_last_error, warn_unlocked

log = logging.getLogger("ckpt_storage")

Kind = Literal["private", "shared"]
"""shared: another process can map the memory."""

ROUNDING_BYTES = 2 * 1024 * 1024
"""Arenas are multiples of this, the size of a huge page on the common machines."""

# mman.h: MADV_WIPEONFORK, which Python's mmap does not name.
_WIPE_ON_FORK = 18

# cuda.h: memory that every CUDA context sees as page-locked.
_REGISTER_PORTABLE = 1

_RETIRED: list[NDArray[np.uint8]] = []
"""Memory of retired arenas."""


class Arena:
    """One mapping of host memory; the kernel frees it when the last view of `memory` is deleted."""

    def __init__(self, kind: Kind, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.file: int | None = None
        self.is_retired = False
        self._was_pinned = False
        try:
            if kind == "shared":
                self.file = _anonymous_file()
            self._close_file = weakref.finalize(self, _close, self.file)
            if self.file is None:
                mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                os.ftruncate(self.file, size_bytes)
                mapping = mmap.mmap(self.file, size_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"{size_bytes} bytes of host memory for staging cannot be allocated: {error}.",
                phase="stage",
                next_step="Free host memory, lower max_pending, or save without staging.",
            ) from error
        if self.file is None and sys.platform == "linux":
            # Not MADV_DONTFORK: a child would unmap whatever it has mapped at that address since.
            with contextlib.suppress(OSError):
                mapping.madvise(_WIPE_ON_FORK)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)

    def pin(self, device: torch.device) -> None:
        """Lock the pages for copies from a CUDA device, if that is possible; idempotent."""
        if self._was_pinned:
            return
        self._was_pinned = True
        address = self.memory.ctypes.data
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, self.size_bytes, _REGISTER_PORTABLE))
        if code:
            clear_last_error(runtime, device)
            warn_unlocked(self.size_bytes, f"CUDA error {code}")
            return
        # On the array, not on the mapping: CPython unmaps before it runs a mapping's finalizers.
        unlock = weakref.finalize(self.memory, _unlock, runtime, address, device)
        # At exit CUDA may be gone already, and the kernel unlocks.
        unlock.atexit = False

    def touch(self) -> None:
        """Have the kernel allocate every page; the bytes are of no use afterwards."""
        self.memory[:: mmap.PAGESIZE] = 0

    def retire(self) -> None:
        """Keep the memory mapped for good, and from every later save: a device may write there."""
        self.is_retired = True
        _RETIRED.append(self.memory)
        log.error(
            "%d bytes of staging memory stay mapped and unused: a copy from a GPU that failed may "
            "still write there.",
            self.size_bytes,
        )

    def close(self) -> None:
        """Close the descriptor, so that no further process can map the memory; idempotent."""
        self.file = None
        self._close_file()


class Arenas:
    """The free arenas of a saver, reused from save to save.

    Thread-safe without a lock: a finalizer or a signal handler may call a method in the middle of
    another call of the same thread.
    """

    def __init__(self, kind: Kind = "private") -> None:
        self._kind: Kind = kind
        self._free: deque[Arena] = deque()
        self._is_closed = False

    def acquire(self, need_bytes: int) -> Arena:
        """Return an arena of at least `need_bytes`, if possible the last that was used."""
        arena = self._pop()
        if arena is not None:
            if arena.size_bytes >= need_bytes:
                return arena
            # Before the larger arena is allocated, so that the process never holds both.
            arena.close()
            del arena
        rounded = math.ceil(max(1, need_bytes) / ROUNDING_BYTES) * ROUNDING_BYTES
        return Arena(self._kind, rounded)

    def release(self, arena: Arena) -> None:
        """Keep an arena for the next `acquire`. No copy or reader uses it, unless it is retired."""
        if arena.is_retired:
            arena.close()
            return
        self._free.append(arena)
        # Also if `close` was called between the two lines.
        if self._is_closed:
            self.free_unused()

    def free_unused(self) -> None:
        """Free the arenas that no save uses."""
        while (arena := self._pop()) is not None:
            arena.close()

    def close(self) -> None:
        """Free all arenas, those in use when they are released; idempotent."""
        self._is_closed = True
        self.free_unused()

    def _pop(self) -> Arena | None:
        try:
            return self._free.pop()
        except IndexError:
            return None


def map_shared(file: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return the memory of another process's shared arena, and close the descriptor.

    Raises `CheckpointError`.
    """
    try:
        return np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"The worker process cannot map {size_bytes} bytes of the staged state: {error}.",
            phase="plan",
            next_step="Raise the limits on address space and mappings (ulimit -v, "
            "vm.max_map_count), or use mode='thread'.",
        ) from error
    finally:
        os.close(file)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckpt_storage")
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def _unlock(runtime: Any, address: int, device: torch.device) -> None:  # noqa: ANN401  # torch types it as a module
    with torch.cuda.device(device):
        code = int(runtime.cudaHostUnregister(address))
    if code:
        clear_last_error(runtime, device)
