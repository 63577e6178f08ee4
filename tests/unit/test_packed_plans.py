"""`PackedLoadPlan`: load plans on their way to the coordinator and back."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ckpt_storage.dcp.border import PackedLoadPlan


def _item(fqn: str) -> ReadItem:
    index, none = MetadataIndex(fqn), torch.Size([])
    return ReadItem(LoadItemType.TENSOR, index, none, index, none, none)


def _sent(plan: LoadPlan) -> LoadPlan:
    """Return what another process makes of a plan."""
    received = pickle.loads(pickle.dumps(plan))
    assert isinstance(received, LoadPlan)
    return received


def test_the_coordinator_unpickles_no_items() -> None:
    """A plan that no planner reads goes there and back packed; the rank reads its own items."""
    plan = PackedLoadPlan([_item("a")], "message", "data")
    there = _sent(plan)
    assert "items" not in vars(there)
    back = _sent(there)
    assert "items" not in vars(back)
    result = plan.unless_changed(back)
    assert result.items is plan.items
    assert (result.storage_data, result.planner_data) == ("message", "data")


def test_a_planner_on_the_coordinator_may_change_the_items() -> None:
    """What it leaves in the list is what the rank gets."""
    plan = PackedLoadPlan([_item("a"), _item("b")], None, None)
    there = _sent(plan)
    there.items.pop()
    result = plan.unless_changed(_sent(there))
    assert [item.dest_index.fqn for item in result.items] == ["a"]


def test_another_plan_from_the_coordinator_is_taken() -> None:
    """A planner may answer with a plan of torch's own class."""
    plan = PackedLoadPlan([_item("a")], None, None)
    _sent(plan)
    other = LoadPlan([_item("c")])
    assert plan.unless_changed(other) is other
