"""An open checkpoint: its values, and verified reads of them in batches.

Elements are read as words of their size, also those of types that numpy lacks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import CheckpointError, FormatError, InvalidInputError
from ckpt_storage.format.boxes import Box, Selection, WindowCopy, clip
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import LOCAL_READ_BYTES, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.model import CommittedSource, Key, Source, adding_context
from ckpt_storage.source.opening import open_newest
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, Gaps
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeReader, ignore

from .near_names import find_near_names
from .views import Entry, Sharding

Words = NDArray[np.generic]
Names = str | Iterable[str] | Callable[[str], bool] | None
"""Names, or a predicate of names; None: all names."""

_PIECE = 1 << 20
"""Elements that are compared or counted together: 8 MiB as float64."""
_PIECES_HELD = 8
"""An upper bound: a piece, the buffers of its read, and the same of a second tensor."""


class Handle:
    """One open checkpoint; every read has its own deadline. Thread-safe.

    The next save of another writer may reuse its file names, so the lengths and times of its files
    are compared with those at the opening after every read.
    """

    def __init__(
        self,
        location: Location,
        *,
        unsafe_pickle: bool,
        arguments: Any,  # noqa: ANN401  # those of `verify`
    ) -> None:
        self.location = location
        self.url = location.url
        self.unsafe_pickle = unsafe_pickle
        self.arguments: Mapping[str, Any] = arguments
        timeouts = arguments["timeout"]
        self._timeout_s = timeouts.load
        self._store = open_store(location, timeouts=timeouts, retry=arguments["retry"])
        self._lock = threading.RLock()
        self._is_closed = False
        with self.session("Opening") as store:
            source = self._open(store)
        self.source = source
        # The size of a piece of tensors that may exceed the memory limit.
        self.piece_bytes = max(1, self.options.memory_limit_bytes // _PIECES_HELD)
        self._pacer = Pacer(self.options.thread_count)
        self.manifest = source.manifest if isinstance(source, CommittedSource) else None
        self.tensors = source.tensors
        self.values = {**source.tensors, **dict.fromkeys(sorted(source.blobs))}
        self.reporting = partial(
            reporting, phase="load", rank=0, with_bar=True, save_id=source.save_id
        )

    def _open(self, store: Store) -> Source:
        self.options = TransferOptions.for_storage(
            is_remote=store.capabilities.is_remote,
            local_threads=2,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=self.arguments["thread_count"],
            memory_limit_bytes=self.arguments["memory_limit_bytes"],
        )
        return open_newest(store, self.options)

    def close(self) -> None:
        """Refuse further reads and close the store; idempotent."""
        self._is_closed = True
        self._store.close()

    def unknown(self, fqn: object) -> KeyError:
        """Return the error for a missing name, with similar names."""
        near = find_near_names(fqn, self.values) if isinstance(fqn, str) else []
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return KeyError(f"{fqn!r:.200} is not in {self.url}{hint}")

    def chosen(self, names: Names, prefix: str | None, other: Handle | None = None) -> list[str]:
        """Return the selected names. Raises `KeyError` for a name in neither checkpoint."""
        if names is None or callable(names):
            selected = [fqn for fqn in self.values if names is None or names(fqn)]
        else:
            wanted = dict.fromkeys([names] if isinstance(names, str) else names)
            for fqn in wanted:
                if fqn not in self.values and (other is None or fqn not in other.values):
                    raise self.unknown(fqn)
            selected = [fqn for fqn in wanted if fqn in self.values]
        return [fqn for fqn in selected if prefix is None or fqn.startswith(prefix)]

    def entry(self, fqn: str) -> Entry:
        """Return dtype and shape of a value."""
        info = self.values.get(fqn)
        if info is None:
            return Entry(fqn=fqn)
        return Entry(fqn=fqn, dtype=info.dtype, shape=info.shape)

    def sharding(self, fqn: str) -> Sharding:
        """Return the chunks of a tensor. Raises `KeyError`."""
        info = self.tensors[fqn]
        return Sharding(shape=info.shape, boxes=info.boxes, owners=info.owners or None)

    @contextmanager
    def session(self, what: str) -> Iterator[Store]:
        """Yield the store for one operation, which fails when no bytes arrive for the timeout."""
        if self._is_closed:
            message = f"{self.url} was closed."
            raise InvalidInputError(message, next_step="Open it again with open_checkpoint.")
        what = f"{what} {self.url}"
        deadline = stalling_deadline("load", self._timeout_s, what)
        with deadline.annotate_errors(what):
            yield self._store.bounded(deadline)

    def places(self, keys: Sequence[Key], store: Store) -> list[ChunkPlace]:
        """Return the places of chunks and blobs; call it in a session."""
        with self._lock:
            self.source.store = store
            return list(self.source.places(keys))

    @contextmanager
    def reading(self, keys: Sequence[Key]) -> Iterator[tuple[ChunkReader, list[ChunkPlace]]]:
        """Yield a reader and the places of chunks and blobs; add context to errors of the block."""
        places: list[ChunkPlace] = []
        with self.session("Reading from") as store, adding_context(self.source, store, places):
            places += self.places(keys, store)
            yield ChunkReader(RangeReader(store, self.options, pacer=self._pacer)), places


OnBytes = Callable[[int], None]

WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""The numpy type of words by the bytes of an element."""


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
        for copy in copies:
            strides = [stride * self.item_bytes for stride in copy.source_strides]
            at = copy.source_offset_elements * self.item_bytes
            words: Words = np.ndarray(copy.sizes, WORDS[self.item_bytes], window, at, strides)
            pairs = zip(copy.dest_offsets, copy.sizes, strict=True)
            # With the ellipsis, an array without dimensions gives a view.
            where: Any = (*(slice(start, start + count) for start, count in pairs), ...)
            self.fill(self.array[where], words)

    def fill(self, out: Words, words: Words) -> None:
        """Put elements into a view of the array."""
        out[...] = words


