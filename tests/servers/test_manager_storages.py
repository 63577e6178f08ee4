"""`CheckpointManager` on every kind of storage, and what it asks of S3 at 10,000 checkpoints."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import manager_cases as cases
import pytest
from commit_tools import body_of, sealed
from servers import Running

from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.prune import prune
from ckpt_storage.manager.retention import KeepBest, KeepLatest, KeepNewerThan
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.store import Store
from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture(params=["memory", "s3", "gcs", "azure"])
def root(request: pytest.FixtureRequest) -> Running:
    """A new root on each kind of storage; `test_manager` has local ones."""
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
        assert cases.pruned(manager).deleted == ()
    left = [entry.path for entry in store.list("") if entry.path[-1:] != "/"]
    names = {path.partition("/")[0] for path in left if "/commits/" not in path}
    assert names == {"tokenizer", *(f"step-0000000{step}" for step in (2, 4, 5)), "step-00000001"}
    assert [path for path in left if path.startswith("step-00000001/")] == [
        "step-00000001/commits/00000001.json",
        "step-00000001/commits/00000002.json",
        "step-00000001/notes.txt",
    ]
    with CheckpointManager(root.url, keep=KeepNewerThan(3600), timeout=60, **options) as manager:
        assert cases.pruned(manager).deleted == (), "all are young, by the storage's clock"
    report = prune(root.url, KeepLatest(1), dry_run=False, storage_options=root.storage_options)
    assert report.deleted == ("step-00000002", "step-00000004")


COUNT = 10_000


@pytest.fixture
def many(tmp_path: Path) -> Iterator[S3Server]:
    """A server with 10,000 committed checkpoints, of each tenth step."""
    cases.saved(tmp_path, 10)
    record = body_of((tmp_path / "step-00000010/commits/00000001.json").read_bytes())
    with S3Server() as server:
        server.create_bucket("bkt")
        for step in range(10, 10 * COUNT + 1, 10):
            path = f"run/step-{step:08d}/commits/00000001.json"
            server.put("bkt", path, sealed({**record, "user": {"step": step}}))
        yield server


def test_the_newest_of_10000_costs_a_listing_and_two_reads(many: S3Server) -> None:
    """`latest` reads no other checkpoint than the newest."""
    options: dict[str, Any] = {"storage_options": many.storage_options, "timeout": 120}
    with CheckpointManager("s3://bkt/run", **options) as manager:
        many.reset_counters()
        assert cases.latest_step(manager) == 10 * COUNT
    asked = Counter(request.op for request in many.requests)
    assert asked == {"list": COUNT // 1000, "get": 2}
