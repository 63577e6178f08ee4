"""The S3 server of the tests of stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remote_tools import emptied

from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture(scope="session")
def running_s3() -> Iterator[S3Server]:
    """One server for all tests of a process, so that they share clients."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


@pytest.fixture
def server(running_s3: S3Server) -> S3Server:
    """The server with an empty bucket, no faults and no memory of requests."""
    emptied(running_s3)
    return running_s3
