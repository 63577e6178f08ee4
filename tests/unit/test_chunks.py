"""Plans of reads: executed on a file in memory, each selection gets what numpy cuts out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.errors import FormatError, InvalidInputError
from ckpt_storage.format.boxes import WindowCopy
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader, Gaps
from ckpt_storage.transfer.pacing import LOCAL_COSTS, REMOTE_COSTS, ReadCosts
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

KIB = 1024
MIB = 1024 * KIB
BLOCK_BYTES = KIB
ITEM_BYTES = 16

TINY = ReadCosts(
    request_s=1e-3,
    stream_bytes_s=2e6,
    copy_bytes_s=3e6,
    part_min_bytes=4 * KIB,
    window_bytes=8 * KIB,
    gap_max_bytes=2 * KIB,
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
    ranges = RangeReader(cast("Store", None), options, Deadline("load", 60))
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
    costs=st.sampled_from([TINY, replace(TINY, copy_bytes_s=1e9), LOCAL_COSTS, REMOTE_COSTS]),
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


@settings(max_examples=50, deadline=None)
@given(step=st.integers(2, 9), start=st.integers(0, 5), columns=st.integers(1, 700))
def test_blocks_without_a_selected_element_are_not_read(
    step: int, start: int, columns: int
) -> None:
    """With gaps "none" each block that is read holds an element that is wanted."""
    array = np.arange(40 * 1024, dtype="f4").reshape(40, 1024)
    file = File("f", bytearray())
    where = (range(start, 40, step), range(columns))
    read = ArrayRead(
        place=file.place("w", array.tobytes(), 0),
        item_bytes=4,
        chunk_sizes=array.shape,
        where=where,
        target=ArrayTarget(tuple(map(len, where)), array.dtype, direct=False),
    )
    held = np.zeros(array.shape, bool)
    held[start::step, :columns] = True
    blocks = np.flatnonzero(held.reshape(-1, BLOCK_BYTES // 4).any(axis=1))
    reads = planned([read], REMOTE_COSTS, gaps="none")
    seen = {at // BLOCK_BYTES for r in reads for at in range(r.start, r.stop, BLOCK_BYTES)}
    assert seen == set(blocks.tolist())


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
