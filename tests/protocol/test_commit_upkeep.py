"""What follows a commit: `.metadata` shows the head, what nobody needs is freed, and deletion."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import commit_tools as tools
import pytest
from commit_model import WEEK_S, gone
from fault_tools import each_fault
from hypothesis import given
from hypothesis import strategies as st
from local_stores import local_store
from s3_server import S3Server

from ckpt_storage import errors
from ckpt_storage.commit import attempt_files, cleaning, deletion, publishing
from ckpt_storage.commit.deletion import remove_tombstone
from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.format.commit_record import split_footer
from ckpt_storage.store import open_store
from ckpt_storage.store.backend import Backend, Capabilities, ObjectInfo
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash


@tools.BOTH
def test_a_rebased_commit_is_published_under_the_slot_it_got(store: tools.DictStore) -> None:
    """The copy was written for the slot aimed at; the footer names the one that was taken."""
    other, attempt = tools.attempted(store), tools.attempted(store)
    tools.fenced(store, other.save_id)
    tools.published(store, attempt, tools.committed(store, attempt))
    assert tools.seen(store.disk.files).footer == 2


@tools.BOTH
@pytest.mark.parametrize("harm", ["removed", "cut", "a footer that is no JSON", "an older copy"])
def test_rolling_forward_repairs_what_is_not_ours(store: tools.DictStore, harm: str) -> None:
    """A `.metadata` that is gone, cut or not of this save is put back, marker or not.

    However large one is that needs nothing, its last bytes are all that is asked, in one request.
    """
    older = tools.saved(store)
    older_bytes = store.disk.files[".metadata"]
    save_id = tools.saved(store)
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
    again = store.failing()
    assert publishing.roll_forward(again, save_id)
    assert again.asked() == [("tail", ".metadata")]


@tools.BOTH
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_damaged_copy_is_not_published(store: tools.DictStore, harm: str) -> None:
    """Rolling forward refuses a bad `stock.metadata`, and leaves the older view in place."""
    older = tools.saved(store)
    attempt = tools.attempted(store)
    tools.committed(store, attempt)
    path = f"saves/{attempt.save_id}/stock.metadata"
    data = store.disk.files[path]
    store.disk.drop(path)
    if harm == "damaged":
        store.disk.put(path, data[:9] + bytes([data[9] ^ 1]) + data[10:])
    assert not publishing.roll_forward(store, attempt.save_id)
    assert tools.seen(store.disk.files).stock == older
    with pytest.raises(errors.IntegrityError):
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


@tools.BOTH
@pytest.mark.parametrize("keep_previous", [0, 1, 2, 5])
def test_superseded_commits_are_freed(store: tools.DictStore, keep_previous: int) -> None:
    """The head and the newest before it stay, however old; nothing remains of the others.

    Where nothing is left over no slot is taken, and no history read.
    """
    ids = [tools.saved(store) for _ in range(5)]
    store.disk.clock_s += 100 * tools.DAY_S
    expected = ids[: max(0, 4 - keep_previous)]
    assert tools.cleaned(store, min_age_s=tools.DAY_S, keep_previous=keep_previous) == expected
    files, kept = store.disk.files, set(ids) - set(expected)
    assert {path.split("/")[1] for path in files if path.startswith("saves/")} == kept
    again, changes = store.failing(), store.disk.changes
    assert tools.cleaned(again, keep_previous=keep_previous) == []
    assert store.disk.changes == changes
    assert keep_previous > 1 or len(again.asked()) <= 7
    assert all(tools.is_whole(store.disk.files, save_id) for save_id in kept)


@tools.BOTH
def test_shards_go_first_and_the_manifest_last(store: tools.DictStore) -> None:
    """So that an attempt that is half deleted can still be recognised."""
    attempt = tools.attempted(store)
    attempt_files.delete_attempt(store, attempt.save_id)
    gone = [path for operation, path in store.asked() if operation == "delete"]
    named = [path for path in gone if path in tools.files_of(attempt.save_id)]
    assert named[0].endswith(".distcp")
    assert gone[-1].endswith("manifest.json")


@tools.BOTH
def test_attempts_that_never_committed_are_fenced_and_freed(store: tools.DictStore) -> None:
    """Old ones go, behind a fence that names them; young ones, commits and other files stay.

    Ages are by the storage's clock, which is years behind this machine's here.
    """
    head = tools.saved(store)
    store.put("saves/notes/mine.txt", b"not an attempt")
    old = tools.attempted(store)
    store.disk.clock_s += tools.DAY_S + 1
    young = tools.attempted(store)
    assert tools.cleaned(store, min_age_s=tools.DAY_S) == [old.save_id]
    files = store.disk.files
    now = tools.seen(files)
    assert now.slots[-1]["type"] == "fence"
    assert now.slots[-1]["fenced"] == [old.save_id]
    assert now.head == head
    assert tools.is_whole(files, head)
    assert tools.is_whole(files, young.save_id)
    assert "saves/notes/mine.txt" in files
    assert not [path for path in files if old.save_id in path]
    with pytest.raises(errors.CommitConflictError):
        tools.committed(store, old)
    assert tools.committed(store, young).save_id == young.save_id
    assert tools.cleaned(store, min_age_s=tools.DAY_S) == []


def test_age_is_told_by_the_storages_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a disk is that of the files on it, not this machine's, which may be off."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert local_store(str(tmp_path)).server_time(".probe") > tools.DAY_S


class Clockless(tools.DictBackend):
    """A storage that tells times in listings alone."""

    def stat(self, path: str) -> ObjectInfo:
        found: ObjectInfo = super().stat(path)
        return replace(found, modified_s=None)

    server_time = Backend.server_time


def test_without_a_clock_superseded_commits_go_and_attempts_stay() -> None:
    """An attempt whose age cannot be told keeps no other files from being freed."""
    store = tools.DictStore(tools.Disk(), tools.CAS, backend=Clockless)
    ids = [tools.saved(store) for _ in range(2)]
    dead = tools.attempted(store)
    ids += [tools.saved(store) for _ in range(2)]
    store.disk.clock_s += 100 * tools.DAY_S
    assert cleaning.free_leftovers(store) == ids[:2]
    assert tools.is_whole(store.disk.files, dead.save_id)


def test_an_attempt_that_died_before_its_first_file_is_freed(tmp_path: Path) -> None:
    """A temporary file of gigabytes shows in no listing; the attempt is found all the same."""
    store = local_store(str(tmp_path), sync_files=False)
    ticket = tools.begun(store)
    upload = store.upload(tools.files_of(ticket.save_id)[0])
    upload.write_part(0, 0, [memoryview(b"0123456789")], last=False)
    assert [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    assert tools.cleaned(store) == [ticket.save_id]
    assert list((tmp_path / "saves").iterdir()) == []


def test_open_uploads_of_a_dead_attempt_are_aborted(server: S3Server) -> None:
    """S3: parts that were sent and never completed are paid for until somebody aborts them."""
    store = open_store("s3://bkt/run", storage_options=server.storage_options)
    head = tools.saved(store)
    dead, alive = tools.begun(store), tools.begun(store)
    # Held, since an upload that nobody holds any more is aborted at once by some clients.
    uploads = []
    for ticket in (dead, alive):
        upload = store.upload(tools.files_of(ticket.save_id)[0])
        upload.write_part(0, 0, [memoryview(bytes(5 << 20))], last=False)
        uploads.append(upload)
    assert server.open_upload_count == 2
    tools.fenced(store, dead.save_id)
    attempt_files.delete_attempt(store, dead.save_id)
    assert server.open_upload_count == 1
    assert tools.cleaned(store) == [alive.save_id]
    assert server.open_upload_count == 0
    files = {key.removeprefix("run/"): data for key, data in server.dump("bkt").items()}
    assert tools.is_whole(files, head)


@tools.BOTH
def test_only_the_save_that_is_meant_is_deleted(
    store: tools.DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty id would mean what is being saved. And another save may commit after the look."""
    live = tools.attempted(store)
    with pytest.raises(errors.InvalidInputError, match="save id"):
        deletion.delete(store, expected_save_id="")
    assert deletion.delete(store, expected_save_id="none") is False
    assert tools.is_whole(store.disk.files, live.save_id)
    old, look = tools.saved(store), deletion.log_to_extend
    monkeypatch.setattr(
        deletion, "log_to_extend", lambda again: (tools.saved(store), look(again))[1]
    )
    assert deletion.delete(store, expected_save_id=old) is False
    assert tools.seen(store.disk.files).head not in {None, old}


