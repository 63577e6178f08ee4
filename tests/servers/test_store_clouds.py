"""S3, Google Cloud Storage and Azure pass the suite of all backends, as servers here have them."""

from __future__ import annotations

from typing import ClassVar

import pytest
from servers import Running

from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend, Settings
from ckpt_storage.store.backends.azure import AzureBackend
from ckpt_storage.store.backends.gcs import GcsBackend
from ckpt_storage.store.backends.s3 import S3Backend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.store_suite import StoreSuite


class CloudSuite(StoreSuite):
    """The suite on the root of the fixture that `at` names, by a backend of one kind.

    Another timeout makes another client.
    """

    kind: ClassVar[type[S3Backend | GcsBackend | AzureBackend]] = S3Backend
    at: ClassVar[str]

    @pytest.fixture
    def location(self, request: pytest.FixtureRequest) -> Location:
        """A bucket or container of its own."""
        root: Running = request.getfixturevalue(self.at)
        return Location.of(root.url, root.storage_options)

    @pytest.fixture
    def backend(self, location: Location) -> Backend:
        """A client."""
        return self.kind(location, Settings(request_timeout_s=30.0))

    @pytest.fixture
    def other(self, location: Location) -> Backend:
        """A second one."""
        return self.kind(location, Settings(request_timeout_s=31.0))


class TestMoto(CloudSuite):
    """S3 as moto has it."""

    at = "moto_root"


class TestS3Server(CloudSuite):
    """S3 as our own strict server has it."""

    at = "s3_root"


class TestAzure(CloudSuite):
    """Azure Blob Storage as Azurite has it."""

    kind, at = AzureBackend, "azure_root"
    many = 30  # a page has 5,000 names there


class TestGcs(CloudSuite):
    """Google Cloud Storage as fake-gcs-server has it."""

    kind, at = GcsBackend, "gcs_root"

    # The server ignores the condition of an upload in parts; `test_store_gcs_faults` has one.
    @pytest.mark.parametrize("is_one_part", [True])
    def test_what_exists_is_refused_or_replaced_as_asked(
        self, store: Store, second: Store, size: int, *, is_one_part: bool
    ) -> None:
        """An object of one part keeps what has the name, or replaces it if told to."""
        super().test_what_exists_is_refused_or_replaced_as_asked(
            store, second, size, is_one_part=is_one_part
        )
