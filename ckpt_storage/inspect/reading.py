"""Selections of tensors and stored objects into memory, read in one batch and verified.

Elements are moved as words of their size, so that types that numpy lacks are read alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import CheckpointError, FormatError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.selections import Selection, WindowCopy, clip
from ckpt_storage.source.model import Key
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, Gaps
from ckpt_storage.transfer.ranges import ignore

from .handle import Handle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.generic]

OnBytes = Callable[[int], None]

WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""The numpy type that moves an element of so many bytes as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead(ChunkRead):
    """A read into the view of an array."""

    array: Words

    @property
    def memory(self) -> memoryview | None:
        """The bytes of the array, if they are adjacent."""
        if not self.array.flags.c_contiguous:
            return None
        return memoryview(self.array.reshape(-1).view("u1"))  # type: ignore[arg-type]  # as in loads

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements into the array."""
        import numpy as np  # noqa: PLC0415  # the caller imported it

        for copy in copies:
            strides = [stride * self.item_bytes for stride in copy.source_strides]
            at = copy.source_offset_elements * self.item_bytes
            found: Words = np.ndarray(copy.sizes, WORDS[self.item_bytes], window, at, strides)
            pairs = zip(copy.dest_offsets, copy.sizes, strict=True)
            where = tuple(slice(start, start + count) for start, count in pairs)
            self.fill(self.array[_view_index(where)], found)

    def fill(self, out: Words, found: Words) -> None:
        """Put elements into a part of the array."""
        out[...] = found


_Part = tuple[Key, Box, Selection, "Words"]
"""The part of a selection in one chunk: its key and box, the positions there, and who gets them."""


def read_tensors(
    handle: Handle,
    wanted: Sequence[tuple[str, Selection]],
    *,
    gaps: Gaps = "none",
    on_bytes: OnBytes = ignore,
) -> list[Words]:
    """Return the elements of each selection (FQN, positions per dimension) as an array of words.

    All are read in one batch. Of a checkpoint with checksums whole blocks are read, and none
    without an element of a selection; with `gaps` "cheap", also gaps that take less time than
    another request. Any thread.

    Raises `IntegrityError` (file, FQN, offset), `CheckpointGoneError`, `StorageError`,
    `FormatError`, `PhaseTimeoutError`.
    """
    import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

    arrays: list[Words] = []
    parts: list[_Part] = []
    for fqn, ranges in wanted:
        kind = WORDS[DTYPES[handle.tensors[fqn].dtype].item_bytes]
        arrays.append(np.empty(tuple(map(len, ranges)), kind))
        parts += _parts(handle, fqn, ranges, arrays[-1])
    if not parts:
        return arrays
    with handle.reading([key for key, *_ in parts]) as (chunks, places):
        reads = [
            ArrayRead(
                place=place,
                item_bytes=array.itemsize,
                chunk_sizes=chunk.sizes,
                where=where,
                array=array,
            )
            for (_, chunk, where, array), place in zip(parts, places, strict=True)
        ]
        raw = [read for read in reads if read.place.kind == "raw"]
        chunks.read(raw, gaps=gaps, on_bytes=on_bytes)
        if len(raw) < len(reads):
            from .torchload import read_opaque, words_of  # noqa: PLC0415  # only torch reads these

            for read, found in read_opaque(chunks, reads, on_bytes=on_bytes):
                array = read.array  # type: ignore[attr-defined]  # made above
                array[...] = words_of(found, array.dtype.str)
    return arrays


def _parts(handle: Handle, fqn: str, ranges: Selection, array: Words) -> list[_Part]:
    """Return the parts of a selection that lie in one chunk each; together they are all of it."""
    if not all(ranges):
        return []
    starts = tuple(r.start for r in ranges)
    hull = Box(starts, tuple(r[-1] + 1 - r.start for r in ranges))
    info = handle.tensors[fqn]
    parts: list[_Part] = []
    for chunk in (info.boxes[at] for at in info.overlapping(hull)):
        inside = clip(ranges, chunk)
        if inside is not None:
            parts.append(((fqn, chunk.offsets), chunk, inside[0], array[_view_index(inside[1])]))
    held_count = sum(view.size for *_, view in parts)
    if held_count != array.size:
        # Memory that no chunk fills would pass for values.
        raise FormatError(
            f"{handle.url}: the chunks of {fqn} hold {held_count} of {array.size} elements that "
            "were asked for.",
            next_step="The save was incomplete, or its metadata is damaged; load another "
            "checkpoint.",
        )
    return parts


