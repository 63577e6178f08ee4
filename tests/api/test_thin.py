"""`thin`: what is dropped and freed, what stays, and what happens beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import copy_cases as cases
import dcp_cases
import pytest
import spec_reader
from part_cases import KEPT, KEPT_FQNS, LARGE, STATE, holds, save
from s3_server import S3Server

import ckpt_storage
from ckpt_storage import errors, list_checkpoints, open_checkpoint, thin, verify
from ckpt_storage.commit import attempt, cleaning
from ckpt_storage.store import Location, open_store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run")
    return tmp_path / "run"


def saves_in(path: Path) -> set[str]:
    return {one.name for one in (path / "saves").iterdir()}


def test_what_is_dropped_is_freed_and_nothing_is_read(run: Path) -> None:
    """The file that stays is the same file; the save that was whole is gone."""
    (before,) = list_checkpoints(run.parent)
    kept = run / "saves" / str(before.save_id) / "__0_0.distcp"
    inode, usage = kept.stat().st_ino, used_bytes(run)
    report = thin(run, drop="optim*")
    assert report.sent_bytes == 0
    assert set(report.dropped) == {"optimizer.m", "optimizer.lr"}
    assert saves_in(run) == {report.save_id}
    assert (run / "saves" / report.save_id / "__0_0.distcp").stat().st_ino == inode
    assert used_bytes(run) < usage - 100_000 < usage
    assert report.freed_bytes > 120_000
    assert holds(run, KEPT)


def used_bytes(path: Path) -> int:
    """Return the bytes on the disk, each file once, as `du` counts."""
    stats = {os.lstat(one).st_ino: os.lstat(one) for one in path.rglob("*")}
    return sum(one.st_blocks * 512 for one in stats.values())


def test_every_reader_finds_what_stays(run: Path) -> None:
    """Ours, stock torch, and the one that was made from the format's page."""
    thin(run, drop="optim*")
    stranger = spec_reader.read(run)
    assert {*stranger.tensors, *stranger.blobs} == KEPT_FQNS
    assert holds(run, KEPT)
    with pytest.raises(errors.CheckpointError, match=r"optimizer\.m"):
        ckpt_storage.load(dcp_cases.zeros_like(STATE), run)


def test_lists_say_what_was_dropped_and_the_time_of_the_whole(run: Path) -> None:
    """Thinning changes no date: retention goes by it."""
    (before,) = list_checkpoints(run.parent)
    thin(run, drop="optim*")
    (after,) = list_checkpoints(run.parent)
    assert (after.part["of"], after.part["exclude"]) == (before.save_id, ["optim*"])
    assert (after.created_at, after.step) == (before.created_at, before.step)
    assert str(after.save_id)[:17] == str(before.save_id)[:17]


def test_again_there_is_nothing_to_drop_and_more_can_be(run: Path) -> None:
    """The record tells all that was ever dropped."""
    (before,) = list_checkpoints(run.parent)
    first = thin(run, drop="optim*")
    again = thin(run, drop=["optim*", "nothing"])
    assert (again.was_thin, again.save_id, again.freed_bytes) == (True, first.save_id, 0)
    second = thin(run, drop="model.b")
    assert not second.was_thin
    (after,) = list_checkpoints(run.parent)
    assert after.part["exclude"] == ["model.b", "optim*"]
    assert after.created_at == before.created_at
    assert saves_in(run) == {second.save_id}
    assert verify(run).ok


def test_of_a_mixed_file_what_stays_is_written_anew(tmp_path: Path) -> None:
    """Slower, and as right."""
    save(run := tmp_path / "run", groups=[])
    report = thin(run, drop="optim*")
    assert report.sent_bytes > 0
    assert saves_in(run) == {report.save_id}
    assert holds(run, KEPT)


@pytest.mark.parametrize("drop", ["*", [], [""], 5])
def test_a_choice_that_cannot_be_changes_nothing(run: Path, drop: Any) -> None:
    """All of it is for `delete`."""
    before = cases.files_below(run)
    with pytest.raises(errors.InvalidInputError):
        thin(run, drop=drop)
    assert cases.files_below(run) == before


def test_nothing_and_another_save_are_not_thinned(run: Path, tmp_path: Path) -> None:
    """`expected_save_id` is for those who decided about one save."""
    with pytest.raises(errors.CheckpointNotFoundError):
        thin(tmp_path / "none", drop="optim*")
    (info,) = list_checkpoints(run.parent)
    with pytest.raises(errors.CheckpointNotFoundError, match=str(info.save_id)):
        thin(run, drop="optim*", expected_save_id="20260101T000000Z-0123456789abcdef")
    thin(run, drop="optim*", expected_save_id=info.save_id)


