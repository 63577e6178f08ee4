"""The stores of a disk and of memory: the suite on both, and what is special about POSIX."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
from local_stores import error_of, local_store
from posix_faults import FaultPosix
from servers import Running
from suites import SuiteAt

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Rule

ODD_ROOT = "röot 100%25 +#[x]*{y}?~'\""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run" / ODD_ROOT)


class TestLocalBackend(SuiteAt):
    """The suite on a folder whose path is as odd as a path can be."""

    at = "folder"

    @pytest.fixture
    def folder(self, root: str) -> Running:
        return Running(url=root)


@pytest.fixture
def store(root: str) -> Store:
    store = local_store(root)
    store.make_folders(["saves/a", "commits"])
    return store


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_missing_folder_is_not_made_by_a_write(store: Store, root: str) -> None:
    """Only `make_folders` makes them; a write says who should have and asks about sharing."""
    for call in (
        lambda: store.put("nothing/x", b"x"),
        lambda: store.create("nothing/x", b"x"),
        lambda: store.upload("nothing/x").token(),
    ):
        error = error_of(call)
        assert error.kind == "not-found"
        assert f"{root}/nothing does not exist on this host" in str(error)
        assert "make_folders" in str(error)
        assert error.next_step is not None
        assert "share" in error.next_step
    assert not Path(root, "nothing").exists()


def test_folders_and_files_have_default_modes(root: str) -> None:
    """The umask decides who may read, as for any program; nothing is private by accident."""
    old = os.umask(0o027)
    try:
        store = local_store(root)
        store.make_folders(["saves"])
        store.put("saves/x", b"x")
        upload = store.upload("saves/y")
        upload.write_part(0, 0, [memoryview(b"y")], last=True)
        upload.complete(1)
    finally:
        os.umask(old)
    modes = [Path(root, name).stat().st_mode & 0o777 for name in ("saves", "saves/x", "saves/y")]
    assert modes == [0o750, 0o640, 0o640]


def test_temporary_files_are_hidden_and_swept(store: Store, root: str) -> None:
    """Exactly the names a draft gives are hidden and removed; look-alikes are objects."""
    drafts = [".x.tmp-0123456789abcdef", "..metadata.tmp-00000000000000ff"]
    alike = [".x.tmp-0123456789ABCDEF", ".x.tmp-0123456789abcde", "x.tmp-0123456789abcdef", ".y"]
    for name in drafts + alike:
        Path(root, "saves/a", name).write_bytes(b"left")
    Path(root, "saves", drafts[0]).write_bytes(b"left")
    assert [entry.path for entry in store.list("saves/a")] == sorted(
        f"saves/a/{name}" for name in alike
    )
    assert store.abort_uploads("saves/a") == 2
    assert names_in(Path(root, "saves/a")) == sorted(alike)
    assert store.abort_uploads("") == 1


def test_a_long_name_leaves_room_for_the_temporary_one(store: Store) -> None:
    """A name of 255 bytes can be written although the temporary name adds to it."""
    for name in ("n" * 255, "ü" * 127):
        store.put(f"saves/a/{name}", b"data")
        assert store.get(f"saves/a/{name}").data == b"data"
    error = error_of(lambda: store.put("saves/a/" + "n" * 256, b"data"))
    assert "ENAMETOOLONG" in str(error)
    assert store.abort_uploads("") == 0


@pytest.mark.parametrize(
    "name",
    [
        ".nfs000000000000abcd00000001",
        # libfuse, lib/fuse.c, hidden_name(): ".fuse_hidden%08x%08x".
        ".fuse_hidden0000000200000001",
    ],
)
def test_what_mounts_keep_of_removed_files_is_no_object(store: Store, root: str, name: str) -> None:
    """Removed files that are still open are not listed; a folder that holds only them may stay."""

    class Busy(Posix):
        """A mount on which a removed file is still open."""

        def unlink(self, path: str) -> None:
            if path.endswith(name):
                raise OSError(errno.EBUSY, "busy")
            super().unlink(path)

    store = local_store(root, posix=Busy())
    store.put("saves/a/x", b"x")
    Path(root, "saves/a", name).write_bytes(b"open")
    store.delete_folder("saves/a")
    assert store.list("") == []
    assert names_in(Path(root, "saves/a")) == [name]


def test_delete_folder_follows_no_link(store: Store, root: str, tmp_path: Path) -> None:
    """What a symbolic link leads to survives the deletion of the folder that holds the link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"data")
    Path(root, "saves/a/folder").symlink_to(outside)
    Path(root, "saves/a/file").symlink_to(outside / "precious")
    Path(root, "saves/whole").symlink_to(outside)
    assert [entry.path for entry in store.list("saves/a")] == ["saves/a/file"]
    assert store.abort_uploads("") == 0
    store.delete_folder("saves/a")
    store.delete_folder("saves/whole")
    assert not Path(root, "saves/a").exists()
    assert not Path(root, "saves/whole").is_symlink()
    assert (outside / "precious").read_bytes() == b"data"


