"""Copies of what was read of a chunk into the tensor that wants it, on any device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ckpt_storage.format.regions import WindowCopy
from ckpt_storage.source.readplan import Sink

__all__ = ["tensor_sink"]


def tensor_sink(target: torch.Tensor, dtype: torch.dtype) -> Sink:
    """Return what copies elements of `dtype` out of windows of a payload into `target`.

    It may be called by several threads; autograd sees none of it.
    """
    # Several windows of one target arrive in several threads.
    lock = threading.Lock() if target.device.type != "cpu" else None
    shape = tuple(target.shape)

    def sink(window: memoryview, copies: Sequence[WindowCopy]) -> None:
        raw = torch.frombuffer(window, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # torch's kernels rely on natural alignment; some crash without
        flat = raw.view(dtype)
        for copy in copies:
            source = flat.as_strided(copy.sizes, copy.source_strides, copy.source_offset_elements)
            dest = target
            for dim, size in enumerate(copy.sizes):
                if size != shape[dim]:
                    dest = dest.narrow(dim, copy.dest_offsets[dim], size)
            if lock is None:
                dest.copy_(source)
            else:
                with lock:
                    dest.copy_(source)

    if not target.is_inference():
        return sink

    def in_inference_mode(window: memoryview, copies: Sequence[WindowCopy]) -> None:
        # The mode is a thread's own, and such a tensor can be written to in it alone.
        with torch.inference_mode():
            sink(window, copies)

    return in_inference_mode
