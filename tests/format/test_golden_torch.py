"""What releases of torch saved that CI does not run stays readable, as golden/README.md tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import torch
from dcp_cases import same, zeros_like

import ckpt_storage

GOLDEN = Path(__file__).parent / "golden" / "torch-2.15"


def expected() -> dict[str, Any]:
    """Return the state that was saved."""
    return {
        "model": {
            "rows": torch.tensor([[(5 * i + j) / 2 for j in range(5)] for i in range(6)]),
            "uneven": torch.tensor(
                [[3 * i + j - 7 for j in range(3)] for i in range(5)], dtype=torch.bfloat16
            ),
            "columns": torch.tensor(
                [[100 * (4 * i + j) for j in range(4)] for i in range(3)], dtype=torch.int16
            ),
            "replicated": torch.tensor([0.0, 0.125, 0.25, 0.375], dtype=torch.float64),
            "turned": torch.tensor([[0, 3], [1, 4], [2, 5]]),
            "scalar": torch.tensor(42),
        },
        "step": 7,
    }


def test_metadata_with_strides_are_read() -> None:
    """Metadata of torch 2.15, which no older torch reads, give every value bit by bit."""
    state = zeros_like(expected())
    reader = dcp_cases.load(state, GOLDEN)
    assert reader.format == "dcp"
    assert same(state, expected())


def test_the_front_doors_read_it() -> None:
    """`load`, `open_checkpoint` and `verify` take it for what it is."""
    state = zeros_like(expected())
    ckpt_storage.load(state, GOLDEN)
    assert same(state, expected())
    with ckpt_storage.open_checkpoint(GOLDEN) as found:
        assert found.format == "dcp"
        for name, value in expected()["model"].items():
            assert found[f"model.{name}"].torch().equal(value)
        assert np.array_equal(found["model.rows"][1:3, ::2], expected()["model"]["rows"][1:3, ::2])
        assert found["step"] == 7
    assert ckpt_storage.verify(GOLDEN).ok
