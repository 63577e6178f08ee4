"""Tensors on their way to the host and to a device: order, with stand-ins for CUDA, and bytes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_stores import local_store

from ckpt_storage.format.boxes import Box, box_selection
from ckpt_storage.loads.items import CudaMover, TensorRead, UploadRing, Use
from ckpt_storage.options import TransferOptions
from ckpt_storage.saves import items
from ckpt_storage.saves.items import from_device, host_bytes, host_views
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader, put
from ckpt_storage.transfer.pacing import LOCAL_COSTS
from ckpt_storage.transfer.ranges import RangeReader

_WAIT_S = 60.0


class LateMover:
    """Stands for `CudaMover`: does each upload `delay_s` after the one before, in a thread.

    A buffer that is filled again too early gives wrong values; a load that does not wait for the
    end finds none.
    """

    def __init__(self, delay_s: float = 0.002) -> None:
        self._delay_s = delay_s
        self._thread = ThreadPoolExecutor(1)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        """Queue an upload."""

        def upload() -> None:
            time.sleep(self._delay_s)
            use(data.clone())

        job = self._thread.submit(upload)
        return lambda: job.result(_WAIT_S)

    def finish(self) -> None:
        """Return when all uploads have ended; none is begun any more."""
        self._thread.shutdown()


HERE = torch.device("cpu")

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeCuda:
    """Streams and events that note what happens; copies on the CPU take place at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._numbers = itertools.count(1)

    def stream(self, _device: object) -> Any:
        """Return a side stream."""
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"wait for {other}"),
            synchronize=lambda: self.log.append("synchronize"),
        )

    def event(self) -> Any:
        """Return an event, which notes what copy was begun and waited for."""
        number = next(self._numbers)
        return SimpleNamespace(
            record=lambda _stream: self.log.append(f"begin {number}"),
            synchronize=lambda: self.log.append(f"end {number}"),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stand-ins for what is called of torch.cuda."""
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the producer")
    monkeypatch.setattr(items, "_pinned", torch.empty_like)
    return fake


def windows(count: int, length: int = 4) -> Iterator[torch.Tensor]:
    """Yield tensors that tell their number."""
    for number in range(count):
        yield torch.full((length,), number, dtype=torch.int32)


def test_the_next_copy_is_under_way_while_a_window_is_used(cuda: FakeCuda) -> None:
    """A window is given out only once its own copy has ended, and the next has begun by then."""
    for number, view in enumerate(from_device(HERE, windows(3), {})):
        assert view.cast("i").tolist() == [number] * 4
        cuda.log.append(f"use {number + 1}")
    assert cuda.log == [
        "wait for the producer",
        *["begin 1", "begin 2", "end 1", "use 1"],
        *["begin 3", "end 2", "use 2", "end 3", "use 3"],
        "synchronize",
    ]
    # A writer that fails in between waits for what was begun.
    views = from_device(HERE, windows(5), {})
    next(views)
    views.close()  # type: ignore[attr-defined]  # a generator's
    assert cuda.log[-1] == "synchronize"


def test_a_part_on_its_way_keeps_its_bytes(cuda: FakeCuda) -> None:
    """However long it takes, and whatever is copied meanwhile."""
    streams: dict[torch.device, Any] = {}
    held = [view for _ in range(10) for view in from_device(HERE, windows(3, 16), streams)]
    assert [view.cast("i")[0] for view in held] == [0, 1, 2] * 10
    assert cuda.log.count("synchronize") == 10


def test_what_is_pinned_is_host_memory_whatever_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts that make their tensors on a GPU by default save and load through host memory."""
    empty = torch.empty
    with torch.device("meta"):
        assert empty(1).is_meta
        plain = {"pin_memory": False}
        monkeypatch.setattr(torch, "empty", lambda *of, **how: empty(*of, **(how | plain)))
        assert items._pinned(torch.ones(2, device="cpu")).is_cpu  # noqa: SLF001  # needs CUDA
        assert CudaMover.buffer(cast("Any", None), 8).is_cpu


KINDS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000),
    lambda: torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000).t(),
    lambda: torch.arange(5_000_000).to(torch.bfloat16)[::3],
    lambda: torch.ones(400_000, 2).cumsum(0).view(torch.complex64)[:, 0].conj(),  # noqa: PLW0108  # a new one each time
    lambda: torch.tensor(3),
    lambda: torch.empty(0, 5),
]


