"""Prune under attack: cut at every step, racing others, with clocks a day off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import prune_cases as cases
import pytest
from commit_tools import BOTH, CAS, DAY_S, DictStore, Disk, attempted, committed

from ckpt_storage.commit import attempt as commit
from ckpt_storage.errors import CheckpointError, CommitConflictError
from ckpt_storage.export.folder import remove_exports
from ckpt_storage.format.exports import Holder
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.retention import KeepBest, KeepEvery, KeepLatest, KeepNewerThan
from ckpt_storage.store import probe
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash

KEEP = KeepLatest(2) | KeepBest("loss", "min")
FAR = Deadline("commit", 86_400)
KEPT = {4, 5, 6}
GONE = {1, 2, 3}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prune is as in a new process."""
    cases.quiet(monkeypatch)


def stored(disk: Disk, *steps: int) -> DictStore:
    """Save steps; return the store."""
    store = DictStore(disk, CAS)
    for step in steps:
        cases.save(store, step)
    return store


def rest(files: Mapping[str, bytes], steps: set[int]) -> dict[str, bytes]:
    """Return all that lies at these steps, and what others put there."""
    prefixes = tuple(f"{cases.name_of(step)}/" for step in steps)
    return {path: data for path, data in files.items() if path.startswith(prefixes)} | {
        path: data for path, data in files.items() if path in cases.OTHERS
    }


def check_unharmed(disk: Disk, before: Mapping[str, bytes]) -> None:
    """Check that nothing is lost that was to be kept, and nothing that is reachable."""
    found = cases.heads(disk.files)
    assert set(found) >= KEPT
    assert rest(disk.files, KEPT | {7}) == before


def check_pruned(disk: Disk, before: Mapping[str, bytes]) -> None:
    """Check that nothing is left but slots, what was being saved, and probes that were cut."""
    check_unharmed(disk, before)
    assert set(cases.heads(disk.files)) == KEPT
    for step in GONE | {8, 9}:
        left = [path for path in disk.files if path.startswith(f"{cases.name_of(step)}/")]
        known = ("/commits/", "/.ckpt-storage-probe-", *cases.OTHERS)
        assert [path for path in left if not any(one in path for one in known)] == []


@BOTH
def test_a_prune_deletes_what_no_policy_keeps(capabilities: Capabilities) -> None:
    """Deleted are the unwanted, their exports, dead attempts and what a cut deletion left."""
    disk = cases.scene(capabilities)
    before = rest(disk.files, KEPT | {7})
    store = DictStore(disk, capabilities)
    dry = cases.pruner(store, KEEP, disk).prune(FAR, dry_run=True)
    assert dry.is_dry_run
    assert set(cases.heads(disk.files)) == KEPT | GONE
    report = cases.prune(store, KEEP, disk)
    assert (report.kept, report.planned) == (dry.kept, dry.planned)
    assert report.deleted == tuple(cases.name_of(step) for step in sorted(GONE))
    assert (report.skipped, report.failed) == ({}, {})
    assert len(report.freed) == 1
    check_pruned(disk, before)
    kept = {decision.name: decision.reasons for decision in report.kept}
    assert kept["tokenizer"] == kept["step-12"] == ("it does not belong to this run",)
    changes = disk.changes
    again = cases.prune(store, KEEP, disk)
    assert (again.deleted, again.freed, again.failed) == ((), (), {})
    assert disk.changes == changes


ACTIONS: tuple[Action, ...] = ("crash_before", "crash_after", "torn", "error", "lost_answer")


@BOTH
@pytest.mark.parametrize("action", ACTIONS)
def test_a_prune_cut_at_any_step_loses_nothing_and_is_gone_on_with(
    capabilities: Capabilities, action: Action, record_property: Callable[[str, object], None]
) -> None:
    """Every operation is cut or failed once: afterwards all is whole, and the next one ends it."""
    origin = cases.scene(capabilities)
    before = rest(origin.files, KEPT | {7})
    dry = DictStore(origin.copy(), capabilities)
    cases.prune(dry, KEEP, origin)
    calls = list(dry.script.calls)
    ends: Counter[str] = Counter()
    for number, call in enumerate(calls):
        disk = origin.copy()
        can_be_torn = call.operation in {"delete", "delete_folder"}
        if action == "torn" and not can_be_torn:
            continue
        rule = Rule(action=action, skip_count=number, kind="timeout", retryable=False)
        probe._RESULTS.clear()  # noqa: SLF001  # as in a new process
        store = DictStore(disk, capabilities, rules=[rule])
        try:
            report = cases.prune(store, KEEP, disk)
            ends["ended"] += 1
            ends["with failures"] += bool(report.failed)
        except SimulatedCrash:
            ends["died"] += 1
        except CheckpointError:
            ends["raised"] += 1
        check_unharmed(disk, before)
        probe._RESULTS.clear()  # noqa: SLF001  # as in a new process
        later = cases.prune(DictStore(disk, capabilities), KEEP, disk)
        assert later.failed == {}, f"{action} at {call}"
        check_pruned(disk, before)
    text = f"{action}: {sum(ends.values())} of {len(calls)} operations: {dict(ends)}"
    record_property("operations", text)
    print(text)  # noqa: T201  # shown by -rP; the counts are asked for
    assert sum(ends.values()) > 20
    assert action == "error" or ends["died"] + ends["ended"]


