"""Windows of weight files put together in memory out of verified ranges of the source.

Every block of the source is checked as it arrives; elements are placed by a handful of strided
copies for each read, never row by row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format.boxes import WindowCopy
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.selections import box_selection
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import Source
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, concerns
from ckpt_storage.transfer.costs import costs_for
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

from .options import CASTABLE
from .plan import ExportPlan, Piece, PieceFinder, Region

Bits = NDArray[Any]
"""Elements of a dtype as unsigned integers of its size, or as the dtype where numpy has it."""

_SLAB_ELEMENTS = 1 << 16
"""Elements converted at a time: what lies between the steps stays in the processor's cache."""

_INFINITE_F32 = np.uint32(0x7F800000)
_MAGNITUDE_F32 = np.uint32(0x7FFFFFFF)
_NAN_BF16 = np.uint16(0x7FC0)
_NUMPY = {"float64": "f8", "float32": "f4", "float16": "f2"}


def check_cast(source_dtype: str, dtype: str) -> None:
    """Raise `InvalidInputError` unless elements of one dtype can become ones of the other."""
    if {source_dtype, dtype} <= CASTABLE:
        return
    raise InvalidInputError(
        f"Elements of {source_dtype} cannot be written as {dtype}.",
        next_step=f"Only {', '.join(sorted(CASTABLE))} are cast.",
    )


def cast_into(source: Bits, source_dtype: str, target: Bits, dtype: str) -> None:
    """Convert `source` into `target`, arrays of one shape and any strides.

    Both hold unsigned integers with the bits of the elements. Rounds to nearest, ties to even;
    what is beyond the range becomes infinite; float64 goes by way of float32, as in torch.
    """
    for index in _slabs(source.shape):
        _cast_slab(source[index], source_dtype, target[index], dtype)


def _slabs(shape: tuple[int, ...]) -> itertools.product[tuple[slice, ...]]:
    """Return the indices of boxes of at most `_SLAB_ELEMENTS` that together are the array."""
    room = _SLAB_ELEMENTS
    steps = []
    for size in reversed(shape):
        step = max(1, min(size, room))
        room //= step
        steps.append([slice(at, at + step) for at in range(0, size, step)])
    return itertools.product(*reversed(steps))


def _cast_slab(source: Bits, source_dtype: str, target: Bits, dtype: str) -> None:
    if source_dtype == "bfloat16":
        wide = source.astype(np.uint32)
        wide <<= np.uint32(16)
        values: Bits = wide.view(np.float32)
    else:
        values = np.ascontiguousarray(source).view(_NUMPY[source_dtype])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype != "float64":
            values = values.astype(np.float32, copy=False)
        if dtype == "bfloat16":
            target[...] = _rounded_to_bfloat16(values.view(np.uint32))
        else:
            target[...] = values.astype(_NUMPY[dtype]).view(target.dtype)


