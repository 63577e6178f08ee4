"""A selection of the fault matrix, which `tests/support/fault_matrix.py` runs whole."""

from __future__ import annotations

import pytest
from fault_cells import chosen
from fault_matrix import Matrix
from fork_server import ForkServer

pytestmark = pytest.mark.deadline

SELECTION = [
    "save | plan | error | member | rank 0",
    "save | write | kill | member | launcher",
    "save | publish | kill | member | rank 0",
    "save | waiting | stop | coordinator | rank 0",
    "save | commit | stop and go on | coordinator | launcher",
    "load | read | kill | coordinator | launcher",
    "consolidate | complete shared | oversleep | coordinator | launcher",
    "consolidate | index | stop | coordinator | launcher",
]


@pytest.fixture(scope="module")
def matrix(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """One that keeps its checkpoints to begin with."""
    return Matrix(fork_server, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("name", SELECTION)
def test_live_ranks_learn_of_a_fault(matrix: Matrix, name: str) -> None:
    """Live ranks raise in time, name rank and phase, and end; checkpoints stay whole."""
    (cell,) = chosen(f"^{name}".replace("|", r"\|"))
    row = matrix.run(cell)
    assert row.problems == [], "\n".join([str(row), *row.problems, *row.story])