@BOTH
@pytest.mark.parametrize("name", cases.RACES)
def test_a_race_loses_nothing(capabilities: Capabilities, name: str) -> None:
    """After every operation of every schedule all that is committed is whole; readers see it."""
    print(cases.check_race(capabilities, name, range(20), systematic=True))  # noqa: T201  # for -rP


@pytest.mark.parametrize("shift_s", [-DAY_S, DAY_S], ids=["a day behind", "a day ahead"])
def test_savers_whose_clocks_are_off_change_nothing(
    monkeypatch: pytest.MonkeyPatch, shift_s: float
) -> None:
    """Ages are by the storage's clock: when a saver says that it saved does not count."""
    from datetime import UTC, datetime, timedelta  # noqa: PLC0415  # here only

    def stamp() -> dict[str, Any]:
        then = datetime.now(UTC) + timedelta(seconds=shift_s)
        return {"created_at": then.isoformat(timespec="seconds"), "host": "h", "pid": 1}

    disk = Disk()
    store = DictStore(disk, CAS)
    monkeypatch.setattr(commit, "stamp", stamp)
    for step in (1, 2, 3, 4, 5):
        cases.save(store, step)
        disk.clock_s += 100.0
    report = cases.prune(store, KeepNewerThan(350.0), disk)
    assert report.deleted == (cases.name_of(1), cases.name_of(2))
    report = cases.prune(store, KeepNewerThan(250.0), disk)
    assert report.deleted == (cases.name_of(3),)
    assert set(cases.heads(disk.files)) == {4, 5}


def test_an_attempt_is_freed_only_a_day_after_its_last_file() -> None:
    """What may still be being saved is left alone; a day later it is fenced and freed.

    Also at a step of `KeepEvery`, and when others are newer.
    """
    disk = Disk()
    store = stored(disk, 1)
    attempt = attempted(cases.at(store, 5))
    one = cases.pruner(store, KeepLatest(1) | KeepEvery(5), disk)
    disk.clock_s += DAY_S - 10
    report = one.prune(FAR)
    assert (report.freed, report.leftovers) == ((), (cases.name_of(5),))
    stored(disk, 10, 11)
    disk.clock_s += 20
    assert one.prune(FAR).freed == (attempt.save_id,)
    with pytest.raises(CommitConflictError):
        committed(cases.at(store, 5), attempt)
    assert set(cases.heads(disk.files)) == {1, 10, 11}


def test_files_that_no_export_writes_stay_beside_it() -> None:
    """A user's own files in an export's folder are not deleted with it."""
    disk = cases.scene(CAS)
    disk.put(f"{cases.name_of(3)}/hf/config.json", b"mine")
    cases.prune(DictStore(disk, CAS), KEEP, disk)
    left = [path for path in disk.files if path.startswith(f"{cases.name_of(3)}/hf/")]
    assert left == [f"{cases.name_of(3)}/hf/config.json"]
    assert cases.prune(DictStore(disk, CAS), KEEP, disk).failed == {}


def test_a_plan_that_is_old_deletes_nothing_that_was_saved_since() -> None:
    """Between plan and deletion a step is saved anew: it stays, and the report says why."""
    disk = cases.scene(CAS)
    store = DictStore(disk, CAS)
    old = cases.pruner(store, KEEP, disk)
    plan = old.prune(FAR, dry_run=True)
    anew = cases.save(store, 2)
    report = old.execute(plan, FAR)
    assert report.deleted == (cases.name_of(1), cases.name_of(3))
    assert list(report.skipped) == [cases.name_of(2)]
    assert cases.heads(disk.files)[2] == anew


@pytest.mark.parametrize("is_deleted", [False, True])
def test_without_its_newest_a_plan_deletes_nothing(*, is_deleted: bool) -> None:
    """Between plan and deletion the newest is deleted by hand or saved anew (I18)."""
    disk = cases.scene(CAS)
    store = DictStore(disk, CAS)
    old = cases.pruner(store, KEEP, disk)
    plan = old.prune(FAR, dry_run=True)
    if is_deleted:
        cases.deleting(6)[1](store)
    else:
        cases.save(store, 6)
    report = old.execute(plan, FAR)
    assert report.deleted == ()
    assert set(report.skipped) == {cases.name_of(step) for step in GONE}
    assert ("another save" in report.skipped[cases.name_of(1)]) != is_deleted
    assert set(cases.heads(disk.files)) == (KEPT | GONE) - ({6} if is_deleted else set())


def test_what_cannot_be_deleted_does_not_keep_the_others() -> None:
    """A step that the storage refuses to delete is reported; the others go."""
    disk = cases.scene(CAS)
    rule = Rule(
        action="error",
        operation="put_absent",
        path=cases.name_of(2),
        hit_count=None,
        kind="permission",
    )
    store = DictStore(disk, CAS, rules=[rule])
    report = cases.prune(store, KEEP, disk)
    assert report.deleted == (cases.name_of(1), cases.name_of(3))
    assert list(report.failed) == [cases.name_of(2)]
    assert set(cases.heads(disk.files)) == KEPT | {2}


