"""Regions of tensors into memory: which blocks to read, in one batch, verified, and copied out.

Elements are moved as words of their size: what they mean is the caller's business, so that types
numpy lacks are read alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.boxes import Box, WindowCopy
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.selections import clip
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, Gaps, concerns
from ckpt_storage.transfer.ranges import RangeReader

from .indexing import slabs
from .session import Key, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.generic]


_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""The numpy type that moves an element of so many bytes as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The elements of one tensor at some positions: per dimension an ascending range."""

    fqn: str
    ranges: tuple[range, ...]

    @classmethod
    def whole(cls, fqn: str, shape: Sequence[int]) -> Region:
        """Return the region of all elements."""
        return cls(fqn=fqn, ranges=tuple(map(range, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of these elements."""
        return tuple(map(len, self.ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The part of a region that lies in one chunk, and the array for it."""

    place: ChunkPlace
    item_bytes: int
    chunk_sizes: tuple[int, ...]
    ranges: tuple[range, ...]
    target: Words

    @property
    def memory(self) -> memoryview | None:
        """The bytes of the array, if they are adjacent."""
        if not self.target.flags.c_contiguous:
            return None
        return memoryview(self.target.reshape(-1).view("u1"))  # type: ignore[arg-type]  # as in loads

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements into the array."""
        _copy(window, self.target, copies)

    def read(self) -> ChunkRead:
        """Return the read that fills the array."""
        return ChunkRead(
            place=self.place,
            item_bytes=self.item_bytes,
            chunk_sizes=self.chunk_sizes,
            where=self.ranges,
            target=self,
        )


def read_regions(
    session: Session,
    regions: Sequence[Region],
    *,
    gaps: Gaps = "none",
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Words]:
    """Return the elements of each region as an array of words, all read in one batch.

    Of a checkpoint with checksums whole blocks are read, and none in which no element of a region
    lies; with `gaps` "cheap", what lies between two is read too where another request would take
    longer. Any thread.

    Raises `IntegrityError` (file, FQN, offset), `CheckpointGoneError`, `StorageError`,
    `FormatError`, `PhaseTimeoutError`.
    """
    import numpy as np  # noqa: PLC0415  # listing a checkpoint needs none

    arrays: list[Words] = [
        np.empty(region.shape, _WORDS[session.outline(region.fqn).item_bytes]) for region in regions
    ]
    store, deadline = session.begin()
    known: list[ChunkPlace] = []
    with (
        deadline.governs(f"Reading from {session.url}"),
        _explained(session, known, store),
    ):
        pieces = _pieces(
            session,
            regions,
            arrays,
            partial(session.places, store=store, deadline=deadline),
        )
        known.extend(piece.place for piece in pieces)
        ranges = RangeReader(store, session.options, deadline, pacer=session.pacer)
        chunks = ChunkReader(ranges, session.costs)
        plain = [piece.read() for piece in pieces if piece.place.kind == "raw"]
        chunks.read(plain, gaps=gaps, on_bytes=on_bytes)
        for place, users in _wholes(pieces):
            (buffer,) = chunks.read_bytes([place], on_bytes=on_bytes)
            _deliver_whole(buffer, place, users)
    return arrays


def read_blobs(
    session: Session,
    fqns: Sequence[str],
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[tuple[bytearray, ChunkPlace]]:
    """Return the stored bytes of values that are no tensors, verified, all read in one batch.

    Raises as `read_regions`.
    """
    store, deadline = session.begin()
    known: list[ChunkPlace] = []
    with (
        deadline.governs(f"Reading from {session.url}"),
        _explained(session, known, store),
    ):
        known.extend(session.places([(fqn, None) for fqn in fqns], store, deadline))
        ranges = RangeReader(store, session.options, deadline, pacer=session.pacer)
        buffers = ChunkReader(ranges, session.costs).read_bytes(known, on_bytes=on_bytes)
    return list(zip(buffers, known, strict=True))


@contextmanager
def _explained(session: Session, places: Sequence[ChunkPlace], store: Store) -> Iterator[None]:
    """Make of errors, and of files that changed meanwhile, what they mean to whoever reads.

    `places` are filled in by the block, as far as it comes.
    """
    try:
        yield
    except StorageError as error:
        raise session.explain(error, places) from error
    except (IntegrityError, FormatError) as error:
        # Damage, unless another writer has replaced files since.
        session.check_unchanged(store, places)
        if isinstance(error, IntegrityError) and error.fqn is None:
            raise _named(error, places) from error
        raise
    session.check_unchanged(store, places)


def _named(error: IntegrityError, places: Sequence[ChunkPlace]) -> IntegrityError:
    """Return `error`, which a store raised about a file, with what the file holds."""
    place = next((place for place in places if concerns(error, place.path)), None)
    if place is None:
        return error
    step = error.next_step or ""
    return IntegrityError(
        f"{str(error).removesuffix(step).strip()} The file holds {place.fqn}.",
        fqn=place.fqn,
        offset=error.offset,
        path=error.path,
        rank=place.rank,
        phase=error.phase,
        next_step=error.next_step,
    )


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


def read_slabs(session: Session, fqn: str, most_count: int) -> Iterator[Words]:
    """Yield the elements of a tensor in C order, as flat arrays of at most `most_count` words.

    Each is read when it is asked for. Raises as `read_regions`.
    """
    for ranges in slabs(session.outline(fqn).shape, most_count):
        (words,) = read_regions(session, [Region(fqn=fqn, ranges=ranges)])
        yield words.reshape(-1)


def _pieces(
    session: Session,
    regions: Sequence[Region],
    arrays: Sequence[Words],
    places_of: Callable[[Sequence[Key]], list[ChunkPlace]],
) -> list[_Piece]:
    parts: list[tuple[Key, int, tuple[int, ...], tuple[range, ...], Words]] = []
    for region, array in zip(regions, arrays, strict=True):
        if 0 in region.shape:
            continue
        hull = Box(
            tuple(r.start for r in region.ranges),
            tuple(r[-1] + 1 - r.start for r in region.ranges),
        )
        for chunk in session.sharding(region.fqn).intersecting(hull):
            inside = clip(region.ranges, chunk)
            if inside is not None:
                ranges, where = inside
                target: Words = array[_view_index(where)]
                key = (region.fqn, chunk.offsets)
                parts.append((key, array.itemsize, chunk.sizes, ranges, target))
    places = places_of([part[0] for part in parts])
    _check_whole(session, regions, parts)
    pieces = []
    for place, (_, item_bytes, sizes, ranges, target) in zip(places, parts, strict=True):
        pieces.append(
            _Piece(
                place=place,
                item_bytes=item_bytes,
                chunk_sizes=sizes,
                ranges=ranges,
                target=target,
            )
        )
    return pieces


def _check_whole(
    session: Session, regions: Sequence[Region], parts: Sequence[tuple[Key, int, Any, Any, Words]]
) -> None:
    """Refuse to return memory that no chunk fills: whatever lay there would pass for values."""
    held: dict[str, int] = {}
    for (fqn, _), _, _, _, target in parts:
        held[fqn] = held.get(fqn, 0) + target.size
    wanted: dict[str, int] = {}
    for region in regions:
        wanted[region.fqn] = wanted.get(region.fqn, 0) + math.prod(region.shape)
    for fqn, count in wanted.items():
        if held.get(fqn, 0) != count:
            raise FormatError(
                f"{session.url}: the chunks of {fqn} hold {held.get(fqn, 0)} of {count} elements "
                "that were asked for.",
                next_step="The save was incomplete, or its metadata is damaged; load another "
                "checkpoint.",
            )


def _copy(window: memoryview, target: Words, copies: Sequence[WindowCopy]) -> None:
    import numpy as np  # noqa: PLC0415  # read_regions imported it

    size = target.itemsize
    flat = np.frombuffer(window, target.dtype)
    for copy in copies:
        source = np.lib.stride_tricks.as_strided(
            flat[copy.source_offset_elements :],
            copy.sizes,
            tuple(stride * size for stride in copy.source_strides),
            writeable=False,
        )
        where = tuple(
            slice(start, start + count)
            for start, count in zip(copy.dest_offsets, copy.sizes, strict=True)
        )
        target[_view_index(where)] = source


def _view_index(where: tuple[slice, ...]) -> tuple[slice | EllipsisType, ...]:
    """Return an index that gives a view always: of no dimensions it would copy the element."""
    return (*where, ...)


def _wholes(pieces: Sequence[_Piece]) -> Iterator[tuple[ChunkPlace, list[_Piece]]]:
    """Yield the items that only torch itself can read, each with all that is wanted of it."""
    found: dict[tuple[str, int], list[_Piece]] = {}
    for piece in pieces:
        if piece.place.kind == "opaque":
            found.setdefault((piece.place.path, piece.place.start), []).append(piece)
    for users in found.values():
        yield users[0].place, users


def _deliver_whole(buffer: bytearray, place: ChunkPlace, users: Sequence[_Piece]) -> None:
    from .torchload import words_of  # noqa: PLC0415  # torch, where nothing else can read it

    words = words_of(buffer, place, users[0].target.dtype.str)
    for piece in users:
        if words.shape != piece.chunk_sizes:
            raise _contradiction(place, f"shape {list(words.shape)}", piece.chunk_sizes)
        where = tuple(slice(r.start, r[-1] + 1, r.step) for r in piece.ranges)
        piece.target[...] = words[where]


def _contradiction(place: ChunkPlace, found: str, sizes: tuple[int, ...]) -> FormatError:
    return FormatError(
        f"{place.fqn} in {place.path} has {found}; the metadata says {list(sizes)} elements.",
        path=place.path,
        next_step="Check that the checkpoint is complete and that its files belong together.",
    )
