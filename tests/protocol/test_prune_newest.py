"""The newest work stays, by step and by time; ages, copies, and what later processes ask again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commit_tools import CAS, DAY_S, DictStore, Disk, body_of, sealed
from manager_cases import damage, restore, state_of
from prune_cases import heads, name_of, prune, pruner, save

from ckpt_storage.errors import FormatError
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.retention import (
    Candidate,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    RetentionPolicy,
)
from ckpt_storage.store import probe
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Rule


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each prune find out anew what its storage can do."""
    monkeypatch.setattr(probe, "_RESULTS", {})


def at_times(disk: Disk, *steps: int) -> None:
    """Save steps a minute after one another."""
    for step in steps:
        disk.clock_s += 60.0
        save(DictStore(disk, CAS), step)


@pytest.mark.parametrize(
    "keep", [KeepLatest(2), KeepLatest(2) | KeepEvery(40), KeepBest("x", "max")]
)
def test_after_going_back_the_newest_work_stays(keep: Any) -> None:
    """New processes save a step each, below the abandoned ones: the next finds what was saved."""
    disk = Disk()
    store = DictStore(disk, CAS)
    at_times(disk, 50, 80, 90, 100)
    for step in (51, 52, 53):
        at_times(disk, step)
        report = prune(store, keep, disk)
        assert step in heads(disk.files)
        reasons = {one.step: one.reasons for one in report.kept}
        assert reasons[step] == ("it was committed last",)
    assert 100 in heads(disk.files)
    assert set(heads(disk.files)) & {51, 52} == set()
    at_times(disk, 110)
    prune(store, KeepLatest(1), disk)
    assert set(heads(disk.files)) == {110}


class KeepYoung(RetentionPolicy):
    """Keep what is younger than three minutes: a policy of a user's own, which goes by age."""

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        found = {}
        for one in candidates:
            assert one.age_s is not None, "the storage tells every age"
            if one.age_s < 180.0:
                found[one.name] = "it is young"
        return found


class KeepLatestIfYoung(KeepLatest):
    """Keep the newest, of those whose age is known."""

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        ages_s = {one.name: one.age_s for one in candidates}
        return {name: why for name, why in super().kept(candidates).items() if ages_s[name]}


@pytest.mark.parametrize(
    "keep",
    [
        KeepYoung(),
        KeepAny((KeepAny((KeepYoung(),)),)),
        KeepNewerThan(100) | KeepYoung(),
    ],
)
def test_a_policy_of_the_users_own_is_told_ages(keep: Any) -> None:
    """What goes by age is asked with the ages, whatever it is called and wherever it stands."""
    disk = Disk()
    at_times(disk, 1, 2, 3, 4, 5)
    disk.clock_s += 30.0
    report = prune(DictStore(disk, CAS), keep, disk)
    assert report.deleted == (name_of(1), name_of(2))
    assert sorted(heads(disk.files)) == [3, 4, 5]


def test_a_policy_that_was_derived_is_told_ages() -> None:
    """One that is made of ours may go by age, too."""
    disk = Disk()
    at_times(disk, 1, 2, 3)
    disk.clock_s += 30.0
    assert prune(DictStore(disk, CAS), KeepLatestIfYoung(2), disk).deleted == (name_of(1),)


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    """Return a manager."""
    chosen: dict[str, Any] = {"mode": "thread", "timeout": 60, "pruning": "manual", **options}
    return CheckpointManager(root, **chosen)


def saved(manager: CheckpointManager, *steps: int) -> None:
    """Save some steps, and wait for what follows."""
    for step in steps:
        manager.save(step, state_of(step), sync_files=False)
        assert manager.wait_pruned(60)


