"""Targets of a load that are legal and odd: what a planner may give takes the stored bytes."""

from __future__ import annotations

from pathlib import Path

import dcp_cases
import pytest
import torch
from dcp_cases import same, seeded, zeros_like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
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
