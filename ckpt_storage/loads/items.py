"""The items of one load plan on this rank: their reads, their targets, and the commit.

Elements are copied into tensors in memory or on a device, and cast on the way.
"""

from __future__ import annotations

import io
import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import repeat
from operator import add, itemgetter, mul

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.boxes import Box, WindowCopy, box_selection
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.torchload import read_opaque, scan_blob
from ckpt_storage.options import Casts
from ckpt_storage.source.model import Source
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, bytes_read

from .casts import CastChecker, can_cast, is_lossless
from .layouts import check_layout
from .loadplanner import OwnChunksLoadPlanner
from .placing import ValuePlacer
from .sharing import Key, ShareOrder
from .tensors import dtype_name, is_freed

log = logging.getLogger("ckpt_storage")


Use = Callable[[torch.Tensor], None]
"""Copies bytes out of a tensor on the target's device; the copy may end after the call."""


class CudaMover:
    """Copies from pinned memory to a device on its own stream, after the caller's queued work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Otherwise a call would create a context on device 0, a thread's default.
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
            # Queued kernels may still write to the targets.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory, or pageable memory if pinning fails."""
        try:
            with torch.cuda.device(self._device):
                return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            log.warning("No pinned memory for a load: %s", error)
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        """Queue the copy of `data`, a view of a `buffer`, and its `use` on the device.

        Returns a function that waits until the buffer may be filled again.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            use(data.to(self._device, non_blocking=True))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            event.record(self._stream)
        return event.synchronize

    def finish(self) -> None:
        """Wait for the stream, and order the caller's stream after it."""
        with torch.cuda.device(self._device):
            self._stream.synchronize()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class UploadRing:
    """A ring of pinned staging buffers for one device; thread-safe."""

    def __init__(self, mover: CudaMover, buffer_count: int) -> None:
        self._mover = mover
        self._slots: queue.SimpleQueue[tuple[torch.Tensor | None, Callable[[], None]]]
        self._slots = queue.SimpleQueue()
        for _ in range(buffer_count):
            self._slots.put((None, lambda: None))
        self._count = buffer_count

    def move(self, window: memoryview, use: Use) -> None:
        """Start to copy a window to the device and to `use` it there; waits for a buffer."""
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
        """Wait until all windows have arrived; no thread may call `move` meanwhile."""
        for _ in range(self._count):
            buffer, wait = self._slots.get()
            wait()
            self._slots.put((buffer, _nothing))
        self._mover.finish()


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRead(ChunkRead):
    """A read into a tensor or a view of it; autograd records nothing.

    `dtype` is that of the stored elements. With a `ring` the stored bytes are copied to the
    tensor's device, and are placed and cast there.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    ring: UploadRing | None = None
    checker: CastChecker | None = None

    @property
    def memory(self) -> memoryview | None:
        """The memory of the tensor, if the stored bytes can be read into it directly."""
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
        """Copy elements out of a window, cast to the tensor's dtype."""
        use = partial(self._copy, copies)
        if self.ring is not None:
            self.ring.move(window, use)
        else:
            use(torch.frombuffer(window, dtype=torch.uint8))

    def _copy(self, copies: Sequence[WindowCopy], raw: torch.Tensor) -> None:
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()  # torch's kernels need natural alignment; some crash without it
        flat = raw.view(self.dtype)
        # The mode is per thread, and inference tensors are writable only in it.
        with torch.inference_mode(self.tensor.is_inference()):
            for copy in copies:
                source = flat.as_strided(
                    copy.sizes, copy.source_strides, copy.source_offset_elements
                )
                box = map(slice, copy.dest_offsets, map(add, copy.dest_offsets, copy.sizes))
                self.assign(tuple(box), source)

    def assign(self, box: tuple[slice, ...], source: torch.Tensor) -> None:
        """Copy stored elements into a box of the tensor. Raises `InvalidInputError` by `casts`."""
        target, is_async = self.tensor[box], self.ring is not None
        if self.checker is None or is_lossless(self.dtype, target.dtype):
            target.copy_(source, non_blocking=is_async)
        else:
            self.checker.copy(source, target, self.place.fqn, non_blocking=is_async)


