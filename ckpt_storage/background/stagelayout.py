"""Where staged tensors go: which bytes are copied once, and how tensors that share them lie there.

Tensors are tied where their extents in memory overlap, whichever storage objects they were made
from. Tied tensors share a window; a window is copied as a whole. A tensor that is spread thinly
over a large extent (a column of a matrix) is packed instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

WINDOW_ALIGN_BYTES = 64
"""Windows start at multiples of this: a cache line, and enough for every kind of element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A run of bytes of the arena that becomes a storage of its own."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How one staged tensor lies in a window; offset and strides count elements."""

    window: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy from tensor `source` into a window.

    `elements`: the tensor's elements go where place `source` says. `bytes`: the whole window is
    copied raw, from the tensor's first element on.
    """

    source: int
    form: Literal["elements", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Windows, places (one a tensor) and copies of one state.

    `ties` are triples (first, other, distance): the layout holds for other tensors of the same
    kinds only if `other` starts `distance` bytes after `first`, and if the number of different
    first addresses is `distinct_count`.
    """

    windows: tuple[Window, ...]
    places: tuple[Place, ...]
    copies: tuple[Copy, ...]
    size_bytes: int
    payload_bytes: int
    ties: tuple[tuple[int, int, int], ...]
    distinct_count: int

    def holds_for(self, addresses: Sequence[int]) -> bool:
        """Return whether tensors at these addresses are tied as those that were planned for."""
        return self.distinct_count == len(set(addresses)) and all(
            addresses[other] - addresses[first] == distance for first, other, distance in self.ties
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """A tensor's elements in memory: `span_bytes` from `address`, of which it needs some."""

    index: int
    tensor: torch.Tensor
    device: torch.device
    address: int
    span_bytes: int
    data_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.span_bytes

    @property
    def kind(self) -> tuple[object, ...]:
        tensor = self.tensor
        return (self.address, tensor.dtype, tensor.shape, tensor.stride())


def plan_layout(tensors: Sequence[torch.Tensor]) -> Layout:
    """Plan the windows for plain strided tensors, of any devices."""
    builder = _Builder(len(tensors))
    extents = []
    for index, tensor in enumerate(tensors):
        extent = _extent(index, tensor)
        if extent.data_bytes == 0 or tensor.is_conj() or tensor.is_neg():
            builder.add_alike([extent])
        else:
            extents.append(extent)
    for group in _overlapping(extents):
        builder.add_group(group)
    return builder.layout([tensor.data_ptr() for tensor in tensors])


def _extent(index: int, tensor: torch.Tensor) -> _Extent:
    item_bytes = tensor.element_size()
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    count = tensor.numel()
    return _Extent(
        index=index,
        tensor=tensor,
        device=tensor.device,
        address=tensor.data_ptr(),
        span_bytes=span * item_bytes if count else 0,
        data_bytes=count * item_bytes,
    )


def _overlapping(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    ordered = sorted(extents, key=lambda each: (str(each.device), each.address, -each.span_bytes))
    group: list[_Extent] = []
    end = 0
    for extent in ordered:
        if group and (extent.device != group[0].device or extent.address >= end):
            yield group
            group = []
        end = max(end, extent.end) if group else extent.end
        group.append(extent)
    if group:
        yield group


class _Builder:
    """Collects windows, places and copies, group by group."""

    def __init__(self, count: int) -> None:
        self._windows: list[Window] = []
        self._places: list[Place | None] = [None] * count
        self._copies: list[Copy] = []
        self._ties: list[tuple[int, int, int]] = []
        self._end = 0

    def add_group(self, group: list[_Extent]) -> None:
        """Place tensors that overlap, sorted by address and then by falling span."""
        alike: dict[tuple[object, ...], list[_Extent]] = {}
        for extent in group:
            alike.setdefault(extent.kind, []).append(extent)
        if len(alike) > 1 and _worth_sharing(group, [each[0] for each in alike.values()]):
            self._add_shared(group)
        else:
            for each in alike.values():
                self.add_alike(each)

    def add_alike(self, group: list[_Extent]) -> None:
        """Place tensors with the same elements in the same order: one tensor, or one tied."""
        first = group[0]
        tensor, size, stride = first.tensor, tuple(first.tensor.shape), first.tensor.stride()
        if first.data_bytes and not _is_dense(size, stride):
            stride = _row_major(size)
        as_stored = not (tensor.is_conj() or tensor.is_neg())
        if as_stored and first.data_bytes and not _copies_elements(tensor.dtype):
            self._add_shared(group)
            return
        if as_stored and stride != tensor.stride() and first.span_bytes <= first.data_bytes:
            # Expanded or overlapping: its elements are fewer than its indices.
            self._add_shared(group)
            return
        window = self._window(first.data_bytes)
        for extent in group:
            self._places[extent.index] = Place(window=window, offset=0, size=size, stride=stride)
        if first.data_bytes:
            self._copies.append(Copy(source=first.index, form="elements"))
        self._tie(group)

    def _add_shared(self, group: list[_Extent]) -> None:
        """Place tensors in one window that is a picture of the memory they share."""
        low = group[0].address
        window = self._window(max(extent.end for extent in group) - low)
        for extent in group:
            tensor = extent.tensor
            self._places[extent.index] = Place(
                window=window,
                offset=(extent.address - low) // tensor.element_size(),
                size=tuple(tensor.shape),
                stride=tensor.stride(),
            )
        self._copies.append(_whole_copy(group, self._windows[window].size_bytes))
        self._tie(group)

    def _tie(self, group: list[_Extent]) -> None:
        first = group[0]
        for other in group[1:]:
            self._ties.append((first.index, other.index, other.address - first.address))

    def _window(self, size_bytes: int) -> int:
        start = -(-self._end // WINDOW_ALIGN_BYTES) * WINDOW_ALIGN_BYTES
        self._end = start + size_bytes
        self._windows.append(Window(start=start, size_bytes=size_bytes))
        return len(self._windows) - 1

    def layout(self, addresses: Sequence[int]) -> Layout:
        """Return what was collected."""
        return Layout(
            windows=tuple(self._windows),
            places=tuple(place for place in self._places if place is not None),
            copies=tuple(self._copies),
            size_bytes=self._end,
            payload_bytes=sum(window.size_bytes for window in self._windows),
            ties=tuple(self._ties),
            distinct_count=len(set(addresses)),
        )


def _worth_sharing(group: list[_Extent], different: list[_Extent]) -> bool:
    """Return whether a picture of all the memory is possible, and no larger than its parts."""
    low, end = group[0].address, max(extent.end for extent in group)
    parts_bytes = sum(min(extent.data_bytes, extent.span_bytes) for extent in different)
    if end - low > parts_bytes:
        return False
    if any((extent.address - low) % extent.tensor.element_size() for extent in different):
        return False
    # The raw copy reads through the storage of the first; others may only look like its views.
    storage = group[0].tensor.untyped_storage()
    return end <= storage.data_ptr() + storage.nbytes()


def _whole_copy(group: list[_Extent], size_bytes: int) -> Copy:
    for extent in group:
        tensor = extent.tensor
        whole = extent.address == group[0].address and extent.data_bytes == size_bytes
        if (
            whole
            and _copies_elements(tensor.dtype)
            and _is_dense(tuple(tensor.shape), tensor.stride())
        ):
            return Copy(source=extent.index, form="elements")
    return Copy(source=group[0].index, form="bytes")


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill their extent, each at a place of its own."""
    expected = 1
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= n
    return True


def _row_major(size: Sequence[int]) -> tuple[int, ...]:
    steps = itertools.accumulate(reversed(size[1:]), lambda step, n: step * max(1, n), initial=1)
    return tuple(reversed(list(steps))) if size else ()


@functools.cache
def _copies_elements(dtype: torch.dtype) -> bool:
    """Return whether torch can copy elements of this kind; of some it knows only the size."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True
