"""Every request of an export to S3 may fail: a lost answer, a passing error, a death at it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import consolidate_cases as cases
import pytest
import servers

import ckpt_storage
from ckpt_storage import CheckpointError, RetryPolicy, consolidate
from ckpt_storage.store.backends.s3 import S3Backend
from ckpt_storage.testing.s3_server import FaultRule, S3Server, crash_rules

PUT_BYTES = 20_000
RETRY = RetryPolicy(attempt_count=3, first_delay_s=0.001, max_delay_s=0.002)
RULES: dict[str, dict[str, Any]] = {
    "lost answer": {"action": "lost"},
    "passing error": {"action": "status", "status": 503},
}


class Bucket:
    """Two checkpoints on S3, and one export folder that is made as it was before each export."""

    def __init__(self, server: S3Server, kind: str) -> None:
        self.server = server
        self._given: dict[str, Any] = {"storage_options": server.storage_options, "retry": RETRY}
        server.create_bucket("bkt")
        for version in (1, 2):
            ckpt_storage.save(cases.small_model(version), f"s3://bkt/run{version}", **self._given)
        if kind == "replace":
            consolidate("s3://bkt/run1", "s3://bkt/out", **self._given)
        self._before = self._output()

    def _output(self) -> dict[str, bytes]:
        return {k: data for k, data in self.server.dump("bkt").items() if k.startswith("out/")}

    def fresh(self) -> None:
        """Make the folder as it was: empty, or for "replace" with an export of version 1."""
        for key in self._output():
            assert servers.ask(self.server.endpoint_url, "DELETE", f"/bkt/{key}")[0] == 204
        for key, data in self._before.items():
            assert servers.ask(self.server.endpoint_url, "PUT", f"/bkt/{key}", data)[0] == 200
        self.server.reset_counters()

    def export(self) -> CheckpointError | None:
        try:
            consolidate("s3://bkt/run2", "s3://bkt/out", max_file_bytes=60_000, **self._given)
        except CheckpointError as error:
            return error
        return None

    @property
    def version(self) -> int | None:
        """Which version the index leads to, None if to no file; fails for a mixture."""
        files = {key.removeprefix("out/"): data for key, data in self._output().items()}
        weight_map = json.loads(files.get(cases.INDEX, b'{"weight_map": {}}'))["weight_map"]
        if not files.keys() & weight_map.values():
            return None
        found = cases.tensors_of(files)
        (version,) = [v for v in (1, 2) if cases.expected_of(cases.small_model(v)) == found]
        return version

    def check_whole(self, at: str) -> None:
        """Assert that the next export ends with version 2 and nothing else."""
        assert self.export() is None, at
        assert self.version == 2, at
        assert len([key for key in self._output() if key.startswith("out/model-")]) == 2, at
        assert self.server.open_upload_count == 0, at


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A server of its own, to which weight files go in parts."""
    parts = replace(S3Backend.capabilities, max_put_bytes=PUT_BYTES)
    monkeypatch.setattr(S3Backend, "capabilities", parts)
    with S3Server() as server:
        yield Bucket(server, request.param)


def requests_of(bucket: Bucket) -> list[tuple[int, str]]:
    """Export once; return what was asked for, of several alike the first, and its number."""
    bucket.fresh()
    assert bucket.export() is None
    found: dict[str, tuple[int, str]] = {}
    for number, request in enumerate(bucket.server.requests):
        asked = f"{request.op} {request.key}"
        found.setdefault(re.sub(r"[0-9a-f]{5,}", "#", asked), (number, asked))
    assert {"create_upload", "part", "complete", "put"} <= {one.split()[0] for one in found}
    return list(found.values())


@pytest.mark.parametrize(
    ("bucket", "fault"),
    [("first", "lost answer"), ("replace", "passing error")],
    indirect=["bucket"],
)
def test_an_export_survives_whatever_passes(bucket: Bucket, fault: str) -> None:
    """A lost answer or a passing error of any one request is not noticed."""
    for number, asked in requests_of(bucket):
        at = f"{fault} at {number} ({asked})"
        bucket.fresh()
        bucket.server.faults([FaultRule(after=number, **RULES[fault])])
        error = bucket.export()
        bucket.server.faults([])
        assert error is None, f"{at}: {error!r}"
        assert bucket.version == 2, at
        bucket.check_whole(at)


@pytest.mark.parametrize("bucket", ["first", "replace"], indirect=True)
def test_an_export_that_dies_leaves_old_or_new(bucket: Bucket) -> None:
    """Whatever request was the last, the index leads to one export, and the next run completes."""
    bucket.fresh()
    before = bucket.version
    for number, asked in requests_of(bucket):
        at = f"after {number} ({asked})"
        bucket.fresh()
        bucket.server.faults(crash_rules(number + 1, "after"))
        bucket.export()
        bucket.server.faults([])
        assert bucket.version in {before, 2}, at
        bucket.check_whole(at)
