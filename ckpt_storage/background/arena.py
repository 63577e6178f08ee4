"""Host memory for copies of states, reused from save to save.

An arena has no name in any file system: private memory is an anonymous mapping, shared memory a
mapping of a memfd. The kernel frees it with the last process that maps it, however that ends, and
the size limit of /dev/shm does not apply.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError

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

_ids = itertools.count(1)


def cuda_runtime() -> Any | None:  # noqa: ANN401  # torch types its CUDA bindings as a module
    """Return torch's binding of the CUDA runtime, or None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Arena:
    """One stretch of host memory, unmapped when the last view of it is gone.

    `memory` are its bytes, writable. `file` is a descriptor of shared memory, open until `close`,
    else None. A forked child shares shared memory, and finds private memory empty.
    """

    def __init__(self, kind: Kind, size_bytes: int) -> None:
        self.arena_id = next(_ids)
        self.size_bytes = size_bytes
        self.file: int | None = None
        self._pinned: bool | None = None
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

    def pin(self, device: torch.device | None = None) -> bool:
        """Lock the pages for asynchronous copies from `device`; return whether that was possible.

        Tried once; idempotent. They are unlocked before they are unmapped.
        """
        if self._pinned is None:
            self._pinned = self._register(device)
        return self._pinned

    def _register(self, device: torch.device | None) -> bool:
        runtime = cuda_runtime()
        if runtime is None:
            return False
        address = self.memory.ctypes.data
        with _on(device):
            code = int(runtime.cudaHostRegister(address, self.size_bytes, _REGISTER_PORTABLE))
        if code:
            log.warning(
                "%d bytes of staging memory cannot be page-locked (CUDA error %d); copies from the "
                "GPU will be slower. Check the limit on locked memory (ulimit -l).",
                self.size_bytes,
                code,
            )
            return False
        # On the array, not on the mapping: CPython unmaps before it runs a mapping's finalizers.
        unlock = weakref.finalize(self.memory, _unlock, runtime, address, device)
        # At exit CUDA may be gone already, and the kernel unlocks.
        unlock.atexit = False
        return True

    def close(self) -> None:
        """Close the descriptor, so that no further process can map the memory; idempotent."""
        self.file = None
        self._close_file()


class Lease:
    """The right to one arena until `release` or `abandon`; a context manager.

    What was staged into it must not be read after `release`: the next holder writes there.
    """

    def __init__(self, arenas: Arenas, held: Arena | None) -> None:
        self._arenas = arenas
        self._held = held
        self._live = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def arena(self, need_bytes: int) -> Arena:
        """Return the arena, made or made anew if it holds less than `need_bytes`.

        A new one is not a copy: what was staged in the old one stays with those who hold it.
        Raises `CheckpointError` if the memory cannot be had, or the lease has ended.
        """
        if not self._live:
            raise InvalidInputError(
                "The lease has ended.", phase="stage", next_step="Take a new lease for each save."
            )
        if self._held is None or self._held.size_bytes < need_bytes:
            if self._held is not None:
                need_bytes += need_bytes // GROWTH_SLACK
                # Before the new one is made, so that the old memory can go first.
                self._held.close()
                self._held = None
            rounded = math.ceil(max(1, need_bytes) / ROUNDING_BYTES) * ROUNDING_BYTES
            self._held = Arena(self._arenas.kind, rounded)
        return self._held

    def release(self) -> None:
        """Give the arena back for reuse; idempotent, never waits, from any thread."""
        self._end(reuse=True)

    def abandon(self) -> None:
        """Give the right back but not the memory, which somebody stuck may still read.

        It is freed when the last view of it is gone; the next lease gets new memory. Idempotent.
        """
        self._end(reuse=False)

    def _end(self, *, reuse: bool) -> None:
        if self._live:
            self._live = False
            held, self._held = self._held, None
            self._arenas._take_back(held, reuse=reuse)  # noqa: SLF001  # its own lease


class Arenas:
    """At most `most` arenas, made on demand and reused from save to save. Thread-safe."""

    def __init__(self, kind: Kind = "private", *, most: int = 1) -> None:
        self.kind: Kind = kind
        self._most = most
        self._changed = threading.Condition()
        self._free: list[Arena] = []
        self._leased_count = 0
        self._closed = False

    def lease(self, *, timeout_s: float = 0.0) -> Lease:
        """Return the right to an arena, waiting at most `timeout_s` for one to be free.

        The one used last comes first: its pages are warm. Raises `PhaseTimeoutError` if all are
        in use, and `InvalidInputError` once they were closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed and self._leased_count >= self._most:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PhaseTimeoutError(
                        f"All {self._most} staging buffers are in use by earlier saves.",
                        timeout_s=timeout_s,
                        phase="stage",
                        next_step="Wait for an earlier save to end, or raise max_pending.",
                    )
                self._changed.wait(left)
            if self._closed:
                raise InvalidInputError(
                    "The staging buffers were closed.",
                    phase="stage",
                    next_step="Save before the saver is closed.",
                )
            self._leased_count += 1
            return Lease(self, self._free.pop() if self._free else None)

    def close(self) -> None:
        """Let go of all memory, of leased arenas when their leases end; idempotent, never waits."""
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
            self._changed.notify_all()
        for arena in free:
            arena.close()

    def _take_back(self, held: Arena | None, *, reuse: bool) -> None:
        with self._changed:
            self._leased_count -= 1
            keep = reuse and not self._closed
            if keep and held is not None:
                self._free.append(held)
            self._changed.notify()
        if held is not None and not keep:
            held.close()


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
