"""Loading with another sharding: equal to slicing the original, and no more bytes than needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, seeded
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import ProgressEvent
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.testing.ranks import RankPool

doors = {"dcp.load": dcp_cases.load, "load": ckpt_storage.load}
each_load = pytest.mark.parametrize("load", doors.values(), ids=doors)

BLOCK_BYTES = 65_536
MIB = 1 << 20
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Placement, Placement]]] = {
    # Runs of 1 MiB and more, however it is cut.
    "wide": ((4, MIB), torch.float32, (Shard(0), Shard(1))),
    "tall": ((3 * MIB, 2), torch.float16, (Shard(0), Shard(0))),
    # Short runs, odd sizes, every element moved.
    "odd": ((129, 77, 5), torch.bfloat16, (Shard(1), Shard(0))),
    "narrow": ((1001, 3), torch.int64, (Shard(0), Replicate())),
    "few": ((3, 5), torch.complex128, (Shard(1), Shard(1))),
    "flags": ((11,), torch.bool, (Shard(0), Replicate())),
}


@cache
def whole(name: str) -> torch.Tensor:
    """Return the original of a tensor."""
    shape, dtype, _ = SHAPES[name]
    return seeded(list(SHAPES).index(name), *shape, dtype=dtype)


def save_on_grid(_rank: int, path: Path) -> None:
    """Save all tensors on a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = {
        name: distribute_tensor(whole(name), mesh, placements)
        for name, (_, _, placements) in SHAPES.items()
    }
    dcp_cases.save(state | {"step": 3}, path)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks."""
    path = tmp_path_factory.mktemp("resharding") / "run"
    ranks.run(save_on_grid, path)
    return path


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Give a list of the lengths in bytes of all reads of shard files inside the block."""
    lengths: list[int] = []
    original = LocalBackend.read

    def read(backend: LocalBackend, path: str, ranges: Iterable[Range]) -> int | None:
        def counted() -> Iterator[Range]:
            for start, target in ranges:
                if path.endswith(".distcp"):
                    lengths.append(target.nbytes)
                yield start, target

        return original(backend, path, counted())

    with patch.object(LocalBackend, "read", read):
        yield lengths