@tools.BOTH
def test_deleting_again_does_not_harm_who_began_since(store: tools.DictStore) -> None:
    """The tombstone in force is found behind a fence, and names only what was before it."""
    tools.saved(store)
    tools.deleted(store)
    later = tools.attempted(store)
    tools.fenced(store, "20260101T000000Z-0123456789abcdef")
    tools.deleted(store)
    assert tools.is_whole(store.disk.files, later.save_id)
    tools.published(store, later, tools.committed(store, later))
    assert tools.seen(store.disk.files).stock == later.save_id


@tools.BOTH
def test_deleting_nothing_leaves_nothing(store: tools.DictStore) -> None:
    """Where no attempt and no slot is, no tombstone is put, and another's files stay.

    A folder that only looks like one of our attempts is another's.
    """
    for path in ("model.safetensors", ".metadata", "saves/models/weights.bin"):
        store.put(path, b"somebody else's")
    before = store.disk.files
    tools.deleted(store)
    assert store.disk.files == before


@tools.BOTH
def test_a_deleted_checkpoint_that_crashed_half_way_is_cleared_by_later_saves(
    store: tools.DictStore,
) -> None:
    """What a dead deleter left is freed as a leftover once the id is used again."""
    old = tools.saved(store)
    with pytest.raises(SimulatedCrash):
        tools.deleted(store.failing(Rule(action="crash_after", operation="put_absent")))
    assert tools.is_whole(store.disk.files, old)
    new = tools.written(store, tools.begun(store, overwrite=False))
    tools.published(store, new, tools.committed(store, new))
    store.disk.clock_s += tools.DAY_S + 1
    assert tools.cleaned(store, min_age_s=tools.DAY_S) == [old]
    now = tools.seen(store.disk.files)
    assert now.head == now.stock == new.save_id