def _rounded_to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 bits, rounded by the lower ones."""
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    rounded = odd.astype(np.uint16)
    # Rounding would carry a NaN's payload into the sign or out of the NaNs.
    is_nan = (bits & _MAGNITUDE_F32) > _INFINITE_F32
    if is_nan.any():
        rounded[is_nan] = _NAN_BF16
    return rounded


# numpy has no 16-byte integer; a copy of complex numbers keeps their bits.
_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class WindowReader:
    """Reads what weight files are made of; may be used by several threads at once.

    A read takes at most `read_bytes`, or one block of the source where that is larger. All tell
    `pacer`, by which the caller decides how many windows are filled at a time.
    """

    def __init__(
        self,
        plan: ExportPlan,
        source: Source,
        store: Store,
        *,
        deadline: Deadline,
        read_bytes: int,
        options: TransferOptions,
        pacer: Pacer,
    ) -> None:
        self._plan = plan
        self._source = source
        self._store = store
        self._deadline = deadline
        self._read_bytes = read_bytes
        # Parallelism is the caller's: each of its threads reads for a window of its own.
        options = dataclasses.replace(options, thread_count=1, part_bytes=read_bytes)
        self._ranges = RangeReader(store, options, deadline, pacer=pacer)
        costs = costs_for(is_remote=store.capabilities.is_remote)
        self._chunks = ChunkReader(self._ranges, costs)
        self._finder = PieceFinder(plan, source.tensors)
        self._places: dict[tuple[str, tuple[int, ...]], ChunkPlace] = {}
        self._lock = threading.Lock()

    def pieces_of(self, file: int, start: int, stop: int) -> list[Piece]:
        """Return the pieces of bytes [start, stop) of a weight file."""
        return list(self._finder.pieces_of(file, start, stop))

    def require(self, region: Region) -> None:
        """Fetch what is needed to find the chunks of a region, in one go.

        Raises `FormatError` for a chunk that does not lie as plain bytes in its file.
        """
        keys = {
            (piece.fqn, piece.chunk_offsets): piece
            for piece in self._finder.pieces_of(region.file, region.start, region.stop)
        }
        self._source.require(list(keys))
        for piece in keys.values():
            self.place_of(piece)

    def place_of(self, piece: Piece) -> ChunkPlace:
        """Return where the chunk of a piece lies."""
        key = piece.fqn, piece.chunk_offsets
        with self._lock:
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = _checked(self._source.place(*key), piece)
        return place

    def forget(self) -> None:
        """Drop what is known of the chunks: the next region needs others."""
        with self._lock:
            self._places.clear()

    def fill(
        self, file: int, start: int, stop: int, window: memoryview, scratch: memoryview
    ) -> int:
        """Put bytes [start, stop) of a weight file into `window`; return the bytes read.

        `scratch` has at least `scratch_bytes`, and is the calling thread's. Raises what the store
        raises, with the tensor and the rank that wrote it, and `IntegrityError` for damage.
        """
        header = self._plan.files[file].header[start:stop]
        window[: len(header)] = header
        pieces = self.pieces_of(file, start, stop)
        reads = [self._chunk_read(piece, window, start) for piece in pieces]
        return self._run(self._chunks.plan(reads), scratch, [read.place for read in reads])

    def verify(self, place: ChunkPlace, start: int, stop: int, scratch: memoryview) -> int:
        """Read bytes [start, stop) of a chunk and check them; return their CRC-32C.

        Where there are checksums, both are ends of blocks.
        """
        crc = 0
        step = len(scratch) - len(scratch) % place.block_bytes
        for at in range(start, stop, step):
            end = min(at + step, stop)
            read = RangeRead(
                path=place.path,
                start=place.start + at,
                stop=place.start + end,
                done=partial(_check, place, at),
                file_bytes=place.file_bytes,
            )
            self._run([read], scratch, [place])
            crc = crc32c_of(scratch[: end - at], crc)
        return crc

    def scratch_bytes(self) -> int:
        """Return how long the buffer must be that reads go through."""
        with self._lock:
            largest = max((place.block_bytes for place in self._places.values()), default=1)
        # An element that does not divide the block is read whole.
        return max(self._read_bytes, largest) + largest

    def _run(
        self, reads: Sequence[RangeRead], scratch: memoryview, places: Sequence[ChunkPlace]
    ) -> int:
        aimed = [
            read
            if read.into is not None
            else dataclasses.replace(read, into=scratch[: read.stop - read.start])
            for read in reads
        ]
        try:
            self._ranges.run(aimed)
        except (StorageError, IntegrityError) as error:
            raise self.explained(error, places) from error
        return sum(read.stop - read.start for read in reads)

    def _chunk_read(self, piece: Piece, window: memoryview, window_start: int) -> ChunkRead:
        tensor = piece.tensor
        out: NDArray[Any] = np.ndarray(
            piece.dest_sizes,
            _BITS[tensor.item_bytes],
            window,
            piece.dest_start - window_start,
        )[_index(piece.dest_offsets, piece.region.sizes)]
        memory = None
        run = piece.dest_run
        if piece.is_plain_copy and run is not None:
            memory = window[run.start - window_start : run.stop - window_start]
        return ChunkRead(
            place=self.place_of(piece),
            item_bytes=tensor.source_item_bytes,
            chunk_sizes=piece.chunk_sizes,
            where=box_selection(piece.region),
            target=_Elements(piece, out, memory),
        )

    def explained(
        self, error: StorageError | IntegrityError, places: Sequence[ChunkPlace]
    ) -> Exception:
        """Return `error` with the tensor that its file holds and the rank that wrote it."""
        mine = [place for place in places if concerns(error, place.path)]
        if not mine:
            return error
        if isinstance(error, StorageError):
            return self._source.explain_missing(mine[0]) if error.kind == "not-found" else error
        if error.fqn is not None:
            return error
        offset = error.offset or 0
        place = next((p for p in mine if p.start <= offset < p.start + p.size_bytes), mine[0])
        by = f", written by rank {place.rank}" if place.rank is not None else ""
        step = error.next_step or ""
        return IntegrityError(
            f"{str(error).removesuffix(step).strip()} The file holds {place.fqn}{by}.",
            fqn=place.fqn,
            offset=error.offset,
            path=place.path,
            rank=place.rank,
            phase="consolidate",
            next_step=error.next_step,
        )


def _checked(place: ChunkPlace, piece: Piece) -> ChunkPlace:
    """Return `place`; raise `FormatError` if a piece cannot be cut out of it."""
    wanted = math.prod(piece.chunk_sizes) * piece.tensor.source_item_bytes
    if place.kind != "raw":
        raise FormatError(
            f"{place.fqn} in {place.path} is stored in a form that only torch.load reads.",
            path=place.path,
            rank=place.rank,
            next_step="Load the checkpoint and save it anew, then consolidate that.",
        )
    if place.size_bytes != wanted:
        raise FormatError(
            f"{place.fqn} in {place.path} has {place.size_bytes} bytes; the metadata says "
            f"{list(piece.chunk_sizes)} elements, {wanted} bytes.",
            path=place.path,
            rank=place.rank,
            next_step="Check that the checkpoint is complete and that its files belong together.",
        )
    if piece.tensor.is_cast:
        check_cast(piece.tensor.source_dtype, piece.tensor.dtype)
    return place


def _check(place: ChunkPlace, first_byte: int, view: memoryview) -> None:
    place.check(view, first_byte)


def _index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


class _Elements:
    """Where the elements of one piece belong in a window of a weight file."""

    __slots__ = ("_out", "_piece", "memory")

    def __init__(self, piece: Piece, out: NDArray[Any], memory: memoryview | None) -> None:
        self._piece = piece
        self._out = out
        self.memory = memory

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy or convert elements from a window of the source."""
        tensor = self._piece.tensor
        item_bytes = tensor.source_item_bytes
        for copy in copies:
            found: NDArray[Any] = np.ndarray(
                copy.sizes,
                _BITS[item_bytes],
                window,
                copy.source_offset_elements * item_bytes,
                [stride * item_bytes for stride in copy.source_strides],
            )
            part = self._out[_index(copy.dest_offsets, copy.sizes)]
            if tensor.is_cast:
                cast_into(found, tensor.source_dtype, part, tensor.dtype)
            else:
                np.copyto(part, found)
