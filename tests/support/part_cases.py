"""What the tests of `copy` with a choice, `thin` and usage share: a small state in two groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from dcp_cases import same, seeded

import ckpt_storage
from ckpt_storage import verify

STATE: dict[str, Any] = {
    "model": {"w": seeded(1, 60, 50), "b": seeded(2, 5), "empty": torch.empty(0, 3)},
    "optimizer": {"m": seeded(3, 600, 50), "lr": 0.1},
    "step": 7,
}
KEPT: dict[str, Any] = {name: value for name, value in STATE.items() if name != "optimizer"}
KEPT_FQNS = {"model.w", "model.b", "model.empty", "step"}

LARGE: dict[str, Any] = {"model": seeded(1, 1500, 1000), "optim": seeded(2, 1500, 1000)}
"""Of this size a group gets a file, and an object storage copies it by itself."""


def save(url: str | Path, state: dict[str, Any] | None = None, **options: Any) -> None:
    """Save a state, by default `STATE`, with a file for each group of 1,000 bytes or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_storage.saves.groups._GROUP_MIN_BYTES", 1000)
        ckpt_storage.save(STATE if state is None else state, url, **options)


def holds(path: Path, wanted: dict[str, Any]) -> bool:
    """Return whether our reader and stock torch's load these values, and all is sound."""
    loaded = []
    for load in (dcp_cases.load, dcp_cases.load_stock):
        loaded.append(dcp_cases.zeros_like(wanted))
        load(loaded[-1], path)
    return verify(path).ok and all(same(state, wanted) for state in loaded)
