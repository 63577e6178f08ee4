"""Plans that `save` keeps: used only when every rank has the same one, never for another state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import front_door_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, zeros_like
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
from ckpt_storage.loads.loadplanner import _Cuts
from ckpt_storage.saves.planning import PLANS, Structure, structure_of
from ckpt_storage.testing.ranks import RankPool


def saved(state: dict[str, Any], path: Path | str, **options: Any) -> int:
    """Save, and return how often a local plan was made."""
    with patch.object(
        dcp.DefaultSavePlanner,
        "create_local_plan",
        autospec=True,
        side_effect=dcp.DefaultSavePlanner.create_local_plan,
    ) as planned:
        ckpt_storage.save(state, path, sync_files=False, **options)
    return planned.call_count


def state_of(step: int) -> dict[str, Any]:
    """Return one structure with other values at each step."""
    return {
        "model": {"w": torch.full((3, 4), float(step)), "b": torch.arange(step, step + 5)},
        "step": step,
    }


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": lambda state: state["model"].update(b=torch.arange(7)),
    "dtype": lambda state: state["model"].update(b=torch.arange(5.0)),
    "name": lambda state: state["model"].update(c=state["model"].pop("b")),
    "fewer": lambda state: state["model"].pop("w"),
    "tensor-to-value": lambda state: state["model"].update(b=[1, 2]),
    "value-to-tensor": lambda state: state.update(step=torch.tensor(9)),
    "nesting": lambda state: state.update({"model.w": state.pop("model")["w"]}),
    "order": lambda state: state.update(model=dict(reversed(state["model"].items()))),
}


@pytest.fixture(autouse=True)
def _forgetting() -> None:
    """Nothing is kept from other tests."""
    PLANS.clear()


def test_a_state_of_one_structure_is_planned_once(tmp_path: Path) -> None:
    """Each save stores its own values; whatever changes is planned anew; so are given planners."""
    states = {str(step): state_of(step) for step in range(3)}
    assert [saved(state, tmp_path / name) for name, state in states.items()] == [1, 0, 0]
    for name, change in CHANGES.items():
        PLANS.clear()
        saved(state_of(2), tmp_path / f"{name}-before")
        state = states[name] = state_of(3)
        change(state)
        assert saved(state, tmp_path / name) == 1, name
        assert saved(state_of(4), tmp_path / f"{name}-after") == 0, name
    for name, state in states.items():
        target = zeros_like(state)
        dcp_cases.load_stock(target, tmp_path / name)
        assert same(target, state), name
    for step in range(2):
        planner = dcp.DefaultSavePlanner()
        assert saved(state_of(step), tmp_path / f"given-{step}", planner=planner) == 1


def save_steps(rank: int, folder: str) -> list[bool]:
    """Save, some ranks forgetting what they kept, or a save being refused; tell who planned."""
    PLANS.clear()
    planned = []
    for step, forgetful in enumerate([None, None, 0, 1, 2, None]):
        if rank == forgetful:
            PLANS.clear()
        if step == 5:
            with pytest.raises(ckpt_storage.CheckpointExistsError):
                saved(cases.state_of(step), f"{folder}/0")
        planned.append(saved(cases.state_of(step), f"{folder}/{step}") > 0)
    return planned


def test_all_ranks_use_what_they_kept_or_none_does(ranks: RankPool, tmp_path: Path) -> None:
    """If one rank has kept nothing all plan anew, and the save is whole; a refusal spoils none."""
    told = ranks.run(save_steps, str(tmp_path), world_size=3)
    assert told == [[True, False, True, True, True, False]] * 3
    for step in range(6):
        target = cases.state_of(step, zeros=True)
        dcp_cases.load_stock(target, tmp_path / str(step))
        cases.assert_state(target, step)


class Planning(torch.Tensor):
    """A tensor that makes its own write items."""


def test_values_that_plan_for_themselves_are_not_kept() -> None:
    """What they would plan cannot be told from outside."""
    state = {"w": torch.zeros(2).as_subclass(Planning)}
    assert structure_of(state, {}, rank=0, world_size=1) is None
    assert structure_of({"w": torch.zeros(2)}, {}, rank=0, world_size=1) is not None


def placed(_rank: int) -> list[list[bool]]:
    """Return which of some DTensors have the structure of the first, all cut as by torch."""
    mesh = init_device_mesh("cpu", (2,))
    cuts = _Cuts()

    def structure(placement: Any, local: torch.Tensor | None = None) -> Structure | None:
        made = DTensor.from_local(
            torch.zeros(4, 2) if local is None else local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size((8, 2)),
            stride=(2, 1),
        )
        assert cuts.own(made)[0] == _create_chunk_list(made)
        return structure_of({"w": made}, {}, rank=0, world_size=2)

    def found() -> list[bool]:
        first = structure(Shard(0))
        others = [
            structure(Shard(0)),
            structure(_StridedShard(0, split_factor=2)),
            structure(_StridedShard(0, split_factor=4)),
            structure(Replicate(), torch.zeros(8, 2)),
            structure(Shard(0), torch.zeros(3, 2)),
        ]
        return [other == first for other in others]

    strict = found()
    with pytest.MonkeyPatch.context() as patched:
        # As some releases of torch that are supported compare them.
        for kind in (Shard, _StridedShard):
            patched.setattr(kind, "__eq__", lambda a, b: a.dim == getattr(b, "dim", None))
            patched.setattr(kind, "__hash__", lambda a: a.dim)
        return [strict, found()]


def test_placements_are_told_apart_even_where_torch_says_they_are_equal(ranks: RankPool) -> None:
    """A strided shard of another factor, or one that is not strided, holds other rows."""
    expected = [True, False, False, False, False]
    assert ranks.run(placed, world_size=2) == [[expected] * 2] * 2
