"""A mirror: each checkpoint is copied, kept until it is, and restored from either root."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import manager_cases as cases
import pytest
from commit_tools import body_of, sealed
from prune_cases import name_of

import ckpt_storage
from ckpt_storage import CheckpointManager, CheckpointNotFoundError, FormatError, IntegrityError
from ckpt_storage.manager.policies import KeepEvery, KeepLatest


def mirrored(tmp_path: Path, **options: Any) -> CheckpointManager:
    return cases.manager_of(tmp_path / "fast", **{"mirror": tmp_path / "slow", **options})


def steps_in(root: Path) -> list[int | None]:
    return [info.step for info in ckpt_storage.list_checkpoints(root)]


def test_each_checkpoint_is_copied_and_both_roots_keep_their_own(tmp_path: Path) -> None:
    """The copies are the same saves, with their metrics; each root is pruned by its policies."""
    with mirrored(tmp_path, keep=KeepLatest(1), mirror_keep=KeepLatest(2)) as manager:
        for step in (1, 2, 3):
            cases.save(manager, step, metrics={"loss": step})
            assert manager.wait_mirrored(60)
        assert manager.wait_pruned(60)
        best = manager.best("loss", "min")
        assert best is not None
        assert (best.step, best.metrics) == (2, {"loss": 2.0})
        assert best.url.startswith(f"file://{tmp_path}/slow")
        assert [info.step for info in manager.all()] == [2, 3]
    assert steps_in(tmp_path / "fast") == [3]
    assert steps_in(tmp_path / "slow") == [2, 3]
    (fast,), (*_, slow) = map(ckpt_storage.list_checkpoints, (tmp_path / "fast", tmp_path / "slow"))
    assert (fast.save_id, fast.metrics) == (slow.save_id, slow.metrics)
    assert ckpt_storage.verify(tmp_path / "slow" / name_of(3)).ok


def test_what_the_mirror_would_not_keep_is_not_copied(tmp_path: Path) -> None:
    """Only multiples of 2 and the newest are sent; the rest does not wait at the first root."""
    with mirrored(tmp_path) as manager:
        cases.save(manager, 1, 2, 3, 4, 5)
    shutil.rmtree(tmp_path / "slow")
    keeps: dict[str, Any] = {"keep": KeepLatest(1), "mirror_keep": KeepEvery(2)}
    with mirrored(tmp_path, pruning="manual", **keeps) as manager:
        assert manager.wait_mirrored(60)
        assert steps_in(tmp_path / "slow") == [2, 4, 5]
        assert cases.pruned(manager).deleted == tuple(map(name_of, (1, 2, 3, 4)))


def test_nothing_goes_before_the_mirror_has_it(tmp_path: Path) -> None:
    """While the mirror cannot be written, what waits for it stays, with that reason."""
    (tmp_path / "slow").write_text("a file is in the way")
    with mirrored(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        cases.save(manager, 1, 2)
        assert not manager.wait_mirrored(60)
        with pytest.raises(ckpt_storage.CheckpointError):
            manager.prune()
    assert steps_in(tmp_path / "fast") == [1, 2]
    (tmp_path / "slow").unlink()
    with mirrored(tmp_path, keep=KeepLatest(1)) as manager:
        assert manager.wait_mirrored(60), "the next process goes on"
        assert manager.wait_pruned(60)
    assert steps_in(tmp_path / "fast") == [2]
    assert steps_in(tmp_path / "slow") == [1, 2]


def test_restore_takes_the_newest_sound_one_of_both(tmp_path: Path) -> None:
    """The first root where it has it; else the mirror: lost, damaged or older at the first."""
    with mirrored(tmp_path) as manager:
        cases.save(manager, 1, 2)
        assert manager.wait_mirrored(60)
        assert cases.restore(manager).info.url.startswith(f"file://{tmp_path}/fast")
    cases.damage(tmp_path / "fast" / name_of(2))
    with mirrored(tmp_path) as manager:
        found = cases.restore(manager, check="deep")
        assert (found.step, [one.name for one in found.skipped]) == (2, [name_of(2)])
        assert found.info.url.startswith(f"file://{tmp_path}/slow")
    shutil.rmtree(tmp_path / "fast")
    with mirrored(tmp_path) as manager:
        assert manager.latest() == manager.resume_info()
        assert cases.latest_step(manager) == cases.restore(manager).step == 2
        cases.save(manager, 3)
        assert cases.restore(manager).step == 3
        # `step=` loads that one alone, from either root; what is nowhere is an error.
        for step in (1, 3):
            assert cases.restore(manager, step=step, check="deep").step == step
        with pytest.raises(CheckpointNotFoundError, match="step 7"):
            manager.restore(cases.blank(), step=7)


def test_a_disk_that_comes_back_with_an_older_save_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two saves of one step the later one is restored, and is never replaced in the mirror."""
    old_id = "20200101T000000Z-0123456789abcdef"
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_storage.format.names.new_save_id", lambda: old_id)
        ckpt_storage.save(cases.state_of(2), tmp_path / "old" / name_of(2), sync_files=False)
    with mirrored(tmp_path) as manager:
        cases.save(manager, 2)
        assert manager.wait_mirrored(60)
    shutil.rmtree(tmp_path / "fast")
    (tmp_path / "old").rename(tmp_path / "fast")
    with mirrored(tmp_path) as manager:
        assert manager.wait_mirrored(60)
        assert cases.restore(manager).info.save_id != old_id
        assert [info.save_id == old_id for info in manager.all()] == [False]


