"""Targets of a load that are legal and odd: what a planner may give takes the stored bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import dcp_cases
import pytest
import torch
from dcp_cases import same, seeded, zeros_like
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage
from ckpt_storage import InvalidInputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_one_element_of_any_stride_is_filled(tmp_path: Path, dtype: torch.dtype) -> None:
    """A target of one element is contiguous whatever its stride says, and is loaded in place."""
    value = seeded(1, 1, dtype=dtype)
    square = seeded(2, 1, 1, dtype=dtype)
    dcp_cases.save({"one": value, "square": square}, tmp_path / "c")
    line = zeros_like(seeded(3, 9, dtype=dtype))
    plane = zeros_like(seeded(4, 7, 5, dtype=dtype))
    targets = {"one": line[::3][1:2], "square": plane[::2, ::3][1:2, 1:2]}
    assert targets["one"].stride() == (3,)
    dcp_cases.load(targets, tmp_path / "c")
    assert same(line[3:4].clone(), value)
    assert same(plane[2:3, 3:4].clone(), square)
    assert int(torch.count_nonzero(line)) <= 1
    assert int(torch.count_nonzero(plane)) <= 1


def test_targets_of_inference_mode_are_filled(tmp_path: Path) -> None:
    """What only code in inference mode may write to is filled, whichever thread reads."""
    value = seeded(5, 64, 48)
    dcp_cases.save({"value": value}, tmp_path / "c")
    with torch.inference_mode():
        whole = torch.zeros(64, 96)
        dcp_cases.load({"value": whole[:, ::2]}, tmp_path / "c")
        assert same(whole[:, ::2].contiguous(), value)
        assert int(torch.count_nonzero(whole[:, 1::2])) == 0


each_door = pytest.mark.parametrize(
    "door", [dcp_cases.load, ckpt_storage.load], ids=["dcp", "ours"]
)


@each_door
def test_a_cast_that_changes_the_kind_of_value_needs_leave(
    tmp_path: Path, door: Callable[..., object]
) -> None:
    """What would lose a fraction, an imaginary part or all but truth names key and both types."""
    for number, (stored, wanted) in enumerate(
        [
            (torch.float32, torch.int64),
            (torch.complex64, torch.float32),
            (torch.complex64, torch.int32),
            (torch.int64, torch.bool),
            (torch.bfloat16, torch.bool),
        ]
    ):
        value = torch.tensor([0.5, 2]).to(stored)
        path = tmp_path / str(number)
        dcp_cases.save({"value": value}, path)
        target = {"value": torch.zeros(2, dtype=wanted)}
        with pytest.raises((InvalidInputError, CheckpointException)) as caught:
            door(target, path)
        assert f"value is stored as {str(stored)[6:]}" in str(caught.value)
        assert str(wanted)[6:] in str(caught.value)
        assert int(torch.count_nonzero(target["value"])) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            door(target, path, allow_lossy=True)
            assert same(target["value"], value.to(wanted))


def test_a_cast_within_a_kind_needs_none(tmp_path: Path) -> None:
    """Fewer bits of the same kind, and a kind that holds the other, are loaded as ever."""
    casts = {
        torch.float32: torch.bfloat16,
        torch.float64: torch.float32,
        torch.int64: torch.int32,
        torch.int32: torch.float32,
        torch.bool: torch.float32,
        torch.bfloat16: torch.complex64,
    }
    state = {str(dtype): torch.tensor([0, 1, 3]).to(dtype) for dtype in casts}
    target = {str(dtype): torch.zeros(3, dtype=wanted) for dtype, wanted in casts.items()}
    dcp_cases.save(dict(state), tmp_path / "c")
    ckpt_storage.load(target, tmp_path / "c")
    assert same(target, {name: state[name].to(value.dtype) for name, value in target.items()})


@each_door
def test_one_target_for_two_values_needs_leave(tmp_path: Path, door: Callable[..., object]) -> None:
    """Tied targets take equal values; where the values differ, the error names both."""
    tied, target = seeded(1, 40, 7), torch.zeros(40, 7)
    dcp_cases.save({"a": tied, "b": tied.clone(), "c": tied + 1}, tmp_path / "c")
    door({"a": target, "b": target}, tmp_path / "c")
    assert same(target, tied)
    with pytest.raises((InvalidInputError, CheckpointException), match=r"a and c"):
        door({"a": target, "c": target}, tmp_path / "c")
    door({"a": target, "c": target}, tmp_path / "c", allow_lossy=True)
