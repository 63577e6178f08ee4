"""Tensors of any source as streams of verified bytes, one bounded window after the other.

Elements are put in order by a handful of strided copies for each read, never row by row. torch is
imported only for an item that torch alone can read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.boxes import Box, GridBoxes, WindowCopy, interval_boxes
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.selections import box_selection
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, bytes_read, concerns
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.ranges import RangeReader

Item = tuple[str, Box | None]
"""A box of a tensor, or, without one, a value that is none."""

_MOST_TOGETHER = 1024
"""Items of one batch, however small: each takes some memory besides its bytes."""

# numpy has no 16-byte integer; a copy of complex numbers keeps their bits.
_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Readable(Protocol):
    """What values are streamed from: every `source.Source`, and a file of `torch.save`."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by FQN."""

    def require(self, chunks: Iterable[tuple[str, tuple[int, ...] | None]]) -> None:
        """Fetch what `place` needs for these chunks."""

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return where a chunk lies."""

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error to raise when the file of `place` is not there."""


class TensorStream:
    """Reads the values of one source; used by one thread.

    A window has at most `window_bytes`, or one element; what a read goes through on its way is
    bounded by `options.memory_limit_bytes`.
    """

    def __init__(
        self,
        source: Readable,
        store: Store,
        *,
        options: TransferOptions,
        deadline: Deadline,
        window_bytes: int,
    ) -> None:
        self._source = source
        self._options = options
        costs = costs_for(is_remote=store.capabilities.is_remote)
        self._chunk_reader = ChunkReader(RangeReader(store, options, deadline), costs)
        self._window_bytes = window_bytes
        self._coming: deque[Item] = deque()
        self._held: dict[Item, memoryview] = {}
        self._own: dict[str, frozenset[Box]] = {}

    def expect(self, items: Iterable[Item]) -> None:
        """Say what will be asked for next, in this order, so that small items are read together.

        One that is asked for out of turn is read by itself. At most a window is read ahead.
        """
        self._coming = deque(items)
        self._held = {}

    def whole(self, fqn: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in C order; each window is the taker's to keep.

        Raises `IntegrityError` naming tensor, file, rank and offset, `FormatError`, and what the
        store raises.
        """
        info = self._source.tensors[fqn]
        return self.box(fqn, Box((0,) * len(info.shape), info.shape))

    def box(self, fqn: str, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box of a tensor in C order, as `whole` does."""
        ahead = self._read_ahead((fqn, box))
        if ahead is not None:
            if len(ahead):
                yield ahead
            return
        info = self._source.tensors[fqn]
        item_bytes = DTYPES[info.dtype].item_bytes
        chunks = self._chunks(info, box)
        if not self._are_plain(fqn, chunks):
            yield self._by_torch(info, box)
            return
        step = max(1, self._window_bytes // item_bytes)
        total = box.volume
        for start in range(0, total, step):
            yield self._window(info, box, chunks, start, min(start + step, total))

    def blob(self, fqn: str) -> memoryview:
        """Return the bytes of a value that is no tensor, as the saver pickled it."""
        ahead = self._read_ahead((fqn, None))
        if ahead is not None:
            return ahead
        self._source.require([(fqn, None)])
        place = self._source.place(fqn, None)
        buffer = bytearray(place.size_bytes)
        self._run([bytes_read(place, memoryview(buffer))])
        return memoryview(buffer)

    def _read_ahead(self, item: Item) -> memoryview | None:
        """Return an item that is read together with those that come after it, None if it is not.

        Many small chunks would take a round trip each.
        """
        found = self._held.pop(item, None)
        coming = self._coming
        if found is not None or not coming or coming[0] != item:
            return found
        held: dict[Item, memoryview] = {}
        reads: list[ChunkRead] = []
        left = self._window_bytes
        while coming and len(held) < _MOST_TOGETHER:
            size = self._plain_bytes(coming[0])
            if size is None or size > left:
                break
            left -= size
            data = bytearray(size)
            fqn, box = one = coming.popleft()
            held[one] = memoryview(data)
            if box is None:
                reads.append(bytes_read(self._source.place(fqn, None), held[one]))
            elif size:
                info = self._source.tensors[fqn]
                chunks = self._chunks(info, box)
                reads += self._reads(info, box, chunks, (0, box.volume), held[one])
        if not held:
            coming.popleft()
            return None
        self._run(reads)
        self._held = held
        return held.pop(item)

    def _plain_bytes(self, item: Item) -> int | None:
        """Return how many bytes an item has; None if torch has to read it, or it is too large."""
        fqn, box = item
        if box is None:
            self._source.require([(fqn, None)])
            return self._source.place(fqn, None).size_bytes
        info = self._source.tensors[fqn]
        size = box.volume * DTYPES[info.dtype].item_bytes
        if not size:
            return 0
        if size > self._window_bytes or not self._are_plain(fqn, self._chunks(info, box)):
            return None
        return size

    def _chunks(self, info: TensorInfo, box: Box) -> list[Box]:
        """Return the chunks that hold elements of a box: where it is one of them, that one."""
        if isinstance(info.boxes, GridBoxes):
            is_own = info.chunk_at(box.offsets) == box
        else:
            # Looking through all chunks for each of them would take their square.
            if info.fqn not in self._own:
                self._own[info.fqn] = frozenset(info.boxes)
            is_own = box in self._own[info.fqn]
        return [box] if is_own else [info.boxes[at] for at in info.overlapping(box)]

    def _are_plain(self, fqn: str, chunks: Sequence[Box]) -> bool:
        """Return whether chunks lie in their files as plain bytes; fetches what tells it."""
        keys = [(fqn, chunk.offsets) for chunk in chunks if not chunk.is_empty]
        self._source.require(keys)
        return all(self._source.place(*key).kind == "raw" for key in keys)

    def _window(
        self, info: TensorInfo, box: Box, chunks: Sequence[Box], start: int, stop: int
    ) -> memoryview:
        """Return elements [start, stop) of a box, counted in C order."""
        data = memoryview(bytearray((stop - start) * DTYPES[info.dtype].item_bytes))
        self._run(self._reads(info, box, chunks, (start, stop), data))
        return data

    def _reads(
        self,
        info: TensorInfo,
        box: Box,
        chunks: Sequence[Box],
        interval: tuple[int, int],
        data: memoryview,
    ) -> list[ChunkRead]:
        """Return what reads an interval of the elements of a box, in C order, into `data`."""
        item_bytes = DTYPES[info.dtype].item_bytes
        reads: list[ChunkRead] = []
        at = 0
        for part in interval_boxes(box.sizes, *interval):
            inner = Box(
                tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)), part.sizes
            )
            view = data[at : at + inner.volume * item_bytes]
            at += len(view)
            for chunk in chunks:
                overlap = chunk.intersect(inner)
                if overlap is not None:
                    reads.append(self._read(info, chunk, overlap, inner, view))
        return reads

    def _read(
        self, info: TensorInfo, chunk: Box, overlap: Box, inner: Box, view: memoryview
    ) -> ChunkRead:
        item_bytes = DTYPES[info.dtype].item_bytes
        place = self._source.place(info.fqn, chunk.offsets)
        out: NDArray[Any] = np.ndarray(inner.sizes, _BITS[item_bytes], view)
        where = overlap.relative_to(inner)
        return ChunkRead(
            place=place,
            item_bytes=item_bytes,
            chunk_sizes=chunk.sizes,
            where=box_selection(overlap.relative_to(chunk)),
            target=_Elements(
                out[_index(where.offsets, where.sizes)],
                item_bytes,
                view if overlap == inner else None,
            ),
        )

    def _run(self, reads: Sequence[ChunkRead]) -> None:
        try:
            self._chunk_reader.read(reads)
        except (StorageError, IntegrityError) as error:
            places = [r.place for r in reads if concerns(error, r.place.path)]
            if isinstance(error, StorageError):
                if error.kind == "not-found" and places:
                    raise self._source.explain_missing(places[0]) from error
                raise
            if error.fqn is None and places:
                error.fqn, error.rank = places[0].fqn, places[0].rank
            raise

    def _by_torch(self, info: TensorInfo, box: Box) -> memoryview:
        """Return a box of a tensor of which an item is no plain one: whole items in memory."""
        from ckpt_storage.inspect.torchload import load_whole  # noqa: PLC0415  # imports torch, and few need it

        item_bytes = DTYPES[info.dtype].item_bytes
        out: NDArray[Any] = np.empty(box.sizes, _BITS[item_bytes])
        for chunk in info.boxes:
            overlap = chunk.intersect(box)
            if overlap is None:
                continue
            place = self._source.place(info.fqn, chunk.offsets)
            self._check_affordable(place, box.volume * item_bytes)
            if place.kind == "raw":
                data = b"".join(self._raw(info, chunk))
            else:
                buffer = bytearray(place.size_bytes)
                self._run([bytes_read(place, memoryview(buffer))])
                data = _bytes_of(load_whole(buffer, place))
            held: NDArray[Any] = np.ndarray(chunk.sizes, _BITS[item_bytes], data)
            source, target = overlap.relative_to(chunk), overlap.relative_to(box)
            out[_index(target.offsets, target.sizes)] = held[_index(source.offsets, source.sizes)]
        return memoryview(out.tobytes())

    def _raw(self, info: TensorInfo, chunk: Box) -> Iterator[memoryview]:
        step = max(1, self._window_bytes // DTYPES[info.dtype].item_bytes)
        for start in range(0, chunk.volume, step):
            yield self._window(info, chunk, [chunk], start, min(start + step, chunk.volume))

    def _check_affordable(self, place: ChunkPlace, box_bytes: int) -> None:
        needed = 2 * place.size_bytes + box_bytes
        if needed > self._options.memory_limit_bytes:
            raise InvalidInputError(
                f"{place.fqn} in {place.path} is stored with strides; rearranging it takes "
                f"{needed} bytes of memory, and memory_limit_bytes is "
                f"{self._options.memory_limit_bytes}.",
                next_step=f"Raise memory_limit_bytes to {needed} or more.",
            )


def _bytes_of(tensor: Any) -> bytes:  # noqa: ANN401  # torch's; this module does not import it
    import torch  # noqa: PLC0415  # see `_by_torch`

    flat = tensor.contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return what gives a view of a box, of an array without dimensions too."""
    return (..., *(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)))


class _Elements:
    """An array of elements, or a part of one, to be filled."""

    __slots__ = ("_item_bytes", "_out", "memory")

    def __init__(self, out: NDArray[Any], item_bytes: int, memory: memoryview | None) -> None:
        self._out = out
        self._item_bytes = item_bytes
        self.memory = memory

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements from a window of the source."""
        for copy in copies:
            found: NDArray[Any] = np.ndarray(
                copy.sizes,
                _BITS[self._item_bytes],
                window,
                copy.source_offset_elements * self._item_bytes,
                [stride * self._item_bytes for stride in copy.source_strides],
            )
            np.copyto(self._out[_index(copy.dest_offsets, copy.sizes)], found)


def payload_bytes(info: TensorInfo) -> int:
    """Return how many bytes the elements of a tensor have."""
    return math.prod(info.shape) * DTYPES[info.dtype].item_bytes
