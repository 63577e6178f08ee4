"""Exports and copies are paced by both storages, within one budget, and end if they stand still."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_cases import save, state_of
from remote_tools import options_of
from s3_server import FaultRule, S3Server

import ckpt_storage
from ckpt_storage import consolidate, verify
from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.export import output
from ckpt_storage.options import MIB, ProgressEvent, RetryPolicy, Timeouts
from ckpt_storage.store.monitor import StallDetector
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.budget import BUDGET, READ_BUDGET
from ckpt_storage.transfer.pacing import Pacer

RETRY = RetryPolicy(first_delay_s=0.0, max_delay_s=0.01)
LIMIT_BYTES = 128 * MIB


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        running.create_bucket("bkt")
        state = {"model": {f"w{i}": torch.full((6 * MIB,), i / 2).bfloat16() for i in range(4)}}
        ckpt_storage.save(state, "s3://bkt/run", storage_options=options_of(running), retry=RETRY)
        running.reset_counters()
        BUDGET.reset()
        yield running


class Noted(Pacer):
    """A pacer that the test can ask."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.heard = 0
        self.lowest = self.start = self.limit()

    def slowed_down(self) -> None:
        super().slowed_down()
        self.heard += 1
        self.lowest = min(self.lowest, self.limit())


@pytest.fixture
def pacers(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Those of all transfers from a storage to a storage: source, target, source, target."""
    made: list[Noted] = []

    def make(*args: Any, **kw: Any) -> Noted:
        made.append(Noted(*args, **kw))
        return made[-1]

    monkeypatch.setattr(output, "Pacer", make)
    return made


def export(server: S3Server) -> None:
    """Export with a cast, so that every byte passes through."""
    consolidate(
        "s3://bkt/run",
        dtype="float32",
        memory_limit_bytes=LIMIT_BYTES,
        storage_options=options_of(server),
        retry=RETRY,
    )


def copy(server: S3Server, limit_bytes: int = LIMIT_BYTES) -> None:
    ckpt_storage.copy(
        "s3://bkt/run",
        f"s3://bkt/{uuid.uuid4().hex}",
        copies="never",
        storage_options=options_of(server),
        memory_limit_bytes=limit_bytes,
        retry=RETRY,
    )


def test_buffers_are_those_of_what_is_in_flight(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads than the memory has room for do not keep a buffer each."""
    seen, write_part = dict[int, Any](), Upload.write_part

    def noted(upload: Upload, number: int, offset: int, views: Any, **options: Any) -> None:
        seen.update((id(view.obj), view.obj) for view in views)
        write_part(upload, number, offset, views, **options)

    monkeypatch.setattr(Upload, "write_part", noted)
    copy(server, 24 * MIB)
    assert 0 < sum(map(len, seen.values())) <= 24 * MIB


@pytest.mark.parametrize(("job", "op"), [(export, "part"), (copy, "get")])
def test_an_export_or_copy_hears_what_its_storages_ask_for(
    server: S3Server, pacers: list[Noted], job: Callable[[S3Server], None], op: str
) -> None:
    """A SlowDown of a read is the source's, one of a part the target's; each halves that limit."""
    key = "distcp" if op == "get" else "safetensors"
    server.faults([FaultRule(op=op, key=key, action="status", times=3)])
    job(server)
    source, target = pacers
    asked, other = (source, target) if op == "get" else (target, source)
    assert (asked.heard, other.heard) == (3, 0)
    assert asked.lowest < asked.start == other.lowest


def test_exports_and_copies_at_a_time_keep_to_one_budget(server: S3Server) -> None:
    """Together they claim no more than one may, they claim it, and all of it is given back."""
    copy(server)
    assert LIMIT_BYTES // 4 <= BUDGET.peak_bytes <= LIMIT_BYTES
    BUDGET.reset()
    export(server)
    assert LIMIT_BYTES // 4 <= BUDGET.peak_bytes <= LIMIT_BYTES
    both = [threading.Thread(target=job, args=(server,)) for job in (export, copy)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert BUDGET.peak_bytes <= LIMIT_BYTES
    assert BUDGET.held_bytes == 0
    assert ckpt_storage.verify("s3://bkt/run", storage_options=options_of(server)).ok


@pytest.mark.parametrize("job", [export, copy])
@pytest.mark.parametrize("op", ["part", "get"])
def test_what_fails_gives_its_memory_back(
    server: S3Server, op: str, job: Callable[[S3Server], None]
) -> None:
    """An export or copy that is refused leaves the whole budget to the next."""
    key = "safetensors|hf/|[0-9a-f]{32}/saves.*distcp" if op == "part" else "distcp"
    server.faults([FaultRule(op=op, key=key, action="status", status=403, times=0)])
    with pytest.raises(CheckpointError):
        job(server)
    assert BUDGET.held_bytes == READ_BUDGET.held_bytes == 0


def test_work_that_moves_never_ends_and_work_that_stands_does() -> None:
    """Bytes and whole files count as moving; an error once told stays."""
    now_s = [100]
    watch = StallDetector("write", 10, "Copying", clock=lambda: now_s[0])
    for byte_count, file_count in [(5, 0), (0, 1)] * 50:
        now_s[0] += 9
        assert watch.failure() is None
        watch.advanced(byte_count, file_count=file_count)
    now_s[0] += 10
    failure = watch.failure()
    assert isinstance(failure, PhaseTimeoutError)
    assert (failure.phase, failure.timeout_s) == ("write", 10)
    watch.advanced(1)
    assert watch.failure() is failure


@pytest.mark.parametrize("work", ["copy", "verify"])
def test_a_storage_that_hangs_ends_the_work(tmp_path: Path, work: str) -> None:
    """The error names the phase, long before the request itself would have ended."""
    with S3Server() as s3:
        s3.create_bucket("bkt")
        save(state_of(1), "s3://bkt/src", storage_options=s3.storage_options)
        s3.faults([FaultRule(key="distcp", action="hang", times=0)])
        timeouts = Timeouts(write=0.5, load=0.5, request=300)
        options: dict[str, Any] = {"storage_options": s3.storage_options, "timeout": timeouts}
        call, target = (ckpt_storage.copy, [tmp_path / "dst"]) if work == "copy" else (verify, [])
        with pytest.raises(PhaseTimeoutError, match=r"made no progress for 0\.5 s"):
            call("s3://bkt/src", *target, **options)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    """The last event has all bytes of all files, those of exports included."""
    save(state_of(1), tmp_path / "src")
    shards = sum(path.stat().st_size for path in (tmp_path / "src").rglob("*.distcp"))
    for is_exported in (False, True):
        extra = 0
        if is_exported:
            consolidate(tmp_path / "src")
            extra = (tmp_path / "src" / "hf" / "model.safetensors").stat().st_size
        events: list[ProgressEvent] = []
        assert verify(tmp_path / "src", progress=events.append).ok
        last = events[-1]
        assert last.done_bytes == last.total_bytes == shards + extra
        assert last.phase == "load"
    quiet: list[ProgressEvent] = []
    verify(tmp_path / "src", deep=False, progress=quiet.append)
    assert quiet == []