class LoadItems:
    """The planned reads of one rank. Raises `InvalidInputError` for targets that do not fit."""

    def __init__(
        self,
        source: Source,
        plan: LoadPlan,
        planner: LoadPlanner,
        *,
        buffer_count: int,
        verify: bool,
        casts: Casts,
        stored_names: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._planner = planner
        self._rings: dict[torch.device, UploadRing] = {}
        self._buffer_count = buffer_count
        self._casts = casts
        self._stored_names = stored_names or {}
        self.checker = CastChecker(casts)
        self._items = plan.items
        # Parallel lists: an object per item would cost the garbage collector time.
        self._targets: list[torch.Tensor] = []
        self._blobs: list[tuple[ReadItem, bytearray, ChunkPlace]] = []
        self._opaque: list[ChunkRead] = []
        self.reads: list[ChunkRead] = []
        places = source.places(
            [(self._stored_name(item), _offsets_of(item)) for item in plan.items]
        )
        self.places = places
        targets: list[torch.Tensor | None] = []
        for item in plan.items:
            is_blob = item.type is LoadItemType.BYTE_IO
            targets.append(None if is_blob else self._target(item, self._dtype_of(item)))
        # The groups of targets that share memory, each with the elements that are read for it.
        self._sharing: list[list[_Value]] = []
        buffers: dict[int, torch.Tensor] = {}
        for group in [] if casts == "any" else _overlapping(targets, places):
            if len({self._content(number, target) for number, target in group}) > 1:
                # A device may have no memory for a second tensor of this size.
                buffers |= {n: torch.empty_like(target, device="cpu") for n, target in group}
                self._sharing.append([(places[n].fqn, target, buffers[n]) for n, target in group])
        for number, (item, place, target) in enumerate(
            zip(plan.items, places, targets, strict=True)
        ):
            source_place = place if verify else place.unchecked()
            if target is None:
                buffer = bytearray(source_place.size_bytes)
                self._blobs.append((item, buffer, source_place))
                self.reads.append(bytes_read(source_place, memoryview(buffer)))
                continue
            self._targets.append(target)
            reads = self._opaque if source_place.kind == "opaque" else self.reads
            buffered = buffers.get(number, target)
            reads.append(self._read(item, self._dtype_of(item), buffered, source_place))

    def _dtype_of(self, item: ReadItem) -> str:
        return self._source.tensors[self._stored_name(item)].dtype

    def _content(self, number: int, target: torch.Tensor) -> tuple[object, ...]:
        """Return a key that is equal for targets that are one tensor and get the same bytes.

        Without checksums no two values are known to be the same bytes.
        """
        item, place = self._items[number], self.places[number]
        layout = target.data_ptr(), target.stride(), target.dtype, target.is_conj(), target.is_neg()
        crcs = number if place.crcs is None else tuple(place.crcs)
        stored = tuple(item.storage_offsets), tuple(item.lengths), crcs
        return (*layout, *stored, self._dtype_of(item))

    def _stored_name(self, item: ReadItem) -> str:
        fqn = item.storage_index.fqn
        return self._stored_names.get(fqn, fqn)

    def _target(self, item: ReadItem, stored: str) -> torch.Tensor:
        """Return the planner's target of an item. Raises `InvalidInputError` if it does not fit."""
        if not isinstance(self._planner, OwnChunksLoadPlanner):
            check_layout(
                item.dest_index.fqn,
                getattr(self._planner, "state_dict", None),
                act="loaded",
                way_out="Load with ckpt_storage.load, without a planner.",
            )
        target = self._planner.resolve_tensor(item)
        if target.requires_grad:
            target = target.detach()
        fqn = item.storage_index.fqn
        if target.shape != item.lengths:
            raise _target_error(
                f"The planner gave a target of shape {list(target.size())} for "
                f"{list(item.lengths)} elements of {fqn}.",
                "Check the load planner's resolve_tensor.",
            )
        if target.is_meta:
            raise _target_error(
                f"The target of {fqn} is on the meta device and can hold nothing.",
                "Materialise it first, by to_empty() say.",
            )
        if is_freed(target):
            raise _target_error(
                f"The target of {fqn} has no memory: its storage was resized to nothing.",
                "Load into tensors that have memory (FSDP: into its state_dict()).",
            )
        if not can_cast(_dtype(stored)[0], target.dtype):
            raise _target_error(
                f"{fqn} is stored as {stored}; its target is {dtype_name(target.dtype)}, to which "
                "torch has no cast.",
                "Load into a target of the stored dtype.",
            )
        return target

    def _read(
        self, item: ReadItem, stored: str, target: torch.Tensor, place: ChunkPlace
    ) -> ChunkRead:
        dtype, item_bytes = _dtype(stored)
        where, device = None, target.device
        if item.lengths != place.sizes or any(item.storage_offsets):
            where = box_selection(Box(tuple(item.storage_offsets), tuple(item.lengths)))
        # For other devices `copy_` is synchronous and needs no ring.
        if device.type == "cuda" and device not in self._rings:
            self._rings[device] = UploadRing(CudaMover(device), self._buffer_count)
        return TensorRead(
            place=place,
            item_bytes=item_bytes,
            chunk_sizes=place.sizes,
            where=where,
            tensor=target,
            dtype=dtype,
            ring=self._rings.get(device),
            checker=self.checker if self._casts != "any" else None,
        )

    @property
    def wanted_bytes(self) -> int:
        """The bytes of all elements and blobs that this rank wants."""
        blobs_bytes = sum(place.size_bytes for _, _, place in self._blobs)
        reads: list[TensorRead] = [
            read for read in (*self.reads, *self._opaque) if isinstance(read, TensorRead)
        ]
        return blobs_bytes + sum(read.tensor.numel() * read.item_bytes for read in reads)

    def split(self, order: ShareOrder) -> tuple[list[ChunkRead], dict[Key, list[ChunkRead]]] | None:
        """Return the unshared reads, and the shared ones by chunk; None: a block spans two units.

        Opaque chunks are never shared.
        """
        shared: dict[Key, list[ChunkRead]] = {key: [] for key in order.keys}
        own: list[ChunkRead] = []
        for item, read in zip(self._items, self.reads, strict=True):
            offsets = _offsets_of(item)
            of_chunk = None if offsets is None else shared.get((read.place.fqn, offsets))
            if of_chunk is None:
                own.append(read)
            elif order.unit_bytes % read.place.block_bytes:
                return None
            else:
                of_chunk.append(read)
        return (own, shared) if all(shared.values()) else None

    def read_opaque(self, chunks: ChunkReader) -> None:
        """Read the items that only torch itself can read, one at a time in memory."""
        for read, elements in read_opaque(chunks, self._opaque):
            read.assign((), elements)  # type: ignore[attr-defined]  # a TensorRead

    def finish(self) -> None:
        """Wait until all copies to devices have ended, and fill targets that share memory.

        Raises `InvalidInputError` if their values differ where they share it.
        """
        for ring in self._rings.values():
            ring.finish()
        for values in self._sharing:
            for value in values:
                _fill(value)
            lost = next((value for value in values if not _is_filled(value)), None)
            if lost is not None:
                raise _sharing_error(lost, values)

    def commit(self, *, unsafe_pickle: bool) -> None:
        """Pass all values to the planner, once all bytes are read and verified."""
        if not unsafe_pickle:
            for _, buffer, place in self._blobs:
                scan_blob(buffer, place)
        tensors = (item for item in self._items if item.type is not LoadItemType.BYTE_IO)
        for item, target in zip(tensors, self._targets, strict=True):
            self._planner.commit_tensor(item, target)
        placer = ValuePlacer(self._planner)
        for item, buffer, _ in self._blobs:
            placer.place(item, io.BytesIO(buffer))


def wanted_regions(
    plans: Sequence[LoadPlan], stored_names: Sequence[Mapping[str, str] | None]
) -> dict[Key, list[tuple[int, Box]]]:
    """Return the ranks that read each chunk, with the region of the chunk that each reads.

    `stored_names` has the stored names of each rank's values; None: those of its plan.
    """
    wants: dict[Key, list[tuple[int, Box]]] = {}
    for rank, (plan, names) in enumerate(zip(plans, stored_names, strict=True)):
        for item in plan.items:
            offsets = _offsets_of(item)
            if offsets is not None:
                region = Box(tuple(item.storage_offsets), tuple(item.lengths))
                fqn = item.storage_index.fqn
                stored = fqn if names is None else names.get(fqn, fqn)
                wants.setdefault((stored, offsets), []).append((rank, region))
    return wants


@cache
def _dtype(name: str) -> tuple[torch.dtype, int]:
    return getattr(torch, name), DTYPES[name].item_bytes


def _offsets_of(item: ReadItem) -> tuple[int, ...] | None:
    if item.type is LoadItemType.BYTE_IO:
        return None
    return _exact(item.storage_index.offset or ())


@lru_cache(1024)
def _exact(offsets: tuple[int, ...]) -> tuple[int, ...]:
    # Equal offsets share one plain tuple: torch.Size would stay tracked by the collector.
    return tuple(offsets)


def _overlapping(
    targets: Sequence[torch.Tensor | None], places: Sequence[ChunkPlace]
) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Yield groups of targets whose addresses overlap, with their numbers, in order.

    The chunks of one value lie between one another, but not at one address.
    """
    extents: dict[torch.device, list[tuple[int, int, int, torch.Tensor]]] = {}
    for number, target in enumerate(targets):
        if target is not None and target.numel():
            start = target.data_ptr()
            last = map(mul, target.stride(), map(add, target.shape, repeat(-1)))
            stop = start + (1 + sum(last)) * target.element_size()
            extents.setdefault(target.device, []).append((start, stop, number, target))
    for ranges in extents.values():
        group, end = list[tuple[int, int, int, torch.Tensor]](), 0
        ranges.sort(key=lambda extent: extent[:3])
        for extent in (*ranges, None):
            if extent is not None and extent[0] < end:
                group.append(extent)
                end = max(end, extent[1])
                continue
            if len(group) > 1:
                starts = {start for start, *_ in group}
                names = {places[number].fqn for _, _, number, _ in group}
                if len(names) > 1 or len(starts) < len(group):
                    members = ((number, target) for _, _, number, target in group)
                    yield sorted(members, key=itemgetter(0))
            if extent is not None:
                group, end = [extent], extent[1]


_Value = tuple[str, torch.Tensor, torch.Tensor]
"""The name, target and elements of a value whose target shares memory."""


def _fill(value: _Value) -> None:
    _, target, elements = value
    # As in `TensorRead`.
    with torch.inference_mode(target.is_inference()):
        target.copy_(elements)


def _is_filled(value: _Value) -> bool:
    """Return whether a target has its elements, byte for byte: NaN equals NaN."""
    plain = [tensor.cpu().resolve_conj().resolve_neg().contiguous() for tensor in value[1:]]
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in plain))


def _sharing_error(lost: _Value, values: Sequence[_Value]) -> InvalidInputError:
    """Return the error that names `lost` and one of the values that overwrite its target."""
    for other in (lost, *values):
        _fill(other)
        if not _is_filled(lost):
            break
    if lost[0] == other[0]:
        return _target_error(
            f"Several elements of the target of {lost[0]} are a single memory location.",
            "Load into a tensor that is not expanded: clone() it first.",
        )
    return _target_error(
        f"The targets of {lost[0]} and {other[0]} share memory, and the checkpoint has different "
        "values for it.",
        "Give each a tensor of its own, load only one of them, or pass casts='any': then either "
        "value may stay.",
    )


def _target_error(message: str, next_step: str) -> InvalidInputError:
    return InvalidInputError(message, phase="load", next_step=next_step)
