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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
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
    "more": lambda state: state.update(more=torch.ones(2)),
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


def test_a_second_save_of_one_structure_plans_nothing(tmp_path: Path) -> None:
    """And stores the values of its own."""
    assert [saved(state_of(step), tmp_path / str(step)) for step in range(3)] == [1, 0, 0]
    for step in range(3):
        target = zeros_like(state_of(step))
        dcp_cases.load_stock(target, tmp_path / str(step))
        assert same(target, state_of(step))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_structure_is_planned_anew(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """Whatever changed; and what was kept of the first is still used."""
    saved(state_of(1), tmp_path / "first")
    state = state_of(2)
    change(state)
    assert saved(state, tmp_path / "second") == 1
    target = zeros_like(state)
    dcp_cases.load_stock(target, tmp_path / "second")
    assert same(target, state)
    assert saved(state_of(3), tmp_path / "third") == 0


def test_planners_that_are_given_plan_every_time(tmp_path: Path) -> None:
    """What the caller passes is asked for each save."""
    for step in range(2):
        planner = dcp.DefaultSavePlanner()
        assert saved(state_of(step), tmp_path / str(step), planner=planner) == 1


def save_steps(rank: int, folder: str, forgetful: int) -> list[int]:
    """Save three times; one rank forgets what it kept before the last."""
    PLANS.clear()
    counts = []
    for step in range(3):
        if step == 2 and rank == forgetful:
            PLANS.clear()
        counts.append(saved(cases.state_of(step), f"{folder}/{step}"))
    return counts


@pytest.mark.parametrize("forgetful", [0, 1, 2, 9])
def test_all_ranks_use_what_they_kept_or_none_does(
    ranks: RankPool, tmp_path: Path, forgetful: int
) -> None:
    """If one rank has kept nothing, all plan anew, and the save is as whole as the first."""
    counts = ranks.run(save_steps, str(tmp_path), forgetful, world_size=3)
    assert [count[:2] for count in counts] == [[1, 0]] * 3
    assert [count[2] > 0 for count in counts] == [forgetful < 3] * 3
    for step in range(3):
        target = cases.state_of(step, zeros=True)
        dcp_cases.load_stock(target, tmp_path / str(step))
        cases.assert_state(target, step)


def save_after_a_failure(_rank: int, folder: str) -> list[int]:
    """Save, fail to save because something is there, and save again."""
    PLANS.clear()
    counts = [saved(cases.state_of(1), f"{folder}/a")]
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        saved(cases.state_of(2), f"{folder}/a")
    counts.append(saved(cases.state_of(3), f"{folder}/b"))
    return counts


def test_a_refused_save_spoils_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """The next save goes by the kept plan."""
    assert ranks.run(save_after_a_failure, str(tmp_path), world_size=2) == [[1, 0]] * 2
    target = cases.state_of(3, zeros=True)
    dcp_cases.load_stock(target, tmp_path / "b")
    cases.assert_state(target, 3)


class Planning(torch.Tensor):
    """A tensor that makes its own write items."""


def test_values_that_plan_for_themselves_are_not_kept() -> None:
    """What they would plan cannot be told from outside."""
    state = {"w": torch.zeros(2).as_subclass(Planning)}
    assert structure_of(state, {}, rank=0, world_size=1) is None
    assert structure_of({"w": torch.zeros(2)}, {}, rank=0, world_size=1) is not None


def placed(_rank: int, equality: str) -> list[bool]:
    """Return which of some DTensors have the structure of the first."""
    mesh = init_device_mesh("cpu", (2,))
    with pytest.MonkeyPatch.context() as patched:
        if equality == "loose":
            # As some releases of torch that are supported compare them.
            for kind in (Shard, _StridedShard):
                patched.setattr(kind, "__eq__", lambda a, b: a.dim == getattr(b, "dim", None))
                patched.setattr(kind, "__hash__", lambda a: a.dim)

        def structure(placement: Any, local: torch.Tensor | None = None) -> Structure | None:
            made = DTensor.from_local(
                torch.zeros(4, 2) if local is None else local,
                mesh,
                [placement],
                run_check=False,
                shape=torch.Size((8, 2)),
                stride=(2, 1),
            )
            return structure_of({"w": made}, {}, rank=0, world_size=2)

        first = structure(Shard(0))
        others = [
            structure(Shard(0)),
            structure(_StridedShard(0, split_factor=2)),
            structure(_StridedShard(0, split_factor=4)),
            structure(Replicate(), torch.zeros(8, 2)),
            structure(Shard(0), torch.zeros(3, 2)),
        ]
        return [other == first for other in others]


@pytest.mark.parametrize("equality", ["strict", "loose"])
def test_placements_are_told_apart_even_where_torch_says_they_are_equal(
    ranks: RankPool, equality: str
) -> None:
    """A strided shard of another factor, or one that is not strided, holds other rows."""
    found = ranks.run(placed, equality, world_size=2)
    assert found == [[True, False, False, False, False]] * 2
