"""Every kind of value that DCP hands over, in every sharding, comes back as it was."""

# ruff: noqa: SLF001  # torch offers no other way to make a legacy ShardedTensor

from __future__ import annotations

import importlib.util
import logging
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import assert_holds, cut, freed, raw_bytes, refused, same, seeded, zeros_like
from on_ranks import on_ranks
from rank_pool import RankPool
from saver_cases import quick_saver, save_spoilt
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Placement, Replicate, Shard

import ckpt_storage
from ckpt_storage import InvalidInputError, ProgressEvent
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.loads import tensors
from ckpt_storage.saves.planning import structure_of
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend

NAMES = [name for name in DTYPES if not name.startswith("bits")]
"""All kinds but those for which torch's own planner raises (it asks for their integer range)."""


def shapes_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of a kind in every way that they can lie in memory."""
    image = seeded(9, 2, 3, 4, 5, dtype=dtype)
    matrix = seeded(6, 50, 40, dtype=dtype)
    return {
        "scalar": seeded(1, dtype=dtype),
        "one": seeded(2, 1, dtype=dtype),
        "odd": seeded(3, 7, 5, 3, dtype=dtype),
        "empty": seeded(4, 0, 4, dtype=dtype),
        "transposed": seeded(5, 6, 3, dtype=dtype).t(),
        "large": seeded(6, 3, 70_001, dtype=dtype),
        "column": matrix[:, 3],
        "expanded": seeded(7, 3, 1, dtype=dtype).expand(3, 40),
        "expanded column": matrix[:2, 3:4].expand(2, 3),
        "windows": seeded(8, 12, dtype=dtype).as_strided((4, 6), (2, 1)),
        "permuted": image.permute(0, 2, 3, 1),
        "inner": image[1:, :, 1:3],
    }


def views() -> dict[str, torch.Tensor]:
    """Return tied, conjugate, negative and other views, and parameters."""
    base = seeded(1, 60, 50)
    conjugate = seeded(2, 40, 30, dtype=torch.complex64).conj()
    weight = nn.Parameter(seeded(3, 20, 10))
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    return {
        "columns": base[:, 3:40:2],
        "rows": base[5:17],
        "flipped storage": base.t()[7:],
        "flipped, in several windows": seeded(7, 3000, 1500).t(),
        "expanded": seeded(4, 1, 9).expand(500, 9),
        "expanded scalar": seeded(5).expand(3, 4),
        "tied": base,
        "tied again": base,
        "parameter": weight,
        "tied parameter": weight,
        "conjugate": conjugate,
        "conjugate columns": conjugate[:, ::3],
        "negative": conjugate.imag,
        "negative scalar": conjugate.imag[0, 0],  # contiguous as it is
        "channels last": seeded(6, 2, 3, 8, 8).to(memory_format=torch.channels_last),
        "no dense order": base.as_strided((5, 5), (7, 3)),
        "offset": base.reshape(-1)[1:],
        "history": weight * 2,
    }


@pytest.mark.parametrize("save", [dcp_cases.save, save_spoilt])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_survives_in_every_shape_and_view(tmp_path: Path, save: Any) -> None:
    """Scalars, empty ones, views and ones larger than a block come back bit by bit, by value.

    One way saves in the background, and the originals change before anything is written.
    """
    state = {name: shapes_of(getattr(torch, name)) for name in NAMES} | {"views": views()}
    expected = {
        name: {
            key: tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
            for key, tensor in tensors.items()
        }
        for name, tensors in state.items()
    }
    save(state, tmp_path)
    assert_holds(tmp_path, expected)


def test_a_load_into_parameters_leaves_them_as_they_are(tmp_path: Path) -> None:
    """Parameters that were loaded into are leaves that require a gradient, without history."""
    parameter, target = nn.Parameter(seeded(1, 3, 4)), nn.Parameter(torch.zeros(3, 4))
    dcp_cases.save({"p": parameter}, tmp_path)
    dcp_cases.load({"p": target}, tmp_path)
    assert (target.requires_grad, target.grad_fn) == (True, None)
    assert same(target.data, parameter.data)


def test_a_load_into_no_memory_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is written where nothing is; tensors without elements need no memory."""
    dcp_cases.save({"w": seeded(1, 3), "empty": torch.empty(0)}, tmp_path)
    lazy = dcp_cases.planner(
        dcp.DefaultLoadPlanner,
        resolve_tensor=lambda _, item: torch.empty(tuple(item.lengths), device="meta"),
    )
    for target, planner, text in (
        (freed(3), None, "The target of w has no memory"),
        (torch.zeros(3), lazy, "The target of w is on the meta device"),
    ):
        given = dcp_cases.load, {"w": target}, tmp_path
        refused(InvalidInputError, text, *given, planner=planner)
    dcp_cases.load({"empty": freed(0)}, tmp_path)


