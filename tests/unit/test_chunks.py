"""Plans of reads, held against numpy; plans of shared reads, held against what ranks want."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.errors import FormatError, InvalidInputError
from ckpt_storage.format.boxes import Box, WindowCopy
from ckpt_storage.loads import sharing
from ckpt_storage.loads.sharing import Key, ShareOrder, plan_shares
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, Gaps
from ckpt_storage.transfer.pacing import LOCAL_COSTS, REMOTE_COSTS, ReadCosts
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

KIB = 1024
MIB = 1024 * KIB
BLOCK_BYTES = KIB
ITEM_BYTES = 16

TINY = ReadCosts(
    gap_bytes=2000,
    copy_bytes=3000,
    part_min_bytes=4 * KIB,
    window_bytes=8 * KIB,
)
"""Gaps of 2000 bytes, direct from 3000 bytes on: small files show what large ones would."""


@dataclass
class File:
    """A file in memory and where its payloads lie."""

    path: str
    data: bytearray

    def place(self, fqn: str, payload: bytes, before: int) -> ChunkPlace:
        """Append `before` bytes of frame and a payload; return its place."""
        self.data += b"\xaa" * before
        start = len(self.data)
        self.data += payload
        blocks = range(0, len(payload), BLOCK_BYTES)
        return ChunkPlace(
            path=self.path,
            fqn=fqn,
            start=start,
            size_bytes=len(payload),
            block_bytes=BLOCK_BYTES,
            crcs=[crc32c(payload[at : at + BLOCK_BYTES]) for at in blocks],
        )


class ArrayTarget:
    """An array to be filled, each element once."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], *, direct: bool) -> None:
        self.array = np.zeros(tuple(shape), dtype)
        self.counts = np.zeros(tuple(shape), int)
        self.memory: memoryview | None = None
        self._lock = threading.Lock()
        if direct and self.array.size:
            self.memory = memoryview(cast("Any", self.array.reshape(-1).view(np.uint8)))

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Copy elements."""
        flat = np.frombuffer(window, self.array.dtype)
        for copy in copies:
            source = np.lib.stride_tricks.as_strided(
                flat[copy.source_offset_elements :],
                copy.sizes,
                [stride * flat.itemsize for stride in copy.source_strides],
            )
            spots = tuple(
                slice(start, start + size)
                for start, size in zip(copy.dest_offsets, copy.sizes, strict=True)
            )
            with self._lock:
                self.array[spots] = source
                self.counts[spots] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead(ChunkRead):
    """A read into an `ArrayTarget`."""

    target: ArrayTarget

    @property
    def memory(self) -> memoryview | None:
        """What the target gives."""
        return self.target.memory

    def put(self, window: memoryview, copies: Sequence[WindowCopy]) -> None:
        """Hand on."""
        self.target.put(window, copies)


def planned(
    reads: Sequence[ChunkRead],
    costs: ReadCosts,
    part_bytes: int = 16 * MIB,
    thread_count: int = 1,
    gaps: Gaps = "cheap",
    turn: int | None = None,
) -> list[RangeRead]:
    """Return the plan of a reader with such costs."""
    options = TransferOptions(
        thread_count=thread_count, part_bytes=part_bytes, block_bytes=BLOCK_BYTES
    )
    ranges = RangeReader(cast("Store", None), options)
    return ChunkReader(ranges, costs).plan(reads, gaps=gaps, turn=turn)


def execute(reads: Sequence[RangeRead], files: dict[str, File]) -> None:
    """Do what `RangeReader.run` does, from memory: read, check, hand over."""
    for read in reads:
        piece = files[read.path].data[read.start : read.stop]
        assert len(piece) == read.stop - read.start > 0
        if read.into is None:
            read.done(memoryview(piece))
        else:
            read.into[:] = piece
            assert read.check is not None
            read.check(read.into, 0)
            read.done(read.into)


@st.composite
def positions(draw: st.DrawFn, size: int) -> range:
    """Draw an ascending range within a dimension."""
    start = draw(st.integers(0, size))
    step = draw(st.sampled_from([1, 1, 1, 2, 3, 40]))
    return range(start, draw(st.integers(start, size)), step)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, File], list[tuple[ChunkRead, ArrayTarget, Any]]]:
    """Draw files with payloads in them, and reads of selections with what they must give."""
    files: dict[str, File] = {}
    wanted: list[tuple[ChunkRead, ArrayTarget, Any]] = []
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for number in range(draw(st.integers(1, 8))):
        file = files.setdefault(name := f"f{draw(st.integers(0, 2))}", File(name, bytearray()))
        shape = draw(
            st.sampled_from([(), (3,), (0, 4), (700,), (5000,), (60, 70), (3, 2000), (7, 5, 90)])
        )
        dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "f4", "c16"])))
        array = random.integers(0, 200, shape).astype(dtype)
        place = file.place(str(number), array.tobytes(), draw(st.integers(0, 5000)))
        for _ in range(draw(st.integers(1, 2))):
            where = tuple(draw(positions(size)) for size in shape)
            whole = draw(st.booleans())
            cut = array if whole else array[tuple(slice(r.start, r.stop, r.step) for r in where)]
            target = ArrayTarget(cut.shape, dtype, direct=draw(st.booleans()))
            read = ArrayRead(
                place=place if draw(st.booleans()) else place.unchecked(),
                item_bytes=array.itemsize,
                chunk_sizes=shape,
                where=None if whole else where,
                target=target,
            )
            wanted.append((read, target, cut))
    return files, wanted


@settings(max_examples=200, deadline=None)
@given(
    case=cases(),
    costs=st.sampled_from([TINY, replace(TINY, copy_bytes=1_000_000), LOCAL_COSTS, REMOTE_COSTS]),
    part_bytes=st.sampled_from([KIB, 4 * KIB, 16 * KIB, MIB]),
    thread_count=st.sampled_from([1, 4]),
    gaps=st.sampled_from(["none", "cheap"]),
    turn=st.sampled_from([None, 0, 1]),
)
def test_every_selection_gets_what_slicing_gives(
    case: tuple[dict[str, File], list[tuple[ChunkRead, ArrayTarget, Any]]],
    costs: ReadCosts,
    part_bytes: int,
    thread_count: int,
    gaps: Gaps,
    turn: int | None,
) -> None:
    """Whatever the costs, shapes, selections and parts, each element arrives once."""
    files, wanted = case
    reads = planned([read for read, _, _ in wanted], costs, part_bytes, thread_count, gaps, turn)
    for read in reads:
        assert read.stop - read.start <= max(part_bytes, BLOCK_BYTES + ITEM_BYTES)
    execute(reads, files)
    for _, target, expected in wanted:
        np.testing.assert_array_equal(target.array, expected)
        if target.memory is None:
            assert (target.counts == 1).all()


def test_a_selection_that_leaves_its_chunk_is_refused() -> None:
    """So is a chunk whose place has another length than its sizes say."""
    place = ChunkPlace(path="f", fqn="w", start=0, size_bytes=32)
    target = ArrayTarget((4,), np.dtype("f4"), direct=False)
    read = ArrayRead(place=place, item_bytes=4, chunk_sizes=(2, 4), where=None, target=target)
    for where in ((range(1, 3), range(2)), (range(-1, 1), range(2)), (range(2),)):
        with pytest.raises(InvalidInputError, match="leaves a chunk"):
            planned([replace(read, where=where)], LOCAL_COSTS)
    with pytest.raises(FormatError, match=r"w in f has 32 bytes; the metadata says \[3, 4\]"):
        planned([replace(read, chunk_sizes=(3, 4))], LOCAL_COSTS)


UNIT_BYTES = 8 * MIB
Wants = dict[Key, list[tuple[int, Box]]]


@pytest.fixture(autouse=True, scope="module")
def eager() -> Iterator[None]:
    """Sharing anything at all is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_LEAST_SAVED_BYTES", 1)
        yield