def test_a_root_that_is_told_nothing_new_asks_nothing_new() -> None:
    """In one process a second prune reads the newest again, and no other checkpoint."""
    disk = cases.scene(CAS)
    store = DictStore(disk, CAS)
    one = Pruner(cases.DiskRoot(store), KeepLatest(2) | KeepEvery(1))
    one.prune(FAR)
    seen_first = len(store.script.calls)
    one.prune(FAR)
    second = store.script.calls[seen_first:]
    touched = {name for call in second if "step" in (name := call.path.partition("/")[0])}
    assert touched <= {cases.name_of(step) for step in (5, 6, 7, 8, 9)}


def test_prunes_sweep_the_kept_steps_in_turn() -> None:
    """What died beside a kept checkpoint goes without a sweep, one step a prune."""
    disk = Disk()
    store = DictStore(disk, CAS)
    for step in (1, 2, 3):
        attempted(cases.at(store, step))
        cases.save(store, step)
    disk.clock_s += 2 * DAY_S
    before = cases.heads(disk.files)
    one = cases.pruner(store, KeepLatest(3), disk, sweeps=True)
    assert [len(one.prune(FAR).freed) for _ in range(4)] == [1, 1, 1, 0]
    assert cases.heads(disk.files) == before


def test_what_a_policy_counts_is_looked_at_again() -> None:
    """Somebody deletes the best after it was read: the next best takes its place, and stays."""
    disk = Disk()
    store = stored(disk)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        cases.save(store, step, loss=loss)
    one = cases.pruner(store, KeepLatest(1) | KeepBest("loss", "min"), disk)
    plan = one.prune(FAR, dry_run=True)
    assert [decision.step for decision in plan.planned] == [1, 3]
    cases.deleting(2)[1](store)
    assert one.prune(FAR).deleted == (cases.name_of(3),)
    assert set(cases.heads(disk.files)) == {1, 4}


def test_the_mirror_is_asked_for_the_save_that_the_last_look_found() -> None:
    """The best was saved anew, worse, after it was read and copied: that save has no copy yet."""
    disk = Disk()
    store = stored(disk)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        cases.save(store, step, loss=loss)
    root, copied = cases.DiskRoot(store), set(cases.heads(disk.files).values())
    root.look([cases.name_of(step) for step in (1, 2, 3)], FAR, fresh=True)
    anew = cases.save(store, 2, loss=2.0)
    root.found_sound(cases.name_of(4), cases.save(store, 4, loss=1.0))
    keep = KeepLatest(1) | KeepBest("loss", "min")
    one = Pruner(
        root, keep, others=lambda found, _: {f.name: "" for f in found if f.save_id not in copied}
    )
    assert one.prune(FAR).deleted == (cases.name_of(3),)
    assert cases.heads(disk.files)[2] == anew


def test_damaged_ones_do_not_end_the_search_for_the_newest() -> None:
    """As many sound ones are looked for as the policy counts, past those known to be damaged."""
    disk = Disk()
    store = DictStore(disk, CAS)
    ids = {step: cases.save(store, step) for step in range(1, 6)}
    root = cases.DiskRoot(store)
    root.found_sound(cases.name_of(4), ids[4])
    five = root.look_at(cases.name_of(5), Deadline("load", 60)).info
    assert five is not None
    root.found_damaged(five, "cut")
    one = Pruner(root, KeepLatest(2) | KeepEvery(3))
    assert one.prune(FAR).deleted == (cases.name_of(1), cases.name_of(2))
    assert set(cases.heads(disk.files)) == {3, 4, 5}


@pytest.mark.parametrize("path", ["model.safetensors.index.json", "names.json", "00001.json"])
def test_an_export_that_begins_while_one_is_removed_stays(path: str) -> None:
    """Another consolidation becomes the holder just before a step of the removal: it stops."""
    disk = cases.scene(CAS)
    files = dict(disk.files)

    def gate(operation: str, at_path: str) -> None:
        if operation == "delete" and at_path.endswith(path):
            pytest.fail(f"{at_path} was deleted under a consolidation that works there")
        if operation == "get" and at_path.endswith("job.json") and turn():
            holder = Holder(run_id="c" * 32, fingerprint="d" * 64)
            disk.put(f"{cases.name_of(3)}/hf/.ckpt-storage/job.json", holder.encode())

    turns = {"model.safetensors.index.json": 1, "00001.json": 4, "names.json": 5}
    left = [turns[path]]

    def turn() -> bool:
        left[0] -= 1
        return left[0] == 0

    here = cases.at(DictStore(disk, CAS, gate), 3)
    assert remove_exports(here) == []
    assert f"{cases.name_of(3)}/hf/.ckpt-storage/names.json" in disk.files
    assert files.keys() >= disk.files.keys()
    remove_exports(cases.at(DictStore(disk, CAS), 3))
    assert not [known for known in disk.files if known.startswith(f"{cases.name_of(3)}/hf/")]
