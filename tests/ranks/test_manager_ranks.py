"""`CheckpointManager` on several ranks: one answer, one choice, one that deletes."""

from __future__ import annotations

from pathlib import Path

import manager_cases as cases
import pytest

from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_save_prune_and_restore_together(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """All ranks see the same; rank 0 deletes; the metrics are those of rank 0."""
    results = ranks.run(cases.train, str(tmp_path), 5, world_size=world_size)
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