@pytest.mark.parametrize("operation", ["open_read", "fstat", "preadv"])
def test_a_stale_file_is_opened_once_more(root: str, operation: str) -> None:
    """ESTALE once is mended by opening the file again; twice it is an error to retry later."""
    local_store(root).make_folders(["saves"])
    local_store(root).put("saves/x", b"data")
    once = FaultPosix([Rule(action="error", operation=operation, errno=errno.ESTALE)])
    quick = RetryPolicy(attempt_count=2, first_delay_s=0.001)
    assert local_store(root, posix=once, policy=quick).get("saves/x").data == b"data"
    assert once.open_count == 0
    twice = FaultPosix([Rule(action="error", operation=operation, errno=errno.ESTALE, hit_count=2)])
    target = memoryview(bytearray(4))
    error = error_of(lambda: local_store(root, posix=twice).read("saves/x", [(0, target)]))
    assert error.retryable
    assert twice.open_count == 0


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_there_is_no_create(root: str, number: int) -> None:
    """A file system without links cannot decide a create, and is told so; nothing stays."""
    local_store(root).make_folders(["commits"])
    no_link = Rule(action="error", operation="link", errno=number)
    with pytest.raises(UnsupportedByStoreError, match="own URL"):
        local_store(root, posix=FaultPosix([no_link])).create("commits/1", b"none")
    assert names_in(Path(root, "commits")) == []


def test_sync_files_false_leaves_out_only_syncs(root: str) -> None:
    """The calls without syncs are those with syncs, less fsync of files and folders."""

    def calls(*, sync_files: bool) -> list[str]:
        posix = FaultPosix()
        store = local_store(f"{root}-{sync_files}", sync_files=sync_files, posix=posix)
        store.make_folders(["saves"])
        store.put("saves/x", b"data")
        store.create("saves/y", b"data")
        store.replace("saves/x", b"other")
        store.delete(["saves/x"])
        return [call.operation for call in posix.script.calls]

    Path(root).parent.mkdir()
    synced = calls(sync_files=True)
    assert {"fsync", "fsync_folder"} <= set(synced)
    assert calls(sync_files=False) == [
        name for name in synced if name not in {"fsync", "fsync_folder"}
    ]


class TestMemory(SuiteAt):
    """Two backends on one root of this process."""

    at = "memory_root"

    @pytest.fixture
    def memory_root(self) -> Running:
        return Running(url=f"memory://{uuid.uuid4().hex}/run")


def test_users_of_fsspec_see_the_same_files() -> None:
    """What a store writes, fsspec's own file system reads, and the other way round."""
    place = uuid.uuid4().hex
    store = open_store(f"memory://{place}/run")
    fs = fsspec.filesystem("memory")
    store.put("x", b"ours")
    fs.pipe_file(f"/{place}/run/y", b"theirs")
    assert fs.cat_file(f"/{place}/run/x") == b"ours"
    assert store.get("y").data == b"theirs"
    assert [entry.path for entry in store.list("")] == ["x", "y"]
    store.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = Posix().open_new(str(tmp_path / "x"))
    yield opened
    os.close(opened)


@pytest.mark.parametrize("number", [None, errno.ENOTTY, errno.EIO])
def test_where_fsync_leaves_the_drives_cache_the_stronger_call_is_made(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """MacOS has F_FULLFSYNC; fsync follows where it is not known, never where it failed."""
    calls: list[str] = []

    def full(fd: int, command: int) -> int:
        os.fstat(fd)
        assert command == 51
        calls.append("full")
        if number is not None:
            raise OSError(number, os.strerror(number))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    syncs: list[Callable[[], None]] = [
        lambda: Posix().fsync(fd),
        lambda: Posix().fsync_folder(str(tmp_path)),
    ]
    for sync in syncs:
        calls.clear()
        with pytest.raises(OSError, match="error") if number == errno.EIO else nullcontext():
            sync()
        assert calls == (["full"] if number in {None, errno.EIO} else ["full", "fsync"])
