"""Damage to a file that checkpoints share by hard links: what a manager trusts and links after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
from reuse_cases import BASE, files_of, flip_a_byte, is_loaded, linked, state_of

import ckpt_storage
from ckpt_storage import CheckpointManager, IntegrityError, KeepLatest, verify
from ckpt_storage.inspect.verify import check_part
from ckpt_storage.store.store import Store

pytest.importorskip("xxhash", reason="the extra `reuse`")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """A manager whose steps 1 to 3 share a frozen file, in which a byte is wrong; step 0 does not.

    It has saved steps 1 to 3, so it knows them as sound.
    """
    ckpt_storage.save(state_of(0), tmp_path / "step-00000000", step=0)
    keep = KeepLatest(2)
    options: dict[str, Any] = {"reuse": True, "stable": "model.base.*", "pruning": "manual"}
    with CheckpointManager(tmp_path, keep=keep, **options) as made:
        for step in range(1, 4):
            made.save(step, state_of(step))
        (file,) = (file for fqns, file in files_of(folder(made, 3)).items() if {*fqns} == BASE)
        assert file.stat().st_nlink == 3
        flip_a_byte(file)
        yield made


def folder(manager: CheckpointManager, step: int) -> Path:
    """Return the folder of a step."""
    return Path(manager.url_of(step).removeprefix("file://"))


def find_damage(manager: CheckpointManager) -> None:
    """Restore step 3, which fails."""
    with pytest.raises(IntegrityError):
        manager.restore(dcp_cases.zeros_like(state_of()), step=3)


def test_a_file_that_is_known_to_be_damaged_is_not_linked(manager: CheckpointManager) -> None:
    """A restore of step 3 finds the damage; the next save shares no file with step 2 either."""
    find_damage(manager)
    manager.save(4, state_of(4))
    assert linked(folder(manager, 4)) == set()
    assert is_loaded(folder(manager, 4), state_of(4))
    manager.save(5, state_of(5))
    assert linked(folder(manager, 5)) == BASE
    assert is_loaded(folder(manager, 5), state_of(5))


def test_a_restore_of_some_values_vouches_for_no_others(manager: CheckpointManager) -> None:
    """After the damage a restore of step 2 reads the adapter only; its frozen file stays unused."""
    find_damage(manager)
    manager.restore({"model": {"lora": dcp_cases.zeros_like(state_of()["model"]["lora"])}}, step=2)
    manager.save(4, state_of(4))
    assert is_loaded(folder(manager, 4), state_of(4))


def test_a_prune_after_a_restore_of_some_values_reads_the_others(
    manager: CheckpointManager,
) -> None:
    """Steps 1 and 2, of which only the adapters were loaded after the damage, are not sound."""
    find_damage(manager)
    for step in (1, 2):
        adapter = {"lora": dcp_cases.zeros_like(state_of()["model"]["lora"])}
        manager.restore({"model": adapter}, step=step)
    manager.prune()
    restored = manager.restore(dcp_cases.zeros_like(state_of()))
    assert restored is not None
    assert restored.step == 0


def test_a_save_that_links_the_file_while_its_damage_is_found_is_no_base(
    manager: CheckpointManager,
) -> None:
    """Its link was made before; the save after it writes everything."""
    has_found = False

    def on_progress(_: object) -> None:
        nonlocal has_found
        if not has_found:
            has_found = True
            find_damage(manager)

    manager.save(4, state_of(4), progress=on_progress)
    assert has_found
    assert linked(folder(manager, 4)) == BASE
    manager.save(5, state_of(5))
    assert is_loaded(folder(manager, 5), state_of(5))


def test_a_save_that_waits_while_its_base_is_found_to_be_damaged_is_no_base(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a mirror finds the damage while the save waits for its name."""
    root, newest = manager._root, manager.latest()  # noqa: SLF001  # no other name for it
    assert newest is not None
    acquire = root.in_use.acquire

    def acquire_later(name: str, use: str, *, timeout_s: float) -> Any:
        root.record_damaged(newest, "a wrong byte")
        return acquire(name, use, timeout_s=timeout_s)

    with monkeypatch.context() as patched:
        patched.setattr(root.in_use, "acquire", acquire_later)
        manager.save(4, state_of(4))
    manager.save(5, state_of(5))
    assert is_loaded(folder(manager, 5), state_of(5))


def test_a_prune_keeps_the_only_checkpoint_without_the_damaged_file(
    manager: CheckpointManager,
) -> None:
    """Steps 1 and 2, saved by this manager, count as sound no longer."""
    find_damage(manager)
    manager.prune()
    restored = manager.restore(state := dcp_cases.zeros_like(state_of()))
    assert restored is not None
    assert restored.step == 0
    assert dcp_cases.same(state, state_of(0))


@pytest.mark.usefixtures("manager")
def test_damage_that_is_found_while_another_checkpoint_is_checked_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The check of step 2, which read no values, is repeated; the prune keeps step 0."""
    with CheckpointManager(tmp_path, keep=KeepLatest(2), pruning="manual") as other:
        newest, root = other.latest(), other._root  # noqa: SLF001  # no other name for it
        assert newest is not None

        def check_part_later(store: Store, *, deep: bool) -> str | None:
            save_id = check_part(store, deep=deep)
            if not deep:
                root.record_damaged(newest, "a wrong byte")
            return save_id

        with monkeypatch.context() as patched:
            patched.setattr("ckpt_storage.manager.root.check_part", check_part_later)
            other.prune()
        restored = other.restore(dcp_cases.zeros_like(state_of()))
    assert restored is not None
    assert restored.step == 0


def test_a_restore_skips_all_that_share_the_file(manager: CheckpointManager) -> None:
    """The next save over step 3 replaces it without `overwrite`, and is whole."""
    restored = manager.restore(dcp_cases.zeros_like(state_of()))
    assert restored is not None
    assert [skipped.name[-1] for skipped in restored.skipped] == ["3", "2", "1"]
    manager.save(3, state_of(30))
    assert is_loaded(folder(manager, 3), state_of(30))


@pytest.mark.parametrize("step", [1, 3])
def test_verify_says_that_others_share_the_damaged_file(
    manager: CheckpointManager, step: int
) -> None:
    """Each checkpoint that has the file reports it, and how many names it has."""
    report = verify(manager.url_of(step))
    (problem,) = report.problems
    assert report.link_counts == {problem.file: 3}
    assert "3 names" in problem.message
