"""Copies from CUDA devices to host memory.

Every CUDA call is made while the device of the tensors is current. In a new thread that is device
0: a call there, or the end of a `torch.cuda.stream` block, would make a context on GPU 0 in the
process of every rank of the node.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

log = logging.getLogger("ckpt_storage")

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_warned: set[str] = set()
"""Warnings that this process has logged, each once."""


def warn_unlocked(size_bytes: int, reason: str) -> None:
    """Log, once a process, that copies from a device go through pageable memory."""
    if "unlocked" not in _warned:
        _warned.add("unlocked")
        log.warning(
            "%d bytes of host memory cannot be page-locked (%s): copies from the GPU are slower. "
            "Check the limit on locked memory (ulimit -l) and the free memory.",
            *(size_bytes, reason),
        )


def fork_stream(device: torch.device) -> Any:  # noqa: ANN401  # a Stream
    """Return a stream of `device` that waits for the work that this thread has enqueued there."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def clear_last_error(runtime: Any, device: torch.device) -> None:  # noqa: ANN401  # torch types it as a module
    """Clear the error that a failed call of the CUDA runtime has set in this thread.

    The next kernel that torch starts would raise it. Torch has no binding of `cudaGetLastError`,
    and the process may hold several copies of the runtime; so a kernel of torch's clears it.
    """
    with torch.cuda.device(device), suppress(RuntimeError):
        if hasattr(runtime, "cudaGetLastError"):
            runtime.cudaGetLastError()
        else:
            torch.empty(1, device=device).fill_(1)


class DeviceReader:
    """Reads tensors of CUDA devices window by window, on a stream of its own, in one thread."""

    def __init__(self) -> None:
        self._can_pin = True

    def views(self, device: torch.device, windows: Iterator[torch.Tensor]) -> Iterator[memoryview]:
        """Yield the copied bytes of each window while the next window is being copied."""
        stream = fork_stream(device)
        pending: deque[tuple[torch.Tensor, Any]] = deque()
        try:
            for window in windows:
                pending.append(self._begin(device, stream, window))
                if len(pending) > 1:
                    yield _end(device, *pending.popleft())
            while pending:
                yield _end(device, *pending.popleft())
        finally:
            # No copy may be under way when the tensor or the host memory is reused.
            with torch.cuda.device(device):
                stream.synchronize()

    def buffer(self, window: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for a window, which torch reuses; pageable where there is none."""
        if self._can_pin:
            try:
                return torch.empty(window.shape, dtype=window.dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                warn_unlocked(window.nbytes, str(error))
        return torch.empty(window.shape, dtype=window.dtype, device="cpu")

    def _begin(self, device: torch.device, stream: Any, window: torch.Tensor) -> Any:  # noqa: ANN401  # a Stream
        """Start a copy; return the buffer, and the event of its end."""
        with torch.cuda.device(device):
            buffer = self.buffer(window)
            with torch.cuda.stream(stream):
                buffer.copy_(window.resolve_conj().resolve_neg(), non_blocking=True)
                # An intermediate tensor that is made here belongs to this stream, and is not
                # reused before the stream has read it.
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
                event.record(stream)
        return buffer, event


def _end(device: torch.device, buffer: torch.Tensor, event: Any) -> memoryview:  # noqa: ANN401  # an Event
    with torch.cuda.device(device):
        event.synchronize()
    return byte_view(buffer)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers of its elements' size, which torch copies and indexes all.

    A tensor without such integers, or with lazy elements, is returned as it is.
    """
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    return tensor.view(_INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Not `reshape`: it keeps the stride of a single element, which may have any value.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11
