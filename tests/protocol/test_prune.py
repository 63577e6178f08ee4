"""What a prune finds at a root: the newest work, links, what other tools put there; and ages."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import commit_tools as tools
import manager_cases as cases
import pytest
import torch.distributed.checkpoint as dcp
from prune_cases import EXPORT, FAR, DiskRoot, at, heads, name_of, prune, pruner, save

import ckpt_storage
from ckpt_storage import KeepBest, KeepEvery, KeepLatest, KeepNewerThan, RetentionPolicy
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import FormatError, PhaseTimeoutError, StorageError
from ckpt_storage.export.removal import remove_exports
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.policies import Candidate, KeepAny
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.root import Root
from ckpt_storage.store import Location, abilities, open_store
from ckpt_storage.store.backend import Backend, ObjectInfo
from ckpt_storage.testing.faults import Rule

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Let each prune find out anew what its storage can do."""
    abilities.RECORDS.clear()


def at_times(store: tools.DictStore, *steps: int) -> tools.DictStore:
    """Save steps a minute after one another; return the store."""
    for step in steps:
        store.disk.clock_s += 60.0
        save(store, step)
    return store


def _steps_in(store: tools.DictStore) -> list[int]:
    return sorted(heads(store.disk.files))


def left(store: tools.DictStore) -> list[str]:
    """Return the names below which something lies."""
    return sorted({path.partition("/")[0] for path in store.disk.files})


def _names_of(*steps: int) -> list[str]:
    return [name_of(step) for step in steps]


def pruned_to_one(root: Path) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Prune to the newest; return what was deleted, and why the others were not."""
    report = ckpt_storage.prune(root, KeepLatest(1), dry_run=False)
    assert report.failed == {}
    return report.deleted, {decision.name: decision.reasons for decision in report.kept}


def _restored_from(folder: Path) -> int:
    state = cases.blank()
    ckpt_storage.load(state, folder)
    return cases.step_in(state)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "keep", [KeepLatest(2), KeepLatest(2) | KeepEvery(40), KeepBest("x", "max")]
)
def test_after_going_back_the_newest_work_stays(store: tools.DictStore, keep: Any) -> None:
    """New processes save a step each, below the abandoned ones: the next finds what was saved."""
    at_times(store, 50, 80, 90, 100)
    for step in (51, 52, 53):
        at_times(store, step)
        report = prune(store, keep)
        assert step in _steps_in(store)
        reasons = {one.step: one.reasons for one in report.kept}
        assert reasons[step] == ("it was committed last",)
    assert 100 in _steps_in(store)
    assert {51, 52}.isdisjoint(_steps_in(store))
    prune(at_times(store, 110), KeepLatest(1))
    assert _steps_in(store) == [110]


class KeepYoung(RetentionPolicy):
    """Keep what is younger than three minutes: a policy of a user's own, which goes by age."""

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        ages_s = {one.name: one.age_s for one in candidates}
        assert None not in ages_s.values(), "the storage tells every age"
        return {name: "it is young" for name, age_s in ages_s.items() if (age_s or 0) < 180.0}


