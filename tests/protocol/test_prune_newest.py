"""The newest work stays, by step and by time; ages, copies, and what later processes ask again."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commit_tools import CAS, QUICK, DictStore, Disk, body_of, sealed
from manager_cases import damage, restore, state_of
from prune_cases import DiskCensus, heads, name_of, prune, pruner, save

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import FormatError
from ckpt_storage.manager.census import Census
from ckpt_storage.manager.claims import Claims
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.pruneplan import SETTLED_PATH, Soundness
from ckpt_storage.manager.pruning import Pruner
from ckpt_storage.manager.retention import (
    Candidate,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    RetentionPolicy,
    last_committed,
)
from ckpt_storage.manager.stepnames import StepNames
from ckpt_storage.manager.upkeep import Upkeep
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, probe
from ckpt_storage.store.deadline import Deadline


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
        reasons = {one.step: one.reasons for one in report.plan.kept}
        assert reasons[step] == ("it was committed last",)
    assert 100 in heads(disk.files)
    assert set(heads(disk.files)) & {51, 52} == set()
    at_times(disk, 110)
    prune(store, KeepLatest(1), disk)
    assert set(heads(disk.files)) == {110}


def info(step: int, created_at: str) -> CheckpointInfo:
    """Return a checkpoint that its saver's clock dates."""
    return CheckpointInfo(
        url="memory://r",
        name=name_of(step),
        format="ckpt_storage",
        step=step,
        created_at=created_at,
    )


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
        KeepAny((KeepYoung(),)),
        KeepAny((KeepAny((KeepYoung(),)),)),
        [KeepYoung(), KeepNewerThan(1)],
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


def test_the_last_is_so_by_the_storages_clock_and_else_by_the_savers() -> None:
    """One storage tells times, another none; of equal ones the highest step is the last."""
    infos = [
        info(5, "2026-01-03T00:00:00+00:00"),
        info(7, "2026-01-02T00:00:00+00:00"),
        info(9, "?"),
    ]
    by_name = {one.name: one for one in infos}
    told = {name_of(5): 10.0, name_of(7): 30.0, name_of(9): 20.0}
    assert last_committed(infos, told) is by_name[name_of(7)]
    assert last_committed(infos, {**told, name_of(9): None}) is by_name[name_of(5)]
    assert last_committed(infos, dict.fromkeys(told, 1.0)) is by_name[name_of(9)]
    assert last_committed([], {}) is None


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    """Return a manager."""
    chosen: dict[str, Any] = {"mode": "thread", "timeout": 60, "pruning": "manual", **options}
    return CheckpointManager(root, **chosen)


def saved(manager: CheckpointManager, *steps: int) -> None:
    """Save some steps, and wait for what follows."""
    for step in steps:
        manager.save(step, state_of(step), sync_files=False)
        assert manager.wait_pruned(60)


@pytest.mark.parametrize("keep", [None, KeepLatest(3)])
def test_a_step_below_the_highest_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: Any
) -> None:
    """The warning says what is chosen, and how the higher ones are given up."""
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        with manager_of(tmp_path, keep=keep) as manager:
            saved(manager, 10, 90, 100)
        assert caplog.text == ""
        with manager_of(tmp_path, keep=keep) as manager:
            saved(manager, 11, 12)
            latest = manager.latest()
            assert latest is not None
            assert latest.step == 100
    assert caplog.text.count("still choose step 100") == 1
    assert "Step 11 was saved below step 100" in caplog.text
    assert "move their folders out" in caplog.text


