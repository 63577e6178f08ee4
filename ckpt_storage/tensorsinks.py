"""Copies of what was read of a chunk into the tensor that wants it, on any device.

Knows torch and windows of payloads; knows no storage and no plan. Called by `loads` for targets
that cannot be filled by the read itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from .readplan import Put, Sink
from .regions import Box, Rows, WindowCopy, rows_of

__all__ = ["MemoryViews", "tensor_puts", "tensor_sink"]


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


class MemoryViews:
    """Memories that begin with a page, seen as tensors: one of each and type of element."""

    def __init__(self) -> None:
        # With the memory, so that no other one gets its number.
        self._known: dict[tuple[int, torch.dtype], tuple[memoryview, torch.Tensor]] = {}

    def of(self, memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
        """Return all of `memory` as a tensor of one dimension."""
        key = id(memory), dtype
        known = self._known.get(key)
        if known is None:
            # A file may end within an element, which then is none of a tensor's.
            count = len(memory) // dtype.itemsize
            known = self._known[key] = memory, torch.frombuffer(memory, dtype=dtype, count=count)
        return known[1]


def tensor_puts(
    target: torch.Tensor,
    dtype: torch.dtype,
    chunk_sizes: tuple[int, ...],
    region: Box,
    views: MemoryViews,
) -> Callable[[memoryview], Put] | None:
    """Return what makes `Request.puts` of a memory for `region` of a chunk; None: use the sink.

    It copies whole rows at once and, of matrices, what is left of rows before and behind them:
    little more is done than the copies themselves.
    """
    if target.device.type != "cpu" or target.is_inference() or region.is_empty or not chunk_sizes:
        return None
    # Worked out once it is asked for: most loads share nothing.
    known: list[Rows] = []

    def put_from(memory: memoryview) -> Put:
        if not known:
            known.append(rows_of(chunk_sizes, region))
        return _RowPut(target, views.of(memory, dtype), known[0]).put

    return put_from


class _RowPut:
    """The put of one target and one memory, whose bytes are seen as `elements`."""

    def __init__(self, target: torch.Tensor, elements: torch.Tensor, rows: Rows) -> None:
        self._target = target
        self._elements = elements
        self._rows = rows
        self._item_bytes = elements.element_size()
        self._row_bytes = rows.row_elements * self._item_bytes
        self._is_matrix = len(rows.strides) == 2  # noqa: PLR2004  # dimensions

    def put(self, at: int, start: int, length: int) -> bool:
        """Copy what is wanted of bytes that lie at `at`, from byte `start` of the payload on."""
        rows, item_bytes = self._rows, self._item_bytes
        if at % item_bytes:
            return False
        first, head = divmod(start, self._row_bytes)
        last, tail = divmod(start + length, self._row_bytes)
        # Where the first row would begin, had it all come.
        begin = (at - head) // item_bytes
        if head or tail:
            if not self._is_matrix or head % item_bytes or tail % item_bytes:
                return False
            whole = self._put_edges(begin, first, head // item_bytes, last, tail // item_bytes)
            begin += (whole - first) * rows.row_elements
            first = whole
        low, high = max(first, rows.first_row), min(last, rows.last_row)
        if low < high:
            begin += (low - first) * rows.row_elements + rows.inner_start
            sizes = (high - low, *rows.inner_sizes)
            source = self._elements.as_strided(sizes, rows.strides, begin)
            self._target[low - rows.first_row : high - rows.first_row].copy_(source)
        return True

    def _put_edges(self, begin: int, first: int, head: int, last: int, tail: int) -> int:
        """Copy what is wanted of rows that are not whole; return the first row that is.

        The bytes begin `head` elements into row `first` and end `tail` elements into row `last`.
        """
        if first == last:
            self._put_part(begin, first, head, tail)
            return first
        row = self._rows.row_elements
        if tail:
            self._put_part(begin + (last - first) * row, last, 0, tail)
        if not head:
            return first
        self._put_part(begin, first, head, row)
        return first + 1

    def _put_part(self, begin: int, number: int, low: int, high: int) -> None:
        """Copy what is wanted of columns [low, high) of a row that would begin at `begin`."""
        rows = self._rows
        start, stop = max(low, rows.inner_start), min(high, rows.inner_start + rows.inner_sizes[0])
        if rows.first_row <= number < rows.last_row and start < stop:
            source = self._elements[begin + start : begin + stop]
            columns = slice(start - rows.inner_start, stop - rows.inner_start)
            self._target[number - rows.first_row, columns].copy_(source)
