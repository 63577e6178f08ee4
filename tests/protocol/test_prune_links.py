"""Symbolic links at a root: what they pin stays, doubles do not count, none is followed."""

from __future__ import annotations

from pathlib import Path

import pytest
from manager_cases import blank, restore, saved, state_of, step_in
from prune_cases import name_of

import ckpt_storage
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import Pruner, delete, prune
from ckpt_storage.manager.retention import KeepLatest, StepNames
from ckpt_storage.manager.root import Root
from ckpt_storage.store import Location
from ckpt_storage.store.deadline import Deadline


def restored_from(folder: Path) -> int:
    """Load a checkpoint and return its step."""
    state = blank()
    ckpt_storage.load(state, folder)
    return step_in(state)


@pytest.mark.parametrize("target", [".", "commits", "saves"])
def test_a_link_of_any_name_pins_what_it_means(tmp_path: Path, target: str) -> None:
    """One calls a checkpoint, or what lies in it, by a name of one's own: it is not deleted."""
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "best").symlink_to(tmp_path / name_of(1) / target)
    (tmp_path / "elsewhere").symlink_to(tmp_path.parent)
    report = prune(tmp_path, KeepLatest(1), dry_run=False)
    assert report.deleted == (name_of(2),)
    kept = {decision.name: decision.reasons for decision in report.kept}
    assert kept[name_of(1)] == ("best is a link to it",)
    assert kept["best"] == kept["elsewhere"] == ("it is a link",)
    assert restored_from(tmp_path / name_of(1)) == 1


def test_a_link_to_a_file_pins_its_checkpoint(tmp_path: Path) -> None:
    """The weights of an export are linked to: the checkpoint that they belong to stays."""
    saved(tmp_path, 1, 2)
    (tmp_path / "weights.safetensors").symlink_to(f"{name_of(1)}/commits/00000001.json")
    report = prune(tmp_path, KeepLatest(1), dry_run=False)
    assert report.deleted == ()


@pytest.mark.parametrize("names_step_1", [False, True])
def test_a_link_made_after_the_plan_counts(tmp_path: Path, *, names_step_1: bool) -> None:
    """Between plan and deletion a checkpoint is pinned, or moved away and linked to."""
    saved(tmp_path / "run", 1, 2)
    root = Root(Location.of(tmp_path / "run"), StepNames())
    one = Pruner(root, KeepLatest(1))
    plan = one.prune(Deadline("commit", 60), dry_run=True)
    assert [decision.name for decision in plan.planned] == [name_of(1)]
    folder = tmp_path / "run" / name_of(1)
    if names_step_1:
        folder.rename(tmp_path / "archived")
        folder.symlink_to(tmp_path / "archived")
    else:
        (tmp_path / "run/best").symlink_to(name_of(1))
    report = one.execute(plan, Deadline("commit", 60))
    assert report.deleted == ()
    why = "it is a link" if names_step_1 else "best is a link to it"
    assert report.skipped == {name_of(1): why}
    assert restored_from(folder) == 1


def test_a_link_to_a_step_is_not_resumed_from(tmp_path: Path) -> None:
    """A link whose name says step 9 means step 1: the newest is still step 2, and all are two."""
    saved(tmp_path, 1, 2)
    (tmp_path / name_of(9)).symlink_to(name_of(1))
    with CheckpointManager(tmp_path, timeout=60) as manager:
        latest = manager.latest()
        assert latest is not None
        assert latest.step == 2
        assert restore(manager).step == 2
        assert [info.step for info in manager.all()] == [1, 2]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_step_that_lies_elsewhere_is_resumed_from_through_its_link(
    tmp_path: Path, *, is_elsewhere: bool
) -> None:
    """A step that was moved, to another disk or under another name, is there by its link alone."""
    root = tmp_path / "run"
    saved(root, 1, 2)
    place = tmp_path / "disk" if is_elsewhere else root / "precious"
    (root / name_of(2)).rename(place)
    (root / name_of(2)).symlink_to(place)
    with CheckpointManager(root, timeout=60) as manager:
        assert restore(manager).step == 2


def test_removing_a_link_leaves_what_it_means(tmp_path: Path) -> None:
    """Lightning removes the link "last": the link goes, the best checkpoint stays whole."""
    for name in ("best", "other"):
        ckpt_storage.save(state_of(1), tmp_path / name, sync_files=False)
    for target in ("best", "nowhere"):
        (tmp_path / "last").symlink_to(target)
        delete(tmp_path / "last", missing_ok=True)
        assert not (tmp_path / "last").is_symlink()
    assert restored_from(tmp_path / "best") == 1
