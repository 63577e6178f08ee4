"""Copies of a part: which values they hold, how their files came, and who reads them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from pathlib import Path
from stat import ST_INO
from typing import Any

import copy_cases as cases
import dcp_cases
import pytest
import spec_reader
from dcp_cases import same, seeded
from part_cases import KEPT, KEPT_FQNS, LARGE, STATE, holds, save
from rank_pool import run_ranks
from s3_server import S3Server

import ckpt_storage
from ckpt_storage import copy, errors, list_checkpoints, open_checkpoint, verify
from ckpt_storage.commit import attempt
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def shards_of(path: Path) -> list[Path]:
    """Return the shard files of the head."""
    head = cases.head_of(cases.files_below(path))
    return sorted((path / "saves" / str(head)).glob("*.distcp"))


def test_the_model_is_linked_and_the_optimizer_left_out(source: Path, target: Path) -> None:
    """No byte of a shard file is read or sent; the one file has two names."""
    report = copy(source, target, exclude="optim*")
    assert report.sent_bytes == report.read_bytes == 0
    assert report.copied_bytes == report.total_bytes > 0
    (shard,) = shards_of(target)
    assert shard.samefile(shards_of(source)[0])
    assert verify(target).ok
    assert verify(source).ok


def test_every_reader_finds_what_is_there(source: Path, target: Path) -> None:
    """Ours, stock torch, and the one that was made from the page of the format."""
    copy(source, target, exclude="optim*")
    assert holds(target, KEPT)
    stranger = spec_reader.read(target)
    assert {*stranger.tensors, *stranger.blobs} == KEPT_FQNS
    assert stranger.tensors["model.w"][1].tobytes() == dcp_cases.raw_bytes(STATE["model"]["w"])
    with open_checkpoint(target) as checkpoint:
        assert set(checkpoint) == {*stranger.tensors, *stranger.blobs}


def test_a_part_says_of_what_it_is_one(source: Path, target: Path) -> None:
    """Lists tell it by the commit record; the save id is another one, the step stays."""
    with open_checkpoint(source) as checkpoint:
        of = checkpoint.save_id
    copy(source, target, include=["model*", "step"], exclude="model.b")
    (info,) = [one for one in list_checkpoints(target.parent) if one.name == "dst"]
    assert info.part == {"of": of, "include": ["model*", "step"], "exclude": ["model.b"]}
    assert info.save_id != of
    assert str(info.save_id)[:17] == str(of)[:17]


def test_a_copy_of_a_copy_of_a_part_is_one_too(source: Path, target: Path, tmp_path: Path) -> None:
    """A plain copy of a part keeps its id and what is said of it."""
    copy(source, target, exclude="optim*")
    copy(target, tmp_path / "third")
    infos = {one.name: one for one in list_checkpoints(tmp_path)}
    assert infos["third"].part == infos["dst"].part != {}
    assert infos["third"].save_id == infos["dst"].save_id


def test_a_choice_of_everything_is_a_plain_copy(source: Path, target: Path) -> None:
    """Which shares no file: it may be meant as a second copy."""
    report = copy(source, target, include="*")
    (info,) = [one for one in list_checkpoints(target.parent) if one.name == "dst"]
    assert info.part == {}
    assert report.copied_bytes == 0
    assert not shards_of(target)[0].samefile(shards_of(source)[0])


def test_what_is_wanted_of_a_mixed_file_is_written_anew(target: Path, tmp_path: Path) -> None:
    """Its bytes are read, checked, and described by checksums of their own."""
    save(source := tmp_path / "src", groups=[])
    report = copy(source, target, exclude="optim*")
    assert report.copied_bytes == 0
    assert 0 < report.total_bytes < sum(one.stat().st_size for one in shards_of(source))
    assert holds(target, KEPT)
    assert set(spec_reader.read(target).tensors) == KEPT_FQNS - {"step"}


def test_damage_of_what_is_wanted_is_not_copied(target: Path, tmp_path: Path) -> None:
    """Of a file that is read; what is left out may be damaged."""
    save(source := tmp_path / "src", groups=[])
    (shard,) = shards_of(source)
    data = shard.read_bytes()
    wanted = dcp_cases.raw_bytes(STATE["model"]["w"])
    other = dcp_cases.raw_bytes(STATE["optimizer"]["m"])
    cases.flip(shard, data.index(wanted[:64]) + 9)
    with pytest.raises(errors.IntegrityError, match=r"model\.w"):
        copy(source, target, exclude="optim*")
    shard.write_bytes(data)
    cases.flip(shard, data.index(other[:64]) + 9)
    copy(source, target, exclude="optim*")
    assert verify(target).ok


def test_a_file_of_another_length_is_not_linked(source: Path, target: Path) -> None:
    """That much a look tells without reading it."""
    shard = shards_of(source)[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(errors.IntegrityError):
        copy(source, target, exclude="optim*")
    assert cases.head_of(cases.files_below(target)) is None


def test_linked_files_cannot_be_written_by_accident(source: Path, target: Path) -> None:
    """An edit of one checkpoint would change the other."""
    copy(source, target, exclude="optim*")
    assert shards_of(target)[0].stat().st_mode & 0o222 == 0


def test_either_checkpoint_may_be_deleted(source: Path, target: Path) -> None:
    """The other one stays whole."""
    copy(source, target, exclude="optim*")
    ckpt_storage.delete(source)
    assert verify(target).ok
    dcp_cases.load(found := dcp_cases.zeros_like(KEPT), target)
    assert same(found, KEPT)


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.EACCES]
)
def test_where_nothing_can_be_linked_the_bytes_are_copied(
    source: Path, target: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file system, too many links, no right, no such call."""
    link = Posix.link

    def refused(self: Posix, one: str, other: str) -> None:
        if one.endswith(".distcp"):
            raise OSError(number, os.strerror(number))
        link(self, one, other)

    monkeypatch.setattr(Posix, "link", refused)
    report = copy(source, target, exclude="optim*")
    assert report.copied_bytes == 0
    assert report.sent_bytes == report.total_bytes
    assert not shards_of(target)[0].samefile(shards_of(source)[0])
    assert verify(target).ok


