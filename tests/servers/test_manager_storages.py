"""`CheckpointManager` on every kind of storage, and what it asks of S3 at 10,000 checkpoints."""

from __future__ import annotations

import http.client
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import manager_cases as cases
import pytest
from commit_tools import sealed
from servers import Running

from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import prune
from ckpt_storage.manager.retention import Keep, KeepBest, KeepLatest, KeepNewerThan
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.store import Store
from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture(params=["local", "memory", "s3", "moto", "gcs", "azure"])
def root(request: pytest.FixtureRequest) -> Running:
    """A new root on each kind of storage."""
    if request.param == "local":
        return Running(url=str(request.getfixturevalue("tmp_path")), storage_options={})
    if request.param == "memory":
        return Running(url=f"memory://{uuid.uuid4().hex}", storage_options={})
    found: Running = request.getfixturevalue(f"{request.param}_root")
    return found


def store_of(root: Running) -> Store:
    """Return the store at a root."""
    return open_store(Location.of(root.url, root.storage_options), timeouts=Timeouts(request=30))


def test_a_run_is_saved_pruned_and_resumed(root: Running) -> None:
    """Saves, exports, retention, other tools' files and restore, alike on every storage."""
    store = store_of(root)
    options: dict[str, Any] = {"storage_options": root.storage_options, "mode": "thread"}
    with CheckpointManager(
        root.url, keep=KeepLatest(2) | KeepBest("loss", "min"), timeout=60, **options
    ) as manager:
        for step in range(1, 6):
            manager.save(
                step,
                cases.state_of(step),
                metrics={"loss": abs(step - 2)},
                consolidate=step == 3,
                sync_files=False,
            )
            if step == 1:
                store.make_folders(["tokenizer"])
                store.put("tokenizer/vocab.json", b"{}")
                store.put("step-00000001/notes.txt", b"mine")
        assert manager.wait_pruned(60)
        assert manager.last_prune is not None
        assert (manager.last_prune.failed, manager.last_prune.skipped) == ({}, {})
        assert [info.step for info in manager.all()] == [2, 4, 5]
        assert cases.restore(manager).step == 5
        report = manager.prune()
        assert report is not None
        assert report.deleted == ()
    left = [entry.path for entry in store.list("") if entry.path[-1:] != "/"]
    names = {path.partition("/")[0] for path in left if "/commits/" not in path}
    assert names == {"tokenizer", *(f"step-0000000{step}" for step in (2, 4, 5)), "step-00000001"}
    assert [path for path in left if path.startswith("step-00000001/")] == [
        "step-00000001/commits/00000001.json",
        "step-00000001/commits/00000002.json",
        "step-00000001/notes.txt",
    ]
    with CheckpointManager(root.url, keep=KeepNewerThan(3600), timeout=60, **options) as manager:
        report = manager.prune()
        assert report is not None
        assert report.deleted == (), "all are young, by the storage's clock"
    report = prune(root.url, KeepLatest(1), dry_run=False, storage_options=root.storage_options)
    assert report.deleted == ("step-00000002", "step-00000004")


SAVE_ID = "20260101T000000Z-%016x"


def commit_record(step: int) -> bytes:
    """Return a commit record, spelt without the package."""
    save_id = SAVE_ID % step
    reference = {"path": f"saves/{save_id}/manifest.json", "bytes": 2, "crc32c": "00000000"}
    return sealed(
        {
            "format": "ckpt_storage.commit/1",
            "type": "commit",
            "slot": 1,
            "write_id": f"{step:032x}",
            "head": {"slot": 1, "save_id": save_id},
            "save_id": save_id,
            "manifest": reference,
            "stock": None,
            "previous": None,
            "user": {"step": step, "metrics": {"loss": float(step)}},
            "created_at": "2026-01-01T00:00:00+00:00",
            "host": "h",
            "pid": 1,
        }
    )


LIST, READ, TIME = "list", "get", "head"

COUNT = 10_000
ODD_COUNT = 100
ODD = [1000 * number + 5 for number in range(1, ODD_COUNT + 1)]
EVEN = [10 * number for number in range(1, COUNT - ODD_COUNT + 1)]
STEPS = sorted({*EVEN, *ODD})
PAGES = COUNT // 1000
"""Requests that a listing of the root needs."""


@pytest.fixture(scope="module")
def many() -> Iterator[S3Server]:
    """A server with 10,000 committed checkpoints; 9,900 of the steps are multiples of 10."""
    with S3Server() as server:
        server.create_bucket("bkt")
        client = http.client.HTTPConnection(server.endpoint_url.removeprefix("http://"), timeout=30)
        for step in STEPS:
            folder = f"/bkt/run/step-{step:08d}"
            for path, data in (
                (f"{folder}/commits/00000001.json", commit_record(step)),
                (f"{folder}/saves/{SAVE_ID % step}/manifest.json", b"{}"),
            ):
                client.request("PUT", path, data)
                with client.getresponse() as answer:
                    assert answer.status == 200
                    answer.read()
        client.close()
        yield server


def asked(server: S3Server) -> Counter[str]:
    """Return how often each operation was asked for since the last look."""
    found = Counter(request.op for request in server.requests)
    server.reset_counters()
    return found


def manager_of(server: S3Server, keep: Keep) -> CheckpointManager:
    """Return a manager of the 10,000 that trusts the newest: there are no shards here."""
    manager = CheckpointManager(
        "s3://bkt/run",
        keep=keep,
        pruning="manual",
        storage_options=server.storage_options,
        timeout=120,
    )
    name = f"step-{STEPS[-1]:08d}"
    manager._root.found_sound(name, SAVE_ID % STEPS[-1])  # noqa: SLF001  # as if it had saved it
    return manager


def test_the_newest_of_10000_costs_a_listing_and_two_reads(many: S3Server) -> None:
    """`latest` reads no other checkpoint than the newest."""
    with manager_of(many, KeepLatest(1)) as manager:
        asked(many)
        latest = manager.latest()
        assert latest is not None
        assert latest.step == STEPS[-1]
        assert asked(many) == {LIST: PAGES, READ: 2}
