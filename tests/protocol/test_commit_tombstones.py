"""The slots of a deleted checkpoint end, whoever removes them, saves or reads meanwhile."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from commit_model import WEEK_S, gone
from commit_tools import (
    DAY_S,
    DictStore,
    Disk,
    attempted,
    begun,
    committed,
    deleted,
    saved,
    seen,
)
from local_stores import local_store

from ckpt_storage.commit.cleaning import remove_tombstone
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import (
    CheckpointExistsError,
    PhaseTimeoutError,
    StorageError,
)
from ckpt_storage.store import open_store
from ckpt_storage.testing.faults import Rule, SimulatedCrash
from ckpt_storage.testing.s3_server import S3Server


def test_an_old_tombstone_goes_without_a_trace(store_: DictStore) -> None:
    """After 7 days by the storage's clock nothing is left, and the id is new."""
    gone(store_, age_s=WEEK_S - 1)
    assert not remove_tombstone(store_)
    store_.disk.clock_s += 2
    assert remove_tombstone(store_)
    assert not store_.disk.files
    assert not remove_tombstone(store_)
    latest = saved(store_)
    assert seen(store_.disk.files).head == latest
    assert not remove_tombstone(store_)


@pytest.fixture
def store_() -> DictStore:
    """A store of objects."""
    return DictStore(Disk())


def test_a_storage_without_conditional_deletion_keeps_it() -> None:
    """It stays, and the next saver builds on it."""
    rule = Rule(action="error", operation="delete_version", kind="unsupported", hit_count=None)
    store = DictStore(Disk(), rules=[rule])
    gone(store)
    assert not remove_tombstone(store)
    latest = saved(store)
    assert seen(store.disk.files).head == latest
    assert seen(store.disk.files).slots[-1]["slot"] == 4


def test_a_removal_that_is_cut_leaves_nothing_to_load_and_may_go_on() -> None:
    """Slots go from the lowest; what is left is still deleted, also for who saves next."""
    count = 0
    for action in ("crash_before", "crash_after"):
        for skip in itertools.count():
            store = DictStore(Disk())
            gone(store)
            try:
                remove_tombstone(store.failing(Rule(action=action, skip_count=skip)))
            except SimulatedCrash:
                count += 1
            else:
                break
            assert read_log(store).head is None
            latest = saved(DictStore(store.disk.copy()))
            assert latest
            assert remove_tombstone(store) or not store.disk.files
    assert count > 10


@pytest.mark.parametrize("age_days", [1, 5, 8])
def test_who_saves_where_a_checkpoint_was_deleted_is_found(
    store_: DictStore, age_days: int
) -> None:
    """On a young tombstone, behind a fence on an older one, and at slot 1 when it has ended."""
    gone(store_, age_s=age_days * DAY_S)
    latest = saved(store_)
    last = read_log(store_)
    assert last.head is not None
    assert last.head.save_id == seen(store_.disk.files).head == latest
    assert last.last_slot == {1: 4, 5: 5, 8: 1}[age_days]
    store_.disk.clock_s += WEEK_S
    assert not remove_tombstone(store_)


def test_an_attempt_of_days_ago_is_not_committed(store_: DictStore) -> None:
    """Its deletion may be forgotten by now."""
    attempt = attempted(store_)
    old = replace(attempt, grant=replace(attempt.grant, began_s=attempt.grant.began_s - 4 * DAY_S))
    with pytest.raises(PhaseTimeoutError, match="not committed"):
        committed(store_, old)
    assert not [path for path in store_.disk.files if path.startswith("commits/")]


def test_on_s3_nothing_stays_and_what_was_replaced_does() -> None:
    """Each deletion bears the condition that the object is what was read."""
    with S3Server() as server:
        server.create_bucket("bkt")
        store = open_store("s3://bkt/run", storage_options=server.storage_options)
        saved(store)
        deleted(store)
        slot = store.get("commits/00000001.json")
        assert slot.version is not None
        store.replace("commits/00000001.json", slot.data + b" ")
        with pytest.raises(StorageError) as caught:
            store.delete_version("commits/00000001.json", slot.version)
        assert caught.value.kind == "precondition"
        store.replace("commits/00000001.json", slot.data)
        assert remove_tombstone(store, min_age_s=0)
        assert server.dump() == {}
        store.close()


def test_a_server_that_ignores_the_condition_keeps_it() -> None:
    """There a paused remover would delete what a saver began anew; so no slot goes."""
    with S3Server(ignore_preconditions=True) as server:
        server.create_bucket("bkt")
        store = open_store("s3://bkt/run", storage_options=server.storage_options)
        saved(store)
        deleted(store)
        before = server.dump()
        assert not remove_tombstone(store, min_age_s=0)
        assert server.dump() == before
        latest = saved(store)
        assert read_log(store).last_slot == 3
        assert latest
        store.close()


def test_on_a_disk_the_folder_goes_with_the_last_slot(tmp_path: Path) -> None:
    """Nothing is left to list; a file that took the place of a slot stays."""
    root = tmp_path / "id"
    store = local_store(str(root), sync_files=False)
    saved(store)
    deleted(store)
    for path in (root / "commits").iterdir():
        os.utime(path, (0, 0))
    slot = store.get("commits/00000001.json")
    assert slot.version is not None
    (root / "commits" / "other").write_bytes(slot.data)
    (root / "commits" / "other").rename(root / "commits" / "00000001.json")
    with pytest.raises(Exception, match="no longer"):
        store.delete_version("commits/00000001.json", slot.version)
    assert remove_tombstone(store)
    assert list(tmp_path.iterdir()) == []
    latest = saved(store)
    with pytest.raises(CheckpointExistsError, match=latest):
        begun(store, overwrite=False)