def test_blobs_come_back_equal(tmp_path: Path) -> None:
    """Numbers, text, None, nested containers and states of random generators survive."""
    generator = np.random.default_rng(7)
    generator.random(3)
    state: dict[str, Any] = {
        "step": 12,
        "rate": 1e-3,
        "name": "漢字",
        "nothing": None,
        "flag": True,
        "raw": b"\0\xff",
        "nested": {"a": [1, 2, {"b": (3, "c")}], "empty": {}, "none": []},
        "python": random.Random(3).getstate(),
        "torch": torch.Generator().manual_seed(5).get_state(),
        "numpy": np.random.RandomState(11).get_state(),
        "numpy generator": generator.bit_generator.state,
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "number": np.float64(0.25),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }
    dcp_cases.save(state, tmp_path)
    for load in (dcp_cases.load, dcp_cases.load_stock):
        load(target := zeros_like(state), tmp_path)
        for key in ("numpy", "array", "number", "numpy generator"):
            assert repr(target.pop(key)) == repr(state[key])
        assert same(target, {key: state[key] for key in target})


SHARDINGS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = {
    "empty shards": ((2, 3), (4,), (Shard(0),)),
    "one element": ((1,), (4,), (Shard(0),)),
    "no element": ((0, 5), (4,), (Shard(0),)),
    "scalar": ((), (4,), (Replicate(),)),
    "same dimension twice": ((11, 3), (2, 2), (Shard(0), Shard(0))),
    "same dimension twice, some empty": ((3, 3), (2, 2), (Shard(0), Shard(0))),
    "grid with empty cells": ((1, 3), (2, 2), (Shard(0), Shard(1))),
    "three dimensions": ((4, 6, 5), (2, 2), (Shard(2), Shard(1))),
}


@on_ranks(4)
def test_every_sharding_and_values_of_single_ranks_survive(rank: int, tmp_path: Path) -> None:
    """1-D and 2-D meshes, uneven and empty shards, replicas: whole and shard by shard.

    What one rank alone has is found by every loader; a shared value is saved once.
    """
    expected: dict[str, Any] = {"shared": {"x": seeded(99, 5)}}
    state = dict(expected)
    for seed, (name, (shape, mesh, placements)) in enumerate(SHARDINGS.items()):
        expected[name] = seeded(seed, *shape)
        state[name] = cut(expected[name], *placements, mesh=mesh)
    dcp_cases.save(state | {f"own {rank}": rank, f"tensor {rank}": seeded(rank, 3)}, tmp_path)
    assert_holds(tmp_path, state, [dcp_cases.load])
    expected |= {f"own {each}": each for each in range(4)}
    assert_holds(tmp_path, expected | {f"tensor {each}": seeded(each, 3) for each in range(4)})
    assert len(list(tmp_path.rglob("rank-*.json"))) == 4
    shared = raw_bytes(seeded(99, 5))
    assert sum(path.read_bytes().count(shared) for path in tmp_path.rglob("*.distcp")) == 1


@on_ranks()
def test_several_parts_of_one_tensor_on_one_rank_survive(rank: int, tmp_path: Path) -> None:
    """No part of a legacy sharded tensor hides another of the same name on the same rank."""
    rows = [[(0, 2), (4, 5), (8, 9)], [(2, 4), (5, 8)]][rank]

    def sharded(whole: torch.Tensor) -> ShardedTensor:
        shards = [
            LocalShard.from_tensor_and_offsets(whole[start:stop].clone(), [start, 0], rank)
            for start, stop in rows
        ]
        made: ShardedTensor = ShardedTensor._init_from_local_shards(shards, (9, 4))
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_cases.save({"parts": sharded(seeded(1, 9, 4))}, tmp_path)
        target = sharded(torch.zeros(9, 4))
        dcp_cases.load({"parts": target}, tmp_path)
    for (start, stop), found in zip(rows, target.local_shards(), strict=True):
        assert same(found.tensor, seeded(1, 9, 4)[start:stop])
    assert_holds(tmp_path, {"parts": seeded(1, 9, 4)})


