"""Every kind of value that DCP hands over survives a save, for torch's reader and for ours."""

# ruff: noqa: SLF001  # torch offers no other way to make a legacy ShardedTensor

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
from dcp_cases import failures_of, freed, raw_bytes, same, seeded, zeros_like
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckpt_storage import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.testing.ranks import RankPool

NAMES = [name for name in DTYPES if not name.startswith("bits")]
"""All kinds but those for which torch's own planner raises (it asks for their integer range)."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_survives_in_every_shape(tmp_path: Path) -> None:
    """Scalars, empty ones, transposed ones and ones larger than a block come back bit by bit."""
    state: dict[str, Any] = {}
    for name in NAMES:
        dtype: torch.dtype = getattr(torch, name)
        state[name] = {
            "scalar": seeded(1, dtype=dtype),
            "one": seeded(2, 1, dtype=dtype),
            "odd": seeded(3, 7, 5, 3, dtype=dtype),
            "empty": seeded(4, 0, 4, dtype=dtype),
            "transposed": seeded(5, 6, 3, dtype=dtype).t(),
            "large": seeded(6, 3, 70_001, dtype=dtype),
        }
    dcp_cases.save(state, tmp_path)
    dcp_cases.assert_holds(tmp_path, state)


def test_views_of_every_kind_are_saved_by_value(tmp_path: Path) -> None:
    """Strided, expanded, tied, conjugate, negative and permuted views come back as values."""
    base = seeded(1, 60, 50)
    complex_base = seeded(2, 40, 30, dtype=torch.complex64)
    weight = nn.Parameter(seeded(3, 20, 10))
    state = {
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
        "conjugate": complex_base.conj(),
        "conjugate columns": complex_base.conj()[:, ::3],
        "negative": complex_base.conj().imag,
        "channels last": seeded(6, 2, 3, 8, 8).to(memory_format=torch.channels_last),
        "no dense order": base.as_strided((5, 5), (7, 3)),
        "offset": base.reshape(-1)[1:],
        "history": weight * 2,
    }
    assert state["conjugate"].is_conj()
    assert state["negative"].is_neg()
    expected = {
        key: value.detach().resolve_conj().resolve_neg().contiguous().clone()
        for key, value in state.items()
    }
    dcp_cases.save(state, tmp_path)
    dcp_cases.assert_holds(tmp_path, expected)


def test_a_load_into_parameters_leaves_them_as_they_are(tmp_path: Path) -> None:
    """Parameters that were loaded into are leaves that require a gradient, without history."""
    parameter = nn.Parameter(seeded(1, 3, 4))
    dcp_cases.save({"p": parameter}, tmp_path)
    target = nn.Parameter(torch.zeros(3, 4))
    dcp_cases.load({"p": target}, tmp_path)
    assert (target.requires_grad, target.grad_fn) == (True, None)
    assert same(target.data, parameter.data)


def test_a_load_into_no_memory_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is written where nothing is; tensors without elements need no memory."""
    dcp_cases.save({"w": seeded(1, 3), "empty": torch.empty(0)}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp_cases.load({"w": freed(3)}, tmp_path)
    (error,) = failures_of(caught.value).values()
    assert isinstance(error, InvalidInputError)
    assert "The target of w has no memory" in str(error)
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
        target = zeros_like(state)
        load(target, tmp_path)
        for key in ("numpy", "array", "number", "numpy generator"):
            assert repr(target.pop(key)) == repr(state[key])
        assert same(target, {key: state[key] for key in target})


Case = tuple[str, tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]

SHARDINGS: list[Case] = [
    ("empty shards", (2, 3), (4,), (Shard(0),)),
    ("one element", (1,), (4,), (Shard(0),)),
    ("no element", (0, 5), (4,), (Shard(0),)),
    ("scalar", (), (4,), (Replicate(),)),
    ("same dimension twice", (11, 3), (2, 2), (Shard(0), Shard(0))),
    ("same dimension twice, some empty", (3, 3), (2, 2), (Shard(0), Shard(0))),
    ("grid with empty cells", (1, 3), (2, 2), (Shard(0), Shard(1))),
    ("three dimensions", (4, 6, 5), (2, 2), (Shard(2), Shard(1))),
]


def sharded_state() -> dict[str, DTensor]:
    """Return one DTensor for each sharding, each with a seed of its own."""
    meshes = {shape: init_device_mesh("cpu", shape) for _, _, shape, _ in SHARDINGS}
    return {
        name: distribute_tensor(seeded(seed, *shape), meshes[mesh], placements)
        for seed, (name, shape, mesh, placements) in enumerate(SHARDINGS)
    }


def save_and_load_sharded(_rank: int, path: Path) -> None:
    """Save DTensors of every sharding and load them into zeros that are sharded alike."""
    state: dict[str, Any] = dict(sharded_state())
    dcp_cases.save(state, path)
    target: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp_cases.load(target, path)
    for name, value in state.items():
        assert same(target[name].to_local(), value.to_local()), name


def test_every_sharding_of_a_dtensor_survives(ranks: RankPool, tmp_path: Path) -> None:
    """1-D and 2-D meshes, uneven and empty shards, replicas: whole and shard by shard."""
    ranks.run(save_and_load_sharded, tmp_path)
    expected = {name: seeded(seed, *shape) for seed, (name, shape, _, _) in enumerate(SHARDINGS)}
    dcp_cases.assert_holds(tmp_path, expected)


def sharded_tensor(rank: int, *, fill: bool) -> ShardedTensor:
    """Return a legacy sharded tensor of 9 rows, of which rank 0 holds three parts, rank 1 two."""
    whole = seeded(1, 9, 4) if fill else torch.zeros(9, 4)
    rows = {0: [(0, 2), (4, 5), (8, 9)], 1: [(2, 4), (5, 8)]}[rank]
    shards = [
        LocalShard.from_tensor_and_offsets(whole[start:stop].clone(), [start, 0], rank)
        for start, stop in rows
    ]
    made: ShardedTensor = ShardedTensor._init_from_local_shards(shards, (9, 4))
    return made


def save_sharded_tensor(rank: int, path: Path) -> None:
    """Save and load a legacy sharded tensor with several parts of one name on each rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"parts": sharded_tensor(rank, fill=True)}
        target = {"parts": sharded_tensor(rank, fill=False)}
        dcp_cases.save(state, path)
        dcp_cases.load(target, path)
    for saved, loaded in zip(
        state["parts"].local_shards(), target["parts"].local_shards(), strict=True
    ):
        assert same(saved.tensor, loaded.tensor)


def test_several_parts_of_one_tensor_on_one_rank_survive(ranks: RankPool, tmp_path: Path) -> None:
    """No part of a sharded tensor hides another of the same name on the same rank."""
    ranks.run(save_sharded_tensor, tmp_path, world_size=2)
    dcp_cases.assert_holds(tmp_path, {"parts": seeded(1, 9, 4)})


def save_own_values(rank: int, path: Path) -> None:
    """Save values that only one rank has, beside some that all have."""
    own = {f"own {rank}": rank, f"tensor {rank}": seeded(rank, 3), "shared": {"x": seeded(9, 5)}}
    dcp_cases.save(own, path)
    target = zeros_like(own)
    dcp_cases.load(target, path)
    assert same(target, own)


def test_values_of_single_ranks_survive(ranks: RankPool, tmp_path: Path) -> None:
    """What one rank alone has is saved, and found by every loader; a shared value is saved once."""
    ranks.run(save_own_values, tmp_path, world_size=3)
    expected: dict[str, Any] = {"shared": {"x": seeded(9, 5)}}
    expected |= {f"own {rank}": rank for rank in range(3)}
    expected |= {f"tensor {rank}": seeded(rank, 3) for rank in range(3)}
    dcp_cases.assert_holds(tmp_path, expected)
    assert len(list(tmp_path.rglob("rank-*.json"))) == 3
    held = [path.read_bytes().count(raw_bytes(seeded(9, 5))) for path in tmp_path.rglob("*.distcp")]
    assert sum(held) == 1
