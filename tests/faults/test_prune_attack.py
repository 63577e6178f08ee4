"""Prune under attack: cut at every step, racing others, with clocks a day off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import prune_cases as cases
import pytest
from commit_tools import BOTH, CAS, DAY_S, DictStore, Disk, attempted, committed
from fault_tools import each_fault

from ckpt_storage.errors import CheckpointError, CommitConflictError
from ckpt_storage.export.removal import remove_exports
from ckpt_storage.format.exports import Holder
from ckpt_storage.manager.folders import FolderState
from ckpt_storage.manager.policies import KeepBest, KeepEvery, KeepLatest
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.store import abilities
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash

pytestmark = pytest.mark.usefixtures("one_core")

KEEP = KeepLatest(2) | KeepBest("loss", "min")
KEPT = {4, 5, 6}
GONE = {1, 2, 3}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prune is as in a new process."""
    cases.quiet(monkeypatch)


def saved(*steps: int, **losses: float) -> DictStore:
    """Save steps, some with a loss; return the store."""
    store = DictStore(Disk(), CAS)
    for step in steps:
        cases.save(store, step, loss=losses.get(f"loss_{step}"))
    return store


def _steps_in(store: DictStore) -> set[int]:
    return set(cases.heads(store.disk.files))


def rest(store: DictStore, steps: set[int]) -> dict[str, bytes]:
    """Return all that lies at these steps, and what others put there."""
    prefixes = (*(f"{cases.name_of(step)}/" for step in steps), *cases.OTHERS)
    return {path: data for path, data in store.disk.files.items() if path.startswith(prefixes)}


def check_pruned(store: DictStore, before: Mapping[str, bytes]) -> None:
    """Check that nothing is left but slots, what was being saved, and probes that were cut."""
    assert rest(store, KEPT | {7}) == before
    assert _steps_in(store) == KEPT
    known = ("/commits/", "/.ckpt-storage-probe-", *cases.OTHERS)
    left = rest(store, GONE | {8, 9})
    assert [path for path in left if not any(name in path for name in known)] == []


@BOTH
def test_a_prune_deletes_what_no_policy_keeps(capabilities: Capabilities) -> None:
    """Deleted are the unwanted, their exports, dead attempts and what a cut deletion left."""
    store = cases.scene(capabilities)
    before = rest(store, KEPT | {7})
    dry = cases.pruner(store, KEEP).prune(cases.FAR, dry_run=True)
    assert dry.is_dry_run
    assert _steps_in(store) == KEPT | GONE
    report = cases.prune(store, KEEP)
    assert (report.kept, report.planned) == (dry.kept, dry.planned)
    assert report.deleted == tuple(map(cases.name_of, sorted(GONE)))
    assert (report.skipped, report.failed) == ({}, {})
    assert len(report.freed) == 1
    check_pruned(store, before)
    kept = {decision.name: decision.reasons for decision in report.kept}
    assert kept["tokenizer"] == kept["step-12"] == ("it does not belong to this run",)
    changes = store.disk.changes
    again = cases.prune(store, KEEP)
    assert (again.deleted, again.freed, again.failed) == ((), (), {})
    assert store.disk.changes == changes


ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    "torn": "delete|delete_folder",
    "error": "",
    "lost_answer": "",
}


@BOTH
@pytest.mark.parametrize("action", ACTIONS)
def test_a_prune_cut_at_any_step_loses_nothing_and_is_gone_on_with(
    capabilities: Capabilities, action: Action, record_property: Callable[[str, object], None]
) -> None:
    """Every operation is cut or failed once: afterwards all is whole; the next prune ends it."""
    origin = cases.scene(capabilities)
    before = rest(origin, KEPT | {7})
    dry = DictStore(origin.disk.copy(), capabilities)
    cases.prune(dry, KEEP)
    ends: Counter[str] = Counter()
    failure = {"kind": "timeout", "retryable": False}
    for at, rule in each_fault(dry.script.calls, {action: ACTIONS[action]}, **failure):
        abilities.RECORDS.clear()  # as in a new process
        store = DictStore(origin.disk.copy(), capabilities, rules=[rule])
        try:
            report = cases.prune(store, KEEP)
            ends["ended with failures" if report.failed else "ended"] += 1
        except SimulatedCrash:
            ends["died"] += 1
        except CheckpointError:
            ends["raised"] += 1
        assert rest(store, KEPT | {7}) == before, at
        assert _steps_in(store) >= KEPT, at
        abilities.RECORDS.clear()  # as in a new process
        later = DictStore(store.disk, capabilities)
        assert cases.prune(later, KEEP).failed == {}, at
        check_pruned(later, before)
    record_property("operations", f"{len(dry.script.calls)}: {dict(ends)}")
    assert ends.total() > 20
    assert action == "error" or ends["died"] + ends["ended"]