def cut_anywhere(
    capabilities: Capabilities,
    before: Callable[[tools.DictStore], tools.T],
    ends: Callable[[tools.DictStore], object],
) -> Iterator[tuple[tools.DictStore, tools.T]]:
    """Yield what is left where `ends` died before, after or within any operation."""
    dry = tools.DictStore(tools.Disk(), capabilities)
    before(dry)
    ends(watched := dry.failing())
    actions: dict[Action, str] = {"crash_before": "", "crash_after": ""}
    faults = [*each_fault(watched.script.calls, actions | {"torn": "delete|delete_folder"})]
    assert len(faults) > 20
    for _, rule in faults:
        store = tools.DictStore(tools.Disk(), capabilities)
        told = before(store)
        # What fails by itself, such as a look at what is not there, has no after.
        with contextlib.suppress(SimulatedCrash):
            ends(store.failing(rule))
        yield store, told


@tools.BOTH
@pytest.mark.parametrize("ends", [cleaning.free_leftovers, tools.deleted])
def test_freeing_and_deleting_may_be_cut_anywhere_and_run_again(
    capabilities: Capabilities, ends: Callable[[tools.DictStore], object]
) -> None:
    """At every point the head is whole, or there is none; the next run leaves no trace."""

    def thrice(store: tools.DictStore) -> list[str]:
        return [tools.attempted(store).save_id, *(tools.saved(store) for _ in range(3))]

    deletes = ends is tools.deleted
    for store, (dead, first, *kept) in cut_anywhere(capabilities, thrice, ends):
        now = tools.seen(store.disk.files)
        if not deletes or now.head is not None:
            assert now.head == now.stock == kept[-1]
            assert all(tools.is_whole(store.disk.files, save_id) for save_id in kept)
        ends(store)
        left = [path for path in store.disk.files if not path.startswith("commits/")]
        assert not (left if deletes else [path for path in left if first in path])
        assert deletes or tools.is_whole(store.disk.files, dead)
        assert tools.seen(store.disk.files).head == (None if deletes else kept[-1])
        files = store.disk.files
        ends(store)
        assert store.disk.files == files