def load_sharded(rank: int, path: Path, dim: int, names: list[str]) -> tuple[int, int, int]:
    """Load tensors cut along one dimension, by both doors, and compare with slices.

    Returns bytes and requests as the store saw them, and bytes as progress told.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state: dict[str, Any] = {}
    for name in names:
        original = whole(name)
        target = torch.zeros(original.shape, dtype=original.dtype)
        cut = min(dim, original.ndim - 1)
        state[name] = distribute_tensor(target, mesh, [Shard(cut)])
    told: Counter[str] = Counter()

    def progress(event: ProgressEvent) -> None:
        told[event.phase] = event.done_bytes

    with counted_reads() as lengths:
        dcp_cases.load(state, path, progress=progress)
    dcp_cases.assert_holds(path, state, [ckpt_storage.load])
    for name in names:
        original = whole(name)
        parts = torch.chunk(original, size, min(dim, original.ndim - 1))
        expected = parts[rank] if rank < len(parts) else original.narrow(0, 0, 0)
        local = state[name].to_local()
        assert same(local, expected.contiguous()) or local.numel() == expected.numel() == 0, name
    return sum(lengths), len(lengths), told["load"]


@pytest.mark.parametrize(("size", "dim"), [(1, 0), (2, 0), (3, 0), (3, 1)])
def test_a_load_with_another_sharding_equals_slicing(
    ranks: RankPool, saved: Path, size: int, dim: int
) -> None:
    """Every rank of one, two or three holds exactly its slice, cut along rows or columns."""
    for counted, _, told in ranks.run(load_sharded, saved, dim, list(SHAPES), world_size=size):
        assert counted == told


RUNS = [("wide", 0, 8), ("wide", 1, 8), ("tall", 0, 4)]
"""Names, dimensions to cut, and how many long runs a rank then needs at most."""


def load_one_by_one(rank: int, path: Path) -> list[tuple[int, int, int]]:
    """Load single tensors; return bytes and requests of each."""
    return [load_sharded(rank, path, dim, [name]) for name, dim, _ in RUNS]


@pytest.mark.parametrize("size", [1, 3])
def test_a_load_fetches_the_bytes_it_needs_and_few_more(
    ranks: RankPool, saved: Path, size: int
) -> None:
    """Of long runs no more is read than the rest of their first and last blocks, at once."""
    for rank, outcome in enumerate(ranks.run(load_one_by_one, saved, world_size=size)):
        for (name, dim, most_runs), (fetched_bytes, count, _) in zip(RUNS, outcome, strict=True):
            parts = torch.chunk(whole(name), size, dim)
            needed_bytes = parts[rank].nbytes if rank < len(parts) else 0
            run_count = most_runs if needed_bytes else 0
            assert needed_bytes <= fetched_bytes <= needed_bytes + 2 * BLOCK_BYTES * run_count
            assert (needed_bytes > 0) <= count <= fetched_bytes // MIB + 3 * run_count


def test_small_tensors_share_requests(tmp_path: Path) -> None:
    """A thousand small tensors cost a handful of reads of a disk, not one each."""
    state = {f"t{number}": seeded(number, 50) for number in range(1000)}
    dcp_cases.save(state, tmp_path)
    with counted_reads() as lengths:
        dcp_cases.assert_holds(tmp_path, state, [dcp_cases.load])
    (file,) = tmp_path.rglob("*.distcp")
    assert sum(lengths) <= file.stat().st_size
    assert len(lengths) <= 4


def test_targets_take_other_dtypes_and_layouts(saved: Path) -> None:
    """Values are converted to the target's dtype; strided and conjugate targets are filled."""
    flat, wide = whole("narrow"), whole("wide")
    target = {
        "narrow": torch.zeros(3, 1001, dtype=torch.int64).t(),
        "wide": torch.zeros(4, 2 * MIB, dtype=torch.float64)[:, ::2],
        "odd": torch.zeros(SHAPES["odd"][0], dtype=torch.float32),
        "tall": torch.zeros(2, 3 * MIB, dtype=torch.float32).t(),
        "few": torch.zeros(3, 5, dtype=torch.complex128).conj(),
    }
    strides = {name: value.stride() for name, value in target.items()}
    dcp_cases.load(dict(target), saved)
    assert same(target["narrow"].contiguous(), flat)
    assert same(target["wide"].contiguous(), wide.double())
    assert same(target["odd"], whole("odd").float())
    assert same(target["tall"].contiguous(), whole("tall").float())
    assert same(target["few"], whole("few"))
    assert strides == {name: value.stride() for name, value in target.items()}


@each_load
def test_missing_keys_and_other_shapes_are_named(saved: Path, load: Any) -> None:
    """A name that was not saved keeps its value with `allow_partial_load`, and is else named."""
    for name, shape, text in (("absent", (3,), "Missing key .*: absent"), ("few", (5, 3), "few")):
        with pytest.raises((CheckpointException, ckpt_storage.CheckpointError), match=text):
            load({name: torch.zeros(shape)}, saved)
    target = {"few": torch.zeros(3, 5, dtype=torch.complex128), "absent": torch.ones(2)}
    load(target, saved, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert same(target["few"], whole("few"))
    assert same(target["absent"], torch.ones(2))


def test_an_expanded_target_is_an_error_not_a_wrong_value(saved: Path) -> None:
    """A target whose elements share memory cannot hold the tensor, and torch says so."""
    target = {"few": torch.zeros(3, 1, dtype=torch.complex128).expand(3, 5)}
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load(target, saved)
    (error,) = failures_of(caught.value).values()
    assert "single memory location" in str(error)


def test_a_load_without_verification_reads_the_elements_alone(saved: Path) -> None:
    """With `verify=False` values are equal and no block is rounded out."""
    target = {"few": torch.zeros(3, 5, dtype=torch.complex128)}
    with counted_reads() as lengths:
        dcp_cases.load(target, saved, verify=False)
    assert same(target["few"], whole("few"))
    assert sum(lengths) == 3 * 5 * 16