def test_where_names_of_one_file_differ_the_bytes_are_copied(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program sshfs gives each name a number of its own, so a link is not seen as the file."""
    stat = Posix.stat

    def renumbered(self: Posix, path: str) -> os.stat_result:
        fields = list(stat(self, path))
        fields[ST_INO] += len(path)
        return os.stat_result(fields)

    monkeypatch.setattr(Posix, "stat", renumbered)
    report = copy(source, target, exclude="optim*")
    assert (report.copied_bytes, report.sent_bytes) == (0, report.total_bytes)
    assert verify(target).ok


def test_copies_never_reads_and_sends_every_byte(source: Path, target: Path) -> None:
    """Nothing is shared then."""
    report = copy(source, target, exclude="optim*", copies="never")
    assert (report.copied_bytes, report.sent_bytes) == (0, report.total_bytes)
    assert not shards_of(target)[0].samefile(shards_of(source)[0])


def test_a_wrong_copy_of_the_storage_is_read_and_sent(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google Cloud Storage reports the checksum of the copy: here another one than recorded."""
    plain = Store.copy_object

    def copied_wrongly(*args: Any, **options: Any) -> int:
        plain(*args, **options)
        return 1

    monkeypatch.setattr(Store, "copy_object", copied_wrongly)
    report = copy(source, target, exclude="optim*")
    assert (report.copied_bytes, report.sent_bytes) == (0, report.total_bytes)
    assert verify(target).ok


def test_another_copy_sends_nothing_and_another_choice_is_another_save(
    source: Path, target: Path
) -> None:
    """The id follows from source and names."""
    first = copy(source, target, exclude="optim*")
    assert copy(source, target, exclude=["optimizer.*"]).was_there
    with pytest.raises(errors.CheckpointExistsError):
        copy(source, target, include="model.w")
    second = copy(source, target, include="model.w", overwrite=True)
    assert second.save_id != first.save_id
    assert set(spec_reader.read(target).tensors) == {"model.w"}


def test_of_two_copies_at_once_one_stays(source: Path, target: Path) -> None:
    """Of the same part, to the same place: whatever their hosts and times, the first to commit."""
    commit, place = attempt.commit, "ckpt_storage.commit.assembly.commit"

    def overtaken(*args: Any, **options: Any) -> Any:
        patch.setattr(place, commit)
        patch.setattr("ckpt_storage.commit.assembly.socket.gethostname", lambda: "another")
        with contextlib.suppress(errors.CommitConflictError):
            copy(source, target, exclude="optim*")
        return commit(*args, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(errors.CommitConflictError):
        patch.setattr(place, overtaken)
        copy(source, target, exclude="optim*")
    assert holds(target, KEPT)
    assert copy(source, target, exclude="optim*").was_there


def test_in_memory_and_from_bucket_to_bucket() -> None:
    """The storage copies what is wanted whole."""
    with S3Server() as s3:
        s3.create_bucket("bkt")
        for root in (f"memory://{uuid.uuid4().hex}", "s3://bkt/run"):
            options = s3.storage_options if root.startswith("s3:") else None
            ckpt_storage.save(LARGE, f"{root}/a", storage_options=options)
            report = copy(f"{root}/a", f"{root}/b", exclude="optim*", storage_options=options)
            assert report.sent_bytes == 0
            assert report.copied_bytes == report.total_bytes
            assert verify(f"{root}/b", storage_options=options).ok


def test_a_part_of_a_checkpoint_of_others_is_refused(tmp_path: Path, target: Path) -> None:
    """And the message says what does it."""
    cases.saved_stock(cases.state_of(1), tmp_path / "src")
    with pytest.raises(errors.InvalidInputError, match="convert"):
        copy(tmp_path / "src", target, exclude="optim*")


@pytest.mark.parametrize(
    ("include", "exclude"), [("nothing*", None), (None, "nothing*"), (None, "*")]
)
def test_a_choice_of_nothing_is_refused(
    source: Path, target: Path, include: str | None, exclude: str | None
) -> None:
    """A pattern that matches nothing is likely misspelt."""
    with pytest.raises(errors.InvalidInputError):
        copy(source, target, include=include, exclude=exclude)
    assert not target.exists()


def save_on_rank(rank: int, folder: str) -> None:
    state = {"model": {f"w{rank}": seeded(rank, 500)}, f"optim.{rank}": seeded(9 + rank, 500)}
    if rank == 1:
        state = {"optim.1": seeded(10, 500)}
    save(f"{folder}/src", state)


def copy_on_rank(_rank: int, folder: str) -> int:
    import torch.distributed as dist  # noqa: PLC0415  # in a rank

    group = dist.group.WORLD
    return copy(f"{folder}/src", f"{folder}/dst", exclude="optim*", process_group=group).sent_bytes


def test_ranks_copy_together_what_ranks_saved(tmp_path: Path, target: Path) -> None:
    """A rank of which nothing is left has a manifest without files."""
    assert [one.failure for one in run_ranks(2, save_on_rank, str(tmp_path))] == [None, None]
    outcomes = run_ranks(2, copy_on_rank, str(tmp_path))
    assert [one.value for one in outcomes] == [0, 0]
    assert set(spec_reader.read(target).tensors) == {"model.w0"}
    assert verify(target).ok
    head = json.loads((target / "commits" / "00000001.json").read_text())["body"]
    assert len(list((target / "saves" / head["save_id"] / "ranks").iterdir())) == 2
