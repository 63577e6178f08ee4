"""Load plans under `dcp.load` travel folded, and no planner can tell."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ckpt_storage.dcp.reader import FoldedPlan


def _item(fqn: str) -> ReadItem:
    index, zeros = MetadataIndex(fqn, [0]), torch.Size([0])
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size([4]))


def _travelled(plan: LoadPlan) -> Any:
    return pickle.loads(pickle.dumps(plan))


def _sent() -> FoldedPlan:
    return FoldedPlan([_item("a"), _item("b")], "hello", {"of": "planner"})


def test_a_plan_that_is_passed_on_comes_back_unread() -> None:
    """A coordinator that only passes it on unpickles no item; nothing is lost on the way."""
    sent = _sent()
    arrived = _travelled(sent)
    assert "items" not in vars(arrived)
    back = sent.unless_changed(_travelled(arrived))
    assert back.items is sent.items
    assert (back.storage_data, back.planner_data) == ("hello", {"of": "planner"})
    assert arrived.items == sent.items
    with pytest.raises(AttributeError):
        _ = arrived.other


def test_what_a_planner_changes_counts() -> None:
    """Whether it changes the list, the plan, or makes another."""
    for way in ("in place", "replaced", "new plan"):
        sent = _sent()
        plan: LoadPlan = _travelled(sent)
        if way == "in place":
            del plan.items[0]
        elif way == "replaced":
            plan = replace(plan, items=plan.items[1:])
        else:
            plan = LoadPlan(plan.items[1:])
        assert sent.unless_changed(_travelled(plan)).items == [_item("b")], way
