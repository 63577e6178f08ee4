"""S3, Google Cloud Storage and Azure pass the suite of all backends, as servers here have them."""

from __future__ import annotations

import pytest
from suites import SuiteAt

from ckpt_storage.store.store import Store


class TestMoto(SuiteAt):
    """S3 as moto has it."""

    at = "moto_root"


class TestS3Server(SuiteAt):
    """S3 as our own strict server has it."""

    at = "s3_root"


class TestAzure(SuiteAt):
    """Azure Blob Storage as Azurite has it."""

    at = "azure_root"
    many = 30  # a page has 5,000 names there


class TestGcs(SuiteAt):
    """Google Cloud Storage as fake-gcs-server has it."""

    at = "gcs_root"

    # The server ignores the condition of an upload in parts; `test_store_gcs_faults` has one.
    @pytest.mark.parametrize("is_one_part", [True])
    def test_what_exists_is_refused_or_replaced_as_asked(
        self, store: Store, second: Store, size: int, *, is_one_part: bool
    ) -> None:
        """An object of one part keeps what has the name, or replaces it if told to."""
        super().test_what_exists_is_refused_or_replaced_as_asked(
            store, second, size, is_one_part=is_one_part
        )
