"""What documents may say and what they may not, by every kind of value in every place."""

from __future__ import annotations

from pathlib import Path

import dcp_cases
import pytest
import torch
from damage_cases import KINDS, check_other_values


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_another_type_breaks_more_than_the_load(tmp_path: Path, kind: str) -> None:
    """Every kind of value in place of every value of a document: no more than the load fails."""
    state = {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0, 2), "step": 5}
    dcp_cases.save(state, tmp_path / "run")
    check_other_values(tmp_path / "run", state, kind, range(1, 9))
