"""What follows a commit: `.metadata` shows the head, what nobody needs is freed, and deletion."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

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
    files_of,
    is_whole,
    published,
    saved,
    seen,
    written,
)
from hypothesis import given
from hypothesis import strategies as st
from local_stores import local_store

from ckpt_storage.commit import cleaning, publishing
from ckpt_storage.errors import CommitConflictError, IntegrityError, InvalidInputError
from ckpt_storage.format.commit_record import split_footer
from ckpt_storage.store import open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.testing.faults import Rule, SimulatedCrash
from ckpt_storage.testing.s3_server import S3Server


@BOTH
def test_a_rebased_commit_is_published_under_the_slot_it_got(store: DictStore) -> None:
    """The copy was written for the slot aimed at; the footer names the one that was taken."""
    other, attempt = attempted(store), attempted(store)
    fenced(store, other.save_id)
    published(store, attempt, committed(store, attempt))
    assert seen(store.disk.files).footer == 2


@BOTH
def test_rolling_forward_costs_two_requests_when_there_is_nothing_to_do(store: DictStore) -> None:
    """However large `.metadata` is, its length and its last bytes are all that is asked for."""
    save_id, again = saved(store), store.failing()
    assert publishing.roll_forward(again, save_id)
    assert again.asked() == [("stat", ".metadata"), ("read", ".metadata")]


@BOTH
@pytest.mark.parametrize("harm", ["removed", "cut", "a footer that is no JSON", "an older copy"])
def test_rolling_forward_repairs_what_is_not_ours(store: DictStore, harm: str) -> None:
    """A `.metadata` that is gone, cut or not of this save is put back, marker or not."""
    older = saved(store)
    older_bytes = store.disk.files[".metadata"]
    save_id = saved(store)
    good = store.disk.files[".metadata"]
    harmed = {
        "cut": good[:-1],
        "a footer that is no JSON": good[:-20] + b"\xff[{(" + good[-16:],
        "an older copy": older_bytes,
    }
    store.disk.drop(".metadata")
    if harm != "removed":
        store.disk.put(".metadata", harmed[harm])
    assert publishing.roll_forward(store, save_id)
    assert store.disk.files[".metadata"] == good
    assert older != save_id


@BOTH
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_damaged_copy_is_not_published(store: DictStore, harm: str) -> None:
    """Rolling forward refuses a bad `stock.metadata`, and leaves the older view in place."""
    older = saved(store)
    attempt = attempted(store)
    committed(store, attempt)
    path = f"saves/{attempt.save_id}/stock.metadata"
    data = store.disk.files[path]
    store.disk.drop(path)
    if harm == "damaged":
        store.disk.put(path, data[:9] + bytes([data[9] ^ 1]) + data[10:])
    assert not publishing.roll_forward(store, attempt.save_id)
    assert seen(store.disk.files).stock == older
    with pytest.raises(IntegrityError):
        publishing.publish_head(store)


FOOTERS = [
    b'{"slot":1e999,"save_id":"x"}',
    b'{"slot":Infinity,"save_id":"x"}',
    b"[" * 100_000,
    b'{"slot":{},"save_id":1}',
    b"[1]",
    b"null",
]


@given(
    st.builds(
        lambda text, length, end: text + b"%08d" % length + end,
        st.one_of(st.binary(max_size=40), st.sampled_from(FOOTERS)),
        st.integers(0, 99_999_999),
        st.sampled_from([b"CKPTSTO1", b""]),
    )
)
def test_no_footer_makes_the_reader_of_footers_fail(data: bytes) -> None:
    """Whatever stands at the end of a `.metadata`, a footer is found or it is not."""
    _, named = split_footer(data)
    assert named is None or isinstance(named.slot, int)


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
def test_a_sweep_keeps_head_and_previous_however_old(store: DictStore) -> None:
    """Age alone frees nothing that is committed and wanted."""
    ids = [saved(store) for _ in range(5)]
    store.disk.clock_s += 100 * DAY_S
    assert cleaned(store, min_age_s=DAY_S) == ids[:3]
    assert all(is_whole(store.disk.files, save_id) for save_id in ids[3:])


@BOTH
def test_shards_go_first_and_the_manifest_last(store: DictStore) -> None:
    """So that an attempt that is half deleted can still be recognised."""
    attempt = attempted(store)
    cleaning.delete_attempt(store, attempt.save_id)
    gone = [path for operation, path in store.asked() if operation == "delete"]
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
    again = store.failing()
    assert cleaned(again) == []
    assert len(again.asked()) < 14
    assert again.asked()[0] == ("list", "saves")


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
        cleaning.delete_attempt(store, dead.save_id)
        assert server.open_upload_count == 1
        assert cleaned(store) == [alive.save_id]
        assert server.open_upload_count == 0
        files = {key.removeprefix("run/"): data for key, data in server.dump().items()}
        assert is_whole(files, head)


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
        cleaning.delete(store, expected_save_id="")
    assert is_whole(store.disk.files, live.save_id)
    assert cleaning.delete(store, expected_save_id="none") is False
    assert is_whole(store.disk.files, live.save_id)


@BOTH
def test_what_replaces_the_save_to_delete_stays(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it commits between the look at the head and the slot that is taken."""
    old, look = saved(store), cleaning.log_to_extend
    monkeypatch.setattr(cleaning, "log_to_extend", lambda again: (saved(store), look(again))[1])
    assert cleaning.delete(store, expected_save_id=old) is False
    assert seen(store.disk.files).head not in {None, old}


@BOTH
def test_deleting_again_does_not_harm_who_began_since(store: DictStore) -> None:
    """The tombstone in force is found behind a fence, and names only what was before it."""
    saved(store)
    deleted(store)
    later = attempted(store)
    fenced(store, "20260101T000000Z-0123456789abcdef")
    deleted(store)
    assert is_whole(store.disk.files, later.save_id)
    published(store, later, committed(store, later))
    assert seen(store.disk.files).stock == later.save_id


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


@BOTH
@pytest.mark.parametrize("ends", [cleaning.free_superseded, deleted])
def test_freeing_and_deleting_may_be_cut_anywhere_and_run_again(
    capabilities: Capabilities, ends: Callable[[DictStore], object]
) -> None:
    """At every point the head is whole, or there is none; the next run leaves no trace."""
    count = 0
    for action in ("crash_before", "crash_after", "torn"):
        for skip in itertools.count():
            store = DictStore(Disk(), capabilities)
            first, *kept = [saved(store) for _ in range(3)]
            operation = "delete|delete_folder" if action == "torn" else ""
            rule = Rule(action=action, operation=operation, skip_count=skip)
            try:
                ends(store.failing(rule))
            except SimulatedCrash:
                count += 1
            else:
                break
            now = seen(store.disk.files)
            if ends is not deleted or now.head is not None:
                assert now.head == now.stock == kept[-1]
                assert all(is_whole(store.disk.files, save_id) for save_id in kept)
            ends(store)
            gone = [first] if ends is not deleted else [first, *kept]
            left = [path for path in store.disk.files if not path.startswith("commits/")]
            assert not [path for path in left if any(save_id in path for save_id in gone)]
            assert seen(store.disk.files).head == (None if ends is deleted else kept[-1])
    assert count > 20
