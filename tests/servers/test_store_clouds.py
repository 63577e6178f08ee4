"""S3, Google Cloud Storage and Azure pass the suite of all backends, as servers here have them."""

from __future__ import annotations

import pytest
from remote_tools import ONCE, POLICY, send
from servers import Running
from suites import SuiteAt

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.azure import AzureBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule


class TestMoto(SuiteAt):
    """S3 as moto has it, which is slow: our own server shows long listings."""

    many, at = 30, "moto_root"


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


def azure(root: Running) -> AzureBackend:
    """Return a backend at Azurite."""
    return AzureBackend(Location.of(root.url, root.storage_options), Settings())


@pytest.mark.parametrize("operation", ["put_part", "complete_upload", "put"])
def test_an_answer_that_azure_lost_is_made_good_or_taken_back(
    azure_root: Running, operation: str
) -> None:
    """All may be done twice; where nobody can tell whether completing worked, nothing stays."""
    parts = [b"small"] if operation == "put" else [b"a" * 65536, b"b" * 65536, b"tail"]

    def faulty(policy: RetryPolicy, *rules: Rule) -> Store:
        return Store(FaultBackend(azure(azure_root), rules), url=azure_root.url, policy=policy)

    store = faulty(POLICY, Rule(action="lost_answer", operation=operation, hit_count=2))
    upload = store.upload("saves/a/x")
    upload.complete(send(upload, parts))
    assert store.get("saves/a/x").data == b"".join(parts)
    store.delete(["saves/a/x"])
    store.close()
    lost = Rule(action="lost_answer", operation=operation, path="saves/a/x", hit_count=None)
    store = faulty(ONCE, lost, Rule(action="error", operation="stat"))
    store.put("saves/a/other", b"stays")
    upload = store.upload("saves/a/x")
    with pytest.raises(StorageError) as caught:
        upload.complete(send(upload, parts))
    upload.abort()
    assert caught.value.kind == "connection"
    assert [entry.path for entry in store.list("")] == ["saves/a/other"]
    store.close()


def test_a_version_on_azure_is_deleted_only_while_it_is_there(azure_root: Running) -> None:
    """What took its place meanwhile stays."""
    backend = azure(azure_root)
    backend.put("x", [memoryview(b"ours")])
    version = backend.stat("x").version
    backend.put("x", [memoryview(b"another's")])
    with pytest.raises(Exception, match="ConditionNotMet"):
        backend.delete_version("x", version or "")
    assert backend.get("x", max_bytes=None).data == b"another's"
    backend.delete_version("x", backend.stat("x").version or "")
    assert list(backend.list("", recursive=True)) == []
