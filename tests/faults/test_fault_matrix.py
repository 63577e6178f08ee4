"""A selection of the fault matrix; with CKPT_STORAGE_FAULT_MATRIX in the environment all of it."""

from __future__ import annotations

import os

import pytest
from fault_cells import all_cells
from fault_matrix import Matrix

SELECTION = {
    "save | plan | error | member | rank 0",
    "save | write | kill | member | launcher",
    "save | publish | kill | member | rank 0",
    "save | waiting | stop | coordinator | rank 0",
    "save | commit | stop and go on | coordinator | launcher",
    "load | read | kill | coordinator | launcher",
    "consolidate | complete shared | oversleep | coordinator | launcher",
    "consolidate | index | stop | coordinator | launcher",
}
WHOLE = {str(cell): cell for cell in all_cells()}
CELLS = WHOLE if "CKPT_STORAGE_FAULT_MATRIX" in os.environ else SELECTION


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    """What keeps the checkpoints to begin with."""
    return Matrix()


@pytest.mark.parametrize("name", sorted(CELLS))
def test_live_ranks_learn_of_a_fault(matrix: Matrix, name: str) -> None:
    """Live ranks raise in time, name rank and phase, and end; checkpoints stay whole."""
    assert matrix.run(WHOLE[name]) == []
