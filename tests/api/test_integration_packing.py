"""Nests of values as packed states."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import ckpt_storage
from ckpt_storage import FormatError
from ckpt_storage.integrations.packing import OUTLINE, WholePlanner, pack, unpack

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.builds(torch.tensor, st.lists(st.integers(0, 9), min_size=1, max_size=3)),
)
_KEYS = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b", "a.b", "state_dict", ""]))
_NESTS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def same(one: object, other: object) -> bool:
    # Only the text tells classes of containers, and the order of keys.
    return dcp_cases.same(one, other) and repr(one) == repr(other)


def through_storage(values: dict[str, Any], url: Path) -> object:
    ckpt_storage.save(pack(values), url)
    planner = WholePlanner()
    ckpt_storage.load({}, url, planner=planner)
    return unpack(planner.loaded, planner.loaded.get(OUTLINE))


@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", "c"]), _NESTS, max_size=4))
@example({"a": {"": torch.tensor([0])}})
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_unpacking_gives_what_was_packed(values: dict[str, Any]) -> None:
    """Classes of containers, keys that are no text, order and every tensor come back."""
    state = pack(values)
    flat = {
        f"{head}.{name}": tensor
        for head, part in state.items()
        if head != OUTLINE
        for name, tensor in part.items()
    }
    assert same(unpack(flat, state[OUTLINE]), values)


def test_keys_that_the_outline_or_a_caller_needs_lose_no_tensor(tmp_path: Path) -> None:
    """A hook of the user's own may call its tensors what we call the outline."""
    values = {
        "outline": {"t": torch.tensor(1)},
        "outline.u": torch.tensor(2),
        "[outline]": {"t": torch.tensor(3)},
        "optimizer_0": OrderedDict([("z", torch.tensor(4)), ("a", torch.rand(3, 2))]),
        "loops": {0: (1, None, "x"), "step": torch.tensor(4.0), "lr": 0.1},
        "optimizer_of_mine": [torch.tensor(5)],
    }
    assert same(through_storage(values, tmp_path / "one"), values)
    assert same(
        through_storage({"outline": torch.tensor(6)}, tmp_path / "two"),
        {"outline": torch.tensor(6)},
    )
    state = pack(values, is_taken=lambda head: head.startswith("optimizer_"))
    heads = ["[optimizer_0]", "[optimizer_of_mine]", "[outline]", "loops", "outline"]
    assert sorted(state) == heads


def test_only_what_is_wanted_is_loaded(tmp_path: Path) -> None:
    """Targets are filled; of the rest, what is not wanted is not read."""
    ckpt_storage.save({"a": torch.ones(2), "b": torch.ones(3), "c": 5, "d": 6}, tmp_path / "one")
    target = {"a": torch.zeros(2)}
    planner = WholePlanner(wanted=lambda fqn: fqn in {"b", "c"})
    ckpt_storage.load(target, tmp_path / "one", planner=planner)
    assert torch.equal(target["a"], torch.ones(2))
    assert sorted(planner.loaded) == ["a", "b", "c"]
    assert torch.equal(planner.loaded["b"], torch.ones(3))
    assert planner.loaded["c"] == 5


@pytest.mark.parametrize(
    "outline", [None, ({},), ({}, {(): "none"}), ("text", {}), ({"a": 1}, "x"), ({}, 1)]
)
def test_a_checkpoint_of_another_kind_is_refused(outline: object) -> None:
    """A checkpoint without an outline, or with a broken one, is an error and no guess."""
    with pytest.raises(FormatError):
        unpack({}, outline)