def test_a_reader_under_way_hears_that_it_is_gone(run: Path) -> None:
    """Of what was dropped no byte of another save is returned."""
    with open_checkpoint(run) as checkpoint:
        thin(run, drop="optim*")
        with pytest.raises(errors.CheckpointGoneError):
            checkpoint["optimizer.m"].torch()


def test_a_save_that_began_before_goes_on_behind(run: Path) -> None:
    """It replaces the checkpoint anyway; the thinning was no other save."""
    begun: list[str] = []
    begin = attempt.begin

    def beginning(*args: Any, **options: Any) -> Any:
        ticket = begin(*args, **options)
        if not begun:
            begun.append(ticket.save_id)
            thin(run, drop="optim*")
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_storage.saves.session.begin", beginning)
        state = STATE | {"step": 8}
        save(run, state, overwrite=True)
    assert holds(run, state)
    assert cases.head_of(cases.files_below(run)) == begun[0]


def test_a_thinning_that_another_save_overtook_stops(run: Path) -> None:
    """What it would thin is not the checkpoint any more."""
    commit, place = attempt.commit, "ckpt_storage.commit.assembly.commit"
    state = STATE | {"step": 8}

    def overtaken(*args: Any, **options: Any) -> Any:
        patch.setattr(place, commit)
        save(run, state, overwrite=True)
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, overtaken)
        with pytest.raises(errors.CommitConflictError):
            thin(run, drop="optim*")
    assert holds(run, state)


def test_a_thinning_of_what_was_freed_meanwhile_says_that_it_is_gone(run: Path) -> None:
    """Two saves came between; the second freed the files that were to be linked."""
    begin = attempt.begin

    def overtaken(*args: Any, **options: Any) -> Any:
        patch.setattr(attempt, "begin", begin)
        for step in (8, 9):
            save(run, STATE | {"step": step}, overwrite=True)
        return begin(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "begin", overtaken)
        with pytest.raises(errors.CheckpointGoneError):
            thin(run, drop="optim*")
    assert holds(run, STATE | {"step": 9})


def test_a_thin_checkpoint_is_saved_over_copied_and_deleted(run: Path, tmp_path: Path) -> None:
    """As any other."""
    thin(run, drop="optim*")
    ckpt_storage.copy(run, tmp_path / "other" / "run")
    assert holds(tmp_path / "other" / "run", KEPT)
    (info,) = list_checkpoints(tmp_path / "other")
    assert info.part["exclude"] == ["optim*"]
    save(run, STATE, overwrite=True)
    assert holds(run, STATE)
    ckpt_storage.delete(run)
    assert list_checkpoints(run.parent) == []
    assert not list(run.rglob("*.distcp"))


def test_what_was_replaced_is_freed_though_the_thinner_died(run: Path) -> None:
    """By the next cleaning, by whomever: a save keeps its predecessor, a thinning does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "delete_attempt", lambda *_: None)
        report = thin(run, drop="optim*")
    assert len(saves_in(run)) == 2
    assert holds(run, KEPT)
    cleaning.free_leftovers(open_store(Location.of(run)))
    assert saves_in(run) == {report.save_id}
    assert holds(run, KEPT)


@contextlib.contextmanager
def buckets() -> Iterator[list[tuple[str, dict[str, Any] | None]]]:
    with S3Server() as server:
        server.create_bucket("bkt")
        memory = f"memory://{uuid.uuid4().hex}/run"
        yield [(memory, None), ("s3://bkt/run", dict(server.storage_options))]


def test_storages_that_copy_send_no_byte() -> None:
    """S3 copies what stays by itself, and so does memory."""
    with buckets() as places:
        for url, options in places:
            ckpt_storage.save(LARGE, url, storage_options=options)
            report = thin(url, drop="optim*", storage_options=options)
            assert (report.sent_bytes, report.copied_bytes) == (0, report.kept_bytes)
            assert verify(url, storage_options=options).ok
            store = open_store(Location.of(url, options))
            assert {one.path.split("/")[1] for one in store.list("saves")} == {report.save_id}
            with open_checkpoint(url, storage_options=options) as checkpoint:
                assert checkpoint["model"].torch().equal(LARGE["model"])


def test_thinning_is_safe_beside_a_copy_of_the_folder(run: Path, tmp_path: Path) -> None:
    """Plain tools see plain files."""
    thin(run, drop="optim*")
    shutil.copytree(run, tmp_path / "copied")
    assert holds(tmp_path / "copied", KEPT)
