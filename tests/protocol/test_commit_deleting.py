"""Deleting a checkpoint: a tombstone first, then the files, whoever saves meanwhile."""

from __future__ import annotations

import pytest
from commit_tools import (
    BOTH,
    DAY_S,
    DictStore,
    Disk,
    attempted,
    begun,
    cleaned,
    committed,
    deleted,
    fenced,
    is_whole,
    published,
    saved,
    seen,
    written,
)

from ckpt_storage.commit.delete import delete
from ckpt_storage.errors import CommitConflictError, InvalidInputError
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.testing.faults import Rule, SimulatedCrash


@BOTH
def test_deleting_leaves_only_the_slots(store: DictStore) -> None:
    """No checkpoint, no `.metadata`, no attempt; the slots stay and tell what happened."""
    saved(store)
    saved(store)
    attempted(store)
    deleted(store)
    files = store.disk.files
    assert set(files) == {f"commits/{slot:08d}.json" for slot in (1, 2, 3)}
    assert seen(files).head is None
    deleted(store)
    assert store.disk.files == files


@BOTH
def test_no_save_id_to_expect_is_refused(store: DictStore) -> None:
    """An empty id where nothing is committed would mean whatever is being saved."""
    live = attempted(store)
    with pytest.raises(InvalidInputError, match="save id"):
        delete(store, expected_save_id="")
    assert is_whole(store.disk.files, live.save_id)
    assert delete(store, expected_save_id="none") is False
    assert is_whole(store.disk.files, live.save_id)


@BOTH
def test_a_paused_saver_meets_the_tombstone(store: DictStore) -> None:
    """A saver that began before the deletion fails; one that began after it commits."""
    saved(store)
    paused = attempted(store)
    deleted(store)
    with pytest.raises(CommitConflictError) as caught:
        committed(store, paused)
    assert caught.value.winner["type"] == "deleted"
    later = saved(store)
    now = seen(store.disk.files)
    assert now.head == now.stock == later


@BOTH
@pytest.mark.parametrize("with_fence", [False, True])
def test_deleting_again_does_not_harm_who_began_since(store: DictStore, with_fence: bool) -> None:  # noqa: FBT001
    """The tombstone in force is found, also behind a fence, and names only what was before it."""
    saved(store)
    deleted(store)
    later = attempted(store)
    if with_fence:
        fenced(store, "20260101T000000Z-0123456789abcdef")
    deleted(store)
    assert is_whole(store.disk.files, later.save_id)
    published(store, later, committed(store, later))
    assert seen(store.disk.files).stock == later.save_id


@BOTH
def test_deleting_may_be_cut_anywhere_and_run_again(capabilities: Capabilities) -> None:
    """At every point there is the whole old checkpoint or none, and the next run finishes."""
    count = 0
    for action in ("crash_before", "crash_after"):
        for skip in range(200):
            store = DictStore(Disk(), capabilities)
            saved(store)
            save_id = saved(store)
            faulty = store.failing(Rule(action=action, skip_count=skip))
            try:
                deleted(faulty)
            except SimulatedCrash:
                count += 1
            else:
                break
            now = seen(store.disk.files)
            assert now.head in {None, save_id}
            if now.head is not None:
                assert is_whole(store.disk.files, save_id)
                assert now.stock == save_id
            deleted(store)
            files = store.disk.files
            assert seen(files).head is None
            assert not [path for path in files if not path.startswith("commits/")]
    assert count > 20


@BOTH
def test_deleting_nothing_leaves_nothing(store: DictStore) -> None:
    """Where no attempt and no slot is, no tombstone is put, and another's files stay."""
    store.put("model.safetensors", b"somebody else's")
    store.put(".metadata", b"stock")
    deleted(store)
    assert set(store.disk.files) == {"model.safetensors", ".metadata"}


@BOTH
def test_a_deleted_checkpoint_that_crashed_half_way_is_cleared_by_later_saves(
    store: DictStore,
) -> None:
    """What a dead deleter left is freed as a leftover once the id is used again."""
    old = saved(store)
    with pytest.raises(SimulatedCrash):
        deleted(store.failing(Rule(action="crash_after", operation="put_absent")))
    assert is_whole(store.disk.files, old)
    new = written(store, begun(store, overwrite=False))
    published(store, new, committed(store, new))
    store.disk.clock_s += DAY_S + 1
    assert cleaned(store, min_age_s=DAY_S) == [old]
    now = seen(store.disk.files)
    assert now.head == now.stock == new.save_id
