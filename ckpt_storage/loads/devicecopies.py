"""Windows of CUDA tensors on their way to the host, one copied while another is written."""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["DeviceCopies"]

_MOST_WINDOW_BYTES = 4 << 20
"""Long enough to hide the start of a copy, short enough to be done while as much is written."""

_WINDOWS_A_BUFFER = 2

_ALIGN_BYTES = 64


class DeviceCopies:
    """Copies through pinned buffers that are used over and over; used by one thread.

    A buffer is free again once no view of it is left, wherever it went: a thread that was given
    up and still sends a part keeps the memory that it reads. So there are as many buffers as what
    is in flight needs, which whoever holds the views bounds.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        """Copy windows of at most `most_bytes`, or fewer where more gain nothing."""
        self.window_bytes = min(most_bytes, _MOST_WINDOW_BYTES)
        self._buffer_bytes = _WINDOWS_A_BUFFER * self.window_bytes
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        # Buffers come back from whatever thread drops the last view, perhaps in a collection.
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._array: Any = None
        self._buffer: torch.Tensor | None = None
        self._used_bytes = 0

    def views(self, windows: Iterator[torch.Tensor]) -> Iterator[memoryview]:
        """Yield the bytes of each window, in C order, while the next one is being copied.

        Every copy has ended when its view is given out, so that the tensors may change once the
        last one was.
        """
        # What the producer has enqueued must be in the tensors before they are copied.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pending: deque[tuple[memoryview, torch.cuda.Event]] = deque()
        try:
            for window in windows:
                pending.append(self._begin(window))
                if len(pending) > 1:
                    yield _arrived(*pending.popleft())
            while pending:
                yield _arrived(*pending.popleft())
        finally:
            # Nothing may be on its way when the tensor, or a buffer, goes to somebody else.
            self._stream.synchronize()

    def _begin(self, window: torch.Tensor) -> tuple[memoryview, torch.cuda.Event]:
        view, target = self._room(window)
        with torch.cuda.stream(self._stream):
            target.copy_(window.resolve_conj().resolve_neg(), non_blocking=True)
            # An intermediate copy made here belongs to this stream, and is not given to another
            # before this stream has read it.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            event.record(self._stream)
        return view, event

    def _room(self, window: torch.Tensor) -> tuple[memoryview, torch.Tensor]:
        """Return the next free pinned bytes, and the same as a tensor of the window's form."""
        size = window.numel() * window.element_size()
        if self._buffer is None or self._used_bytes + size > self._buffer.numel():
            self._next_buffer(size)
        start = self._used_bytes
        self._used_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        assert self._buffer is not None  # noqa: S101  # for the type checker
        target = self._buffer[start : start + size].view(window.dtype).view(window.shape)
        return memoryview(self._array)[start : start + size], target

    def _next_buffer(self, size: int) -> None:
        self._array = None
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = _pinned(max(size, self._buffer_bytes))
        self._buffer, self._used_bytes = buffer, 0
        self._array = buffer.numpy()
        weakref.finalize(self._array, self._free.put, buffer).atexit = False


def _pinned(byte_count: int) -> torch.Tensor:
    return torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)


def _arrived(view: memoryview, event: torch.cuda.Event) -> memoryview:
    event.synchronize()
    return view
