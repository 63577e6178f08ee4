"""What a prune finds under the names of steps that is not its own: other tools' saves, links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from commit_tools import BOTH, CAS, DAY_S, DictStore, Disk, attempted, deleted, saved
from manager_cases import blank, names_in, state_of, step_in
from manager_cases import saved as saved_in
from prune_cases import EXPORT, at, heads, name_of, prune, pruner, save

import ckpt_storage
from ckpt_storage.commit.publishing import is_foreign
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.export.export_folder import remove_exports
from ckpt_storage.format.exports import Holder
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import delete
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.store import Location, open_store, probe
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.deadline import Deadline


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each prune find out anew what its storage can do."""
    monkeypatch.setattr(probe, "_RESULTS", {})


def manager_of(root: Path, **options: Any) -> CheckpointManager:
    """Return a manager that prunes when it is told to."""
    return CheckpointManager(root, pruning="manual", timeout=60, mode="thread", **options)


def test_a_stock_save_under_a_pruned_name_stays(tmp_path: Path) -> None:
    """Another tool saves where one of ours was deleted: it is listed, opened and left alone."""
    saved_in(tmp_path, 1, 2, 3)
    folder = tmp_path / name_of(1)
    assert ckpt_storage.prune(tmp_path, KeepLatest(2), dry_run=False).deleted == (name_of(1),)
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(folder))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):
        report = ckpt_storage.prune(tmp_path, KeepLatest(1), dry_run=False)
        assert report.failed == {}
    with manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        assert manager.prune() is not None
        assert [(one.step, one.format) for one in manager.all()] == [
            (1, "dcp"),
            (3, "ckpt_storage"),
        ]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    listed = ckpt_storage.list_checkpoints(tmp_path)
    assert [(one.name, one.format) for one in listed] == [
        (name_of(1), "dcp"),
        (name_of(3), "ckpt_storage"),
    ]
    delete(folder, missing_ok=True)
    state = blank()
    ckpt_storage.load(state, folder)
    assert step_in(state) == 1


@BOTH
def test_deleting_again_leaves_the_metadata_of_others(capabilities: Capabilities) -> None:
    """A tombstone's `.metadata` goes only if its footer is ours and of an earlier slot."""
    store = DictStore(Disk(), capabilities)
    saved(store)
    deleted(store)
    store.put(".metadata", b"stock")
    assert is_foreign(store, read_log(store))
    deleted(store)
    assert store.disk.files[".metadata"] == b"stock"


@BOTH
def test_an_export_of_a_stock_save_over_a_tombstone_stays(capabilities: Capabilities) -> None:
    """What was exported from another tool's checkpoint is not removed by a prune or a sweep."""
    disk = Disk()
    store = DictStore(disk, capabilities)
    for step in (1, 2):
        save(store, step)
    prune(store, KeepLatest(1), disk)
    attempted(at(store, 1))
    disk.put(f"{name_of(1)}/.metadata", b"stock")
    for path, data in EXPORT.items():
        disk.put(f"{name_of(1)}/{path}", data)
    disk.clock_s += 9 * DAY_S
    files = disk.files
    one = pruner(store, KeepLatest(1), disk)
    one.prune(Deadline("commit", 600))
    report = one.sweep(Deadline("commit", 600))
    assert report.skipped == {name_of(1): "another tool wrote it"}
    prune(store, KeepLatest(1), disk)
    assert disk.files == files


def test_folders_of_others_below_saves_are_no_attempts() -> None:
    """A folder that only looks like one of ours is not deleted, and gets no tombstone."""
    disk = Disk()
    store = DictStore(disk, CAS)
    disk.put("saves/models/weights.bin", b"of others")
    files = disk.files
    deleted(store)
    assert disk.files == files