@BOTH
@pytest.mark.parametrize("name", cases.RACES)
def test_a_race_loses_nothing(capabilities: Capabilities, name: str) -> None:
    """After every operation of every schedule all that is committed is whole; readers see it."""
    print(cases.check_race(capabilities, name, range(20), systematic=True))  # noqa: T201  # for -rP


def test_an_attempt_is_freed_only_a_day_after_its_last_file() -> None:
    """What may still be being saved is left alone; a day later it is fenced and freed.

    Also at a step of `KeepEvery`, and when others are newer.
    """
    store = saved(1)
    attempt = attempted(cases.at(store, 5))
    pruner = cases.pruner(store, KeepLatest(1) | KeepEvery(5))
    store.disk.clock_s += DAY_S - 10
    report = pruner.prune(cases.FAR)
    assert (report.freed, report.leftovers) == ((), (cases.name_of(5),))
    for step in (10, 11):
        cases.save(store, step)
    store.disk.clock_s += 20
    assert pruner.prune(cases.FAR).freed == (attempt.save_id,)
    with pytest.raises(CommitConflictError):
        committed(cases.at(store, 5), attempt)
    assert _steps_in(store) == {1, 10, 11}


def test_a_plan_that_is_old_deletes_nothing_that_was_saved_since() -> None:
    """Between plan and deletion a step is saved anew: it stays, and the report says why."""
    store = cases.scene()
    old = cases.pruner(store, KEEP)
    plan = old.prune(cases.FAR, dry_run=True)
    anew = cases.save(store, 2)
    report = old.execute(plan, cases.FAR)
    assert report.deleted == (cases.name_of(1), cases.name_of(3))
    assert list(report.skipped) == [cases.name_of(2)]
    assert cases.heads(store.disk.files)[2] == anew


@pytest.mark.parametrize("is_deleted", [False, True])
def test_without_its_newest_a_plan_deletes_nothing(*, is_deleted: bool) -> None:
    """Between plan and deletion the newest is deleted by hand or saved anew (I18)."""
    store = cases.scene()
    old = cases.pruner(store, KEEP)
    plan = old.prune(cases.FAR, dry_run=True)
    if is_deleted:
        cases.deleting(6)[1](store)
    else:
        cases.save(store, 6)
    report = old.execute(plan, cases.FAR)
    assert report.deleted == ()
    assert set(report.skipped) == set(map(cases.name_of, GONE))
    assert ("another save" in report.skipped[cases.name_of(1)]) != is_deleted
    assert _steps_in(store) == (KEPT | GONE) - ({6} if is_deleted else set())


def test_what_cannot_be_deleted_does_not_keep_the_others() -> None:
    """A step that the storage refuses to delete is reported; the others go."""
    refused: dict[str, Any] = {"path": cases.name_of(2), "kind": "permission", "hit_count": None}
    store = cases.scene().failing(Rule(action="error", operation="put_absent", **refused))
    report = cases.prune(store, KEEP)
    assert report.deleted == (cases.name_of(1), cases.name_of(3))
    assert list(report.failed) == [cases.name_of(2)]
    assert _steps_in(store) == KEPT | {2}


def test_a_root_that_is_told_nothing_new_asks_nothing_new() -> None:
    """In one process a second prune reads the newest again, and no other checkpoint."""
    store = cases.scene()
    pruner = Pruner(cases.DiskRoot(store), KeepLatest(2) | KeepEvery(1))
    pruner.prune(cases.FAR)
    first_count = len(store.script.calls)
    pruner.prune(cases.FAR)
    touched = {call.path.partition("/")[0] for call in store.script.calls[first_count:]}
    steps = {name for name in touched if "step" in name}
    assert steps <= set(map(cases.name_of, (5, 6, 7, 8, 9)))


