"""Slots that are lost or damaged, `.metadata` of older saves, and what only looks like a save."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import commit_tools as tools
import pytest
import torch
from s3_server import S3Server

from ckpt_storage import errors, load, save, verify
from ckpt_storage.commit import attempt, publishing, slotlog
from ckpt_storage.commit.attempt import begin
from ckpt_storage.format.names import STOCK_METADATA, slot_path
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import open_store

SUBSETS = [lost for count in (1, 2, 3) for lost in itertools.combinations((1, 2, 3), count)]


def loaded(url: str | Path, **options: Any) -> float:
    state = {"w": torch.zeros(2)}
    load(state, url, **options)
    return float(state["w"][0])


def save_thrice(url: str | Path, **options: Any) -> None:
    for step in (1, 2, 3):
        more: dict[str, Any] = {"overwrite": step > 1, "step": step, **options}
        save({"w": torch.full((2,), float(step))}, url, **more)


@pytest.fixture
def thrice(tmp_path: Path) -> Path:
    save_thrice(tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("slot", [1, 2, 3])
def test_only_the_highest_slot_and_its_head_must_be_sound(tmp_path: Path, slot: int) -> None:
    """Damage in a superseded slot stops neither loads nor saves, and `verify` reports it."""
    run = tmp_path / "run"
    save_thrice(run)
    save({"w": torch.full((2,), 4.0)}, run, overwrite=True, step=4)
    flip(run / slot_path(slot))
    assert loaded(run) == 4.0
    assert slot_path(slot) in {problem.file for problem in verify(run).problems}
    save({"w": torch.full((2,), 5.0)}, run, overwrite=True, step=5)
    assert loaded(run) == 5.0


def test_a_deleted_checkpoint_is_deleted_whatever_its_older_slots_hold(
    store: tools.DictStore,
) -> None:
    """The record says so that is the highest slot."""
    tools.saved(store)
    tools.deleted(store)
    store.disk.put(slot_path(1), b"damaged")
    assert tools.begun(store, overwrite=False).last_slot == 2


def check_newest_or_nothing(url: str | Path, **options: Any) -> None:
    """Assert that step 3 is loaded or refused, and that a save is refused or can be loaded."""
    with contextlib.suppress(errors.FormatError):
        assert loaded(url, **options) == 3.0
    try:
        save({"w": torch.full((2,), 9.0)}, url, overwrite=True, step=9, **options)
    except errors.FormatError as error:
        message = str(error)
    else:
        assert loaded(url, **options) == 9.0
        return
    assert "Restore commits/ from a copy" in message


@pytest.mark.parametrize("lost", SUBSETS, ids=str)
def test_lost_slots_never_give_an_older_step(thrice: Path, lost: tuple[int, ...]) -> None:
    """The newest is loaded or nothing; a save is refused or can be loaded afterwards."""
    for slot in lost:
        (thrice / slot_path(slot)).unlink()
    check_newest_or_nothing(thrice)


def test_on_a_disk_a_gap_is_seen_without_metadata(thrice: Path) -> None:
    """A listing shows that there are slots above the gap."""
    (thrice / slot_path(2)).unlink()
    (thrice / STOCK_METADATA).unlink()
    with pytest.raises(errors.FormatError, match="commits/"):
        loaded(thrice)


@pytest.mark.parametrize("lost", SUBSETS, ids=str)
def test_on_an_object_store_no_save_is_invisible(lost: tuple[int, ...]) -> None:
    """As on a disk; `.metadata` tells of the lost slots."""
    with S3Server() as server:
        server.create_bucket("bkt")
        options: dict[str, Any] = {"storage_options": server.storage_options}
        save_thrice("s3://bkt/run", **options)
        open_store("s3://bkt/run", **options).delete([slot_path(slot) for slot in lost])
        check_newest_or_nothing("s3://bkt/run", **options)


def test_what_others_commit_during_the_check_is_not_lost(
    disk: tools.Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk, whose listing may name slots that were created after the log was read."""
    store = tools.DictStore(disk, replace(tools.BLIND, is_remote=False))
    tools.saved(store)
    before, listed = slotlog.read_log(store), slotlog.listed_slots
    saves = [tools.saved] * 2

    def listed_later(of: Any) -> Any:
        monkeypatch.setattr(slotlog, "listed_slots", listed)
        if saves:
            saves.pop()(store)
        monkeypatch.setattr(slotlog, "listed_slots", listed_later)
        return listed(of)

    monkeypatch.setattr(slotlog, "listed_slots", listed_later)
    publishing.check_slots(store, before, None)
    assert slotlog.read_log(store).last_slot > 1


@tools.BOTH
def test_a_footer_above_the_tombstone_means_lost_slots(store: tools.DictStore) -> None:
    """A save after a deletion whose slot is lost is not deleted, and no save goes over it."""
    tools.saved(store)
    tools.deleted(store)
    tools.saved(store)
    store.disk.drop(slot_path(3))
    with pytest.raises(errors.FormatError, match="slot 3"):
        open_source(store, TransferOptions())
    for overwrite in (True, False):
        with pytest.raises(errors.FormatError, match="slot 3"):
            begin(store, overwrite=overwrite)


@tools.BOTH
def test_a_commit_without_stock_metadata_removes_the_older_one(store: tools.DictStore) -> None:
    """Else torch's own readers would load the older save."""
    tools.saved(store)
    later = tools.attempted(store)
    attempt.commit(store, later.ticket, manifest=later.manifest, stock=None)
    assert tools.seen(store.disk.files).stock != later.save_id
    assert publishing.roll_forward(store, later.save_id) is False
    assert STOCK_METADATA not in store.disk.files
    assert slotlog.read_log(store).head is not None


@pytest.mark.parametrize("left", ["saves/", "saves/.ckpt-storage-probe-0123456789abcdef", "fence"])
def test_what_is_no_attempt_is_no_save_in_progress(tmp_path: Path, left: str) -> None:
    """Empty folders, probes and fences of attempts that were freed are no checkpoint."""
    (tmp_path / "run" / "saves").mkdir(parents=True)
    (tmp_path / "run" / "commits").mkdir()
    store = open_store(tmp_path / "run")
    if left == "fence":
        tools.fenced(store, "20260101T000000Z-0123456789abcdef")
    elif not left.endswith("/"):
        (tmp_path / "run" / left).write_bytes(b"probe")
    with pytest.raises(errors.CheckpointNotFoundError):
        load({"w": torch.zeros(2)}, tmp_path / "run")


def test_a_deletion_shows_behind_a_fence(tmp_path: Path) -> None:
    """A fence that was put behind a tombstone does not make it a save in progress."""
    store = open_store(tmp_path)
    tools.saved(store)
    tools.deleted(store)
    tools.fenced(store, "20260101T000000Z-0123456789abcdef")
    with pytest.raises(errors.CheckpointGoneError, match="deleted"):
        load({"w": torch.zeros(2)}, tmp_path)


def test_a_fence_without_its_head_is_refused(store: tools.DictStore) -> None:
    """A record that lacks `head` says nothing about whether there is a checkpoint."""
    tools.fenced(store, tools.saved(store))
    body = tools.body_of(store.disk.files[slot_path(2)])
    del body["head"]
    store.disk.put(slot_path(2), tools.sealed(body))
    with pytest.raises(errors.FormatError, match="head"):
        slotlog.read_log(store)
