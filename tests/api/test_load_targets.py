"""Targets that a checkpoint does not fill: errors with names and next steps, and one warning.

Stock torch raises at the first missing name and says nothing of an empty optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ckpt_storage

each_load = pytest.mark.parametrize(
    "load", [dcp_cases.load, ckpt_storage.load], ids=["dcp", "ours"]
)
Load = Callable[..., object]


def adam(steps: int) -> torch.optim.Adam:
    """Return an optimizer of two parameters after some steps."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(steps):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "ckpt_storage"]


@each_load
def test_a_fresh_optimizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    """Stock restores none of the states and is silent; here a warning names the first of them."""
    dcp_cases.save({"optim": adam(1).state_dict()}, tmp_path / "c")
    caplog.clear()
    by_stock = {"optim": adam(0).state_dict()}
    dcp_cases.load_stock(by_stock, tmp_path / "c")
    assert by_stock["optim"]["state"] == {}
    target = {"optim": adam(0).state_dict()}
    load(target, tmp_path / "c")
    (message,) = messages(caplog)
    assert "optim.state.0.exp_avg" in message
    assert "'optim.state'" in message
    assert "get_optimizer_state_dict" in message


@each_load
def test_a_shorter_list_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    """The first name past the end of the target's list is named."""
    dcp_cases.save({"losses": [torch.ones(1), torch.ones(2)]}, tmp_path / "c")
    caplog.clear()
    load({"losses": [torch.zeros(1)]}, tmp_path / "c")
    (message,) = messages(caplog)
    assert "losses.1" in message


@each_load
def test_a_target_that_is_filled_or_leaves_a_key_out_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    """Neither a state with steps, nor a target without an optimizer, nor what was saved empty."""
    state = {"optim": adam(1).state_dict(), "w": torch.ones(2), "none": {}, "list": []}
    dcp_cases.save(dict(state), tmp_path / "c")
    caplog.clear()
    load({"optim": adam(1).state_dict(), "none": {}, "list": []}, tmp_path / "c")
    load({"w": torch.zeros(2)}, tmp_path / "c")
    assert messages(caplog) == []


def refusal(target: dict[str, Any], path: Path, **options: Any) -> str:
    """Return the message of the error that a load raises; the error names its next step."""
    with pytest.raises(ckpt_storage.InvalidInputError) as caught:
        ckpt_storage.load(target, path, **options)
    assert caught.value.next_step
    return str(caught.value)


each_planner = pytest.mark.parametrize(
    "options", [{}, {"planner": DefaultLoadPlanner()}], ids=["default", "custom"]
)


@each_planner
def test_missing_names_are_counted_and_listed(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error has how many are missing of how many, the first ten, and the partial option."""
    ckpt_storage.save({"w": torch.ones(1)}, tmp_path / "c")
    target = {"w": torch.zeros(1), **{f"new.{n:02}": torch.zeros(1) for n in range(12)}}
    text = refusal(target, tmp_path / "c", **options)
    assert "12 of 13 names of the target are not in" in text
    assert "'new.00'" in text
    assert "'new.09'" in text
    assert "'new.10'" not in text
    assert "and 2 more" in text
    assert "allow_partial_load=True" in text
    assert "rename=" in text


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("model._orig_mod.layer.weight", "model.layer.weight"),
        ("model.layer.weight", "model._orig_mod.layer.weight"),
        ("module.layer.weight", "layer.weight"),
        ("layer.weight", "module.layer.weight"),
        ("model.layer.weight", "layer.weight"),
        ("layer.wieght", "layer.weight"),
    ],
)
def test_close_names_are_suggested(tmp_path: Path, stored: str, wanted: str) -> None:
    """Names under torch.compile's and DDP's wrappers, in other containers, and misspelt."""
    ckpt_storage.save({stored: torch.ones(1), "other": torch.ones(1)}, tmp_path / "c")
    text = refusal({wanted: torch.zeros(1)}, tmp_path / "c")
    assert f"For {wanted!r} the checkpoint may mean {stored!r}." in text


@each_planner
def test_other_shapes_are_listed(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error has how many differ, and both shapes."""
    ckpt_storage.save({"a": torch.ones(2), "b": torch.ones(3, 4)}, tmp_path / "c")
    text = refusal({"a": torch.zeros(3), "b": torch.zeros(4, 3)}, tmp_path / "c", **options)
    assert "2 targets have other shapes" in text
    assert "b has shape [3, 4] there and [4, 3] in the target" in text


@each_planner
def test_a_plain_target_of_a_tensor_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error says that the value is a tensor in the checkpoint, and what the target is."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path / "c")
    text = refusal({"a": 3}, tmp_path / "c", **options)
    assert "a is a tensor there; its target is of type int" in text


@each_planner
def test_two_targets_of_one_name_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    """Nested keys are joined by dots: the error has both paths."""
    ckpt_storage.save({"a": {"b": torch.ones(2)}}, tmp_path / "c")
    target = {"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}
    text = refusal(target, tmp_path / "c", **options)
    assert "are called 'a.b': those under ['a', 'b'] and ['a.b']" in text


def test_a_partial_load_takes_what_is_there(tmp_path: Path) -> None:
    """The option that the error names loads the rest."""
    ckpt_storage.save({"w": torch.ones(1)}, tmp_path / "c")
    target = {"w": torch.zeros(1), "new": torch.zeros(1)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    ckpt_storage.load(target, tmp_path / "c", planner=planner)
    assert (target["w"].item(), target["new"].item()) == (1, 0)
