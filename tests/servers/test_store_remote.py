"""Remote stores pass the suite of all stores, and survive what networks and servers do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from servers import Running

from ckpt_storage.errors import CheckpointError
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


class TestWebdav(RemoteSuite):
    """A backend that nobody special-cased."""

    # webdav4 does not quote "#" and "%" in a path.
    odd_names = tuple(name for name in RemoteSuite.odd_names if not {"#", "%"} & set(name))

    @pytest.fixture
    def root(self, webdav_root: Running) -> Running:
        """A folder of its own."""
        return webdav_root


@pytest.mark.awkward
class TestSftp(RemoteSuite):
    """SFTP, by whichever backend is installed."""

    @pytest.fixture
    def root(self, sftp_root: Running) -> Running:
        """A folder of its own."""
        return sftp_root

    def test_uploads_of_a_dead_process_can_be_aborted(self, store: Store, other: Store) -> None:
        """The temporary file of an open upload is found below its folder, and removed."""
        uploads = [store.start_upload(f"saves/{name}/x", part_bytes=10) for name in ("a", "ab")]
        for upload in uploads:
            upload.write_part(0, 0, [memoryview(b"0123456789")], last=False)
            upload.write_part(1, 10, [memoryview(b"abc")], last=True)
        assert other.abort_uploads("saves/a") == 1
        with pytest.raises(CheckpointError):
            uploads[0].complete(13)
        uploads[0].abort()
        uploads[1].complete(13)
        assert [entry.path for entry in other.list("")] == ["saves/ab/x"]
