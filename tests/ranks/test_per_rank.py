"""Values that belong to a rank, such as the state of its random generator: `PerRank`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cli_tools
import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from front_door_cases import caught
from on_ranks import on_ranks
from rank_pool import RankPool
from safetensors.torch import load_file
from saver_cases import quick_saver
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import CheckpointError, PerRank


def _state(rank: int) -> dict[str, Any]:
    """Return what a rank would lose if one value were stored for all."""
    return {
        "model": {"w": seeded(1, 4)},
        "rng": PerRank(seeded(rank + 10, 5)),
        "trainer": {"data": PerRank({"position": 100 + rank, "buffer": [seeded(rank, 3), rank]})},
        "large": PerRank(torch.full((1 << 18,), float(rank))),
    }


def _target() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(4)},
        "rng": PerRank(torch.zeros(5)),
        "trainer": {"data": PerRank({"position": 0, "buffer": [torch.zeros(3), 0]})},
        "large": PerRank(torch.ones(1 << 18)),
    }


def _assert_own(target: dict[str, Any], rank: int) -> None:
    expected = _state(rank)
    for found, value in (
        (target["rng"], expected["rng"]),
        (target["trainer"]["data"], expected["trainer"]["data"]),
        (target["large"], expected["large"]),
    ):
        assert same(found.value, value.value)
        assert found.values == []
    assert same(target["model"], expected["model"])


@on_ranks()
def test_stock_dcp_gives_every_rank_one_value(rank: int, tmp_path: Path) -> None:
    """Stock `dcp.save` stores one generator's state, which every rank gets."""
    state = {"rng": seeded(rank + 10, 5)}
    dcp.save(state, checkpoint_id=tmp_path)
    dcp.load(target := {"rng": torch.zeros(5)}, checkpoint_id=tmp_path)
    assert same(target["rng"], seeded(10, 5))


@pytest.mark.parametrize("way", ["save", "thread", "process", "dcp", "dcp.async_save"])
@on_ranks(2, 3)
def test_each_rank_gets_its_own_value(rank: int, tmp_path: Path, way: str) -> None:
    """Whichever way it is saved, both ways to load give each rank its own value."""
    state = _state(rank)
    if way == "save":
        ckpt_storage.save(state, tmp_path, sync_files=False)
    elif way == "dcp":
        dcp_cases.save(state, tmp_path)
    elif way == "dcp.async_save":
        writer = ckpt_storage.CheckpointStorageWriter(tmp_path, sync_files=False)
        dcp.async_save(state, storage_writer=writer).result()  # type: ignore[union-attr]  # a Future
    else:
        with quick_saver(way) as saver:  # type: ignore[arg-type]  # a parameter
            saver.save(state, tmp_path, sync_files=False).result()
    for load in (ckpt_storage.load, dcp_cases.load, dcp_cases.load_stock):
        load(target := _target(), tmp_path)
        _assert_own(target, rank)
    # Saved again as it was loaded.
    ckpt_storage.save(target, tmp_path / "again", sync_files=False)
    ckpt_storage.load(again := _target(), tmp_path / "again")
    _assert_own(again, rank)


def _save(rank: int, path: Path) -> None:
    ckpt_storage.save(_state(rank), path, sync_files=False)


def _load_all(rank: int, path: Path) -> None:
    empty: dict[str, Any] = {"rng": PerRank(), "trainer": {"data": PerRank()}}
    for target in (_target(), empty):
        ckpt_storage.load(target, path)
        rng, data = target["rng"], target["trainer"]["data"]
        assert rng.value is None, rank
        assert data.value is None, rank
        for number in range(3):
            expected = _state(number)
            assert same(rng.values[number], expected["rng"].value)
            assert same(data.values[number], expected["trainer"]["data"].value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_world_size_gives_all_values(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """More or fewer ranks than saved get the values of all ranks that saved, in order."""
    ranks.run(_save, tmp_path, world_size=3)
    ranks.run(_load_all, tmp_path, world_size=world_size)


@on_ranks()
def test_no_template_is_needed(rank: int, tmp_path: Path) -> None:
    """An empty `PerRank` takes what was saved, of any structure."""
    ckpt_storage.save(_state(rank), tmp_path, sync_files=False)
    target: dict[str, Any] = {"rng": PerRank(), "trainer": {"data": PerRank()}, "large": PerRank()}
    ckpt_storage.load(target, tmp_path)
    _assert_own({**target, "model": _state(rank)["model"]}, rank)


def _load_by_dcp(_rank: int, path: Path) -> None:
    with pytest.raises(CheckpointException, match="per-rank"):
        dcp_cases.load({"rng": PerRank(torch.zeros(5))}, path)


def test_dcp_load_needs_the_same_world_size(ranks: RankPool, tmp_path: Path) -> None:
    """Under `dcp.load` the planner looks for this rank's name before a reader can say more."""
    ranks.run(_save, tmp_path, world_size=3)
    ranks.run(_load_by_dcp, tmp_path, world_size=2)


def test_a_failed_load_leaves_the_value(tmp_path: Path) -> None:
    """What was not saved as `PerRank` is missing, and the target keeps its value."""
    ckpt_storage.save({"rng": torch.ones(2)}, tmp_path, sync_files=False)
    target = {"rng": PerRank(torch.zeros(2))}
    error = caught(ckpt_storage.load, target, tmp_path)
    assert isinstance(error, CheckpointError)
    assert "rng.per-rank-0-of-1" in str(error)
    assert same(target["rng"].value, torch.zeros(2))


def _save_model(rank: int, path: Path) -> None:
    state = {"model": {"w": seeded(1, 4), "seed": PerRank(torch.ones(2) * rank)}}
    ckpt_storage.save(state, path, sync_files=False)


def test_exports_have_no_value_of_a_rank(ranks: RankPool, tmp_path: Path) -> None:
    """Weights are exported without them, which the report says; inspection shows them."""
    ranks.run(_save_model, path := tmp_path / "run", world_size=2)
    report = ckpt_storage.consolidate(path, tmp_path / "hf")
    assert list(load_file(tmp_path / "hf" / "model.safetensors")) == ["w"]
    left = {skipped.fqn: skipped.reason for skipped in report.skipped}
    names = [f"model.seed.per-rank-{rank}-of-2" for rank in range(2)]
    assert left == dict.fromkeys(names, "per rank")
    with ckpt_storage.open_checkpoint(path) as opened:
        assert set(opened) == {"model.w", *names}
        assert [float(opened[name][0]) for name in names] == [0.0, 1.0]
    shown = cli_tools.call("tree", str(path), "--depth", "4")
    assert shown.exit_code == 0
    assert "per-rank-" in shown.stdout
    ckpt_storage.convert(path, tmp_path / "all.pt", to="torch_save")
    converted = torch.load(tmp_path / "all.pt", weights_only=True)
    assert float(converted["model"]["seed"]["per-rank-1-of-2"][0]) == 1.0


def test_a_copy_has_the_same_value() -> None:
    """Copies, which stagers make, hold the value; `repr` shows it."""
    value = PerRank({"a": [1, 2]})
    copied = copy.deepcopy(value)
    assert copied.value == {"a": [1, 2]}
    assert copied.value is not value.value
    assert repr(value) == "PerRank({'a': [1, 2]})"
    assert not dist.is_initialized()
