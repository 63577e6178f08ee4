"""Where elements go: tensors in this process's memory or on a device, converted on the way."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

import torch

from ckpt_storage.format.boxes import WindowCopy
from ckpt_storage.transfer.chunks import ChunkRead

log = logging.getLogger("ckpt_storage")

Use = Callable[[torch.Tensor], None]
"""Takes bytes that are on the device of its tensors; what it begins there may end later."""


class CudaMover:
    """Uploads from pinned memory on a stream of its own, behind what the caller has queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        # Tensors may still be written to by what is queued there.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory, plain where there is none to be had."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            log.warning("No pinned memory for a load: %s", error)
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        """Queue the upload of `data`, in such memory, and its `use` on the device.

        Returns what waits until the memory may be filled again.
        """
        with torch.cuda.stream(self._stream):
            use(data.to(self._device, non_blocking=True))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            event.record(self._stream)
        return event.synchronize

    def finish(self) -> None:
        """Wait for the stream, and let the caller's own go on behind it."""
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class UploadRing:
    """A few buffers that windows go through on their way to one device; for several threads."""

    def __init__(self, mover: CudaMover, buffer_count: int) -> None:
        self._mover = mover
        self._slots: queue.SimpleQueue[tuple[torch.Tensor | None, Callable[[], None]]]
        self._slots = queue.SimpleQueue()
        for _ in range(buffer_count):
            self._slots.put((None, lambda: None))
        self._count = buffer_count

    def move(self, window: memoryview, use: Use) -> None:
        """Begin to move a window and to `use` it; waits for a buffer."""
        buffer, wait = self._slots.get()
        try:
            wait()
            wait = _nothing
            size = len(window)
            if buffer is None or buffer.numel() < size:
                buffer = self._mover.buffer(size)
            data = buffer[:size]
            data.copy_(torch.frombuffer(window, dtype=torch.uint8))
            wait = self._mover.start(data, use)
        finally:
            self._slots.put((buffer, wait))

    def finish(self) -> None:
        """Return when all windows have arrived; called when no thread moves any."""
        for _ in range(self._count):
            buffer, wait = self._slots.get()
            wait()
            self._slots.put((buffer, _nothing))
        self._mover.finish()


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRead(ChunkRead):
    """A read into a tensor, or into a part of one; autograd sees none of it.

    `dtype` is that of the stored elements. With a `ring` they go to the tensor's device as they
    are stored, and are placed and converted there.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    ring: UploadRing | None = None

    @property
    def memory(self) -> memoryview | None:
        """The memory of the tensor, if it takes the stored bytes as they are."""
        tensor = self.tensor
        if (
            self.ring is not None
            or tensor.dtype != self.dtype
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        # Where a dimension has one element, a contiguous tensor may have any stride there.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements out of a window, converted to the tensor's own type."""
        use = partial(self._copy, copies)
        if self.ring is not None:
            self.ring.move(window, use)
        else:
            use(torch.frombuffer(window, dtype=torch.uint8))

    def _copy(self, copies: Sequence[WindowCopy], raw: torch.Tensor) -> None:
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()  # torch's kernels rely on natural alignment; some crash without
        flat = raw.view(self.dtype)
        # The mode is a thread's own, and an inference tensor can be written to in it alone.
        with torch.inference_mode(self.tensor.is_inference()):
            for copy in copies:
                source = flat.as_strided(
                    copy.sizes, copy.source_strides, copy.source_offset_elements
                )
                part = map(slice, copy.dest_offsets, map(add, copy.dest_offsets, copy.sizes))
                self.tensor[tuple(part)].copy_(source, non_blocking=self.ring is not None)
