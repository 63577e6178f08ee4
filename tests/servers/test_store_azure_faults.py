"""Uploads to Azure survive lost answers, and an abort takes back what one showed."""

from __future__ import annotations

import pytest
from servers import Running

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.azure import AzureBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule

POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)
ONCE = RetryPolicy(attempt_count=1)
PART_BYTES = 64 * 1024
PARTS = [b"a" * PART_BYTES, b"b" * PART_BYTES, b"tail"]


def put(store: Store, parts: list[bytes]) -> None:
    """Upload parts, and abort if that fails."""
    upload = store.upload("saves/a/x")
    offset = 0
    try:
        for number, part in enumerate(parts):
            upload.write_part(number, offset, [memoryview(part)], last=number == len(parts) - 1)
            offset += len(part)
        upload.complete(offset)
    except StorageError:
        upload.abort()
        raise


def faulty(root: Running, policy: RetryPolicy, *rules: Rule) -> Store:
    """Return a store on Azure whose calls go wrong to order."""
    location = Location.of(root.url, root.storage_options)
    return Store(
        FaultBackend(AzureBackend(location, Settings()), rules), url=root.url, policy=policy
    )


@pytest.mark.parametrize(
    ("parts", "operation"), [(PARTS, "put_part"), (PARTS, "complete_upload"), ([b"small"], "put")]
)
def test_a_lost_answer_is_made_good_or_taken_back(
    azure_root: Running, parts: list[bytes], operation: str
) -> None:
    """All may be done twice; where nobody can tell whether completing worked, nothing stays."""
    store = faulty(azure_root, POLICY, Rule(action="lost_answer", operation=operation, hit_count=2))
    put(store, parts)
    assert store.get("saves/a/x").data == b"".join(parts)
    store.delete(["saves/a/x"])
    store.close()
    lost = Rule(action="lost_answer", operation=operation, path="saves/a/x", hit_count=None)
    store = faulty(azure_root, ONCE, lost, Rule(action="error", operation="stat"))
    store.put("saves/a/other", b"stays")
    with pytest.raises(StorageError) as caught:
        put(store, parts)
    assert caught.value.kind == "connection"
    assert [entry.path for entry in store.list("")] == ["saves/a/other"]
    store.close()


def test_a_version_is_deleted_only_while_it_is_there(azure_root: Running) -> None:
    """What took its place meanwhile stays."""
    location = Location.of(azure_root.url, azure_root.storage_options)
    backend = AzureBackend(location, Settings())
    backend.put("x", [memoryview(b"ours")])
    version = backend.stat("x").version
    backend.put("x", [memoryview(b"another's")])
    with pytest.raises(Exception, match="ConditionNotMet"):
        backend.delete_version("x", version or "")
    assert backend.get("x", max_bytes=None).data == b"another's"
    backend.delete_version("x", backend.stat("x").version or "")
    assert list(backend.list("", recursive=True)) == []
