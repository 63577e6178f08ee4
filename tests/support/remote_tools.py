"""How the tests of remote stores open a store on our S3 server."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fsspec.registry import _registry
from limits import HANG_S
from s3_server import S3Server
from servers import Running

from ckpt_storage.options import RetryPolicy, Timeouts
from ckpt_storage.store import open_store
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload

KEY = "AKIAEXAMPLEKEYID"
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
PART_BYTES = 5 * 1024 * 1024
PARTS = [bytes([i]) * PART_BYTES for i in range(2)] + [b"tail"]
POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)
ONCE = RetryPolicy(attempt_count=1)


def options_of(server: S3Server) -> dict[str, Any]:
    """Return options that reach the server with credentials that a test can search for."""
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": server.endpoint_url, "region_name": "us-east-1"},
    }


def plain(
    server: S3Server,
    url: str = "s3://bkt/run",
    request_timeout_s: float = HANG_S,
    policy: RetryPolicy = ONCE,
) -> Store:
    """Return a store without retries."""
    return open_store(
        url,
        storage_options=options_of(server),
        timeouts=Timeouts(request=request_timeout_s),
        retry=policy,
    )


def retrying(server: S3Server, *, request_timeout_s: float = HANG_S) -> Store:
    return plain(server, request_timeout_s=request_timeout_s, policy=POLICY)


def send(upload: Upload, parts: Sequence[bytes]) -> int:
    """Write parts in order and return their bytes in all."""
    offset = 0
    for number, part in enumerate(parts):
        upload.write_part(number, offset, [memoryview(part)], last=number == len(parts) - 1)
        offset += len(part)
    return offset


def ops(server: S3Server) -> Counter[str]:
    return Counter(request.op for request in server.requests)


@pytest.fixture(scope="session")
def s3_buckets() -> Iterator[S3Server]:
    """Another server, for tests with buckets of their own."""
    with S3Server() as running:
        yield running


@pytest.fixture
def s3_root(s3_buckets: S3Server) -> Running:
    """A root in a bucket of its own."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_buckets.create_bucket(bucket)
    return Running(url=f"s3://{bucket}/run", storage_options=s3_buckets.storage_options)


@pytest.fixture
def registered() -> Iterator[dict[str, type]]:
    """What a test puts in fsspec's registry; as it was after the test."""
    before = dict(_registry)
    yield _registry
    _registry.clear()
    _registry.update(before)