def read_tensors(
    handle: Handle,
    wanted: Sequence[tuple[str, Selection]],
    *,
    gaps: Gaps = "none",
    on_bytes: OnBytes = ignore,
) -> list[Words]:
    """Return the elements of each selection (FQN, positions per dimension) as an array of words.

    All are read in one batch. Raises `IntegrityError` (file, FQN, offset), `CheckpointGoneError`,
    `StorageError`, `FormatError`, `PhaseTimeoutError`.
    """
    arrays: list[Words] = []
    parts: list[tuple[Key, Callable[..., ArrayRead]]] = []
    for fqn, ranges in wanted:
        kind = WORDS[DTYPES[handle.tensors[fqn].dtype].item_bytes]
        arrays.append(np.empty(tuple(map(len, ranges)), kind))
        parts += _parts(handle, fqn, ranges, arrays[-1])
    _read_parts(handle, parts, gaps=gaps, on_bytes=on_bytes)
    return arrays


def read_into(handle: Handle, fqn: str, ranges: Selection, array: Words) -> None:
    """Read the elements of a selection into an array of words; raises as `read_tensors`."""
    _read_parts(handle, list(_parts(handle, fqn, ranges, array)), gaps="cheap", on_bytes=ignore)


def _read_parts(
    handle: Handle,
    parts: Sequence[tuple[Key, Callable[..., ArrayRead]]],
    *,
    gaps: Gaps,
    on_bytes: OnBytes,
) -> None:
    if not parts:
        return
    with handle.reading([key for key, _ in parts]) as (chunks, places):
        reads = [read(place=place) for (_, read), place in zip(parts, places, strict=True)]
        raw = [read for read in reads if read.place.kind == "raw"]
        chunks.read(raw, gaps=gaps, on_bytes=on_bytes)
        if len(raw) < len(reads):
            from .torchload import read_opaque, words_of  # noqa: PLC0415  # imports torch

            for read, elements in read_opaque(chunks, reads, on_bytes=on_bytes):
                array = read.array  # type: ignore[attr-defined]  # an `ArrayRead`
                array[...] = words_of(elements, array.dtype.str)


def _parts(
    handle: Handle, fqn: str, ranges: Selection, array: Words
) -> Iterator[tuple[Key, Callable[..., ArrayRead]]]:
    """Yield the chunks of a selection, each with its read, which still lacks the place."""
    if not all(ranges):
        return
    starts = tuple(r.start for r in ranges)
    hull = Box(starts, tuple(r[-1] + 1 - r.start for r in ranges))
    info, covered_count = handle.tensors[fqn], 0
    for chunk in (info.boxes[at] for at in info.overlapping(hull)):
        inside: Any = clip(ranges, chunk)
        if inside is not None:
            where, into = inside[0], array[(*inside[1], ...)]
            covered_count += into.size
            read = partial(ArrayRead, item_bytes=array.itemsize, chunk_sizes=chunk.sizes)
            yield (fqn, chunk.offsets), partial(read, where=where, array=into)
    if covered_count != array.size:
        # The other elements would be uninitialised memory.
        raise FormatError(
            f"{handle.url}: the chunks of {fqn} hold {covered_count} of the {array.size} selected "
            "elements.",
            next_step="The save was incomplete, or its metadata is damaged; load another "
            "checkpoint.",
        )


