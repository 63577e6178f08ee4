"""A value that is not sharded is stored once: ranks that hold unlike ones by one name are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of

import ckpt_storage
from ckpt_storage import CheckpointStorageWriter, RankMismatchError
from ckpt_storage.testing.ranks import RankPool

Door = Literal["save", "dcp"]
OTHERS: dict[str, Any] = {
    "shape": torch.ones(4),
    "dtype": torch.ones(3, dtype=torch.float16),
}


def save(rank: int, path: Path, door: Door, other: str) -> None:
    """Save a tensor on rank 0 and something else by its name on rank 1."""
    state = {"same": torch.ones(2), "value": OTHERS[other] if rank else torch.ones(3)}
    if door == "save":
        ckpt_storage.save(state, path)
    else:
        dcp.save(state, storage_writer=CheckpointStorageWriter(path))


@pytest.mark.parametrize("door", ["save", "dcp"])
@pytest.mark.parametrize("other", OTHERS)
def test_unlike_values_by_one_name_are_refused(
    ranks: RankPool, tmp_path: Path, door: Door, other: str
) -> None:
    """All ranks raise, with the name and who holds what; no rank's tensor is dropped."""
    for outcome in ranks.outcomes(save, tmp_path, door, other, world_size=2):
        raised = outcome.error
        for error in failures_of(raised).values() if door == "dcp" else [raised]:
            assert isinstance(error, RankMismatchError)
            assert "the name value: float32 [3]: ranks 0" in str(error)
            assert sorted(error.values.values()) == [[0], [1]]
    assert ckpt_storage.list_checkpoints(tmp_path) == []
