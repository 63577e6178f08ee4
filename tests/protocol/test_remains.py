"""What a killed process leaves beside `.metadata`, how far back a save looks, and publishing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import commit_tools as tools
import pytest
from local_stores import local_store
from posix_faults import FaultPosix
from s3_server import S3Server

from ckpt_storage import StorageError
from ckpt_storage.commit import attempt, cleaning, deletion, publishing
from ckpt_storage.commit.process import has_ended, process_identity
from ckpt_storage.format.names import STOCK_METADATA, begun_path, slot_path
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store

DAY_S = 24 * 3600

LEFT = (".metadata", "commits/00000009.json", ".ckpt-storage-probe-0123456789abcdef")


def leave(root: Path, age_s: float) -> list[Path]:
    """Leave what a kill does: temporary files of a given age, and a probe."""
    paths = []
    for name in LEFT:
        folder, _, base = name.rpartition("/")
        is_probe = base.startswith(".ckpt-storage")
        path = root / folder / (base if is_probe else f".{base}.tmp-0123456789abcdef")
        path.write_bytes(b"half")
        moment = path.stat().st_mtime - age_s
        os.utime(path, (moment, moment))
        paths.append(path)
    return paths


@pytest.mark.parametrize("ends", [cleaning.free_leftovers, deletion.delete])
def test_old_temporary_files_go(tmp_path: Path, ends: Callable[[Store], object]) -> None:
    """A save and a deletion remove those that are older than a day, and no younger ones."""
    store = local_store(str(tmp_path), sync_files=False)
    tools.saved(store)
    young = leave(tmp_path, DAY_S / 2)
    ends(store)
    assert all(path.exists() for path in young)
    old = leave(tmp_path, DAY_S + 60)
    ends(store)
    assert [path for path in old if path.exists()] == []


def test_a_deleted_checkpoints_folder_goes_whatever_lay_in_it(tmp_path: Path) -> None:
    """With the tombstone go temporary files and probes, and so the folder."""
    root = tmp_path / "id"
    store = local_store(str(root), sync_files=False)
    tools.saved(store)
    leave(root, 8 * DAY_S)
    tools.deleted(store)
    leave(root, 8 * DAY_S)
    for path in (root / "commits").iterdir():
        os.utime(path, (0, 0))
    assert deletion.remove_tombstone(store)
    assert list(tmp_path.iterdir()) == []


def test_freeing_looks_no_further_back_than_what_it_frees() -> None:
    """An attempt that died needs only the slots since it began, however many there are."""
    disk, count = tools.Disk(), 200
    store = tools.DictStore(disk)
    for _ in range(count):
        tools.saved(store)
    cleaning.free_leftovers(store)
    dead = tools.attempted(store)
    disk.clock_s += 2 * DAY_S
    for _ in range(2):
        tools.saved(store)
    again = store.failing()
    assert dead.save_id in cleaning.free_leftovers(again)
    read = [path for operation, path in again.asked() if operation == "get"]
    # A few searches for the head, of 2 log2(n) reads each, and no walk.
    assert len([path for path in read if path.startswith("commits/")]) < count / 2


def test_an_attempt_of_another_container_is_not_dead(tmp_path: Path) -> None:
    """Pods on the host's network share its name; their process ids mean nothing to one another."""
    store = local_store(str(tmp_path), sync_files=False)
    ticket = attempt.begin(store, overwrite=True)
    body = tools.body_of((tmp_path / begun_path(ticket.save_id)).read_bytes())
    boot, namespace, pid, start = str(body["process"]).split("/")
    others = {
        "of another namespace": f"{boot}/1/999999999/{start}",
        "of another boot": f"another/{namespace}/999999999/{start}",
        "of an older release": None,
    }
    for process in others.values():
        (tmp_path / begun_path(ticket.save_id)).write_bytes(
            tools.sealed(body | {"process": process})
        )
        assert cleaning.free_dead(store, besides="") == []
    ended = f"{boot}/{namespace}/{pid}/1"
    (tmp_path / begun_path(ticket.save_id)).write_bytes(tools.sealed(body | {"process": ended}))
    assert cleaning.free_dead(store, besides="") == [ticket.save_id]


def test_a_process_is_known_by_its_start() -> None:
    """A process id that is used again is another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = process_identity(child.pid)
        assert identity
        assert not has_ended(identity)
        child.communicate(b"\n")
    assert has_ended(identity)
    assert has_ended(process_identity())
    place, _, start = identity.rpartition("/")
    assert has_ended(f"{place}/{int(start) + 1}")


class HangingSync(Posix):
    """The fsync of folders does not return before it is told to."""

    def __init__(self) -> None:
        self.is_hanging, self.go_on = False, threading.Event()

    def fsync_folder(self, path: str) -> None:
        """Hang if it is to."""
        if self.is_hanging:
            self.go_on.wait(30)
        super().fsync_folder(path)


def test_a_creation_whose_sync_still_runs_is_unknown(tmp_path: Path) -> None:
    """The name is there, but may not survive a power cut: neither success nor failure."""
    posix = HangingSync()
    backend = LocalBackend(str(tmp_path), posix=posix)
    policy = RetryPolicy(attempt_count=2, first_delay_s=0.0)
    store = Store(backend, url="file:///x", policy=policy, request_timeout_s=0.3)
    store.make_folders(["commits"])
    posix.is_hanging = True
    try:
        with pytest.raises(StorageError) as raised:
            store.create(slot_path(1), b"record")
    finally:
        posix.go_on.set()
    assert raised.value.kind == "unknown"
    assert (tmp_path / slot_path(1)).read_bytes() == b"record"


def test_publishing_reads_the_end_of_metadata_alone() -> None:
    """One suffix range of a few hundred bytes, however long the file is."""
    with S3Server() as server:
        server.create_bucket("bkt")
        store = open_store("s3://bkt/run", storage_options=server.storage_options)
        tools.saved(store)
        server.put("bkt", f"run/{STOCK_METADATA}", bytes(1 << 20) + b".")
        later = tools.attempted(store)
        record = tools.committed(store, later)
        server.reset_counters()
        assert tools.published(store, later, record)
        read = [r for r in server.requests if r.op == "get" and r.key.endswith(STOCK_METADATA)]
        assert sum(request.bytes_out for request in read) <= 1024 * len(read)
        assert len(read) <= 2


def test_publishing_ends_with_backoff_where_others_always_win(
    store: tools.DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of attempts, with a pause that grows after each."""
    own = tools.attempted(store)
    record = tools.committed(store, own)
    pauses: list[int] = []

    def lose(_: object, path: str, *_more: object) -> None:
        raise StorageError(f"{path} was replaced by another", kind="precondition")

    def pause(number: int) -> bool:
        pauses.append(number)
        return True

    monkeypatch.setattr(publishing, "compare_and_swap", lose)
    monkeypatch.setattr(store, "pause", pause)
    with pytest.raises(StorageError, match="attempts to publish"):
        publishing.publish_head(store, own=record, own_stock=own.stock_bytes)
    assert pauses == list(range(1, 11))


def test_completed_and_dropped_uploads_are_not_kept(tmp_path: Path) -> None:
    """A store that wrote many files remembers none of them, and holds no descriptor."""
    posix = FaultPosix()
    store = Store(LocalBackend(str(tmp_path), posix=posix), url="file:///x")
    for number in range(5):
        upload = store.upload(f"a{number}")
        upload.write_part(0, 0, [memoryview(b"1")], last=True)
        if number % 2:
            upload.complete(1)
        finished = weakref.ref(upload)
        del upload
        gc.collect()
        assert finished() is None
    assert posix.open_count == 0