def read_stored(
    handle: Handle, fqns: Sequence[str], *, on_bytes: OnBytes = ignore
) -> list[tuple[bytearray, ChunkPlace]]:
    """Return the stored bytes of blobs, all read in one batch."""
    if not fqns:
        return []
    with handle.reading([(fqn, None) for fqn in fqns]) as (chunks, places):
        buffers = chunks.read_bytes(places, on_bytes=on_bytes)
    return list(zip(buffers, places, strict=True))


def read_objects(
    handle: Handle, fqns: Sequence[str], *, on_bytes: OnBytes = ignore
) -> Mapping[str, object]:
    """Return the objects in blobs. Raises `UnsafeContentError` if unpickling would run code."""
    stored = read_stored(handle, fqns, on_bytes=on_bytes)
    if not stored:
        return {}
    from .torchload import blob_value  # noqa: PLC0415  # imports torch

    return {
        fqn: blob_value(buffer, place, unsafe_pickle=handle.unsafe_pickle)
        for fqn, (buffer, place) in zip(fqns, stored, strict=True)
    }


def slabs(shape: Sequence[int], max_count: int) -> Iterator[Selection]:
    """Yield adjacent selections of at most `max_count` elements, in C order.

    Each has adjacent rows of one dimension; that of an empty shape has no elements.
    """
    count = math.prod(shape)
    if count <= max_count:
        yield tuple(map(range, shape))
    else:
        step = max(1, max_count * shape[0] // count)
        for start in range(0, shape[0], step):
            for inner in slabs(shape[1:], max_count):
                yield (range(start, min(start + step, shape[0])), *inner)


def walk(
    handles: Sequence[Handle], fqns: Iterable[str], *, on_bytes: OnBytes
) -> Iterator[tuple[str, list[Words]]]:
    """Yield the elements of tensors in C order, in pieces: flat words from each of `handles`.

    Shapes are those of the first handle. Small tensors are read in batches.
    """
    batch: list[tuple[str, Selection]] = []
    max_bytes, size_bytes = min(handle.piece_bytes for handle in handles), 0
    for fqn in fqns:
        item_bytes = max(handle.entry(fqn).item_bytes for handle in handles)
        for slab in slabs(handles[0].tensors[fqn].shape, max(1, max_bytes // item_bytes)):
            slab_bytes = math.prod(map(len, slab)) * item_bytes
            if size_bytes + slab_bytes > max_bytes:
                yield from _pieces(handles, batch, on_bytes)
                batch, size_bytes = [], 0
            batch.append((fqn, slab))
            size_bytes += slab_bytes
    yield from _pieces(handles, batch, on_bytes)


def _pieces(
    handles: Sequence[Handle], batch: Sequence[tuple[str, Selection]], on_bytes: OnBytes
) -> Iterator[tuple[str, list[Words]]]:
    arrays = [read_tensors(handle, batch, gaps="cheap") for handle in handles]
    for (fqn, _), *sides in zip(batch, *arrays, strict=True):
        flat = [words.reshape(-1) for words in sides]
        on_bytes(sum(words.nbytes for words in flat))
        for at in range(0, max(1, len(flat[0])), _PIECE):
            yield fqn, [words[at : at + _PIECE] for words in flat]


def numpy_name(dtype: str) -> str | None:
    """Return the type of numpy or `ml_dtypes` for torch's `dtype`, None if there is none."""
    is_narrow = dtype == "bfloat16" or dtype.startswith("float8")
    return dtype if is_narrow else DTYPES[dtype].numpy


def elements_of(words: Words, dtype: str) -> NDArray[Any]:
    """Return words as elements of torch's `dtype`, in the same memory. Raises `CheckpointError`."""
    name = numpy_name(dtype)
    if name is None:
        what = f"numpy has no type for {dtype}."
        raise CheckpointError(what, next_step="Read the tensor with .torch().")
    if DTYPES[dtype].numpy is not None:
        return words.view(name)
    import ml_dtypes  # noqa: PLC0415  # rarely needed

    return words.view(getattr(ml_dtypes, name))
