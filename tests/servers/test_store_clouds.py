"""S3, Google Cloud Storage, Azure, WebDAV and SFTP pass the suite of all backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import servers
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from remote_tools import ONCE, POLICY, send
from servers import Running
from sshfs import SSHFileSystem
from suites import SuiteAt

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, open_store
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


class TestWebdav(SuiteAt):
    """A synchronous client, which sends a file when it is closed."""

    many, at = 30, "webdav_root"

    # webdav4 does not quote "#" and "%" in a path.
    odd_names = tuple(name for name in SuiteAt.odd_names if not {"#", "%"} & set(name))


class TestSshfs(SuiteAt):
    """An asynchronous client."""

    many, at = 30, "sshfs_root"

    @pytest.fixture
    def sshfs_root(self, sftp_root: Running, registered: dict[str, type]) -> Running:
        """A folder of its own."""
        registered["sftp"] = SSHFileSystem
        return sftp_root


def test_a_checkpoint_over_sftp_is_saved_loaded_and_overwritten(
    sftp_root: Running, registered: dict[str, type]
) -> None:
    """DCP saves, loads, and saves in place of it, with files of several parts."""
    registered["sftp"] = SSHFileSystem
    options: dict[str, Any] = {"storage_options": sftp_root.storage_options}
    for seed in (1, 2):
        state = {"rows": dcp_cases.seeded(seed, 600, 1000), "step": torch.tensor(seed)}
        dcp_cases.save(state, sftp_root.url, overwrite=True, part_bytes=1 << 20, **options)
        found = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp_cases.load(found, sftp_root.url, **options)
        assert dcp_cases.same(found, state)
    store = open_store(sftp_root.url, **options)
    assert store.abort_uploads("") == 0
    store.close()


@pytest.mark.parametrize("family", [SSHFileSystem, SFTPFileSystem])
def test_a_lost_connection_is_made_anew(
    tmp_path: Path, registered: dict[str, type], family: type
) -> None:
    """After the server was started again, a store goes on: the call is repeated."""
    registered["sftp"] = family
    with servers.sftp(tmp_path) as server:
        store = open_store(
            f"{server.url}/run",
            storage_options=server.storage_options,
            retry=POLICY,
        )
        store.make_folders([])
        store.put("x", b"before")
    with servers.sftp(tmp_path, port=server.storage_options["port"]):
        assert store.get("x").data == b"before"
        store.put("y", b"after")
        store.close()


def test_what_cannot_be_removed_is_told(registered: dict[str, type]) -> None:
    """A deletion during which the connection goes is no success."""

    class Broken(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        """Answers nothing about a file that it was to remove."""

        cachable = False

        def rm_file(self, path: str) -> None:
            """Lose the connection."""
            raise ConnectionResetError(path)

        def info(self, path: str, **options: Any) -> Any:
            """Answer nothing."""
            raise ConnectionResetError(path, options)

    registered["broken"] = Broken
    store = open_store("broken://run", retry=ONCE)
    with pytest.raises(StorageError, match="deletion") as caught:
        store.delete(["x"])
    assert caught.value.kind == "connection"
    store.close()
