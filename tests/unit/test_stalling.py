"""Long work ends when it stands still, not when it is long; and it tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time it stands at."""
        return self.now_s


def test_work_that_moves_never_ends_and_work_that_stands_does() -> None:
    """Bytes and whole files count as moving; an error once told stays."""
    clock = Clock()
    watch = Stalling("write", 10, "Copying", clock=clock)
    for _ in range(100):
        clock.now_s += 9
        assert watch.failure() is None
        watch.advanced(5)
        clock.now_s += 9
        watch.ended_file()
    clock.now_s += 10
    failure = watch.failure()
    assert isinstance(failure, PhaseTimeoutError)
    assert (failure.phase, failure.timeout_s) == ("write", 10)
    watch.advanced(1)
    assert watch.failure() is failure


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """An S3 server with a bucket."""
    with S3Server() as server:
        server.create_bucket("bkt")
        yield server


@pytest.mark.parametrize("work", ["copy", "verify"])
def test_a_storage_that_hangs_ends_the_work(tmp_path: Path, s3: S3Server, work: str) -> None:
    """The error names the phase, long before the request itself would have ended."""
    save(state_of(1), "s3://bkt/src", storage_options=s3.storage_options)
    s3.faults([FaultRule(key="distcp", action="hang", times=0)])
    timeouts = Timeouts(write=0.5, load=0.5, request=300)
    options: dict[str, Any] = {"storage_options": s3.storage_options, "timeout": timeouts}
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: copy("s3://bkt/src", tmp_path / "dst", **options),
        "verify": lambda: verify("s3://bkt/src", **options),
    }
    with pytest.raises(PhaseTimeoutError, match=r"has not moved for 0\.5 s"):
        calls[work]()


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