def test_a_step_below_the_highest_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning of a prune says what is chosen."""
    options: dict[str, Any] = {"keep": KeepLatest(3), "pruning": "background"}
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        with manager_of(tmp_path, **options) as manager:
            saved(manager, 10, 90, 100)
        assert caplog.text == ""
        with manager_of(tmp_path, **options) as manager:
            saved(manager, 11, 12)
            latest = manager.latest()
            assert latest is not None
            assert latest.step == 100
    assert caplog.text.count("still choose step 100") == 1
    assert "Step 11 was saved below step 100" in caplog.text


def test_a_copy_that_is_damaged_does_not_stand_for_the_original(tmp_path: Path) -> None:
    """Copies have the same save id: only the one that is damaged is passed over."""
    with manager_of(tmp_path) as manager:
        saved(manager, 1, 5)
    shutil.copytree(tmp_path / name_of(5), tmp_path / name_of(6))
    damage(tmp_path / name_of(6))
    with manager_of(tmp_path) as manager:
        assert restore(manager, check="deep").step == 6 - 1
        latest = manager.latest()
        assert latest is not None
        assert latest.step == 5


def test_a_newer_format_is_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`latest` and `restore` follow one rule: too new is an error, damage is passed over."""
    with manager_of(tmp_path) as manager:
        saved(manager, 1, 2)
    slot = tmp_path / name_of(2) / "commits/00000001.json"
    whole = slot.read_bytes()
    slot.write_bytes(sealed({**body_of(whole), "format": "ckpt_storage.commit/99"}))
    with manager_of(tmp_path) as manager:
        with pytest.raises(FormatError, match="commit/99"):
            manager.restore(state_of(0))
        with pytest.raises(FormatError, match="commit/99"):
            manager.latest()
    slot.write_bytes(whole[:-5])
    with manager_of(tmp_path) as manager, caplog.at_level(logging.WARNING, "ckpt_storage"):
        latest = manager.latest()
        assert latest is not None
        assert latest.step == restore(manager).step == 1
    assert f"{name_of(2)} is passed over" in caplog.text


def test_a_dry_run_writes_nothing_and_judges_ages_by_this_machines_clock() -> None:
    """A plan with ages needs no right to write."""
    disk = Disk()
    at_times(disk, 1, 2, 3, 4)
    files, changes = disk.files, disk.changes
    one = pruner(DictStore(disk, CAS), KeepNewerThan(100.0), disk)
    plan = one.prune(Deadline("commit", 60), dry_run=True)
    # The disk's clock is years behind this machine's: by this one all are old.
    assert [decision.step for decision in plan.planned] == [1, 2, 3]
    assert (disk.files, disk.changes) == (files, changes)


def test_of_a_deleted_checkpoint_nothing_is_left_after_a_week() -> None:
    """Its slots stay for 7 days by the storage's clock; then a prune removes them."""
    disk = Disk()
    at_times(disk, 1, 2, 3)
    store = DictStore(disk, CAS)
    assert prune(store, KeepLatest(1), disk).deleted == (name_of(1), name_of(2))
    disk.clock_s += 6.9 * DAY_S
    prune(store, KeepLatest(1), disk)
    assert {path.partition("/")[0] for path in disk.files} == {name_of(1), name_of(2), name_of(3)}
    disk.clock_s += 0.2 * DAY_S
    prune(store, KeepLatest(1), disk)
    assert {path.partition("/")[0] for path in disk.files} == {name_of(3)}
    at_times(disk, 2)
    assert set(heads(disk.files)) == {2, 3}


def test_slots_that_cannot_be_removed_do_not_hide_what_was_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others go, the report is returned, and the next process tries again."""
    disk = Disk()
    at_times(disk, 1, 2, 3, 4)
    store = DictStore(disk, CAS)
    prune(store, KeepLatest(2), disk)
    disk.clock_s += 8 * DAY_S
    at_times(disk, 5)
    rule = Rule(
        action="error", operation="delete.*", path=name_of(1), hit_count=None, retryable=False
    )
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        report = prune(store.failing(rule), KeepLatest(2), disk)
    assert report.deleted == (name_of(3),)
    assert f"{name_of(1)} was not pruned" in caplog.text
    assert {path.partition("/")[0] for path in disk.files} == {name_of(n) for n in (1, 3, 4, 5)}
    prune(store, KeepLatest(2), disk)
    assert {path.partition("/")[0] for path in disk.files} == {name_of(n) for n in (3, 4, 5)}
