"""Tensors as host bytes: views where the memory can be used as it is, bounded copies elsewhere."""

from __future__ import annotations

import ctypes
import queue
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loads.resolving import is_freed

MAKE_PLAIN = "Convert it to a dense tensor with data before saving, or leave it out."
"""What to do about a tensor that cannot be saved."""

_MOST_WINDOW_BYTES = 4 << 20
"""Long enough to hide the start of a copy, short enough to be done while as much is written."""

_WINDOWS_A_BUFFER = 2

_ALIGN_BYTES = 64


class DeviceCopies:
    """Copies through pinned buffers, each free again once no view of it is left; for one thread."""

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
        """Yield the copied bytes of each window while the next one is being copied."""
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


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def fault_of(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor are not stored as such; None if they are."""
    reason = None
    if torch.nn.parameter.is_lazy(tensor):
        reason = "it is uninitialised"
    elif tensor.is_nested:
        reason = "it is a nested tensor"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        reason = "it is quantised"
    elif tensor.is_meta:
        reason = "it is on the meta device and has no data"
    elif is_freed(tensor):
        reason = "its memory was given back (its storage was resized to nothing)"
    return reason


def check_plain(tensor: torch.Tensor, fqn: str) -> None:
    """Raise `InvalidInputError` unless the tensor is dense, with its elements stored as such."""
    kind = type(tensor)
    reason = fault_of(tensor)
    if kind not in _PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        reason = reason or f"its type {kind.__qualname__} wraps others, and has no bytes of its own"
    if reason:
        raise InvalidInputError(
            f"{fqn} cannot be saved: {reason}.", phase="write", next_step=MAKE_PLAIN
        )


def host_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the elements of a small tensor in C order."""
    if type(tensor) in _PLAIN and is_as_stored(tensor):
        # A view, an array and a buffer cost ten times this, which many small tensors feel.
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return bytes(_view(plain))


class HostCopies:
    """Tensors as host memory, one after the other, with one `window_bytes`; for one thread."""

    def __init__(self) -> None:
        self._device_copies: dict[torch.device, DeviceCopies] = {}

    def views(self, tensor: torch.Tensor, window_bytes: int) -> Iterator[memoryview]:
        """Yield the elements of `tensor` in C order as consecutive byte views.

        A contiguous CPU tensor is one view of its own memory, not copied, and must not change
        while the view is in use. Anything else is copied window by window, each of at most
        `window_bytes` (or one element), so memory stays bounded whatever the tensor's size; from a
        CUDA device the next window is copied while the one before is in use.
        """
        tensor = tensor.detach()
        if is_as_stored(tensor):
            yield _view(tensor)
            return
        if tensor.device.type == "cuda":
            copies = self._device_copies.get(tensor.device)
            if copies is None:
                copies = DeviceCopies(tensor.device, window_bytes)
                self._device_copies[tensor.device] = copies
            yield from copies.views(_windows(tensor, _count(tensor, copies.window_bytes)))
            return
        for window in _windows(tensor, _count(tensor, window_bytes)):
            yield _view(window.resolve_conj().resolve_neg().to("cpu").contiguous())


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is what is to be written."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not lazy


def _count(tensor: torch.Tensor, window_bytes: int) -> int:
    return max(1, window_bytes // max(1, tensor.element_size()))


def _view(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    # Not `reshape`: it leaves the stride of a single element, which may be anything.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11


def _windows(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if tensor.numel() <= most:
        yield tensor
        return
    length = tensor.size(0)
    rows = max(1, most * length // tensor.numel())
    if rows == 1:
        for row in tensor.unbind(0):
            yield from _windows(row, most)
        return
    for start in range(0, length, rows):
        yield tensor.narrow(0, start, min(rows, length - start))