def test_a_commit_that_is_not_noted_yet_is_not_above_what_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The background looks after the commit of step 2, and before its manager knows of that."""
    with manager_of(tmp_path) as manager:
        saved(manager, 1, 2, 9)
    set_aside = tmp_path.with_name("aside")
    (tmp_path / name_of(9)).rename(set_aside)
    claims, timeouts = Claims(), Timeouts()
    census = Census(Location.of(tmp_path), StepNames(), timeouts=timeouts, retry=None)
    upkeep = Upkeep(census, Soundness(), None, claims=claims, pruning="manual", timeouts=timeouts)
    upkeep.begin(is_coordinator=True)
    end_claim = claims.take(name_of(2), "it is being saved", timeout_s=0)
    upkeep.committed(name_of(1), None)
    upkeep.wake()
    assert upkeep.wait(60)
    assert caplog.text == ""
    set_aside.rename(tmp_path / name_of(9))
    upkeep.committed(name_of(2), None)
    end_claim()
    for _ in range(2):
        upkeep.wake()
        assert upkeep.wait(60)
    upkeep.close(60)
    assert caplog.text.count("Step 2 was saved below step 9") == 1


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


def test_soundness_is_of_a_name_and_a_save() -> None:
    """What was saved here as one name says nothing of its copy, which a prune must look at."""
    disk = Disk()
    store = DictStore(disk, CAS)
    at_times(disk, 4, 5)
    for path, data in disk.files.items():
        if path.startswith(f"{name_of(5)}/"):
            disk.put(path.replace(name_of(5), name_of(6)), data)
    soundness = Soundness()
    soundness.found_sound(name_of(5), heads(disk.files)[5])
    one = Pruner(DiskCensus(store), KeepLatest(1), retry=QUICK, soundness=soundness)
    six = next(sight.info for sight in DiskCensus(store).downwards(Deadline("load", 60)))
    assert six is not None
    assert six.step == 6
    assert not soundness.is_known(six)
    soundness.found_damaged(six, "cut")
    assert one.prune(Deadline("commit", 60)).plan.anchor == dataclasses.replace(
        six, step=5, name=name_of(5), url=six.url.replace(name_of(6), name_of(5))
    )


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
    for keep, min_age_s in ((KeepNewerThan(100.0), 0.0), (KeepLatest(1), 150.0)):
        one = pruner(DictStore(disk, CAS), keep, disk, min_age_s=min_age_s)
        plan = one.prune(Deadline("commit", 60), dry_run=True).plan
        # The disk's clock is years behind this machine's: by this one all are old.
        assert [decision.step for decision in plan.deleted] == [1, 2, 3]
        assert (disk.files, disk.changes) == (files, changes)


COUNT = 300


@pytest.fixture(name="long_run")
def _long_run() -> tuple[Disk, Counter[str], DictStore]:
    """A run of 300 steps, all pruned but the last two, and a store that counts requests."""
    disk = Disk()
    asked: Counter[str] = Counter()
    store = DictStore(disk, CAS, lambda operation, _: asked.update([operation]))
    at_times(disk, *range(1, COUNT + 1))
    assert len(prune(store, KeepLatest(2), disk).deleted) == COUNT - 2
    return disk, asked, store


LongRun = tuple[Disk, Counter[str], DictStore]


def test_later_processes_do_not_look_at_each_pruned_step_again(long_run: LongRun) -> None:
    """The second process notes what it found; later ones look at a few, however many there are."""
    disk, asked, store = long_run
    prune(store, KeepLatest(2), disk)
    for _ in range(3):
        asked.clear()
        at_times(disk, max(heads(disk.files)) + 1)
        asked.clear()
        assert len(prune(store, KeepLatest(2), disk).deleted) == 1
        assert asked["list"] <= 64 + 20
        assert sum(asked.values()) <= 64 + 60
    assert b"ckpt_storage.pruned/1" in disk.files[SETTLED_PATH]


def test_a_step_that_is_saved_again_is_pruned_again(long_run: LongRun) -> None:
    """By the process that saved it at once; by others in time, and until then it is kept."""
    disk, _, store = long_run
    prune(store, KeepLatest(2), disk)
    at_times(disk, 7, COUNT + 1)
    one = pruner(store, KeepLatest(2), disk)
    for step in (7, COUNT + 1):
        one.protect(name_of(step), "it is what this manager saved last")
    assert one.prune(Deadline("commit", 60)).deleted == (name_of(7), name_of(COUNT - 1))
    at_times(disk, 9)
    at_times(disk, COUNT + 2)
    for _ in range(200):
        prune(store, KeepLatest(2), disk)
        if 9 not in heads(disk.files):
            break
    assert set(heads(disk.files)) == {COUNT + 1, COUNT + 2}


def test_a_process_that_saves_a_noted_step_looks_at_it(long_run: LongRun) -> None:
    """Also after it has read the note; and a prune that finds nothing new writes no note."""
    disk, _, store = long_run
    prune(store, KeepLatest(2), disk)
    one = pruner(store, KeepLatest(2), disk)
    one.prune(Deadline("commit", 60))
    changes = disk.changes
    one.prune(Deadline("commit", 60))
    assert disk.changes == changes
    at_times(disk, *range(7, 17))
    for step in (*range(7, 17), COUNT):
        one.protect(name_of(step), "it is what this manager saved last")
    assert set(one.prune(Deadline("commit", 60)).deleted) == {name_of(s) for s in range(7, 16)}


def test_after_a_sweep_every_step_is_looked_at(long_run: LongRun) -> None:
    """What others saved again under names that are noted is found by the next prune."""
    disk, _, store = long_run
    prune(store, KeepLatest(2), disk)
    at_times(disk, *range(5, 15), COUNT + 1)
    one = pruner(store, KeepLatest(2), disk)
    one.sweep(Deadline("commit", 60))
    one.prune(Deadline("commit", 60))
    assert set(heads(disk.files)) == {COUNT, COUNT + 1}


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 100])
def test_a_note_that_is_damaged_is_not_used(long_run: LongRun, content: bytes) -> None:
    """Then all are looked at, nothing else changes, and the note is written anew."""
    disk, _, store = long_run
    prune(store, KeepLatest(2), disk)
    disk.put(SETTLED_PATH, content)
    report = prune(store, KeepLatest(2), disk)
    assert (report.deleted, report.failed) == ((), {})
    assert b"ckpt_storage.pruned/1" in disk.files[SETTLED_PATH]


def test_a_note_of_other_names_is_not_used(long_run: LongRun) -> None:
    """Steps are noted for one template; a root may be pruned by another."""
    disk, _, store = long_run
    prune(store, KeepLatest(2), disk)
    note = disk.files[SETTLED_PATH]
    census = DiskCensus(store, "other-{step}")
    Pruner(census, KeepLatest(2), retry=QUICK).prune(Deadline("commit", 60))
    assert disk.files[SETTLED_PATH] == note