@has_cuda
def test_a_cuda_tensor_gives_what_its_copy_on_the_host_gives() -> None:
    """Window by window and whole, of any form."""
    for make in KINDS:
        tensor, expected = make().cuda(), host_bytes(make().contiguous())
        for window_bytes in (1 << 14, 1 << 24):
            views = host_views(tensor, window_bytes, {})
            assert b"".join(map(bytes, views)) == expected
        assert host_bytes(tensor) == expected


@has_cuda
def test_what_the_producer_enqueued_is_in_the_copy() -> None:
    """Kernels still under way on the producer's stream come first; later ones come after."""
    tensor = torch.zeros(8 << 20, device="cuda")
    for _ in range(50):
        tensor += 1
    views = [bytes(view) for view in host_views(tensor, 1 << 22, {})]
    tensor.zero_()
    expected = torch.full((8 << 20,), 50.0)
    assert b"".join(views) == host_bytes(expected)


DTYPES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 4}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """Draw the sizes of a chunk and a region of it."""
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(
        draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)
    )
    return sizes, Box(starts, lengths)


def strided(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with gaps in memory, all zeros."""
    return torch.zeros((*sizes[:-1], 2 * sizes[-1]), dtype=dtype)[..., ::2]


@given(
    cut=cuts(),
    dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
    has_gaps=st.booleans(),
    is_inference=st.booleans(),
)
def test_each_wanted_element_arrives_once(
    cut: tuple[tuple[int, ...], Box],
    dtype: torch.dtype,
    data: st.DataObject,
    *,
    has_gaps: bool,
    is_inference: bool,
) -> None:
    """Over windows that begin and end anywhere in rows, each anywhere in a memory."""
    sizes, region = cut
    item_bytes, count = DTYPES[dtype], math.prod(sizes)
    # Never 0, and so few that bytes and bfloat16 hold each.
    payload = (torch.arange(count) % 97 + 1).to(dtype)
    with torch.inference_mode(is_inference):
        target = (
            strided(region.sizes, dtype) if has_gaps else torch.zeros(region.sizes, dtype=dtype)
        )
    read = TensorRead(
        place=ChunkPlace(path="f", fqn="w", start=0, size_bytes=count * item_bytes),
        item_bytes=item_bytes,
        chunk_sizes=sizes,
        where=box_selection(region),
        tensor=target,
        dtype=dtype,
    )
    edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    for low, high in itertools.pairwise(edges):
        at = data.draw(st.sampled_from([0, 1, 7]))
        memory = bytes(at) + payload[low:high].view(torch.uint8).numpy().tobytes()
        put(read, low * item_bytes, memoryview(bytearray(memory))[at:])
    wanted = payload.view(sizes)
    for dim, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        wanted = wanted.narrow(dim, start, size)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("buffer_count", [1, 3])
def test_elements_on_their_way_to_a_device_are_not_overwritten(
    tmp_path: Path, buffer_count: int
) -> None:
    """Windows go through few buffers, from four threads, late; each element arrives as it was."""
    wanted = torch.arange(40 * 1024, dtype=torch.float32).reshape(40, 1024)
    (tmp_path / "f").write_bytes(wanted.numpy().tobytes())
    place = ChunkPlace(path="f", fqn="w", start=0, size_bytes=wanted.nbytes)
    ring = UploadRing(cast("CudaMover", LateMover()), buffer_count)
    targets = [torch.zeros(40, 1000, dtype=torch.float64), torch.zeros(20, 1024)]
    wheres = [(range(40), range(24, 1024)), (range(0, 40, 2), range(1024))]
    reads = [
        TensorRead(
            place=place,
            item_bytes=4,
            chunk_sizes=(40, 1024),
            where=where,
            tensor=target,
            dtype=torch.float32,
            ring=ring,
        )
        for where, target in zip(wheres, targets, strict=True)
    ]
    options = TransferOptions(thread_count=4, part_bytes=8 * 1024, block_bytes=1024)
    costs = replace(LOCAL_COSTS, part_min_bytes=4 * 1024, window_bytes=8 * 1024)
    ranges = RangeReader(local_store(str(tmp_path)), options)
    ChunkReader(ranges, costs).read(reads)
    ring.finish()
    assert torch.equal(targets[0], wanted[:, 24:].double())
    assert torch.equal(targets[1], wanted[::2])
