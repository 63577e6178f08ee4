"""Retention with a third verdict: kept whole, kept in part, deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import pytest
from dcp_cases import same, seeded

import ckpt_storage
from ckpt_storage import (
    CheckpointManager,
    InvalidInputError,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    KeepPart,
    list_checkpoints,
    prune,
    verify,
)

KEEP = KeepLatest(2) | KeepEvery(4) | KeepPart(drop="optim*")


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"w": seeded(step, 300)},
        "optim": {"m": seeded(step + 50, 900)},
        "step": step,
    }


def part_of(step: int) -> dict[str, Any]:
    return {name: value for name, value in state_of(step).items() if name != "optim"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the steps 1 to 6, all whole."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 7):
            manager.save(step, state_of(step), sync_files=False)
    return tmp_path / "run"


def whole_and_thin(root: Path) -> tuple[list[int | None], list[int | None]]:
    infos = list_checkpoints(root)
    thin = [info.step for info in infos if info.part]
    return [info.step for info in infos if not info.part], thin


def test_others_are_thinned_in_place_of_being_deleted(root: Path) -> None:
    """The latest and the multiples stay whole; a second prune has nothing to do."""
    report = prune(root, KEEP, dry_run=False)
    assert report.thinned == tuple(f"step-0000000{n}" for n in (1, 2, 3))
    assert report.deleted == ()
    assert report.failed == report.skipped == {}
    assert whole_and_thin(root) == ([4, 5, 6], [1, 2, 3])
    for step in range(1, 7):
        wanted = part_of(step) if step < 4 else state_of(step)
        dcp_cases.load(found := dcp_cases.zeros_like(wanted), path := root / f"step-0000000{step}")
        assert same(found, wanted)
        assert verify(path).ok
    again = prune(root, KEEP, dry_run=False)
    assert (again.parts, again.thinned) == ((), ())
    assert next(one.reasons for one in again.kept) == ("KeepPart('optim*')",)


def test_a_dry_run_says_which_and_changes_nothing(root: Path) -> None:
    """With the reason, which is the policy."""
    report = prune(root, KEEP)
    assert [(one.step, one.reasons) for one in report.parts] == [
        (step, ("KeepPart('optim*')",)) for step in (1, 2, 3)
    ]
    assert report.planned == ()
    assert whole_and_thin(root) == ([1, 2, 3, 4, 5, 6], [])


def test_thin_ones_are_not_counted_as_the_latest(root: Path) -> None:
    """Of two that are to be kept whole, both are; and the newest whole one is never touched."""
    ckpt_storage.thin(root / "step-00000006", drop="optim*")
    report = prune(root, KeepLatest(2) | KeepPart(drop="optim*"), dry_run=False)
    assert whole_and_thin(root) == ([4, 5], [1, 2, 3, 6])
    assert report.newest is not None
    assert report.newest.step == 5


def test_without_the_policy_thin_ones_are_deleted_as_others_are(root: Path) -> None:
    """But for one above the newest whole checkpoint."""
    ckpt_storage.thin(root / "step-00000006", drop="optim*")
    ckpt_storage.thin(root / "step-00000001", drop="optim*")
    report = prune(root, KeepLatest(1), dry_run=False)
    assert report.deleted == tuple(f"step-0000000{n}" for n in (1, 2, 3, 4))
    reasons = {one.step: one.reasons for one in report.kept}
    assert "it is thin, and nothing whole is newer" in reasons[6]
    assert whole_and_thin(root) == ([5], [6])


def test_thinning_changes_no_age(root: Path) -> None:
    """A policy of ages counts from the commit of the whole save."""
    prune(root, KEEP, dry_run=False)
    report = prune(root, [KeepNewerThan(0.001)], dry_run=False)
    assert {"step-00000001", "step-00000002", "step-00000003"} <= {*report.deleted}


def test_what_has_nothing_to_drop_stays_and_is_not_tried_again(tmp_path: Path) -> None:
    """By the same pruner."""
    keep = KeepLatest(1) | KeepPart(drop="nothing*")
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait_pruned()
        manager.prune()
        report = manager.prune()
    assert report is not None
    assert (report.parts, report.skipped) == ((), {})
    assert whole_and_thin(tmp_path) == ([1, 2], [])


def test_a_run_thins_after_each_save_and_resumes_from_the_newest_whole_one(tmp_path: Path) -> None:
    """In the background, as it deletes."""
    with CheckpointManager(tmp_path, keep=KeepLatest(1) | KeepPart(drop="optim*")) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            manager.wait_pruned()
    assert whole_and_thin(tmp_path) == ([3], [1, 2])
    ckpt_storage.thin(tmp_path / "step-00000003", drop="nothing")
    with CheckpointManager(tmp_path) as manager:
        state = dcp_cases.zeros_like(state_of(0))
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == 3
        assert same(state, state_of(3))


def test_a_thin_one_is_restored_only_if_a_part_is_asked_for(root: Path) -> None:
    """The message says what was left out, and how to load the rest."""
    prune(root, KeepLatest(1) | KeepPart(drop="optim*"), dry_run=False)
    ckpt_storage.delete(root / "step-00000006")
    with CheckpointManager(root) as manager:
        assert manager.latest() is None
        with pytest.raises(ckpt_storage.IntegrityError, match="part=True"):
            manager.restore(dcp_cases.zeros_like(state_of(0)))
        with pytest.raises(InvalidInputError, match=r"optim\* were left out.*part=True"):
            manager.restore(dcp_cases.zeros_like(state_of(0)), step=2)
        state = dcp_cases.zeros_like(part_of(0))
        restored = manager.restore(state, part=True)
        assert restored is not None
        assert (restored.step, restored.info.part["exclude"]) == (5, ["optim*"])
        assert same(state, part_of(5))
        manager.restore(state, step=2, part=True)
        assert same(state, part_of(2))


@pytest.mark.parametrize("drop", ["", (), ("a", ""), (1,)])
def test_a_part_that_cannot_be_is_refused(drop: Any) -> None:
    """And two policies that would drop different things."""
    with pytest.raises(InvalidInputError):
        KeepPart(drop=drop)


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    """It would not be clear what stays."""
    with pytest.raises(InvalidInputError, match="KeepPart"):
        prune(tmp_path, [KeepLatest(1), KeepPart(drop="a"), KeepPart(drop="b")])


def test_a_mirror_that_has_the_whole_is_not_sent_the_part(tmp_path: Path) -> None:
    """Its own policy decides what is dropped there."""
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    with CheckpointManager(
        run, keep=KeepLatest(1) | KeepPart(drop="optim*"), mirror=mirror
    ) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
            assert manager.wait_mirrored()
            manager.wait_pruned()
        manager.prune()
        manager.wait_mirrored()
    assert whole_and_thin(run) == ([2], [1])
    assert whole_and_thin(mirror) == ([1, 2], [])
