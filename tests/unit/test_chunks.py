"""Reads of selections, held against slicing; windows on their way to and from a device; shares."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from crc32c import crc32c
from fake_cuda import DEVICE, FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.errors import FormatError, InvalidInputError
from ckpt_storage.format.boxes import Box, interval_boxes
from ckpt_storage.loads import sharing
from ckpt_storage.loads.items import CudaMover, TensorRead, UploadRing, Use
from ckpt_storage.loads.sharing import Key, plan_shares
from ckpt_storage.options import KIB, MIB, TransferOptions
from ckpt_storage.saves import devices
from ckpt_storage.saves.devices import DeviceReader
from ckpt_storage.store import Location
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader, Gaps
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.read_costs import LOCAL_COSTS, REMOTE_COSTS, ReadCosts

BLOCK_BYTES = KIB
ITEM_BYTES = 16

TINY = ReadCosts(gap_bytes=2000, copy_bytes=3000, part_min_bytes=4 * KIB, window_bytes=8 * KIB)
"""Gaps of 2000 bytes, direct from 3000 bytes on: small files show what large ones would."""


def stored(files: dict[str, bytearray], path: str, tensor: torch.Tensor, before: int) -> ChunkPlace:
    """Append `before` bytes of frame and a tensor to a file; return its place."""
    payload = tensor.contiguous().numpy().tobytes()
    data = files.setdefault(path, bytearray())
    data += b"\xaa" * before
    blocks = range(0, len(payload), BLOCK_BYTES)
    place = ChunkPlace(
        path=path,
        fqn=path,
        start=len(data),
        size_bytes=len(payload),
        block_bytes=BLOCK_BYTES,
        crcs=[crc32c(payload[at : at + BLOCK_BYTES]) for at in blocks],
    )
    data += payload
    return place


def read(
    reads: Sequence[TensorRead],
    files: Mapping[str, bytearray],
    costs: ReadCosts = LOCAL_COSTS,
    *,
    part_bytes: int = 16 * MIB,
    thread_count: int = 1,
    gaps: Gaps = "cheap",
    turn: int | None = None,
) -> None:
    backend = MemoryBackend(Location.of("memory://chunks"))
    for path, data in files.items():
        backend.put(path, [memoryview(data)])
    options = TransferOptions(
        thread_count=thread_count, part_bytes=part_bytes, block_bytes=BLOCK_BYTES
    )
    with contextlib.closing(Store(backend, url="memory://chunks")) as store:
        ranges = RangeReader(store, options)
        planned = ChunkReader(ranges, costs).plan(reads, gaps=gaps, turn=turn)
        longest = max((one.stop - one.start for one in planned), default=0)
        assert longest <= max(part_bytes, BLOCK_BYTES + ITEM_BYTES)
        ranges.run(planned)


@st.composite
def targets(draw: st.DrawFn, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Draw a tensor of zeros: as it is stored, with gaps, of another type, of inference mode."""
    kind = draw(st.sampled_from(["plain", "plain", "gaps", "wide", "inference"]))
    if kind == "gaps":
        return torch.zeros((*sizes, 2), dtype=dtype)[..., 0]
    with torch.inference_mode(kind == "inference"):
        return torch.zeros(sizes, dtype=torch.complex128 if kind == "wide" else dtype)


@st.composite
def positions(draw: st.DrawFn, size: int) -> range:
    start = draw(st.integers(0, size))
    step = draw(st.sampled_from([1, 1, 1, 2, 3, 40]))
    return range(start, draw(st.integers(start, size)), step)