def test_a_deletion_is_of_both_roots(tmp_path: Path) -> None:
    """What is deleted by the manager does not come back from the mirror, nor is it copied again."""
    with mirrored(tmp_path) as manager:
        cases.save(manager, 1, 2)
        assert manager.wait_mirrored(60)
        assert manager.delete(2)
        assert not manager.delete(2)
        assert cases.restore(manager).step == 1
        cases.save(manager, 3)
        assert manager.wait_mirrored(60)
    assert steps_in(tmp_path / "fast") == steps_in(tmp_path / "slow") == [1, 3]


@pytest.mark.parametrize(
    ("broken", "fast", "slow"), [(3, [4], [2, 4]), (4, [3, 4], [2, 3])], ids=["older", "newest"]
)
def test_a_damaged_one_is_not_waited_for(
    tmp_path: Path, broken: int, fast: list[int], slow: list[int]
) -> None:
    """It is told once; both roots are pruned, and keep the newest sound one."""
    with mirrored(tmp_path) as manager:
        cases.save(manager, 1, 2)
        assert manager.wait_mirrored(60)
    with mirrored(tmp_path, mirror=None) as manager:
        cases.save(manager, 3, 4)
    cases.damage(tmp_path / "fast" / name_of(broken))
    with mirrored(tmp_path, keep=KeepLatest(1), mirror_keep=KeepLatest(2)) as manager:
        assert not manager.wait_mirrored(60)
        assert steps_in(tmp_path / "slow") == slow
        assert manager.wait_pruned(60)
        assert steps_in(tmp_path / "fast") == fast
        cases.save(manager, 5)
        assert manager.wait_mirrored(60)
        assert manager.wait_pruned(60)
    assert steps_in(tmp_path / "fast") == [5]
    assert steps_in(tmp_path / "slow") == [slow[-1], 5]


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_step_that_cannot_be_read_is_no_missing_one(tmp_path: Path, *, is_newer: bool) -> None:
    """`step=` raises what is wrong with its record; a copy that is loaded instead is told."""
    with mirrored(tmp_path) as manager:
        cases.save(manager, 1)
        assert manager.wait_mirrored(60)
    slot = tmp_path / "fast" / name_of(1) / "commits/00000001.json"
    whole = slot.read_bytes()
    newer = sealed({**body_of(whole), "format": "ckpt_storage.commit/99"})
    slot.write_bytes(newer if is_newer else whole[:-5])
    with (
        mirrored(tmp_path, mirror=None) as manager,
        pytest.raises(FormatError if is_newer else IntegrityError, match="00000001"),
    ):
        manager.restore(cases.blank(), step=1)
    with mirrored(tmp_path) as manager:
        found = cases.restore(manager, step=1)
    assert found.info.url.startswith(f"file://{tmp_path}/slow")
    assert [one.url for one in found.skipped] == [f"file://{tmp_path}/fast/{name_of(1)}"]