def whole(*sizes: int) -> Box:
    """Return the region of a whole chunk."""
    return Box((0,) * len(sizes), sizes)


def plan(wants: Wants, shapes: Mapping[Key, tuple[int, ...]], world_size: int) -> list[ShareOrder]:
    """Return the orders for chunks of 2-byte elements; sharing anything at all is enough."""
    orders = plan_shares(
        wants, lambda key: (shapes[key], 2), world_size=world_size, unit_bytes=UNIT_BYTES
    )
    assert orders is not None
    return orders


@st.composite
def needs(draw: st.DrawFn) -> tuple[int, dict[Key, tuple[int, ...]], Wants]:
    """Draw a world, chunks, and the regions that some ranks want of them."""
    world_size = draw(st.integers(2, 5))
    kinds = st.sampled_from([(8, 3), (3000, 2000), (5000, 3001), (100,), (64, 64, 64)])
    shapes: dict[Key, tuple[int, ...]] = {
        (f"t{i}", (0,) * len(shape)): shape
        for i, shape in enumerate(draw(st.lists(kinds, min_size=1, max_size=5)))
    }
    wants: Wants = {}
    for key, shape in shapes.items():
        for rank in draw(st.sets(st.integers(0, world_size - 1))):
            starts = [draw(st.integers(0, n - 1)) for n in shape]
            sizes = [draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
            part = Box(tuple(starts), tuple(sizes))
            wants.setdefault(key, []).append((rank, draw(st.sampled_from([whole(*shape), part]))))
    return world_size, shapes, wants


@settings(max_examples=60, deadline=None)
@given(needs=needs())
def test_what_a_rank_wants_of_a_shared_chunk_is_in_its_units(
    needs: tuple[int, dict[Key, tuple[int, ...]], Wants],
) -> None:
    """Each byte that a rank wants of a chunk that is shared lies in a unit of that rank."""
    world_size, shapes, wants = needs
    orders = plan_shares(
        wants, lambda key: (shapes[key], 2), world_size=world_size, unit_bytes=UNIT_BYTES
    )
    shared = {key for order in orders or () for key in order.keys}
    for key in shared:
        for rank, region in wants[key]:
            mask = np.zeros(shapes[key], bool)
            mask[tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))] = 1
            missing = np.repeat(mask.reshape(-1), 2)
            for unit in (orders or ())[rank].units:
                for piece, start, stop in unit.pieces:
                    if piece == key:
                        missing[start:stop] = False
            assert not missing.any()