def test_a_removal_that_is_cut_leaves_nothing_to_load_and_may_go_on() -> None:
    """Slots go from the lowest; what is left is still deleted, also for who saves next."""
    for store, _ in cut_anywhere(tools.CAS, gone, remove_tombstone):
        assert read_log(store).head is None
        assert tools.saved(tools.DictStore(store.disk.copy()))
        assert remove_tombstone(store) or not store.disk.files


@pytest.mark.parametrize("age_days", [1, 5, 8])
def test_who_saves_where_a_checkpoint_was_deleted_is_found(
    store: tools.DictStore, age_days: int
) -> None:
    """On a young tombstone, behind a fence on an older one, and at slot 1 when it has ended."""
    gone(store, age_s=age_days * tools.DAY_S)
    latest = tools.saved(store)
    last = read_log(store)
    assert last.head is not None
    assert last.head.save_id == tools.seen(store.disk.files).head == latest
    assert last.last_slot == {1: 4, 5: 5, 8: 1}[age_days]
    store.disk.clock_s += WEEK_S
    assert not remove_tombstone(store)


def test_an_attempt_of_days_ago_is_not_committed(store: tools.DictStore) -> None:
    """Its deletion may be forgotten by now."""
    attempt = tools.attempted(store)
    old = replace(
        attempt, ticket=replace(attempt.ticket, began_s=attempt.ticket.began_s - 4 * tools.DAY_S)
    )
    with pytest.raises(errors.PhaseTimeoutError, match="not committed"):
        tools.committed(store, old)
    assert not [path for path in store.disk.files if path.startswith("commits/")]


def test_on_s3_nothing_stays_and_what_was_replaced_does(server: S3Server) -> None:
    """Each deletion bears the condition that the object is what was read."""
    store = open_store("s3://bkt/run", storage_options=server.storage_options)
    tools.saved(store)
    tools.deleted(store)
    slot = store.get("commits/00000001.json")
    assert slot.version is not None
    store.replace("commits/00000001.json", slot.data + b" ")
    with pytest.raises(errors.StorageError) as caught:
        store.delete_version("commits/00000001.json", slot.version)
    assert caught.value.kind == "precondition"
    store.replace("commits/00000001.json", slot.data)
    assert remove_tombstone(store, min_age_s=0)
    assert server.dump("bkt") == {}
    store.close()


def test_a_server_that_ignores_the_condition_keeps_it() -> None:
    """There a paused remover would delete what a saver began anew; so no slot goes."""
    with S3Server(ignore_preconditions=True) as server:
        server.create_bucket("bkt")
        store = open_store("s3://bkt/run", storage_options=server.storage_options)
        tools.saved(store)
        tools.deleted(store)
        before = server.dump()
        assert not remove_tombstone(store, min_age_s=0)
        assert server.dump() == before
        assert tools.saved(store)
        assert read_log(store).last_slot == 3
        store.close()


def test_on_a_disk_the_folder_goes_with_the_last_slot(tmp_path: Path) -> None:
    """Nothing is left to list; a file that took the place of a slot stays."""
    root = tmp_path / "id"
    store = local_store(str(root), sync_files=False)
    tools.saved(store)
    tools.deleted(store)
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
    latest = tools.saved(store)
    with pytest.raises(errors.CheckpointExistsError, match=latest):
        tools.begun(store, overwrite=False)
