"""A selection of the fault matrix, which `tests/support/fault_matrix.py` runs whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cells import Cell, Fault, Host, Victim, all_cells
from fault_matrix import Matrix

SELECTION: list[tuple[str, str, Fault, Victim, Host]] = [
    ("save", "plan", "error", "member", "rank 0"),
    ("save", "write", "kill", "member", "launcher"),
    ("save", "publish", "kill", "member", "rank 0"),
    ("save", "waiting", "stop", "coordinator", "rank 0"),
    ("save", "commit", "stop and go on", "coordinator", "launcher"),
    ("load", "read", "kill", "coordinator", "launcher"),
    ("consolidate", "complete shared", "oversleep", "coordinator", "launcher"),
    ("consolidate", "index", "stop", "coordinator", "launcher"),
]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    """The driver with its nursery."""
    with Matrix() as running:
        yield running


@pytest.mark.parametrize("chosen", SELECTION, ids=" | ".join)
def test_live_ranks_learn_of_a_fault(
    matrix: Matrix, chosen: tuple[str, str, Fault, Victim, Host]
) -> None:
    """Live ranks raise in time, name rank and phase, and end; checkpoints stay whole."""
    operation, phase, fault, victim, host = chosen
    cell = Cell(operation=operation, phase=phase, fault=fault, victim=victim, host=host)
    assert cell in all_cells(3)
    row = matrix.run(cell)
    assert row.problems == [], "\n".join([str(row), *row.problems, *row.story])
