"""Plans of reads: executed on a file in memory, each region gets the bytes that numpy cuts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.errors import IntegrityError
from ckpt_storage.format.boxes import Box, WindowCopy
from ckpt_storage.source.costs import LOCAL_COSTS, REMOTE_COSTS, ReadCosts
from ckpt_storage.source.model import Place
from ckpt_storage.source.readplan import Request, Span, bytes_request, plan_reads, plan_spans
from ckpt_storage.transfer.ranges import Fetch

KIB = 1024
MIB = 1024 * KIB
BLOCK_BYTES = KIB

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

    def place(self, fqn: str, payload: bytes, before: int) -> Place:
        """Append `before` bytes of frame and a payload; return its place."""
        self.data += b"\xaa" * before
        start = len(self.data)
        self.data += payload
        blocks = range(0, len(payload), BLOCK_BYTES)
        return Place(
            path=self.path,
            fqn=fqn,
            start=start,
            size_bytes=len(payload),
            block_bytes=BLOCK_BYTES,
            crcs=[crc32c(payload[at : at + BLOCK_BYTES]) for at in blocks],
        )


def _memory_of(array: Any) -> memoryview:  # numpy 2 types no buffer on 3.11
    return memoryview(array.reshape(-1).view(np.uint8))


def request_for(
    place: Place, array: np.ndarray[Any, Any], region: Box, *, direct: bool
) -> tuple[Request, np.ndarray[Any, Any]]:
    """Return the request for a region of `array`, and the array that it fills."""
    result = np.zeros(region.sizes, array.dtype)
    lock = threading.Lock()

    def sink(window: memoryview, copies: Sequence[WindowCopy]) -> None:
        flat = np.frombuffer(window, array.dtype)
        for copy in copies:
            source = np.lib.stride_tricks.as_strided(
                flat[copy.source_offset_elements :],
                copy.sizes,
                [stride * array.itemsize for stride in copy.source_strides],
            )
            spots = tuple(
                slice(start, start + size)
                for start, size in zip(copy.dest_offsets, copy.sizes, strict=True)
            )
            with lock:
                result[spots] = source

    is_whole = region == Box((0,) * array.ndim, array.shape)
    request = Request(
        place=place,
        item_bytes=array.itemsize,
        chunk_sizes=array.shape,
        region=None if is_whole and direct else region,
        sink=sink,
        target=_memory_of(result) if direct and result.size else None,
    )
    return request, result


def execute(fetches: Sequence[Fetch], files: dict[str, File]) -> None:
    """Do what `run_fetches` does, from memory: read, check, hand over."""
    for fetch in fetches:
        piece = files[fetch.path].data[fetch.start : fetch.stop]
        assert len(piece) == fetch.stop - fetch.start > 0
        if fetch.target is None:
            fetch.done(memoryview(piece))
        else:
            fetch.target[:] = piece
            assert fetch.check is not None
            fetch.check(fetch.target, 0)
            fetch.done(fetch.target)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, File], list[tuple[Request, Any, Any]]]:
    """Draw files with payloads in them, and requests for regions with what they must give."""
    files: dict[str, File] = {}
    wanted = []
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    for number in range(draw(st.integers(1, 8))):
        file = files.setdefault(name := f"f{draw(st.integers(0, 2))}", File(name, bytearray()))
        shape = draw(
            st.sampled_from([(), (3,), (0, 4), (700,), (5000,), (60, 70), (3, 2000), (7, 5, 90)])
        )
        dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.complex128]))
        array = random.integers(0, 200, shape).astype(dtype)
        place = file.place(str(number), array.tobytes(), draw(st.integers(0, 5000)))
        for _ in range(draw(st.integers(1, 2))):
            starts, sizes = [], []
            for size in shape:
                start = draw(st.integers(0, size))
                starts.append(start)
                sizes.append(draw(st.integers(0, size - start)))
            region = Box(tuple(starts), tuple(sizes))
            if draw(st.booleans()):
                region = Box((0,) * len(shape), shape)
            direct = draw(st.booleans())
            spots = tuple(slice(a, b) for a, b in zip(region.offsets, region.stops, strict=True))
            wanted.append((*request_for(place, array, region, direct=direct), array[spots]))
    return files, wanted


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    costs=st.sampled_from([TINY, replace(TINY, copy_bytes_s=1e9), LOCAL_COSTS, REMOTE_COSTS]),
    part_bytes=st.sampled_from([KIB, 4 * KIB, 16 * KIB, MIB]),
    stream_count=st.sampled_from([1, 4]),
    turn=st.sampled_from([None, 0, 1]),
)
def test_every_region_gets_its_bytes(
    case: tuple[dict[str, File], list[tuple[Request, Any, Any]]],
    costs: ReadCosts,
    part_bytes: int,
    stream_count: int,
    turn: int | None,
) -> None:
    """Whatever the costs, shapes, regions and parts: what arrives is what slicing gives."""
    files, wanted = case
    fetches = plan_reads(
        [request for request, _, _ in wanted],
        part_bytes=part_bytes,
        costs=costs,
        stream_count=stream_count,
        turn=turn,
    )
    largest_item = 16
    for fetch in fetches:
        assert fetch.stop - fetch.start <= max(part_bytes, BLOCK_BYTES + largest_item)
    execute(fetches, files)
    for _, result, expected in wanted:
        np.testing.assert_array_equal(result, expected)


def small_payloads(count: int, size: int) -> tuple[File, list[Request], list[Any]]:
    """Return a file of small payloads with frames between, and requests for all of them."""
    file, requests, pairs = File("f", bytearray()), [], []
    for number in range(count):
        array = np.full(size, number % 251, np.uint8)
        place = file.place(str(number), array.tobytes(), 900)
        request, result = request_for(place, array, Box((0,), (size,)), direct=True)
        requests.append(request)
        pairs.append((result, array))
    return file, requests, pairs


def test_a_wide_gap_is_not_read() -> None:
    """Two small payloads at the ends of a file of 5 MB are two reads, not one."""
    file = File("f", bytearray())
    first = file.place("a", b"x" * 100, 0)
    last = file.place("b", b"y" * 100, 5 * MIB)
    for costs in (LOCAL_COSTS, REMOTE_COSTS):
        buffers = bytearray(100), bytearray(100)
        requests = [bytes_request(p, b) for p, b in zip((first, last), buffers, strict=True)]
        fetches = plan_reads(requests, part_bytes=16 * MIB, costs=costs)
        assert sum(fetch.stop - fetch.start for fetch in fetches) == 200
        execute(fetches, {"f": file})
        assert [bytes(buffer) for buffer in buffers] == [b"x" * 100, b"y" * 100]


def test_a_large_payload_goes_straight_into_its_target() -> None:
    """No byte of a payload of 20 MB passes through a buffer, in parts of nearly one size."""
    size = 20 * MIB
    place = Place(path="f", fqn="w", start=77, size_bytes=size, block_bytes=64 * KIB)
    target = bytearray(size)
    fetches = plan_reads(
        [bytes_request(place, target)], part_bytes=8 * MIB, costs=REMOTE_COSTS, stream_count=1
    )
    assert all(fetch.target is not None for fetch in fetches)
    lengths = [fetch.stop - fetch.start for fetch in fetches]
    assert sum(lengths) == size
    assert len(lengths) == 3
    assert max(lengths) - min(lengths) <= 3 * 64 * KIB


@pytest.mark.parametrize("at", [0, 50, 1999])
def test_a_flipped_bit_in_a_small_payload_is_told(at: int) -> None:
    """The error names the tensor and the place of the block."""
    file, requests, _ = small_payloads(2000, 1500)
    place = requests[at].place
    file.data[place.start + 1200] ^= 4
    fetches = plan_reads(requests, part_bytes=16 * MIB)
    with pytest.raises(IntegrityError) as caught:
        execute(fetches, {"f": file})
    assert caught.value.fqn == str(at)
    assert caught.value.offset == place.start + 1024


def test_spans_are_read_together_and_verified() -> None:
    """Spans of neighbouring payloads share a read; each is handed over where it lies in it."""
    file = File("f", bytearray())
    payloads = [bytes([i]) * 3000 for i in range(5)]
    places = [file.place(str(i), payload, 10) for i, payload in enumerate(payloads)]
    spans = [Span(place=p, start=1024, stop=3000, token=i) for i, p in enumerate(places)]
    got: dict[int, bytes] = {}

    def taken(members: Sequence[tuple[int, Span]], view: memoryview) -> None:
        for at, span in members:
            got[span.token] = bytes(view[at : at + span.stop - span.start])

    fetches = plan_spans(spans, taken, part_bytes=MIB, costs=LOCAL_COSTS)
    assert len(fetches) == 1
    execute(fetches, {"f": file})
    assert got == {i: payload[1024:] for i, payload in enumerate(payloads)}
    file.data[places[3].start + 2000] ^= 1
    with pytest.raises(IntegrityError, match="block of 3"):
        execute(plan_spans(spans, taken, part_bytes=MIB, costs=LOCAL_COSTS), {"f": file})
