"""Tensors as host bytes: views where the memory can be used as it is, bounded copies elsewhere."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator

import torch

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loads.resolving import is_freed

MAKE_PLAIN = "Convert it to a dense tensor with data before saving, or leave it out."
"""What to do about a tensor that cannot be saved."""

_MOST_WINDOW_BYTES = 4 << 20
"""Long enough to hide the start of a copy, short enough to be done while as much is written."""

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
    """Tensors as host memory, one after the other; for one thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

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
        is_cuda = tensor.device.type == "cuda"
        most_bytes = min(window_bytes, _MOST_WINDOW_BYTES) if is_cuda else window_bytes
        windows = _windows(tensor, max(1, most_bytes // max(1, tensor.element_size())))
        if is_cuda:
            yield from self.from_device(tensor.device, windows)
            return
        for window in windows:
            yield _view(window.resolve_conj().resolve_neg().to("cpu").contiguous())

    def from_device(
        self, device: torch.device, windows: Iterator[torch.Tensor]
    ) -> Iterator[memoryview]:
        """Yield the copied bytes of each window while the next one is being copied."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        # What the producer has enqueued must be in the tensors before they are copied.
        stream.wait_stream(torch.cuda.current_stream(device))
        pending: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        try:
            for window in windows:
                target = _pinned(window)
                with torch.cuda.stream(stream):
                    target.copy_(window.resolve_conj().resolve_neg(), non_blocking=True)
                    # An intermediate copy made here belongs to this stream, and is not given to
                    # another before this stream has read it.
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
                    event.record(stream)
                pending.append((target, event))
                if len(pending) > 1:
                    yield _arrived(*pending.popleft())
            while pending:
                yield _arrived(*pending.popleft())
        finally:
            # Nothing may be on its way when the tensor, or host memory, goes to somebody else.
            stream.synchronize()


def _pinned(window: torch.Tensor) -> torch.Tensor:
    """Return pinned memory for a window; torch uses it again once no view of it is left."""
    return torch.empty(window.shape, dtype=window.dtype, device="cpu", pin_memory=True)


def _arrived(target: torch.Tensor, event: torch.cuda.Event) -> memoryview:
    event.synchronize()
    return _view(target)


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is what is to be written."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not lazy


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
