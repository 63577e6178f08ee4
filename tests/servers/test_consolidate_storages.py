"""Exports, copies and managers on every kind of storage, read back by clients that are not ours."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import fsspec
import manager_cases
import pytest
import torch
from commit_tools import body_of, sealed
from consolidate_cases import check, check_report
from copy_cases import files_below, save, save_files, state_of
from limits import HANG_S
from rank_pool import RankPool
from s3_server import FaultRule, S3Server
from servers import Running

import ckpt_storage
from ckpt_storage import copy
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.policies import KeepBest, KeepLatest, KeepNewerThan
from ckpt_storage.manager.prune import prune
from ckpt_storage.options import Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.store import Store

DTYPES = ["bfloat16", "float8_e4m3fn", "bool", "int64"]
MIB = 1 << 20


@pytest.fixture(params=["s3_root", "moto_root", "gcs_root", "azure_root"])
def root(request: pytest.FixtureRequest) -> Running:
    running: Running = request.getfixturevalue(request.param)
    return running


def files_at(url: str, options: dict[str, Any]) -> dict[str, bytes]:
    protocol, _, path = url.partition("://")
    fs = fsspec.filesystem(protocol, **options, skip_instance_cache=True, use_listings_cache=False)
    found = fs.find(path)
    return {name.split(f"{path.strip('/')}/")[-1]: fs.cat_file(name) for name in found}


def test_every_storage_to_itself_and_a_disk(ranks: RankPool, root: Running, tmp_path: Path) -> None:
    """Ranks export tensors of every sharding to where they lie; and from and to a local folder."""
    given: dict[str, Any] = {"storage_options": root.storage_options}
    options = {**given, "max_file_bytes": 400_000}
    report = ranks.run(cases.save_and_export, root.url, options, DTYPES, world_size=2)[0]
    files = files_at(f"{root.url}/hf", dict(root.storage_options))
    check(files, cases.whole_state(DTYPES))
    check_report(report, files)
    assert ckpt_storage.verify(root.url, **given).ok
    consolidate(root.url, tmp_path / "out", **given)
    check(cases.files_in(tmp_path / "out"), cases.whole_state(DTYPES))
    ckpt_storage.save(cases.whole_state(DTYPES), tmp_path / "run")
    output, given = f"{root.url}-export", {"output_storage_options": root.storage_options}
    ranks.run(cases.export, tmp_path / "run", output, given, world_size=2)
    check(files_at(output, dict(root.storage_options)), cases.whole_state(DTYPES))


def big_model() -> dict[str, torch.Tensor]:
    count = 12 * MIB
    return {
        "a": torch.arange(count, dtype=torch.int16).reshape(-1, 1024),
        "b": torch.arange(count, dtype=torch.int16).flip(0).reshape(-1, 1024),
        "c": torch.arange(100),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_export_within_a_bucket_is_verified(
    ranks: RankPool, s3_root: Running, world_size: int
) -> None:
    """All bytes are read, checked and sent; damage names the tensor, and no upload stays."""
    url, options = s3_root.url, dict(s3_root.storage_options)
    ckpt_storage.save(big_model(), url, storage_options=options)
    given = {"storage_options": options}
    report = ranks.run(cases.export, url, None, given, world_size=world_size)[0]
    files = files_at(f"{url}/hf", options)
    check(files, big_model())
    check_report(report, files)
    assert report.sent_bytes == report.total_bytes
    assert report.read_bytes < 1.1 * report.sent_bytes + MIB
    store = open_store(url, storage_options=options)
    (shard,) = [one.path for one in store.list("saves") if one.path.endswith(".distcp")]
    data = store.get(shard).data
    at = data.index(big_model()["b"].numpy().tobytes()[:64]) + 5 * MIB
    store.put(shard, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(IntegrityError) as caught:
        consolidate(url, f"{url}-2", storage_options=options)
    assert caught.value.fqn == "b"
    assert store.abort_uploads("") == 0


def test_uploads_that_a_dead_run_left_open_are_aborted(
    s3_buckets: S3Server, s3_root: Running
) -> None:
    """A run that dies with uploads open is cleared away by the next; nobody else's are touched."""
    given: dict[str, Any] = {"storage_options": s3_root.storage_options}
    ckpt_storage.save(big_model(), s3_root.url, **given)
    before = s3_buckets.open_upload_count
    s3_buckets.faults(
        [
            FaultRule(op=op, action="status", status=403, code="AccessDenied", times=0)
            for op in ("complete", "abort")
        ]
    )
    with pytest.raises(CheckpointError):
        consolidate(s3_root.url, **given)
    s3_buckets.faults([])
    assert s3_buckets.open_upload_count == before + 1
    consolidate(s3_root.url, **given)
    assert s3_buckets.open_upload_count == before
    check(files_at(f"{s3_root.url}/hf", dict(s3_root.storage_options)), big_model())