def test_equal_needs_are_shared_out_evenly() -> None:
    """Of a replicated model each rank reads its part, none more than a unit beyond the others."""
    shapes: dict[Key, tuple[int, ...]] = {(f"w{i}", (0, 0)): (1024, 8192) for i in range(9)}
    shapes.update({(f"b{i}", (0,)): (512,) for i in range(1000)})
    wants = {key: [(rank, whole(*shape)) for rank in range(4)] for key, shape in shapes.items()}
    orders = plan(wants, shapes, 4)
    read = [sum(u.size_bytes for u in o.units if u.owner == o.rank) for o in orders]
    assert sum(read) == sum(2 * int(np.prod(shape)) for shape in shapes.values())
    assert max(read) - min(read) <= UNIT_BYTES


def test_rows_are_not_shared_and_short_columns_are() -> None:
    """Ranks that want different rows read their own; columns of 8 KB lie in blocks of all."""
    key: Key = ("w", (0, 0))
    wants = {key: [(rank, Box((rank * 1000, 0), (1000, 4000))) for rank in range(4)]}
    assert (
        plan_shares(wants, lambda _: ((4000, 4000), 2), world_size=4, unit_bytes=UNIT_BYTES) is None
    )
    wants = {key: [(rank, Box((0, rank * 1000), (4000, 1000))) for rank in range(4)]}
    orders = plan(wants, {key: (4000, 4000)}, 4)
    assert [unit.ranks for unit in orders[0].units] == [(0, 1, 2, 3)] * 4


def test_what_takes_too_long_to_plan_is_refused_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Units times ranks are bounded, before anything is computed; each rank reads for itself."""
    users = [(rank, whole(4)) for rank in range(2048)]
    wants: Wants = {(f"w{i}", (0,)): users for i in range(500)}

    def shape_of(_key: Key) -> tuple[tuple[int, ...], int]:
        raise AssertionError

    with caplog.at_level("INFO", logger="ckpt_storage"):
        assert plan_shares(wants, shape_of, world_size=2048, unit_bytes=UNIT_BYTES) is None
    assert "Each rank reads for itself" in caplog.text
    shape = (5000 * UNIT_BYTES,)
    for rank_count in (100, 101):
        wants = {("w", (0,)): [(rank, whole(*shape)) for rank in range(rank_count)]}
        found = plan_shares(
            wants, lambda _: (shape, 2), world_size=rank_count, unit_bytes=UNIT_BYTES
        )
        assert (found is None) == (rank_count > 100)
