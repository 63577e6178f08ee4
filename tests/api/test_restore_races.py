"""What `restore` says that it loaded is what it loaded, whoever saves meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from manager_cases import blank, manager_of, pruned, saved, state_of, step_in

import ckpt_storage
from ckpt_storage.errors import CheckpointInProgressError, IntegrityError, StorageError
from ckpt_storage.inspect import verify
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.resume import Check
from ckpt_storage.manager.retention import KeepLatest
from ckpt_storage.manager.root import Root, Uses
from ckpt_storage.transfer.ranges import RangeReader


def overwrite(root: Path, marker: int) -> str | None:
    """Save step 2 anew with the state of another step; return the save id."""
    with CheckpointManager(root, timeout=60) as other:
        return other.save(2, state_of(marker), overwrite=True, sync_files=False).save_id


def check_restored(root: Path, ids: list[str | None], check: Check) -> None:
    """Restore, and compare with the save that was made meanwhile."""
    with CheckpointManager(root, timeout=60) as manager:
        state = blank()
        found = manager.restore(state, check=check)
    assert found is not None
    assert (found.step, found.info.save_id, found.skipped) == (2, ids[0], ())
    assert step_in(state) == 77


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_overwritten_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The save that is told is the one whose bytes are in the state."""
    saved(tmp_path, 1, 2)
    load = ckpt_storage.load
    ids: list[str | None] = []

    def slow(state: Any, url: Any, **options: Any) -> None:
        if when == "after":
            load(state, url, **options)
        if not ids:
            ids.append(overwrite(tmp_path, 77))
        if when == "before":
            load(state, url, **options)

    monkeypatch.setattr("ckpt_storage.manager.manager.load", slow)
    check_restored(tmp_path, ids, "read")


@pytest.mark.parametrize("is_freed", [False, True])
def test_what_is_overwritten_while_it_is_checked_is_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_freed: bool
) -> None:
    """A save that is superseded, and perhaps freed, in the middle of a check is not damaged."""
    saved(tmp_path, 1, 2)
    ids: list[str | None] = []

    class Slow(RangeReader):
        def run(self, *given: Any, **more: Any) -> None:
            if not ids:
                old = tmp_path / "step-00000002/saves"
                before = set(old.iterdir())
                ids.append(overwrite(tmp_path, 77))
                for path in before if is_freed else ():
                    shutil.rmtree(path)
            super().run(*given, **more)

    monkeypatch.setattr(verify, "RangeReader", Slow)
    check_restored(tmp_path, ids, "deep")


def test_what_is_overwritten_again_and_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for a job that saves over what is loaded; the error says so."""
    saved(tmp_path, 2)
    with CheckpointManager(tmp_path, timeout=60) as manager:
        slow = mock.Mock(side_effect=lambda *_, **__: overwrite(tmp_path, 3))
        monkeypatch.setattr("ckpt_storage.manager.manager.load", slow)
        with pytest.raises(CheckpointInProgressError, match="saved anew"):
            manager.restore(blank())


def test_damage_between_two_looks_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is damaged after the choice is skipped; without an older one it raises."""
    take = Uses.take

    def cut(uses: Uses, name: str, *given: Any, **more: Any) -> Any:
        slot = tmp_path / name / "commits/00000001.json"
        slot.write_bytes(slot.read_bytes()[:-5])
        return take(uses, name, *given, **more)

    saved(tmp_path, 2)
    with CheckpointManager(tmp_path, timeout=60) as manager:
        monkeypatch.setattr(Uses, "take", cut)
        with pytest.raises(IntegrityError, match="None of the 1 committed"):
            manager.restore(blank())


def test_a_restore_that_fails_leaves_nothing_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be looked at is pruned later by the same manager."""
    saved(tmp_path, 1, 2)
    away = mock.Mock(side_effect=StorageError("The storage is away.", kind="connection"))
    with manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(Root, "look_at", away)
            with pytest.raises(StorageError, match="away"):
                manager.restore(blank(), step=1)
        assert pruned(manager).deleted == ("step-00000001",)
