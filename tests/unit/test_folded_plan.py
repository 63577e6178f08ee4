"""Load plans under `dcp.load` travel folded, and no planner can tell."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ckpt_storage.dcp.folded import FoldedPlan


def _item(fqn: str) -> ReadItem:
    index, zeros = MetadataIndex(fqn, [0]), torch.Size([0])
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size([4]))


def _travelled(plan: LoadPlan) -> Any:
    return pickle.loads(pickle.dumps(plan))


@pytest.fixture
def sent() -> FoldedPlan:
    """A plan of two items as a rank sends it."""
    return FoldedPlan([_item("a"), _item("b")], "hello", {"of": "planner"})


def test_a_plan_arrives_as_it_was_sent(sent: FoldedPlan) -> None:
    """Nothing is lost on the way to the coordinator and back."""
    arrived = _travelled(_travelled(sent))
    assert (arrived.items, arrived.storage_data, arrived.planner_data) == (
        sent.items,
        "hello",
        {"of": "planner"},
    )
    with pytest.raises(AttributeError):
        _ = arrived.other


def test_a_coordinator_that_passes_plans_on_unpickles_no_item(sent: FoldedPlan) -> None:
    """What it passes on, the rank takes for the items it has."""
    arrived = _travelled(sent)
    assert "items" not in vars(arrived)
    back = sent.unless_changed(_travelled(arrived))
    assert back.items is sent.items
    assert back.storage_data == "hello"


@pytest.mark.parametrize("way", ["in place", "replaced", "new plan"])
def test_what_a_planner_changes_counts(sent: FoldedPlan, way: str) -> None:
    """Whether it changes the list, the plan, or makes another."""
    plan: LoadPlan = _travelled(sent)
    if way == "in place":
        del plan.items[0]
    elif way == "replaced":
        plan = replace(plan, items=plan.items[1:])
    else:
        plan = LoadPlan(plan.items[1:])
    assert sent.unless_changed(_travelled(plan)).items == [_item("b")]
