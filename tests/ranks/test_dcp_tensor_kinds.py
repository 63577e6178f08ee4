"""Every kind of value that DCP hands over survives a save, for torch's reader and for ours."""

# ruff: noqa: SLF001  # torch offers no other way to make a legacy ShardedTensor

from __future__ import annotations

import importlib.util
import random
import warnings
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, freed, raw_bytes, same, seeded, zeros_like
from saver_cases import save_spoilt
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import InvalidInputError
from ckpt_storage.format.names import DTYPES
from ckpt_storage.loads import resolving
from ckpt_storage.saves.planning import structure_of
from ckpt_storage.testing.ranks import RankPool

NAMES = [name for name in DTYPES if not name.startswith("bits")]
"""All kinds but those for which torch's own planner raises (it asks for their integer range)."""


each_door = pytest.mark.parametrize("save", [dcp_cases.save, save_spoilt])
"""One saves in the background, and the originals change before anything is written."""


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


@each_door
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_survives_in_every_shape(tmp_path: Path, save: Any) -> None:
    """Scalars, empty ones, transposed ones and ones larger than a block come back bit by bit."""
    state = {name: shapes_of(getattr(torch, name)) for name in NAMES}
    expected = {
        name: {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        for name, tensors in state.items()
    }
    save(state, tmp_path)
    dcp_cases.assert_holds(tmp_path, expected)


@each_door
def test_views_of_every_kind_are_saved_by_value(tmp_path: Path, save: Any) -> None:
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
    save(state, tmp_path)
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

    class Lazy(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.empty(tuple(read_item.lengths), device="meta")

    for target, planner, text in (
        (freed(3), None, "The target of w has no memory"),
        (torch.zeros(3), Lazy(), "The target of w is on the meta device"),
    ):
        with pytest.raises(CheckpointException) as caught:
            dcp_cases.load({"w": target}, tmp_path, planner=planner)
        (error,) = failures_of(caught.value).values()
        assert isinstance(error, InvalidInputError)
        assert text in str(error)
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


def save_and_load_sharded(rank: int, path: Path) -> None:
    """Save DTensors of every sharding, and values that one rank has; load them sharded alike."""
    meshes = {shape: init_device_mesh("cpu", shape) for _, _, shape, _ in SHARDINGS}
    state: dict[str, Any] = {
        name: distribute_tensor(seeded(seed, *shape), meshes[mesh], placements)
        for seed, (name, shape, mesh, placements) in enumerate(SHARDINGS)
    }
    state |= {f"own {rank}": rank, f"tensor {rank}": seeded(rank, 3), "shared": {"x": seeded(9, 5)}}
    dcp_cases.save(state, path)
    dcp_cases.assert_holds(path, state, [dcp_cases.load])


def test_every_sharding_and_values_of_single_ranks_survive(ranks: RankPool, tmp_path: Path) -> None:
    """1-D and 2-D meshes, uneven and empty shards, replicas: whole and shard by shard.

    What one rank alone has is found by every loader; a shared value is saved once.
    """
    ranks.run(save_and_load_sharded, tmp_path)
    expected: dict[str, Any] = {
        name: seeded(seed, *shape) for seed, (name, shape, _, _) in enumerate(SHARDINGS)
    }
    expected |= {"shared": {"x": seeded(9, 5)}}
    expected |= {f"own {rank}": rank for rank in range(4)}
    expected |= {f"tensor {rank}": seeded(rank, 3) for rank in range(4)}
    dcp_cases.assert_holds(tmp_path, expected)
    assert len(list(tmp_path.rglob("rank-*.json"))) == 4
    held = [path.read_bytes().count(raw_bytes(seeded(9, 5))) for path in tmp_path.rglob("*.distcp")]
    assert sum(held) == 1


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


is_asked = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None
needs_torch = pytest.mark.skipif(not is_asked, reason="this torch has no CheckpointableTensor")

_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def marked(tensor: torch.Tensor, *parts: object) -> torch.Tensor:
    """Make a tensor say which parts of which global tensor it holds."""
    for name, value in zip(_NAMES, parts, strict=True):
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize("known", [True, False])
def test_what_a_tensor_says_of_its_parts_counts_where_torch_asks(
    monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """Then no plan is kept for it; other releases take it for a whole one."""
    monkeypatch.setattr(resolving, "_is_known", known)
    state = {"part": marked(torch.ones(2, 3), (8, 3), ((0, 0),), ((0, 0),), ((2, 3),))}
    kept = structure_of(state, {"part": ("part",)}, rank=0, world_size=1)
    assert (kept is None) is known


def pieces(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """Return four of eight rows, and a tensor of which each rank has two parts."""
    rows = torch.arange(24.0).reshape(8, 3)[rank * 4 : rank * 4 + 4].clone()
    whole, starts = torch.arange(12.0), (3 * rank, 6 + 3 * rank)
    two = torch.cat([whole[start : start + 3] for start in starts])
    if empty:
        rows.zero_()
        two.zero_()
    marked(rows, (8, 3), ((rank * 4, 0),), ((0, 0),), ((4, 3),))
    marked(two, (12,), tuple((start,) for start in starts), ((0,), (3,)), ((3,), (3,)))
    return {"rows": rows, "two": two, "step": 5}


def save_and_load(rank: int, folder: str) -> None:
    """Save parts on two ranks in each way and load them again on the same two."""
    state = pieces(rank)
    for number, how in enumerate(["save", "save", "thread", "process"]):
        url = f"{folder}/step-{number}"
        if how == "save":
            ckpt_storage.save(state, url)
        else:
            with ckpt_storage.AsyncSaver(mode=how) as saver:  # type: ignore[arg-type]  # a parameter
                saver.save(state, url).result()
        target = pieces(rank, empty=True)
        ckpt_storage.load(target, url)
        for name in ("rows", "two"):
            assert torch.equal(target[name], state[name]), (how, name)


@needs_torch
def test_parts_are_saved_as_parts(ranks: RankPool, tmp_path: Path) -> None:
    """Every rank's parts are in the checkpoint; one process reads the whole."""
    ranks.run(save_and_load, str(tmp_path), world_size=2)
    for number in range(4):
        target: dict[str, Any] = {"rows": torch.zeros(8, 3), "two": torch.zeros(12)}
        ckpt_storage.load(target, tmp_path / f"step-{number}")
        assert torch.equal(target["rows"].flatten(), torch.arange(24.0))
        assert torch.equal(target["two"], torch.arange(12.0))