SHAPES = [(), (3,), (0, 4), (700,), (5000,), (60, 70), (3, 2000), (7, 5, 90), (3, 1, 4, 2)]
DTYPES = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.complex128]
Case = tuple[dict[str, bytearray], list[tuple[TensorRead, torch.Tensor]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw files with tensors in them, and reads of selections with what they must give."""
    files: dict[str, bytearray] = {}
    wanted: list[tuple[TensorRead, torch.Tensor]] = []
    for _ in range(draw(st.integers(1, 8))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        # Never 0, and so few that each type holds each.
        values = (torch.arange(math.prod(shape)) % 197 + 1).to(dtype).reshape(shape)
        bits = values.view(torch.int16) if dtype == torch.bfloat16 else values
        path = f"f{draw(st.integers(0, 2))}"
        place = stored(files, path, bits, draw(st.integers(0, 5000)))
        for _ in range(draw(st.integers(1, 2))):
            where = tuple(draw(positions(size)) for size in shape)
            whole = draw(st.booleans())
            cut = values if whole else values[tuple(slice(r.start, r.stop, r.step) for r in where)]
            one = TensorRead(
                place=place if draw(st.booleans()) else place.unchecked(),
                item_bytes=dtype.itemsize,
                chunk_sizes=shape,
                where=None if whole else where,
                tensor=draw(targets(cut.shape, dtype)),
                dtype=dtype,
            )
            wanted.append((one, cut))
    return files, wanted


@settings(max_examples=100, deadline=None)
@given(
    case=cases(),
    costs=st.sampled_from([TINY, replace(TINY, copy_bytes=1_000_000), LOCAL_COSTS, REMOTE_COSTS]),
    part_bytes=st.sampled_from([KIB, 4 * KIB, 16 * KIB, MIB]),
    thread_count=st.sampled_from([1, 4]),
    gaps=st.sampled_from(["none", "cheap"]),
    turn=st.sampled_from([None, 0, 1]),
)
def test_every_selection_gets_what_slicing_gives(
    case: Case, costs: ReadCosts, part_bytes: int, thread_count: int, gaps: Gaps, turn: int | None
) -> None:
    """Whatever the costs, shapes, selections, parts and targets, each element arrives."""
    files, wanted = case
    how: dict[str, Any] = {"thread_count": thread_count, "gaps": gaps, "turn": turn}
    read([one for one, _ in wanted], files, costs, part_bytes=part_bytes, **how)
    for one, expected in wanted:
        assert torch.equal(one.tensor, expected.to(one.tensor.dtype))


@pytest.mark.parametrize("start", [1, 700, 1023])
def test_a_long_selection_that_begins_within_a_block_arrives(start: int) -> None:
    """Its first bytes are read with their block, the other blocks into the target."""
    files: dict[str, bytearray] = {}
    values = (torch.arange(40 * KIB) % 197).to(torch.uint8)
    one = TensorRead(
        place=stored(files, "f", values, 100),
        item_bytes=1,
        chunk_sizes=tuple(values.shape),
        where=(range(start, len(values)),),
        tensor=torch.zeros(len(values) - start, dtype=torch.uint8),
        dtype=torch.uint8,
    )
    read([one], files, TINY, part_bytes=16 * KIB)
    assert torch.equal(one.tensor, values[start:])


def test_a_window_is_copied_out_by_few_copies() -> None:
    """At most two boxes more for each dimension, however many rows lie between its ends."""
    shape = (50, 40, 30)
    boxes = interval_boxes(shape, 1, math.prod(shape) - 1)
    assert [found.volume for found in boxes] == [29, 39 * 30, 48 * 1200, 39 * 30, 29]


def test_a_selection_that_leaves_its_chunk_is_refused() -> None:
    """So is a chunk whose place has another length than its sizes say."""
    place = ChunkPlace(path="f", fqn="w", start=0, size_bytes=32)
    one = TensorRead(
        place=place,
        item_bytes=4,
        chunk_sizes=(2, 4),
        where=None,
        tensor=torch.zeros(4),
        dtype=torch.float32,
    )
    for where in ((range(1, 3), range(2)), (range(-1, 1), range(2)), (range(2),)):
        with pytest.raises(InvalidInputError, match="leaves a chunk"):
            read([replace(one, where=where)], {})
    for rows in (1, 3):
        with pytest.raises(
            FormatError, match=rf"w in f has 32 bytes; the metadata says \[{rows}, 4"
        ):
            read([replace(one, chunk_sizes=(rows, 4))], {})


class LateMover:
    """Stands for `CudaMover`: does each upload 2 ms after the one before, in a thread.

    A buffer that is filled again too early gives wrong values; a load that does not wait for the
    end finds none.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.finish = self._thread.shutdown

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        def upload() -> None:
            time.sleep(0.002)
            use(data.clone())

        return self._thread.submit(upload).result


@pytest.mark.parametrize("buffer_count", [1, 3])
def test_elements_on_their_way_to_a_device_are_not_overwritten(buffer_count: int) -> None:
    """Windows go through few buffers, from four threads, late; each element arrives as it was."""
    files: dict[str, bytearray] = {}
    values = torch.arange(40 * 1024, dtype=torch.float32).reshape(40, 1024)
    first = TensorRead(
        place=stored(files, "f", values, 0),
        item_bytes=4,
        chunk_sizes=(40, 1024),
        where=(range(40), range(24, 1024)),
        tensor=torch.zeros(40, 1000, dtype=torch.float64),
        dtype=torch.float32,
        ring=UploadRing(cast("CudaMover", LateMover()), buffer_count),
    )
    where = (range(0, 40, 2), range(1024))
    second = replace(first, where=where, tensor=torch.zeros(20, 1024))
    costs = replace(LOCAL_COSTS, part_min_bytes=4 * KIB, window_bytes=8 * KIB)
    read([first, second], files, costs, thread_count=4, part_bytes=8 * KIB)
    assert first.ring is not None
    first.ring.finish()
    assert torch.equal(first.tensor, values[:, 24:].double())
    assert torch.equal(second.tensor, values[::2])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine that seems to have CUDA; copies are done at once."""
    monkeypatch.setattr(devices, "_warned", set())
    return FakeCuda(monkeypatch)


COPY = ["cudaHostAlloc", "stream", "Event", "record"]


def test_the_next_copy_is_under_way_while_a_window_is_used(cuda: FakeCuda) -> None:
    """A window is given out once its own copy has ended, and the next has begun by then.

    A part on its way keeps its bytes, whatever is copied meanwhile. Every call is made while the
    tensors' device is current, and none while the caller has a window.
    """
    rows, held = torch.arange(12).reshape(3, 4), list[memoryview]()
    for view in DeviceReader().views(DEVICE, iter(rows)):
        assert cuda.current != DEVICE
        held.append(view)
        cuda.calls.append("use")
    assert cuda.calls == [
        *["Stream", "current_stream", "wait_stream"],
        *[*COPY, *COPY, "Event.synchronize", "use"],
        *[*COPY, "Event.synchronize", "use", "Event.synchronize", "use"],
        "synchronize",
    ]
    # A writer that fails in between waits for what was begun.
    views = DeviceReader().views(DEVICE, iter(torch.zeros(5, 4)))
    next(views)
    views.close()  # type: ignore[attr-defined]  # a generator's
    assert cuda.calls[-1] == "synchronize"
    assert b"".join(held) == rows.numpy().tobytes()


def test_a_save_without_pinned_memory_copies_through_plain_memory(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for once a save, and its lack is warned of once."""
    cuda.failing.add("cudaHostAlloc")
    rows = torch.arange(12).reshape(3, 4)
    for _ in range(2):
        reader = DeviceReader()
        for _ in range(2):
            views = list(reader.views(DEVICE, iter(rows)))
            assert b"".join(views) == rows.numpy().tobytes()
    assert cuda.calls.count("cudaHostAlloc") == 2
    assert caplog.text.count("page-locked") == 1


def test_what_is_pinned_is_host_memory_whatever_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts that make their tensors on a GPU by default save and load through host memory."""
    empty = torch.empty
    with torch.device("meta"):
        assert empty(1).is_meta
        plain = {"pin_memory": False}
        monkeypatch.setattr(torch, "empty", lambda *of, **how: empty(*of, **(how | plain)))
        assert DeviceReader().buffer(torch.ones(2, device="cpu")).is_cpu
        assert CudaMover.buffer(cast("Any", SimpleNamespace(_device=-1)), 8).is_cpu


UNIT_BYTES = 8 * MIB


def shares(
    wants: dict[Key, list[tuple[int, Box]]], shape_of: Callable[[Key], tuple[int, ...]], count: int
) -> Any:
    """Return how ranks share chunks of 2-byte elements; sharing anything at all is enough."""
    with mock.patch.object(sharing, "_MIN_SAVED_BYTES", 1):
        shape = lambda key: (shape_of(key), 2)  # noqa: E731
        return plan_shares(wants, shape, world_size=count, unit_bytes=UNIT_BYTES)


def box(*sizes: int, at: tuple[int, ...] | None = None) -> Box:
    return Box(at or (0,) * len(sizes), sizes)


def test_equal_needs_are_shared_out_evenly() -> None:
    """Of a replicated model each rank reads its part, none more than a unit beyond the others."""
    shapes: dict[Key, tuple[int, ...]] = {(f"w{i}", (0, 0)): (1024, 8192) for i in range(9)}
    shapes.update({(f"b{i}", (0,)): (512,) for i in range(1000)})
    wants = {key: [(rank, box(*shape)) for rank in range(4)] for key, shape in shapes.items()}
    orders = shares(wants, shapes.__getitem__, 4)
    sizes = [sum(u.size_bytes for u in o.units if u.owner == o.rank) for o in orders]
    assert sum(sizes) == sum(2 * int(np.prod(shape)) for shape in shapes.values())
    assert max(sizes) - min(sizes) <= UNIT_BYTES


def test_rows_are_not_shared_and_short_columns_are() -> None:
    """Ranks that want different rows read their own; columns of 8 KB lie in blocks of all."""
    key: Key = ("w", (0, 0))
    rows = {key: [(rank, box(1000, 4000, at=(rank * 1000, 0))) for rank in range(4)]}
    assert shares(rows, lambda _: (4000, 4000), 4) is None
    columns = {key: [(rank, box(4000, 1000, at=(0, rank * 1000))) for rank in range(4)]}
    orders = shares(columns, lambda _: (4000, 4000), 4)
    assert [unit.ranks for unit in orders[0].units] == [(0, 1, 2, 3)] * 4


def test_what_takes_too_long_to_plan_is_refused_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Units times ranks are bounded, before anything is computed; each rank reads for itself."""
    users = [(rank, box(4)) for rank in range(2048)]
    asked = mock.Mock()
    with caplog.at_level("INFO", logger="ckpt_storage"):
        assert shares({(f"w{i}", (0,)): users for i in range(500)}, asked, 2048) is None
    asked.assert_not_called()
    assert "Each rank reads for itself" in caplog.text
    shape = (5000 * UNIT_BYTES,)
    for count in (100, 101):
        wants: dict[Key, Any] = {("w", (0,)): [(rank, box(*shape)) for rank in range(count)]}
        assert (shares(wants, lambda _: shape, count) is None) == (count > 100)
