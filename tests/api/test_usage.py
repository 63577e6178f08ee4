"""What `list_checkpoints`, `ls` and `show` say about groups and bytes."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from cli_tools import answer, call
from copy_cases import saved_stock, state_of
from part_cases import save
from s3_server import S3Server

import ckpt_storage
from ckpt_storage import StorageUsage, copy, list_checkpoints, thin


def usage_of(path: Path) -> StorageUsage:
    """Return the usage of one checkpoint."""
    infos = {info.name: info for info in list_checkpoints(path.parent, usage=True)}
    usage = infos[path.name].usage
    assert usage is not None
    return usage


def shard_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.distcp"))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save(tmp_path / "run" / "step-1")
    return tmp_path / "run" / "step-1"


def test_a_whole_checkpoint_has_groups_and_owns_its_bytes(whole: Path) -> None:
    """The bytes of the groups are those of the shard files, and a deletion frees all of them."""
    usage = usage_of(whole)
    assert list(usage.group_bytes) == ["", "optim*"]
    assert usage.group_bytes["optim*"] > 120_000 > usage.group_bytes[""]
    assert usage.apparent_bytes == usage.own_bytes == shard_bytes(whole)


def test_linked_bytes_are_own_bytes_of_neither_checkpoint(whole: Path) -> None:
    """A copy of a part shares its files with its source, until one of the two is deleted."""
    part = whole.with_name("step-2")
    copy(whole, part, exclude="optim*")
    before, usage = usage_of(whole), usage_of(part)
    assert list(usage.group_bytes) == [""]
    assert (usage.own_bytes, usage.apparent_bytes) == (0, shard_bytes(part))
    assert before.own_bytes == before.group_bytes["optim*"]
    ckpt_storage.delete(whole)
    assert usage_of(part).own_bytes == shard_bytes(part)


def test_a_thin_checkpoint_owns_what_stays(whole: Path) -> None:
    """The whole save, with which it shared files for a moment, is freed."""
    thin(whole, drop="optim*")
    usage = usage_of(whole)
    assert list(usage.group_bytes) == [""]
    assert usage.own_bytes == usage.apparent_bytes == shard_bytes(whole)


def test_bytes_are_counted_where_there_are_no_links() -> None:
    """In memory and in a bucket a copy owns its bytes."""
    with S3Server() as server:
        server.create_bucket("bkt")
        for root in (f"memory://{uuid.uuid4().hex}", "s3://bkt/run"):
            options = server.storage_options if root.startswith("s3:") else None
            save(f"{root}/step-1", storage_options=options)
            copy(f"{root}/step-1", f"{root}/step-2", exclude="optim*", storage_options=options)
            infos = list_checkpoints(root, usage=True, storage_options=options)
            usages = [info.usage for info in infos]
            assert [usage and set(usage.group_bytes) for usage in usages] == [{"", "optim*"}, {""}]
            assert all(usage and usage.own_bytes == usage.apparent_bytes > 0 for usage in usages)


def test_an_unreadable_manifest_keeps_its_checkpoint_in_the_list(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its usage is not known, and the log says why."""
    (manifest,) = whole.glob("saves/*/manifest.json")
    manifest.chmod(0o644)
    manifest.write_bytes(b"{}")
    (info,) = list_checkpoints(whole.parent, usage=True)
    assert info.usage is None
    assert "its usage is not known" in caplog.text


def test_usage_is_read_if_it_is_asked_for(whole: Path) -> None:
    """It costs a read of each manifest. Checkpoints of stock torch have none."""
    saved_stock(state_of(1), whole.with_name("stock"))
    assert [info.usage for info in list_checkpoints(whole.parent)] == [None, None]
    infos = list_checkpoints(whole.parent, usage=True)
    assert {info.name for info in infos if info.usage is None} == {"stock"}


def test_ls_and_show_print_groups_and_bytes(whole: Path) -> None:
    """In columns of `ls -l`, in lines of `show`, and as numbers in JSON."""
    copy(whole, whole.with_name("step-2"), exclude="optim*")
    (_, info) = answer("ls", "-l", whole.parent)["checkpoints"]
    assert info["usage"]["own_bytes"] == 0
    assert info["usage"]["group_bytes"] == {"": info["usage"]["apparent_bytes"]}
    assert answer("show", whole.with_name("step-2"))["usage"] == info["usage"]
    assert answer("ls", whole.parent)["checkpoints"][0]["usage"] is None
    head, first, second = call("ls", "-l", whole.parent).stdout.splitlines()
    assert head.split()[-6:-3] == ["size", "own", "groups"]
    assert "139 kB  122 kB  other 16.6 kB, optim* 122 kB" in first
    assert "optim* 12" in first
    assert " 0 B  other 16.6 kB" in second
    text = call("show", whole).stdout
    assert "groups          other 16.6 kB, optim* 122 kB" in text
    assert "own bytes       122 kB" in text
