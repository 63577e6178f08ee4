"""Loads under other names: `rename=` goes from the stored name to that in the target.

Stock torch has no such option: a state with other names is loaded by a planner of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from dcp_cases import cut, seeded
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

import ckpt_storage

each_load = pytest.mark.parametrize(
    "load", [dcp_cases.load, ckpt_storage.load], ids=["dcp", "ours"]
)
Load = Callable[..., object]
REFUSED = (ckpt_storage.InvalidInputError, CheckpointException)


@each_load
def test_a_mapping_renames_what_it_lists(tmp_path: Path, load: Load) -> None:
    """Tensors and plain values get new names; those that the mapping leaves out keep theirs."""
    state = {"a": seeded(1, 4), "b": seeded(2, 3), "n": 7, "same": seeded(3, 2)}
    dcp_cases.save(dict(state), tmp_path / "c")
    target = {
        "model": {"x": torch.zeros(4), "y": torch.zeros(3)},
        "step": 0,
        "same": torch.zeros(2),
    }
    load(target, tmp_path / "c", rename={"a": "model.x", "b": "model.y", "n": "step"})
    wanted = {"model": {"x": state["a"], "y": state["b"]}, "step": 7, "same": state["same"]}
    assert dcp_cases.same(target, wanted)


@each_load
def test_names_may_be_exchanged(tmp_path: Path, load: Load) -> None:
    """Two values take each other's name."""
    dcp_cases.save({"a": seeded(1, 4), "b": seeded(2, 4)}, tmp_path / "c")
    target = {"a": torch.zeros(4), "b": torch.zeros(4)}
    load(target, tmp_path / "c", rename={"a": "b", "b": "a"})
    assert dcp_cases.same(target, {"a": seeded(2, 4), "b": seeded(1, 4)})


@each_load
def test_a_function_takes_wrappers_off(tmp_path: Path, load: Load) -> None:
    """Weights saved under torch.compile load into the plain model."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    compiled = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    dcp_cases.save({"model": compiled}, tmp_path / "c")
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    load(
        {"model": plain.state_dict()},
        tmp_path / "c",
        rename=lambda name: name.replace("_orig_mod.", ""),
    )
    assert dcp_cases.same(plain.state_dict(), model.state_dict())


@each_load
@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        ({"absent": "x"}, "rename names 'absent', which is no value of the checkpoint"),
        ({"a": "b"}, "a and b would both be called 'b'"),
        (lambda _: "same", "would both be called 'same'"),
        (lambda _: None, "a would be called None"),
        (lambda _: "", "a would be called ''"),
        (7, "rename is 7"),
        ({"a": 7}, "rename is {'a': 7}"),
    ],
)
def test_names_that_cannot_be_are_refused(
    tmp_path: Path, load: Load, rename: Any, reason: str
) -> None:
    """The rules are those of exports: every entry names a value, and no two values one name."""
    dcp_cases.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(REFUSED) as caught:
        load({"x": torch.zeros(2)}, tmp_path / "c", rename=rename)
    is_hidden = load is dcp_cases.load and dcp_cases.HIDES_REASONS
    assert is_hidden or reason in str(caught.value)


@each_load
def test_an_old_name_is_missing_after_a_rename(tmp_path: Path, load: Load) -> None:
    """A value has one name only."""
    dcp_cases.save({"a": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(BaseException, match=r"'a'|in checkpoint state_dict: a"):
        load({"a": torch.zeros(2)}, tmp_path / "c", rename={"a": "x"})


def test_damage_is_told_by_the_stored_name(tmp_path: Path) -> None:
    """An error of the storage names the value as the checkpoint has it."""
    dcp_cases.save({"a": seeded(1, 4000)}, tmp_path / "c")
    (file,) = tmp_path.glob("c/**/*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ckpt_storage.IntegrityError) as caught:
        ckpt_storage.load({"x": torch.zeros(4000)}, tmp_path / "c", rename={"a": "x"})
    assert caught.value.fqn == "a"


def test_a_manager_restores_under_other_names(tmp_path: Path) -> None:
    """`restore` takes the same option."""
    with ckpt_storage.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(2)})
        target = {"x": torch.zeros(2)}
        assert manager.restore(target, rename={"a": "x"}) is not None
    assert target["x"].tolist() == [1, 1]


@pytest.mark.parametrize("value", [None, {"a": [torch.zeros(2), 0], "b": ""}])
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner()], ids=["ours", "torch's"])
def test_a_value_of_a_rank_loads_under_another_name(
    tmp_path: Path, planner: Any, value: Any
) -> None:
    """A `PerRank` takes its structure from the checkpoint under a new name, with a value or not."""
    saved = {"a": [seeded(1, 2), 3], "b": "x"}
    ckpt_storage.save({"rng": ckpt_storage.PerRank(saved), "w": seeded(2, 3)}, tmp_path)
    target = {"t": {"seed": ckpt_storage.PerRank(value)}, "w": torch.zeros(3)}
    ckpt_storage.load(
        target, tmp_path, rename=lambda name: name.replace("rng", "t.seed"), planner=planner
    )
    assert dcp_cases.same(target["t"]["seed"].value, saved)  # type: ignore[index]  # a dict


@on_ranks()
def test_each_rank_may_have_its_own_names(rank: int, tmp_path: Path) -> None:
    """Two pipeline stages number their layers from 0: each rank loads its own layers."""
    state = {f"layers.{n}.w": cut(seeded(n, 4, 2), Shard(0)) for n in range(4)}
    dcp_cases.save(state, tmp_path / "c")
    own = {f"layers.{2 * rank + n}.w": f"stage.{n}.w" for n in range(2)}
    for planner in (None, DefaultLoadPlanner()):
        target = {name: torch.zeros(4, 2) for name in own.values()}
        ckpt_storage.load(target, tmp_path / "c", rename=own, planner=planner)
        wanted = {f"stage.{n}.w": seeded(2 * rank + n, 4, 2) for n in range(2)}
        assert dcp_cases.same(target, wanted)


@on_ranks()
def test_ranks_share_reads_under_different_names(rank: int, tmp_path: Path) -> None:
    """What both ranks need is read once, whatever each of them calls it."""
    state = {f"layers.{n}.w": cut(seeded(n, 4, 2), Shard(0)) for n in range(4)}
    dcp_cases.save(state, tmp_path / "c")
    own = {f"layers.{n}.w": f"layers.{(n + rank) % 4}.w" for n in range(4)}
    loads: list[Load] = [ckpt_storage.load, dcp_cases.load]
    for load in loads:
        for planner in (None, DefaultLoadPlanner()):
            target = {f"layers.{n}.w": torch.zeros(4, 2) for n in range(4)}
            options = {"shared_reads": "always", "rename": own, "planner": planner}
            load(target, tmp_path / "c", **options)
            wanted = {f"layers.{(n + rank) % 4}.w": seeded(n, 4, 2) for n in range(4)}
            assert dcp_cases.same(target, wanted)