def test_a_link_to_an_older_step_is_no_newer_checkpoint(tmp_path: Path) -> None:
    """A link counts for nothing, and what it means is kept as long as it is there."""
    saved_in(tmp_path, 4, 5)
    (tmp_path / name_of(10)).symlink_to(name_of(5))
    report = ckpt_storage.prune(tmp_path, KeepLatest(1), dry_run=False)
    assert report.deleted == (name_of(4),)
    saved_in(tmp_path, 7)
    report = ckpt_storage.prune(tmp_path, KeepLatest(1), dry_run=False)
    assert report.deleted == ()
    kept = {decision.name: decision.reasons for decision in report.kept}
    assert kept[name_of(5)] == (f"{name_of(10)} is a link to it",)
    assert kept[name_of(10)] == ("it is a link",)
    state = blank()
    ckpt_storage.load(state, tmp_path / name_of(10))
    assert step_in(state) == 5, "what the link means can still be loaded"


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    """A step that was moved elsewhere and linked to stays there."""
    saved_in(tmp_path / "run", 1, 2, 3)
    (tmp_path / "archive").mkdir()
    (tmp_path / "run" / name_of(1)).rename(tmp_path / "archive/one")
    (tmp_path / "run" / name_of(1)).symlink_to(tmp_path / "archive/one")
    with manager_of(tmp_path / "run", keep=KeepLatest(1)) as manager:
        report = manager.prune()
    assert report is not None
    assert report.deleted == (name_of(2),)
    assert names_in(tmp_path / "archive") == ["one"]


def test_two_names_of_one_save_are_kept_together() -> None:
    """Where links cannot be seen: a save that is kept is not deleted under another name."""
    disk = Disk()
    store = DictStore(disk, CAS)
    for step in (4, 5):
        save(store, step)
    for path, data in disk.files.items():
        if path.startswith(f"{name_of(5)}/"):
            disk.put(path.replace(name_of(5), name_of(10)), data)
    report = prune(store, KeepLatest(1), disk)
    assert report.deleted == (name_of(4),)
    assert set(heads(disk.files)) == {5, 10}
    kept = {decision.step: decision.reasons for decision in report.kept}
    assert kept[5] == (f"it is the same save as {name_of(10)}, and may be the same folder",)


def test_a_newest_that_is_another_save_than_was_judged_deletes_nothing() -> None:
    """Between plan and deletion the newest is saved anew: what was judged is gone (I18)."""
    disk = Disk()
    store = DictStore(disk, CAS)
    for step in (1, 2):
        save(store, step)
    one = pruner(store, KeepLatest(1), disk)
    plan = one.prune(Deadline("commit", 600), dry_run=True)
    save(store, 2)
    report = one.execute(plan, Deadline("commit", 600))
    assert report.deleted == ()
    assert "another save" in report.skipped[name_of(1)]


class Uploading(DictStore):
    """A store on which uploads are open: paths that any process may ask for."""

    uploads: set[str]

    def abort_uploads(self, prefix: str, *, only: Callable[[str], bool] | None = None) -> int:
        """Abort those that are meant."""
        below = {path for path in self.uploads if path.startswith(f"{prefix}/" if prefix else "")}
        meant = {path for path in below if only is None or only(path)}
        self.uploads -= meant
        return len(meant)


EXPORTED = {
    **EXPORT,
    "hf/.ckpt-storage/job.json": Holder(run_id="b" * 32, fingerprint="a" * 64).encode(),
}
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
    store = Uploading(Disk(), CAS)
    store.uploads = OUR_UPLOADS | OTHER_UPLOADS
    for path, data in {**EXPORTED, **others}.items():
        store.disk.put(path, data)
    assert remove_exports(store) == sorted(others)
    assert store.uploads == OTHER_UPLOADS
    assert set(store.disk.files) == set(others)


def test_a_consolidation_aborts_only_uploads_of_those_before_it(tmp_path: Path) -> None:
    """A second consolidation clears what a dead one left, and nothing of others."""
    ckpt_storage.save(state_of(1), tmp_path / "a", consolidate=True, sync_files=False)
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