class KeepFiveIfYoung(KeepLatest):
    """One that is made of ours may go by age, too."""

    def kept(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Return the names that the rule keeps, each with the reason."""
        young = KeepYoung().kept(candidates)
        return {name: why for name, why in super().kept(candidates).items() if name in young}


@pytest.mark.parametrize(
    "keep",
    [KeepYoung(), KeepAny((KeepAny((KeepYoung(),)),)), KeepNewerThan(100) | KeepFiveIfYoung(5)],
)
def test_a_policy_of_the_users_own_is_told_ages(store: tools.DictStore, keep: Any) -> None:
    """What goes by age is asked with the ages, whatever it is called and wherever it stands.

    They are the storage's: this machine's clock, which savers note, is years ahead.
    """
    at_times(store, 1, 2, 3, 4, 5)
    store.disk.clock_s += 30.0
    assert prune(store, keep).deleted == (name_of(1), name_of(2))
    assert _steps_in(store) == [3, 4, 5]


def test_a_dry_run_writes_nothing_and_judges_ages_by_this_machines_clock(
    store: tools.DictStore,
) -> None:
    """A plan with ages needs no right to write."""
    at_times(store, 1, 2, 3, 4)
    files, changes = store.disk.files, store.disk.changes
    plan = pruner(store, KeepNewerThan(100.0)).prune(FAR, dry_run=True)
    # The disk's clock is years behind this machine's: by this one all are old.
    assert [decision.step for decision in plan.planned] == [1, 2, 3]
    assert (store.disk.files, store.disk.changes) == (files, changes)


class Timeless(tools.DictBackend):
    """A storage that tells no times, such as some of fsspec's."""

    def stat(self, path: str) -> ObjectInfo:
        found: ObjectInfo = super().stat(path)
        return replace(found, modified_s=None)

    def list(self, prefix: str, **options: Any) -> Iterator[ObjectInfo]:
        for entry in super().list(prefix, **options):
            yield replace(entry, modified_s=None)

    server_time = Backend.server_time


def test_where_no_times_are_told_what_goes_by_age_stays() -> None:
    """No clock of ours stands in for the storage's; what goes by steps is pruned all the same."""
    store = at_times(tools.DictStore(tools.Disk(), backend=Timeless), 1, 2, 3)
    report = prune(store, KeepNewerThan(0))
    assert [one.step for one in report.kept] == [1, 2, 3]
    assert "does not report its age" in report.kept[0].reasons[0]
    assert prune(store, KeepLatest(2)).deleted == (name_of(1),)
    store.disk.clock_s += 8 * tools.DAY_S
    assert prune(store, KeepLatest(2)).failed == {}
    assert left(store) == _names_of(1, 2, 3)


def test_a_prune_without_time_for_old_slots_leaves_them_to_the_next(
    store: tools.DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was tried to the end is not tried again in a process."""
    again = pruner(at_times(store, 1, 2), KeepLatest(1))
    again.prune(FAR)
    store.disk.clock_s += 7.1 * tools.DAY_S
    with monkeypatch.context() as patch:
        late = mock.Mock(side_effect=PhaseTimeoutError("late", phase="commit", timeout_s=1.0))
        patch.setattr("ckpt_storage.commit.deletion.remove_tombstone", late)
        with pytest.raises(PhaseTimeoutError, match="late"):
            again.prune(FAR)
    again.prune(FAR)
    assert left(store) == _names_of(2)


def test_of_a_deleted_checkpoint_nothing_is_left_after_a_week(store: tools.DictStore) -> None:
    """Its slots stay for 7 days by the storage's clock; then a prune removes them."""
    at_times(store, 1, 2, 3)
    assert prune(store, KeepLatest(1)).deleted == (name_of(1), name_of(2))
    for days, steps in ((6.9, (1, 2, 3)), (0.2, (3,))):
        store.disk.clock_s += days * tools.DAY_S
        prune(store, KeepLatest(1))
        assert left(store) == _names_of(*steps)
    assert _steps_in(at_times(store, 2)) == [2, 3]


def test_slots_that_cannot_be_removed_do_not_hide_what_was_deleted(
    store: tools.DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go, the report is returned, and the next process tries again."""
    prune(at_times(store, 1, 2, 3, 4), KeepLatest(2))
    store.disk.clock_s += 8 * tools.DAY_S
    at_times(store, 5)
    refusal: dict[str, Any] = {"operation": "delete.*", "hit_count": None, "retryable": False}
    rule = Rule(action="error", path=name_of(1), **refusal)
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        assert prune(store.failing(rule), KeepLatest(2)).deleted == (name_of(3),)
    assert f"{name_of(1)} was not pruned" in caplog.text
    assert left(store) == _names_of(1, 3, 4, 5)
    prune(store, KeepLatest(2))
    assert left(store) == _names_of(3, 4, 5)


def test_slots_that_stay_cost_little_and_are_tried_once_a_process(store: tools.DictStore) -> None:
    """A storage deletes without conditions: thousands of old ones keep no prune for hours."""
    prune(at_times(store, 1, 2, 3, 4), KeepLatest(1))
    store.disk.clock_s += 8 * tools.DAY_S
    rule = Rule(action="error", operation="delete_version", kind="unsupported", hit_count=None)
    refusing = store.failing(rule)
    again = pruner(refusing, KeepLatest(1))
    again.prune(FAR)
    first = len(refusing.asked())
    assert first < 3 * 35
    again.prune(FAR)
    assert len(refusing.asked()) <= first + 3
    assert left(store) == _names_of(1, 2, 3, 4)


def test_a_step_below_the_highest_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning of a prune says what is chosen."""
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        cases.saved(tmp_path, 10, 90, 100, keep=KeepLatest(3))
        assert caplog.text == ""
        with cases.manager_of(tmp_path, keep=KeepLatest(3)) as manager:
            for step in (11, 12):
                manager.save(step, cases.state_of(step), sync_files=False)
                assert manager.wait_pruned(60)
            assert cases.latest_step(manager) == 100
    assert caplog.text.count("still choose step 100") == 1
    assert "Step 11 was saved below step 100" in caplog.text


def test_a_copy_that_is_damaged_does_not_stand_for_the_original(tmp_path: Path) -> None:
    """Copies have the same save id: only the one that is damaged is passed over."""
    cases.saved(tmp_path, 1, 5)
    shutil.copytree(tmp_path / name_of(5), tmp_path / name_of(6))
    cases.damage(tmp_path / name_of(6))
    with cases.manager_of(tmp_path) as manager:
        assert cases.restore(manager, check="deep").step == cases.latest_step(manager) == 5


def test_a_newer_format_is_no_reason_to_take_an_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`latest` and `restore` follow one rule: damage is passed over, but too new is an error."""
    cases.saved(tmp_path, 1, 2)
    slot = tmp_path / name_of(2) / "commits/00000001.json"
    body = tools.body_of(slot.read_bytes())
    slot.write_bytes(tools.sealed({**body, "format": "ckpt_storage.commit/99"}))
    with cases.manager_of(tmp_path) as manager:
        for look in (manager.latest, lambda: manager.restore(cases.blank())):
            with pytest.raises(FormatError, match="commit/99"):
                look()
    slot.write_bytes(b"{")
    with cases.manager_of(tmp_path) as manager, caplog.at_level(logging.WARNING, "ckpt_storage"):
        assert cases.latest_step(manager) == 1
    assert f"{name_of(2)} is skipped" in caplog.text


@pytest.mark.parametrize("target", [".", "commits", "commits/00000001.json"])
def test_a_link_of_any_name_pins_what_it_means(tmp_path: Path, target: str) -> None:
    """One calls a checkpoint, or what lies in it, by a name of one's own: it is not deleted."""
    cases.saved(tmp_path, 1, 2, 3)
    (tmp_path / "best").symlink_to(tmp_path / name_of(1) / target)
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent)
    gone, kept = pruned_to_one(tmp_path)
    assert gone == (name_of(2),)
    assert kept[name_of(1)] == ("best is a link to it",)
    if target != "commits/00000001.json":
        assert kept["best"] == kept["elsewhere"] == ("it is a link",)
    assert _restored_from(tmp_path / name_of(1)) == 1


@pytest.mark.parametrize("is_archived", [False, True])
def test_a_link_made_after_the_plan_counts(tmp_path: Path, *, is_archived: bool) -> None:
    """Between plan and deletion a checkpoint is pinned, or moved away and linked to."""
    cases.saved(tmp_path / "run", 1, 2)
    one = Pruner(Root(Location.of(tmp_path / "run"), StepNames()), KeepLatest(1))
    plan = one.prune(FAR, dry_run=True)
    assert [decision.name for decision in plan.planned] == [name_of(1)]
    folder = tmp_path / "run" / name_of(1)
    if is_archived:
        folder.rename(tmp_path / "archived")
        folder.symlink_to(tmp_path / "archived")
    else:
        (tmp_path / "run/best").symlink_to(name_of(1))
    report = one.execute(plan, FAR)
    assert report.deleted == ()
    why = "it is a link" if is_archived else "best is a link to it"
    assert report.skipped == {name_of(1): why}
    assert _restored_from(folder) == 1


def test_no_plan_deletes_what_is_newer_than_its_newest(store: tools.DictStore) -> None:
    """Whoever made the plan: without something newer that is sound a checkpoint stays."""
    one = pruner(at_times(store, 1, 2), KeepLatest(1))
    plan = one.prune(FAR, dry_run=True)
    (old,), newest = plan.planned, plan.kept[-1]
    report = one.execute(replace(plan, planned=(newest,), newest=old.info), FAR)
    assert report.skipped == {name_of(2): "nothing sound is newer"}
    assert _steps_in(store) == [1, 2]


def test_a_stock_save_into_leftovers_is_none(tmp_path: Path) -> None:
    """Between plan and execution another tool saves into a folder that held leftovers."""
    cases.saved(tmp_path, 2)
    folder = tmp_path / name_of(1)
    folder.mkdir()
    (folder / "note").touch()
    one = Pruner(Root(Location.of(tmp_path), StepNames()), KeepLatest(1))
    plan = one.prune(FAR, dry_run=True)
    assert plan.leftovers == (name_of(1),)
    dcp.save(cases.state_of(1), storage_writer=dcp.FileSystemWriter(folder))
    before = _contents(folder)
    assert one.execute(plan, FAR).skipped == {name_of(1): "another tool wrote it"}
    assert _contents(folder) == before


def test_a_storage_that_does_not_answer_is_no_unreadable_checkpoint(
    store: tools.DictStore,
) -> None:
    """What may not be read is a state of the folder; a request that fails is an error."""
    save(store, 1)
    for kind in ("connection", "permission"):
        rule = Rule(action="error", operation="get", path=name_of(1), kind=kind, hit_count=None)
        root = DiskRoot(store.failing(rule))
        if kind == "permission":
            assert root.read_state(name_of(1), FAR).status == "unreadable"
        else:
            with pytest.raises(StorageError):
                root.read_state(name_of(1), FAR)


def test_a_link_to_an_older_step_is_no_newer_checkpoint(tmp_path: Path) -> None:
    """A link counts for nothing, and what it means is kept as long as it is there."""
    cases.saved(tmp_path, 4, 5)
    (tmp_path / name_of(10)).symlink_to(name_of(5))
    assert pruned_to_one(tmp_path)[0] == (name_of(4),)
    cases.saved(tmp_path, 7)
    gone, kept = pruned_to_one(tmp_path)
    assert gone == ()
    assert kept[name_of(5)] == (f"{name_of(10)} is a link to it",)
    assert kept[name_of(10)] == ("it is a link",)
    with cases.manager_of(tmp_path) as manager:
        assert cases.latest_step(manager) == cases.restore(manager).step == 7
        assert [info.step for info in manager.all()] == [5, 7]
    assert _restored_from(tmp_path / name_of(10)) == 5, "what it means can still be loaded"


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_step_that_lies_elsewhere_is_reached_through_its_link(
    tmp_path: Path, *, is_elsewhere: bool
) -> None:
    """It was moved, to another disk or under another name: it is restored, and never deleted."""
    root = tmp_path / "run"
    place = tmp_path / "disk" if is_elsewhere else root / "precious"
    cases.saved(root, 1, 2)
    (root / name_of(2)).rename(place)
    (root / name_of(2)).symlink_to(place)
    with cases.manager_of(root) as manager:
        assert cases.restore(manager).step == 2
    cases.saved(root, 3)
    assert pruned_to_one(root)[0] == (name_of(1),)
    assert _restored_from(place) == 2


def test_removing_a_link_leaves_what_it_means(tmp_path: Path) -> None:
    """Lightning removes the link "last": the link goes, the best checkpoint stays whole."""
    ckpt_storage.save(cases.state_of(1), tmp_path / "best", sync_files=False)
    for target in ("best", "nowhere"):
        (tmp_path / "last").symlink_to(target)
        ckpt_storage.delete(tmp_path / "last", missing_ok=True)
        assert not (tmp_path / "last").is_symlink()
    assert _restored_from(tmp_path / "best") == 1


def test_a_stock_save_under_a_pruned_name_stays(tmp_path: Path) -> None:
    """Another tool saves where one of ours was deleted: it is listed, opened and left alone."""
    cases.saved(tmp_path, 1, 2, 3)
    folder = tmp_path / name_of(1)
    assert ckpt_storage.prune(tmp_path, KeepLatest(2), dry_run=False).deleted == (name_of(1),)
    dcp.save(cases.state_of(1), storage_writer=dcp.FileSystemWriter(folder))
    before = _contents(folder)
    for _ in range(2):
        pruned_to_one(tmp_path)
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        assert manager.prune() is not None
        listed = [(one.step, one.format) for one in manager.all()]
    assert listed == [(1, "dcp"), (3, "ckpt_storage")]
    assert _contents(folder) == before
    found = [(one.name, one.format) for one in ckpt_storage.list_checkpoints(tmp_path)]
    assert found == [(name_of(1), "dcp"), (name_of(3), "ckpt_storage")]
    ckpt_storage.delete(folder, missing_ok=True)
    assert _restored_from(folder) == 1


@tools.BOTH
def test_deleting_again_leaves_the_metadata_of_others(store: tools.DictStore) -> None:
    """A tombstone's `.metadata` goes only if its footer is ours and of an earlier slot."""
    tools.saved(store)
    tools.deleted(store)
    store.put(".metadata", b"stock")
    assert is_foreign(store, read_log(store))
    tools.deleted(store)
    assert store.disk.files[".metadata"] == b"stock"


@tools.BOTH
def test_an_export_of_a_stock_save_over_a_tombstone_stays(store: tools.DictStore) -> None:
    """What was exported from what is not ours is removed by no prune and no sweep."""
    prune(at_times(store, 1, 2), KeepLatest(1))
    tools.attempted(at(store, 1))
    stock = {**EXPORT, ".metadata": b"stock"}
    for step, found in ((1, stock), (3, stock), (4, EXPORT)):
        for path, data in found.items():
            store.disk.put(f"{name_of(step)}/{path}", data)
    store.disk.clock_s += 9 * tools.DAY_S
    files = store.disk.files
    one = pruner(store, KeepLatest(1), sweeps=True)
    for _ in range(3):
        one.prune(FAR)
    assert store.disk.files == files


def test_two_names_of_one_save_are_kept_together(store: tools.DictStore) -> None:
    """Where links cannot be seen: a save that is kept is not deleted under another name."""
    at_times(store, 4, 5)
    for path, data in store.disk.files.items():
        if path.startswith(f"{name_of(5)}/"):
            store.disk.put(path.replace(name_of(5), name_of(10)), data)
    report = prune(store, KeepLatest(1))
    assert report.deleted == (name_of(4),)
    assert _steps_in(store) == [5, 10]
    kept = {decision.step: decision.reasons for decision in report.kept}
    assert kept[5] == (f"it is the same save as {name_of(10)}, and may be the same folder",)


class Uploading(tools.DictStore):
    """A store on which uploads are open: paths that any process may ask for."""

    uploads: set[str]

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        below = {path for path in self.uploads if path.startswith(f"{prefix}/" if prefix else "")}
        meant = {path for path in below if only is None or only(path)}
        self.uploads -= meant
        return len(meant)


OUR_UPLOADS = {
    "hf/model.safetensors",
    "hf/model-00002-of-00002-aaaaaaaa.safetensors",
    "hf/.ckpt-storage/aaaaaaaaaaaaaaaa/00002.json",
}
OTHER_UPLOADS = {
    "hf/adapter.bin",
    "hf/sub/model.safetensors",
    "hf/.ckpt-storage/notes.bin",
    "hf2/model.safetensors",
}


@pytest.mark.parametrize("others", [{}, {"hf/other/x.bin": b"1"}, {"hf/a.txt": b""}])
def test_a_removal_aborts_only_uploads_of_its_exports(others: dict[str, bytes]) -> None:
    """Of what is open in an export's folder, only what exports write is aborted."""
    store = Uploading(tools.Disk(), tools.CAS)
    store.uploads = OUR_UPLOADS | OTHER_UPLOADS
    for path, data in {**EXPORT, **others}.items():
        store.disk.put(path, data)
    assert remove_exports(store) == sorted(others)
    assert store.uploads == OTHER_UPLOADS
    assert set(store.disk.files) == set(others)


def test_a_consolidation_aborts_only_uploads_of_those_before_it(tmp_path: Path) -> None:
    """A second consolidation clears what a dead one left, and nothing of others."""
    ckpt_storage.save(cases.state_of(1), tmp_path / "a", consolidate=True, sync_files=False)
    store = open_store(Location.of(tmp_path / "a"))
    names = ["model.safetensors", "adapter.bin"]
    uploads = {name: store.upload(f"hf/{name}") for name in names}
    for upload in uploads.values():
        upload.write_part(0, 0, [memoryview(b"data")], last=True)
    ckpt_storage.consolidate(tmp_path / "a")
    drafts = {path.name.partition(".tmp-")[0] for path in (tmp_path / "a/hf").glob(".*.tmp-*")}
    for upload in uploads.values():
        upload.abort()
    store.close()
    assert drafts == {f".{name}" for name in names[1:]}