def _view_index(where: tuple[slice, ...]) -> tuple[slice | EllipsisType, ...]:
    """Return an index that gives a view always: of no dimensions it would copy the element."""
    return (*where, ...)


def read_stored(
    handle: Handle, fqns: Sequence[str], *, on_bytes: OnBytes = ignore
) -> list[tuple[bytearray, ChunkPlace]]:
    """Return values that are no tensors as they are stored, all read in one batch.

    Raises as `read_tensors`.
    """
    if not fqns:
        return []
    with handle.reading([(fqn, None) for fqn in fqns]) as (chunks, places):
        buffers = chunks.read_bytes(places, on_bytes=on_bytes)
    return list(zip(buffers, places, strict=True))


def read_objects(
    handle: Handle, fqns: Sequence[str], *, on_bytes: OnBytes = ignore
) -> Mapping[str, object]:
    """Return values that are no tensors, unpickled as far as that runs no code.

    Raises `UnsafeContentError` for others, unless the handle allows them, and as `read_tensors`.
    """
    stored = read_stored(handle, fqns, on_bytes=on_bytes)
    if not stored:
        return {}
    from .torchload import blob_value  # noqa: PLC0415  # torch.load reads what it wrote

    return {
        fqn: blob_value(buffer, place, unsafe_pickle=handle.unsafe_pickle)
        for fqn, (buffer, place) in zip(fqns, stored, strict=True)
    }


def batches(
    tensors: Sequence[tuple[Sequence[int], int]], most_bytes: int
) -> Iterator[list[tuple[int, Selection]]]:
    """Yield the parts to read of tensors (shape, bytes of an element), some at a time.

    A part is the place of its tensor among them and a selection; parts of one tensor follow one
    another in C order. Those of one batch have at most `most_bytes` together.
    """
    batch: list[tuple[int, Selection]] = []
    size_bytes = 0
    for at, (shape, item_bytes) in enumerate(tensors):
        for part in slabs(shape, max(1, most_bytes // item_bytes)):
            part_bytes = math.prod(map(len, part)) * item_bytes
            if batch and size_bytes + part_bytes > most_bytes:
                yield batch
                batch, size_bytes = [], 0
            batch.append((at, part))
            size_bytes += part_bytes
    if batch:
        yield batch


def slabs(shape: Sequence[int], most_count: int) -> Iterator[Selection]:
    """Yield selections of at most `most_count` elements that follow one another in C order.

    Each is of adjacent rows of one dimension, so that it is one run of every chunk it meets
    that is not cut in a dimension before that one. An empty shape has none.
    """
    if 0 in shape:
        return
    dim, row_count = 0, math.prod(shape)
    while dim < len(shape) and row_count // shape[dim] > most_count:
        row_count //= shape[dim]
        dim += 1
    outer = itertools.product(*([range(i, i + 1) for i in range(size)] for size in shape[:dim]))
    if dim == len(shape):
        yield from outer
        return
    size = shape[dim]
    step = max(1, most_count * size // row_count)
    inner = tuple(range(n) for n in shape[dim + 1 :])
    for before in outer:
        for start in range(0, size, step):
            yield (*before, range(start, min(start + step, size)), *inner)


def numpy_name(dtype: str) -> str | None:
    """Return the name of numpy's type, or `ml_dtypes`', for torch's `dtype`; None without one."""
    name = DTYPES[dtype].numpy
    is_narrow = dtype == "bfloat16" or dtype.startswith("float8")
    return dtype if name is None and is_narrow else name


def elements_of(words: Words, dtype: str) -> NDArray[Any]:
    """Return words as elements of torch's type `dtype`, in the same memory.

    Raises `CheckpointError` for a type that neither numpy nor `ml_dtypes` has.
    """
    name = numpy_name(dtype)
    if name is None:
        raise CheckpointError(
            f"numpy has no type for {dtype}.", next_step="Read the tensor with .torch()."
        )
    if DTYPES[dtype].numpy is not None:
        return words.view(name)
    import ml_dtypes  # noqa: PLC0415  # only where it is needed

    return words.view(getattr(ml_dtypes, name))
