"""Saving a step again: what is damaged is replaced, else refused; on all ranks."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import manager_cases as cases
import pytest
import torch
from manager_cases import damage, restore, saved, state_of

import ckpt_storage
from ckpt_storage.errors import CheckpointError, CheckpointExistsError, InvalidInputError
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.testing.ranks import RankPool

RUN: dict[str, Any] = {"mode": "thread", "timeout": 60}
NEWEST = "step-00000002"


@pytest.mark.parametrize(("check", "in_background"), [("read", True), ("deep", False)])
def test_training_that_falls_back_past_damage_comes_by_its_step_again(
    tmp_path: Path, check: Any, caplog: pytest.LogCaptureFixture, *, in_background: bool
) -> None:
    """The job that resumed from step 1 saves step 2 again, is told of it, and resumes from that."""
    saved(tmp_path, 1, 2)
    damage(tmp_path / NEWEST)
    with CheckpointManager(tmp_path, keep=KeepLatest(3), **RUN) as manager:
        assert restore(manager, check=check).step == 1
        caplog.clear()
        if in_background:
            manager.save_async(2, state_of(2), sync_files=False).result(60)
        else:
            manager.save(2, state_of(2), sync_files=False)
        said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert len([text for text in said if "is to replace it" in text]) == 1
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager, check="deep").step == 2


def test_a_sound_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    """What another job saved since under the name of the damaged step stays."""
    saved(tmp_path, 1, 2)
    damage(tmp_path / NEWEST)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager).step == 1
        ckpt_storage.save(state_of(2), tmp_path / NEWEST, overwrite=True, sync_files=False)
        with pytest.raises(CheckpointExistsError):
            manager.save(2, state_of(2), sync_files=False)
        with pytest.raises(CheckpointExistsError):
            manager.save(1, state_of(1), sync_files=False)
    with CheckpointManager(tmp_path, **RUN) as manager:
        assert restore(manager).step == 2


def test_all_ranks_save_the_damaged_step_again(ranks: RankPool, tmp_path: Path) -> None:
    """No rank needs to know of `overwrite`, and no two ranks disagree."""
    ranks.run(cases.train, str(tmp_path), 2, world_size=2)
    damage(tmp_path / NEWEST)
    results = ranks.run(cases.resume_and_save, str(tmp_path), world_size=3)
    assert results == [(1, "step-00000002")] * 3


@pytest.mark.parametrize(("bad_rank", "in_background"), [(0, False), (1, True)])
@pytest.mark.parametrize("what", ["metrics", "step", "claim"])
def test_what_one_rank_refuses_is_told_to_all(
    ranks: RankPool, tmp_path: Path, what: str, bad_rank: int, *, in_background: bool
) -> None:
    """Wrong arguments on one rank, or a name that is being deleted, end the save of all."""
    results = ranks.run(
        cases.save_unlike, str(tmp_path), what, bad_rank, in_background, world_size=2
    )
    assert all(f"rank {bad_rank}" in text.lower() for text, _ in results), results
    wanted = {"metrics": "no number", "step": "is no step", "claim": "being deleted"}[what]
    assert all(wanted in text for text, _ in results), results
    # Afterwards all save together again.
    assert [name for _, name in results] == ["step-00000008"] * 2


@pytest.mark.parametrize(
    "metrics",
    [{"x": torch.ones(3)}, {"x": 10**400}, {"x": "much"}, {"x" * 20_000: 1.0}, 7],
    ids=range(5),
)
def test_metrics_that_cannot_be_are_refused_by_our_errors(tmp_path: Path, metrics: Any) -> None:
    """Whatever a number's own conversion raises, the save ends by an error of ours."""
    with CheckpointManager(tmp_path, **RUN) as manager:
        with pytest.raises(CheckpointError) as caught:
            manager.save(1, state_of(1), metrics=metrics, sync_files=False)
        if isinstance(metrics, dict):
            assert isinstance(caught.value, InvalidInputError)
        assert list(tmp_path.iterdir()) == []
        info = manager.save(1, state_of(1), metrics={"x": math.inf}, sync_files=False)
        assert info.metrics == {"x": math.inf}
