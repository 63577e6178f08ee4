"""Copies of windows of a chunk into tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_mover import LateMover
from local_stores import local_store

from ckpt_storage.format.boxes import Box, box_selection
from ckpt_storage.loads.targets import CudaMover, Rings, TensorRead
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader, put
from ckpt_storage.transfer.pacing import LOCAL_COSTS
from ckpt_storage.transfer.ranges import RangeReader

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
    rings = Rings(buffer_count, make=lambda _: cast("CudaMover", LateMover()))
    device = torch.device("cuda")  # the mover decides
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
            ring=rings.of(device),
        )
        for where, target in zip(wheres, targets, strict=True)
    ]
    options = TransferOptions(thread_count=4, part_bytes=8 * 1024, block_bytes=1024)
    costs = replace(LOCAL_COSTS, part_min_bytes=4 * 1024, window_bytes=8 * 1024)
    ranges = RangeReader(local_store(str(tmp_path)), options, Deadline("load", 60))
    ChunkReader(ranges, costs).read(reads)
    rings.finish()
    assert torch.equal(targets[0], wanted[:, 24:].double())
    assert torch.equal(targets[1], wanted[::2])