def test_from_a_disk_to_google_and_azure(
    tmp_path: Path, gcs_root: Running, azure_root: Running
) -> None:
    """What comes back is the save that went out, byte for byte."""
    source = tmp_path / "src"
    save(state_of(1), source)
    copy(source, gcs_root.url, destination_storage_options=gcs_root.storage_options)
    copy(
        gcs_root.url,
        azure_root.url,
        storage_options=gcs_root.storage_options,
        destination_storage_options=azure_root.storage_options,
    )
    copy(azure_root.url, tmp_path / "back", storage_options=azure_root.storage_options)
    assert save_files(files_below(tmp_path / "back")) == save_files(files_below(source))


@pytest.fixture(params=["memory", "s3", "gcs", "azure"])
def place(request: pytest.FixtureRequest) -> Running:
    """A new place on each kind of storage; `test_manager` has local ones."""
    if request.param == "memory":
        return Running(url=f"memory://{uuid.uuid4().hex}", storage_options={})
    found: Running = request.getfixturevalue(f"{request.param}_root")
    return found


def store_of(place: Running) -> Store:
    return open_store(Location.of(place.url, place.storage_options), timeouts=Timeouts(request=30))


def test_a_run_is_saved_pruned_and_resumed(place: Running) -> None:
    """Saves, exports, retention, other tools' files and restore, alike on every storage."""
    store = store_of(place)
    options: dict[str, Any] = {"storage_options": place.storage_options, "mode": "thread"}
    with CheckpointManager(
        place.url, keep=KeepLatest(2) | KeepBest("loss", "min"), timeout=HANG_S, **options
    ) as manager:
        for step in range(1, 6):
            manager.save(
                step,
                manager_cases.state_of(step),
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
        assert manager_cases.restore(manager).step == 5
        assert manager_cases.pruned(manager).deleted == ()
    left = [entry.path for entry in store.list("") if entry.path[-1:] != "/"]
    names = {path.partition("/")[0] for path in left if "/commits/" not in path}
    assert names == {"tokenizer", *(f"step-0000000{step}" for step in (2, 4, 5)), "step-00000001"}
    assert [path for path in left if path.startswith("step-00000001/")] == [
        "step-00000001/commits/00000001.json",
        "step-00000001/commits/00000002.json",
        "step-00000001/notes.txt",
    ]
    with CheckpointManager(
        place.url, keep=KeepNewerThan(3600), timeout=HANG_S, **options
    ) as manager:
        assert manager_cases.pruned(manager).deleted == (), "all are young, by the storage's clock"
    report = prune(place.url, KeepLatest(1), dry_run=False, storage_options=place.storage_options)
    assert report.deleted == ("step-00000002", "step-00000004")


COUNT = 10_000


@pytest.fixture
def many(tmp_path: Path) -> Iterator[S3Server]:
    """A server with 10,000 committed checkpoints, of each tenth step."""
    manager_cases.saved(tmp_path, 10)
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
        assert manager_cases.latest_step(manager) == 10 * COUNT
    asked = Counter(request.op for request in many.requests)
    assert asked == {"list": COUNT // 1000, "get": 2}
