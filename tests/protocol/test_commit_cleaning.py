"""Freeing what nobody needs any more, and nothing else: superseded commits, dead attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from commit_tools import (
    BLIND,
    BOTH,
    CAS,
    DAY_S,
    DictStore,
    Disk,
    attempted,
    begun,
    cleaned,
    committed,
    fenced,
    files_of,
    is_whole,
    just_committed,
    saved,
    seen,
)
from local_stores import local_store

from ckpt_storage.commit import cleaning, delete
from ckpt_storage.errors import CommitConflictError
from ckpt_storage.store import open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.testing.faults import Rule, SimulatedCrash
from ckpt_storage.testing.s3_server import S3Server


@BOTH
@pytest.mark.parametrize("keep_previous", [0, 1, 2, 5])
def test_superseded_commits_are_freed(store: DictStore, keep_previous: int) -> None:
    """The head and the newest `keep_previous` before it stay; nothing remains of the others."""
    ids = [saved(store) for _ in range(5)]
    freed = cleaning.free_superseded(store, keep_previous=keep_previous)
    expected = ids[: max(0, 4 - keep_previous)]
    assert freed == expected
    files = store.disk.files
    assert {path.split("/")[1] for path in files if path.startswith("saves/")} == (
        set(ids) - set(expected)
    )
    assert cleaning.free_superseded(store, keep_previous=keep_previous) == []
    assert all(is_whole(files, save_id) for save_id in set(ids) - set(expected))


@BOTH
def test_what_metadata_names_is_not_freed_before_it_names_the_head(store: DictStore) -> None:
    """The head was never published: freeing publishes it first."""
    old = saved(store)
    just_committed(store)
    attempt, _ = just_committed(store)
    assert seen(store.disk.files).stock == old
    watched: list[bool] = []

    def gate(operation: str, path: str) -> None:
        del path
        if operation.startswith("delete"):
            watched.append(seen(store.disk.files).stock == attempt.save_id)

    store.gate = gate
    cleaning.free_superseded(store, keep_previous=0)
    assert watched
    assert all(watched)


def test_a_sweep_keeps_head_and_previous_however_old() -> None:
    """Age alone frees nothing that is committed and wanted."""
    for capabilities in (CAS, BLIND):
        store = DictStore(Disk(), capabilities)
        ids = [saved(store) for _ in range(5)]
        store.disk.clock_s += 100 * DAY_S
        assert cleaned(store, min_age_s=DAY_S) == ids[:3]
        assert all(is_whole(store.disk.files, save_id) for save_id in ids[3:])


@BOTH
def test_freeing_may_be_cut_anywhere_and_run_again(capabilities: Capabilities) -> None:
    """After a crash at any operation the head is whole, and the next run leaves no trace."""
    count = 0
    for action in ("crash_before", "crash_after", "torn"):
        for skip in range(200):
            store = DictStore(Disk(), capabilities)
            ids = [saved(store) for _ in range(3)]
            rule = Rule(
                action=action,
                operation="delete|delete_folder" if action == "torn" else "",
                skip_count=skip,
            )
            faulty = store.failing(rule)
            try:
                cleaning.free_superseded(faulty)
            except SimulatedCrash:
                count += 1
            else:
                break
            files = store.disk.files
            now = seen(files)
            assert now.head == now.stock == ids[2]
            assert is_whole(files, ids[2])
            assert is_whole(files, ids[1])
            cleaning.free_superseded(store)
            assert not [path for path in store.disk.files if ids[0] in path]
    assert count > 20


@BOTH
def test_shards_go_first_and_the_manifest_last(store: DictStore) -> None:
    """So that an attempt that is half deleted can still be recognised."""
    attempt = attempted(store)
    gone: list[str] = []
    store.gate = lambda operation, path: gone.append(path) if operation == "delete" else None
    delete.delete_attempt(store, attempt.save_id)
    named = [path for path in gone if path in files_of(attempt.save_id)]
    assert named[0].endswith(".distcp")
    assert gone[-1].endswith("manifest.json")


@BOTH
def test_attempts_that_never_committed_are_fenced_and_freed(store: DictStore) -> None:
    """Old ones go, behind a fence that names them; young ones, commits and other files stay."""
    head = saved(store)
    store.put("saves/notes/mine.txt", b"not an attempt")
    old = attempted(store)
    store.disk.clock_s += DAY_S + 1
    young = attempted(store)
    assert cleaned(store, min_age_s=DAY_S) == [old.save_id]
    files = store.disk.files
    now = seen(files)
    assert now.slots[-1]["type"] == "fence"
    assert now.slots[-1]["fenced"] == [old.save_id]
    assert now.head == head
    assert is_whole(files, head)
    assert is_whole(files, young.save_id)
    assert "saves/notes/mine.txt" in files
    assert not [path for path in files if old.save_id in path]
    with pytest.raises(CommitConflictError):
        committed(store, old)
    assert committed(store, young).save_id == young.save_id
    assert cleaned(store, min_age_s=DAY_S) == []


@BOTH
def test_without_leftovers_no_slot_is_taken_and_no_history_read(store: DictStore) -> None:
    """Looking for leftovers costs a listing and the search for the head."""
    for _ in range(20):
        saved(store)
        cleaning.free_superseded(store)
    calls: list[tuple[str, str]] = []
    store.gate = lambda operation, path: calls.append((operation, path))
    assert cleaned(store) == []
    assert len(calls) < 14
    assert calls[0] == ("list", "saves")


@pytest.mark.parametrize("wrong_by_s", [-DAY_S, DAY_S])
def test_age_is_told_by_the_storages_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_by_s: float
) -> None:
    """With the local clock off by a day, what is 23 hours old stays and what is 25 goes."""
    real = time.time
    store = local_store(str(tmp_path), sync_files=False)
    saved(store)
    ages = {23.0: attempted(store), 25.0: attempted(store)}
    for hours, attempt in ages.items():
        for path in (tmp_path / "saves" / attempt.save_id).rglob("*"):
            then = real() - hours * 3600
            os.utime(path, (then, then))
    monkeypatch.setattr(time, "time", lambda: real() + wrong_by_s)
    assert cleaned(store, min_age_s=DAY_S) == [ages[25.0].save_id]


def test_an_attempt_that_died_before_its_first_file_is_freed(tmp_path: Path) -> None:
    """A temporary file of gigabytes shows in no listing; the attempt is found all the same."""
    store = local_store(str(tmp_path), sync_files=False)
    grant = begun(store)
    upload = store.upload(files_of(grant.save_id)[0])
    upload.write_part(0, 0, [memoryview(b"0123456789")], last=False)
    assert [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    assert cleaned(store) == [grant.save_id]
    assert list((tmp_path / "saves").iterdir()) == []


def test_open_uploads_of_a_dead_attempt_are_aborted() -> None:
    """S3: parts that were sent and never completed are paid for until somebody aborts them."""
    with S3Server(min_part_bytes=10) as server:
        server.create_bucket("bkt")
        store = open_store("s3://bkt/run", storage_options=server.storage_options)
        head = saved(store)
        dead, alive = begun(store), begun(store)
        # Held, since an upload that nobody holds any more is aborted at once by some clients.
        uploads = []
        for grant in (dead, alive):
            upload = store.upload(files_of(grant.save_id)[0])
            upload.write_part(0, 0, [memoryview(bytes(5 << 20))], last=False)
            uploads.append(upload)
        assert server.open_upload_count == 2
        fenced(store, dead.save_id)
        delete.delete_attempt(store, dead.save_id)
        assert server.open_upload_count == 1
        assert cleaned(store) == [alive.save_id]
        assert server.open_upload_count == 0
        files = {key.removeprefix("run/"): data for key, data in server.dump().items()}
        assert is_whole(files, head)