is_asked = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
needs_torch = pytest.mark.skipif(not is_asked, reason="this torch has no CheckpointableTensor")

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def marked(tensor: torch.Tensor, *parts: object) -> torch.Tensor:
    for name, value in zip(_NAMES, parts, strict=True):
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize("known", [True, False])
def test_what_a_tensor_says_of_its_parts_counts_where_torch_asks(
    monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """Then no plan is kept for it; other releases take it for a whole one."""
    monkeypatch.setattr(tensors, "_torch_reads_chunks", known)
    state = {"part": marked(torch.ones(2, 3), (8, 3), ((0, 0),), ((0, 0),), ((2, 3),))}
    kept = structure_of(state, {"part": ("part",)}, rank=0, world_size=1)
    assert (kept is None) is known


@needs_torch
@on_ranks()
def test_parts_are_saved_as_parts(rank: int, tmp_path: Path) -> None:
    """Every rank's parts are in the checkpoint, by each way to save; one process reads the whole.

    Of one tensor a rank has four of eight rows, of the other two parts.
    """
    whole = {"rows": torch.arange(24.0).reshape(8, 3), "two": torch.arange(12.0)}
    starts = (3 * rank, 6 + 3 * rank)

    def pieces(rows: torch.Tensor, two: torch.Tensor) -> dict[str, Any]:
        mine = rows[rank * 4 : rank * 4 + 4].clone()
        both = torch.cat([two[start : start + 3] for start in starts])
        return {
            "rows": marked(mine, (8, 3), ((rank * 4, 0),), ((0, 0),), ((4, 3),)),
            "two": marked(both, (12,), tuple((n,) for n in starts), ((0,), (3,)), ((3,), (3,))),
        }

    state = pieces(**whole)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for number, how in enumerate(["save", "save", "thread", "process"]):
        url = tmp_path / f"step-{number}"
        if how == "save":
            ckpt_storage.save(state, url)
        else:
            with quick_saver(how) as saver:  # type: ignore[arg-type]  # a parameter
                saver.save(state, url).result()
        target = pieces(torch.zeros(8, 3), torch.zeros(12))
        ckpt_storage.load(target, url)
        assert same(target, state), how
        assert_holds(url, whole, [ckpt_storage.load], process_group=alone)


MIB = 1 << 20
BLOCK_BYTES = 65_536
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
LONG_RUNS = [("wide", 0, 8), ("wide", 1, 8), ("tall", 0, 4)]
"""Names, dimensions to cut, and how many long runs a rank then needs at most."""


@cache
def whole(name: str) -> torch.Tensor:
    shape, dtype, _ = SHAPES[name]
    return seeded(list(SHAPES).index(name), *shape, dtype=dtype)


def _save_on_grid(_rank: int, path: Path) -> None:
    state = {name: cut(whole(name), *how, mesh=(2, 2)) for name, (_, _, how) in SHAPES.items()}
    dcp_cases.save(state, path)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resharding") / "run"
    ranks.run(_save_on_grid, path)
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


@on_ranks(1, 2, 3)
def test_a_load_with_another_sharding_equals_slicing(rank: int, saved: Path) -> None:
    """Every rank holds exactly its slice, by both doors; progress tells the bytes that are read.

    Of long runs no more is read than the rest of their first and last blocks, at once.
    """
    for names, dim, most_runs in [
        *((list(SHAPES), dim, 0) for dim in (0, 1)),
        *(([name], dim, most_runs) for name, dim, most_runs in LONG_RUNS),
    ]:
        dims = {name: min(dim, whole(name).ndim - 1) for name in names}
        state: dict[str, Any] = {
            name: cut(torch.zeros_like(whole(name)), Shard(dims[name])) for name in names
        }
        events: Counter[str] = Counter()

        def progress(event: ProgressEvent, events: Counter[str] = events) -> None:
            events[event.phase] = event.done_bytes

        with counted_reads() as lengths:
            dcp_cases.load(state, saved, progress=progress)
        assert_holds(saved, state, [ckpt_storage.load])
        assert sum(lengths) == events["load"]
        needed_bytes = 0
        for name in names:
            parts = torch.chunk(whole(name), dist.get_world_size(), dims[name])
            mine, expected = state[name].to_local(), [*parts, None, None][rank]
            assert mine.numel() == 0 if expected is None else same(mine, expected.contiguous())
            needed_bytes += mine.nbytes
        if most_runs:
            run_count = most_runs if needed_bytes else 0
            assert needed_bytes <= sum(lengths) <= needed_bytes + 2 * BLOCK_BYTES * run_count
            assert (needed_bytes > 0) <= len(lengths) <= sum(lengths) // MIB + 3 * run_count


@on_ranks()
def test_a_resharding_load_logs_what_each_rank_reads(rank: int, saved: Path) -> None:
    """One debug line has the bytes that this rank wants and reads, the requests, and the rank."""
    state = {"tall": cut(torch.zeros_like(whole("tall")), Shard(1))}
    lines: list[str] = []
    log, handler = logging.getLogger("ckpt_storage"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        with counted_reads() as lengths:
            dcp_cases.load(state, saved)
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
    (line,) = [line for line in lines if " wants " in line]
    assert f"rank {rank} wants {state['tall'].to_local().nbytes} bytes" in line
    (read,) = re.findall(r"It reads (\d+) bytes in \d+ requests", line)
    assert int(read) == sum(lengths)


def test_small_tensors_share_requests(tmp_path: Path) -> None:
    """A thousand small tensors cost a handful of reads of a disk, not one each."""
    state = {f"t{number}": seeded(number, 50) for number in range(1000)}
    dcp_cases.save(state, tmp_path)
    with counted_reads() as lengths:
        assert_holds(tmp_path, state, [dcp_cases.load])
    (file,) = tmp_path.rglob("*.distcp")
    assert sum(lengths) <= file.stat().st_size
    assert len(lengths) <= 4


def test_targets_take_other_dtypes_and_layouts(saved: Path) -> None:
    """Values are converted to the target's dtype; strided and conjugate targets are filled."""
    target = {
        "narrow": torch.zeros(3, 1001, dtype=torch.int64).t(),
        "wide": torch.zeros(4, 2 * MIB, dtype=torch.float64)[:, ::2],
        "odd": torch.zeros(SHAPES["odd"][0], dtype=torch.float32),
        "tall": torch.zeros(2, 3 * MIB, dtype=torch.float32).t(),
        "few": torch.zeros(3, 5, dtype=torch.complex128).conj(),
    }
    strides = {name: value.stride() for name, value in target.items()}
    dcp_cases.load(dict(target), saved)
    for name, value in target.items():
        assert same(value, whole(name).to(value.dtype)), name
    assert strides == {name: value.stride() for name, value in target.items()}


@pytest.mark.parametrize("load", [dcp_cases.load, ckpt_storage.load], ids=["dcp.load", "load"])
def test_missing_keys_and_other_shapes_are_named(saved: Path, load: Any) -> None:
    """A name that was not saved keeps its value with `allow_partial_load`, and is else named."""
    for name, shape, text in (("absent", (3,), "absent"), ("few", (5, 3), "few")):
        with pytest.raises((CheckpointException, ckpt_storage.CheckpointError), match=text):
            load({name: torch.zeros(shape)}, saved)
    target = {"few": torch.zeros(3, 5, dtype=torch.complex128), "absent": torch.ones(2)}
    load(target, saved, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert same(target, {"few": whole("few"), "absent": torch.ones(2)})


def test_an_expanded_target_is_an_error_not_a_wrong_value(saved: Path) -> None:
    """A target whose elements share memory cannot hold the tensor, and torch says so."""
    target = {"few": torch.zeros(3, 1, dtype=torch.complex128).expand(3, 5)}
    refused(Exception, "single memory location", dcp_cases.load, target, saved)


def test_a_load_without_verification_reads_the_elements_alone(saved: Path) -> None:
    """With `verify=False` values are equal and no block is rounded out."""
    with counted_reads() as lengths:
        assert_holds(saved, {"few": whole("few")}, [dcp_cases.load], verify=False)
    assert sum(lengths) == 3 * 5 * 16
