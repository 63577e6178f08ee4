"""Copies of windows of a chunk into tensors."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage.format.boxes import Box
from ckpt_storage.format.selections import box_selection
from ckpt_storage.loads.targets import TensorTarget
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, put

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
    read = ChunkRead(
        place=ChunkPlace(path="f", fqn="w", start=0, size_bytes=count * item_bytes),
        item_bytes=item_bytes,
        chunk_sizes=sizes,
        where=box_selection(region),
        target=TensorTarget(target, dtype),
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


def test_a_target_of_another_type_is_converted() -> None:
    """The planner may want other elements than are stored."""
    target = torch.zeros(2, 2, dtype=torch.float64)
    read = ChunkRead(
        place=ChunkPlace(path="f", fqn="w", start=0, size_bytes=32),
        item_bytes=4,
        chunk_sizes=(2, 4),
        where=(range(2), range(2, 4)),
        target=TensorTarget(target, torch.float32),
    )
    payload = torch.arange(8, dtype=torch.float32).numpy().tobytes()
    put(read, 0, memoryview(bytearray(payload)))
    assert target.tolist() == [[2, 3], [6, 7]]
