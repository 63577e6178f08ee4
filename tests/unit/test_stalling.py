"""Long work ends when it stands still, not when it is long; and it tells how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from copy_cases import save, state_of

from ckpt_storage import consolidate, verify
from ckpt_storage.errors import PhaseTimeoutError
from ckpt_storage.export.copy import copy
from ckpt_storage.options import ProgressEvent, Timeouts
from ckpt_storage.store.deadline import Stalling
from ckpt_storage.testing.s3_server import FaultRule, S3Server


def test_work_that_moves_never_ends_and_work_that_stands_does() -> None:
    """Bytes and whole files count as moving; an error once told stays."""
    now_s = [100]
    watch = Stalling("write", 10, "Copying", clock=lambda: now_s[0])
    for note in [lambda: watch.advanced(5), watch.ended_file] * 50:
        now_s[0] += 9
        assert watch.failure() is None
        note()
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
        call, target = (copy, [tmp_path / "dst"]) if work == "copy" else (verify, [])
        with pytest.raises(PhaseTimeoutError, match=r"has not moved for 0\.5 s"):
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
