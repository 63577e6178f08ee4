"""Names that listings tell: what `Store.list` makes of them, and what backends do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_names import UNSAFE, RawBucket, bucket_of, tree
from local_stores import local_store
from s3_objects import S3Objects
from s3_server import S3Server

from ckpt_storage import UnsafeContentError
from ckpt_storage.format.names import path_flaw
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store


def test_a_server_that_lists_other_keys_is_not_believed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not begin with the prefix that was asked for is no object below the root."""
    server.put("bkt", "victim/secret", b"1")
    store = open_store("s3://bkt/run", storage_options=server.storage_options)
    answer = S3Objects._list  # noqa: SLF001  # what the server does

    def lie(self: S3Objects, request: Any, home: Any) -> Any:
        request.query.pop("prefix", None)
        return answer(self, request, home)

    monkeypatch.setattr(S3Objects, "_list", lie)
    assert store.list("") == []
    with pytest.raises(UnsafeContentError, match="victim/secret"):
        store.list("", unsafe_names="refuse")
    store.close()


def test_a_file_system_that_lists_other_names_is_not_believed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fsspec's listings are full names: those of another folder are none of this one."""
    with bucket_of("generic", {"x": b"1"}, server) as (url, _):
        other = {"name": "bkt/victim/secret", "size": 1, "type": "file"}
        monkeypatch.setattr(RawBucket, "ls", lambda *_args, **_options: [other])
        store = open_store(url)
        assert store.list("") == []
        with pytest.raises(UnsafeContentError, match="victim/secret"):
            store.list("", unsafe_names="refuse")
        store.close()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a/./b", "..", ".", "a\\..\\x", "a\n"])
def test_a_deletion_through_fsspec_removes_no_file_with_an_unsafe_name(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Servers resolve such names: what is removed must lie below the folder."""
    removed: list[str] = []
    monkeypatch.setattr(RawBucket, "rm_file", lambda _fs, path: removed.append(path), raising=False)
    with bucket_of("generic", {"saves/good": b"", f"saves/{name}": b""}, server) as (url, _):
        store = open_store(url)
        store.delete_folder("saves")
        store.close()
    assert removed == ["bkt/run/saves/good"]


@pytest.mark.parametrize("name", [".a\\..\\x", f".a\\..\\{'x' * 60}", ".a\n"])
def test_no_unfinished_file_with_an_unsafe_name_is_removed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file system with backslashes would remove a file outside the folder."""
    removed: list[str] = []
    monkeypatch.setattr(RawBucket, "rm_file", lambda _fs, path: removed.append(path), raising=False)
    end = ".tmp-0123456789abcdef"
    with bucket_of("generic", {f".good{end}": b"", f"{name}{end}": b""}, server) as (url, _):
        store = open_store(url)
        assert [upload.token for upload in store.open_uploads("")] == [f".good{end}"]
        store.abort_uploads("")
        store.close()
    assert removed == [f"bkt/run/.good{end}"]


ONE = memoryview(b"1")
WRITES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("link/new", b"1"),
    "create": lambda store: store.create("link/new", b"1"),
    "replace": lambda store: store.replace("link/sub/bait", b"1"),
    "upload": lambda store: store.upload("link/new").write_part(0, 0, [ONE], last=True),
    "make_folders": lambda store: store.make_folders(["link/new/folder"]),
    "delete": lambda store: store.delete(["link/sub/bait"]),
    "delete_version": lambda store: store.delete_version("link/sub/bait", "0-0"),
    "delete_folder": lambda store: store.delete_folder("link/sub"),
}


@pytest.fixture
def linked(tmp_path: Path) -> Store:
    """A root with a link to a folder outside, in which lie a file and an unfinished one."""
    outside, root = tmp_path / "outside" / "sub", tmp_path / "root"
    outside.mkdir(parents=True)
    root.mkdir()
    (outside / "bait").write_bytes(b"precious")
    (outside / ".bait.tmp-0123456789abcdef").write_bytes(b"precious, too")
    (root / "link").symlink_to(tmp_path / "outside")
    return local_store(root)


@pytest.mark.parametrize("call", WRITES.values(), ids=WRITES)
def test_a_link_out_of_a_local_root_is_not_written_through(
    linked: Store, tmp_path: Path, call: Callable[[Store], object]
) -> None:
    """The error names link and root; what lies there stays, and nothing is added."""
    before = tree(tmp_path / "outside")
    with pytest.raises(UnsafeContentError, match="symbolic link"):
        call(linked)
    assert tree(tmp_path / "outside") == before


def test_a_link_out_of_a_local_root_holds_nothing_to_clear_away(
    linked: Store, tmp_path: Path
) -> None:
    """Neither objects nor unfinished ones are listed below it; a deletion takes the link alone."""
    before = tree(tmp_path / "outside")
    assert linked.list("link") == []
    assert linked.list("link/sub") == []
    assert linked.open_uploads("link") == []
    assert linked.abort_uploads("") == 0
    assert linked.abort_uploads("link/sub") == 0
    linked.delete_folder("link")
    assert tree(tmp_path / "outside") == before
    assert linked.list("", recursive=False) == []


def test_a_link_to_a_file_is_read_through(linked: Store, tmp_path: Path) -> None:
    """As in the cache of huggingface_hub, whose snapshots are links."""
    (tmp_path / "root" / "file").symlink_to(tmp_path / "outside" / "sub" / "bait")
    assert linked.get("file").data == b"precious"
    assert [one.path for one in linked.list("")] == ["file"]
    linked.replace("file", b"other")
    assert (tmp_path / "outside" / "sub" / "bait").read_bytes() == b"precious"


@pytest.mark.parametrize(
    "name", ["a", "a/b", "...", ".a/b..", "epoch:5", "run:v1/x", "a b", "é%2e"]
)
def test_a_plain_name_has_no_flaw(name: str) -> None:
    """Dots within a part, colons of people and percent signs lead nowhere."""
    assert path_flaw(name) is None


@pytest.mark.parametrize("name", [*UNSAFE, ""])
def test_an_unsafe_name_has_one(name: str) -> None:
    """The reason is told."""
    assert path_flaw(name)
