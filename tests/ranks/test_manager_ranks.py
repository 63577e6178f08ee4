"""`CheckpointManager` on several ranks; saving a step again, where it is damaged or refused."""

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


def test_ranks_save_prune_and_restore_together(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks see the same; rank 0 deletes; the metrics are those of rank 0."""
    results = ranks.run(cases.train, str(tmp_path), 5, world_size=3)
    assert all(result == results[0] for result in results)
    assert results[0][:-1] == ["step-00000004", "step-00000005"]
    assert cases.names_in(tmp_path) == ["step-00000004", "step-00000005"]


def test_ranks_that_mean_other_roots_are_told(ranks: RankPool, tmp_path: Path) -> None:
    """A rank with a root of its own is no reason to restore from two: all raise."""
    with CheckpointManager(tmp_path / "a", timeout=60) as manager:
        manager.save(1, cases.state_of(1), sync_files=False)
    names = ranks.run(cases.resume_alone, str(tmp_path / "a"), str(tmp_path / "b"), world_size=2)
    assert names == ["RankMismatchError"] * 2


@pytest.mark.parametrize("noticed", [0, 2])
def test_a_signal_on_one_rank_is_answered_by_all(
    ranks: RankPool, tmp_path: Path, noticed: int
) -> None:
    """All ranks save at the same steps, once for the signal, and know which rank it came to."""
    results = ranks.run(cases.decide, str(tmp_path), noticed, 10_000_000, world_size=3)
    saves, preempted, _ = results[0]
    assert preempted == f"SIGUSR1 on rank {noticed}"
    assert all((found, why) == (saves, preempted) for found, why, _ in results)
    assert len([step for step in saves if step % 10]) <= 1
    assert [taken for *_, taken in results] == [rank == noticed for rank in range(3)]


def test_ranks_that_ask_at_different_steps_are_told(ranks: RankPool, tmp_path: Path) -> None:
    """Steps that do not match are an error on all ranks, not a save on some."""
    names = ranks.run(cases.decide_apart, str(tmp_path), world_size=2)
    assert names == ["RankMismatchError"] * 2


def test_a_rank_that_was_refused_and_tries_again_meets_the_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Arguments that were wrong on one rank leave no trace: the next manager works with theirs."""
    with CheckpointManager(tmp_path, timeout=60) as manager:
        manager.save(1, cases.state_of(1), sync_files=False)
    names = ranks.run(cases.make_again, str(tmp_path), world_size=2)
    assert names == ["step-00000001"] * 2


@pytest.mark.parametrize("what", ["preemption", "every_steps", "every_s", "names"])
def test_ranks_that_decide_by_other_arguments_are_told(
    ranks: RankPool, tmp_path: Path, what: str
) -> None:
    """At the first look all ranks learn that an argument differs; none waits for a rank in vain."""
    errors = ranks.run(cases.decide_unlike, str(tmp_path), what, world_size=2)
    assert all(error.startswith("RankMismatchError") for error in errors), errors
    assert all(what in error for error in errors), errors


def test_what_the_coordinator_finds_damaged_counts_on_no_rank(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Damage that only rank 0 saw is known to all: `latest` is what was restored, on every rank."""
    ranks.run(cases.train, str(tmp_path), 3, world_size=2)
    cases.damage(tmp_path / "step-00000003")
    results = ranks.run(cases.resume_deep, str(tmp_path), world_size=3)
    assert [(step, latest) for step, latest, _ in results] == [(2, 2)] * 3
    (skipped,) = results[2][2]
    assert (tmp_path / "step-00000003/saves" / str(skipped)).is_dir()
