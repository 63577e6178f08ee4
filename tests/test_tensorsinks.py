"""Copies of windows of a chunk into tensors: whichever way, each wanted element arrives once."""

from __future__ import annotations

import itertools
import math
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage.readplan import Request, deliver
from ckpt_storage.regions import Box
from ckpt_storage.source import Place
from ckpt_storage.tensorsinks import MemoryViews, tensor_puts, tensor_sink

PAGE = mmap.PAGESIZE
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
)
def test_puts_do_what_the_sink_does(
    cut: tuple[tuple[int, ...], Box], dtype: torch.dtype, data: st.DataObject, *, has_gaps: bool
) -> None:
    """Over windows that begin and end anywhere in rows, each anywhere in a memory, also at 0."""
    sizes, region = cut
    item_bytes, count = DTYPES[dtype], math.prod(sizes)
    row = math.prod(sizes[1:])
    # Never 0, and so few that bytes and bfloat16 hold each.
    payload = (torch.arange(count) % 97 + 1).to(dtype)
    target = strided(region.sizes, dtype) if has_gaps else torch.zeros(region.sizes, dtype=dtype)
    puts = tensor_puts(target, dtype, sizes, region, MemoryViews())
    assert puts is not None
    memory = memoryview(mmap.mmap(-1, 16 * PAGE))
    put = puts(memory)
    request = Request(
        place=Place(path="f", fqn="w", start=0, size_bytes=count * item_bytes),
        item_bytes=item_bytes,
        chunk_sizes=sizes,
        region=region,
        sink=tensor_sink(target, dtype),
    )
    edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    for low, high in itertools.pairwise(edges):
        begin, length = low * item_bytes, (high - low) * item_bytes
        at = data.draw(st.sampled_from([0, 1, 7, 16 * PAGE // item_bytes - (high - low)]))
        at *= item_bytes
        memory[:] = b"\xff" * len(memory)
        memory[at : at + length] = payload[low:high].view(torch.uint8).numpy().tobytes()
        is_done = put(at, begin, length)
        assert is_done or (len(sizes) > 2 and (low % row or high % row))
        if not is_done:
            deliver(request, begin, memory[at : at + length])
    wanted = payload.view(sizes)
    for dim, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        wanted = wanted.narrow(dim, start, size)
    assert torch.equal(target, wanted)


def test_bytes_that_lie_between_elements_need_the_sink() -> None:
    """Nothing is copied by halves of elements, nor from where torch could not read them."""
    target = torch.zeros(4, 2)
    puts = tensor_puts(target, torch.float32, (4, 4), Box((0, 1), (4, 2)), MemoryViews())
    assert puts is not None
    put = puts(memoryview(bytearray(b"\1" * PAGE)))
    assert not put(2, 0, 16)
    assert not put(0, 2, 16)
    assert not put(0, 0, 18)
    assert not target.any()


@pytest.mark.parametrize("kind", ["meta", "inference", "empty", "scalar"])
def test_what_is_no_plain_memory_needs_the_sink(kind: str) -> None:
    """Tensors elsewhere, those of inference mode, and regions of nothing get no puts."""
    with torch.inference_mode(kind == "inference"):
        target = torch.zeros(2, 2, device="meta" if kind == "meta" else "cpu")
    region = Box((0, 0), (2, 0 if kind == "empty" else 2))
    sizes: tuple[int, ...] = (2, 4)
    if kind == "scalar":
        target, sizes, region = torch.zeros(()), (), Box((), ())
    assert tensor_puts(target, torch.float32, sizes, region, MemoryViews()) is None


def test_a_target_of_another_type_is_converted() -> None:
    """As the sink converts: the planner may want other elements than are stored."""
    target = torch.zeros(2, 2, dtype=torch.float64)
    puts = tensor_puts(target, torch.float32, (2, 4), Box((0, 2), (2, 2)), MemoryViews())
    assert puts is not None
    memory = memoryview(bytearray(PAGE))
    memory[: 8 * 4] = torch.arange(8, dtype=torch.float32).view(torch.uint8).numpy().tobytes()
    assert puts(memory)(0, 0, 32)
    assert target.tolist() == [[2, 3], [6, 7]]


def test_a_memory_is_seen_once_as_each_type() -> None:
    """Thousands of requests make no thousands of views; other memories have their own."""
    views, memory = MemoryViews(), memoryview(bytearray(PAGE))
    assert views.of(memory, torch.float32) is views.of(memory, torch.float32)
    assert views.of(memory, torch.uint8).numel() == PAGE
    others = [views.of(memoryview(bytearray([number]) * PAGE), torch.uint8) for number in range(9)]
    assert [int(other[0]) for other in others] == list(range(9))