def test_prunes_sweep_the_kept_steps_in_turn() -> None:
    """What died beside a kept checkpoint goes without a sweep, one step a prune."""
    store = saved()
    for step in (1, 2, 3):
        attempted(cases.at(store, step))
        cases.save(store, step)
    store.disk.clock_s += 2 * DAY_S
    before = cases.heads(store.disk.files)
    pruner = cases.pruner(store, KeepLatest(3), sweeps=True)
    assert [len(pruner.prune(cases.FAR).freed) for _ in range(4)] == [1, 1, 1, 0]
    assert cases.heads(store.disk.files) == before


def test_what_a_policy_counts_is_looked_at_again() -> None:
    """Somebody deletes the best after it was read: the next best takes its place, and stays."""
    store = saved(1, 2, 3, 4, loss_1=0.5, loss_2=0.1, loss_3=0.9, loss_4=0.8)
    pruner = cases.pruner(store, KeepLatest(1) | KeepBest("loss", "min"))
    plan = pruner.prune(cases.FAR, dry_run=True)
    assert [decision.step for decision in plan.planned] == [1, 3]
    cases.deleting(2)[1](store)
    assert pruner.prune(cases.FAR).deleted == (cases.name_of(3),)
    assert _steps_in(store) == {1, 4}


def test_the_mirror_is_asked_for_the_save_that_the_last_look_found() -> None:
    """The best was saved anew, worse, after it was read and copied: that save has no copy yet."""
    store = saved(1, 2, 3, loss_1=0.5, loss_2=0.1, loss_3=0.9)
    root, copied = cases.DiskRoot(store), set(cases.heads(store.disk.files).values())
    root.read_states([*map(cases.name_of, (1, 2, 3))], cases.FAR, fresh=True)
    anew = cases.save(store, 2, loss=2.0)
    root.record_sound(cases.name_of(4), cases.save(store, 4, loss=1.0))
    keep = KeepLatest(1) | KeepBest("loss", "min")

    def protect(states: Collection[FolderState], _: Deadline) -> dict[str, str]:
        return {state.name: "" for state in states if state.save_id not in copied}

    pruner = Pruner(root, keep, protect=protect)
    assert pruner.prune(cases.FAR).deleted == (cases.name_of(3),)
    assert cases.heads(store.disk.files)[2] == anew


def test_damaged_ones_do_not_end_the_search_for_the_newest() -> None:
    """As many sound ones are sought as the policy counts, past those known to be damaged."""
    store = saved(1, 2, 3, 4, 5)
    root = cases.DiskRoot(store)
    five = root.read_state(cases.name_of(5), cases.FAR).info
    assert five is not None
    root.record_damaged(five, "cut")
    root.record_sound(cases.name_of(4), cases.heads(store.disk.files)[4])
    pruner = Pruner(root, KeepLatest(2) | KeepEvery(3))
    assert pruner.prune(cases.FAR).deleted == tuple(map(cases.name_of, (1, 2)))
    assert _steps_in(store) == {3, 4, 5}


LOOKS = {"model.safetensors.index.json": 1, "00001.json": 4, "names.json": 5}
"""Before what is deleted, and at which look for the holder, another comes."""


@pytest.mark.parametrize("path", LOOKS)
def test_an_export_that_begins_while_one_is_removed_stays(path: str) -> None:
    """Another consolidation becomes the holder just before a step of the removal: it stops."""
    disk, folder = cases.scene().disk, f"{cases.name_of(3)}/hf"
    before = disk.files.keys()
    looks = iter(range(1, 99))
    holder = Holder(run_id="c" * 32, fingerprint="d" * 64).encode()

    def gate(operation: str, at_path: str) -> None:
        if operation == "delete" and at_path.endswith(path):
            pytest.fail(f"{at_path} was deleted under a consolidation that works there")
        is_look = operation == "get" and at_path.endswith("job.json")
        if is_look and next(looks) == LOOKS[path]:
            disk.put(f"{folder}/.ckpt-storage/job.json", holder)

    assert remove_exports(cases.at(DictStore(disk, CAS, gate), 3)) == []
    assert f"{folder}/.ckpt-storage/names.json" in disk.files
    assert before >= disk.files.keys()
    remove_exports(cases.at(DictStore(disk, CAS), 3))
    assert [known for known in disk.files if known.startswith(folder)] == [f"{folder}/config.json"]
