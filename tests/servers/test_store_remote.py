"""Remote stores pass the suite of all stores, and survive what networks and servers do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from servers import Running

from ckpt_storage.store import Location, open_store
from ckpt_storage.store.remote import RemoteStore
from ckpt_storage.store.store import Store
from ckpt_storage.testing._old_suite import StoreSuite
from ckpt_storage.testing.s3_server import S3Server

REQUEST_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests, so that all share two clients."""
    with S3Server() as running:
        yield running


def opened(root: Running, *, request_timeout_s: float = REQUEST_TIMEOUT_S) -> RemoteStore:
    """Return a new store on a root, without retries."""
    location = Location.of(root.url, root.storage_options)
    return RemoteStore(location, request_timeout_s=request_timeout_s)


class RemoteSuite(StoreSuite):
    """The suite on two stores of the root that the fixture `root` gives."""

    @pytest.fixture
    def root(self) -> Running:
        """Override: a fresh root."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, root: Running) -> Store:
        """A store on the root."""
        return opened(root)

    @pytest.fixture
    def other(self, root: Running) -> Store:
        """A second store, with a client of its own: another timeout makes another key."""
        return opened(root, request_timeout_s=REQUEST_TIMEOUT_S + 1)


class TestMoto(RemoteSuite):
    """S3 as moto has it."""

    @pytest.fixture
    def root(self, moto_root: Running) -> Running:
        """A bucket of its own."""
        return moto_root


class TestS3Server(RemoteSuite):
    """S3 as our own strict server has it."""

    @pytest.fixture
    def root(self, s3_server: S3Server) -> Running:
        """A bucket of its own."""
        bucket = f"test-{uuid.uuid4().hex}"
        s3_server.create_bucket(bucket)
        return Running(url=f"s3://{bucket}/run", storage_options=s3_server.storage_options)


class TestS3ServerBehindRetries(TestS3Server):
    """What users get: the same store within deadlines and retries."""

    @pytest.fixture
    def store(self, root: Running) -> Store:
        """A store as `open_store` makes it."""
        return open_store(root.url, storage_options=root.storage_options)
