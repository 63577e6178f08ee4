"""S3, Google Cloud Storage, Azure, WebDAV and SFTP pass the suite of all backends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import servers
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from remote_tools import ONCE, POLICY
from servers import Running
from sshfs import SSHFileSystem
from suites import SuiteAt

from ckpt_storage.errors import StorageError
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends import clouds
from ckpt_storage.store.backends.azure import AzureBackend
from ckpt_storage.store.store import Store


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

    def test_a_version_is_deleted_only_while_it_is_there(self, store: Store) -> None:
        """Not to be learned here; `test_store_gcs_faults` has it."""
        pytest.skip(f"the server at {store.url} ignores the condition of a deletion")


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
            f"{server.url}/run", storage_options=server.storage_options, retry=POLICY
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
            raise ConnectionResetError(path)

        def info(self, path: str, **options: Any) -> Any:
            raise ConnectionResetError(path, options)

    registered["broken"] = Broken
    store = open_store("broken://run", retry=ONCE)
    with pytest.raises(StorageError, match="deletion") as caught:
        store.delete(["x"])
    assert caught.value.kind == "connection"
    store.close()


def test_a_deletion_on_azure_leaves_names_that_its_client_resolves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request for "saves/../x" would be one for "x"; a warning says what stays."""
    caplog.set_level(logging.WARNING, "ckpt_storage")
    sent: list[str] = []
    monkeypatch.setattr(clouds.CloudBackend, "delete", lambda _self, paths: sent.extend(paths))
    location = Location.of("az://box/run", {"account_name": "a", "account_key": "aaaa"})
    AzureBackend(location, Settings()).delete(["saves/a", "saves/../x", "saves/f//"])
    assert sent == ["saves/a", "saves/f//"]
    assert "'saves/../x'" in caplog.text


def test_a_part_that_changed_since_its_checksum_is_not_sent_to_azure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The MD5 that the SDK sends is of the changed bytes, so that the service would take them."""
    sent: list[str] = []

    def run(_: object, _call: object, name: str, *_args: object, **_more: object) -> None:
        sent.append(name)

    monkeypatch.setattr(AzureBackend, "_run", run)
    location = Location.of("az://box/run", {"account_name": "a", "account_key": "aaaa"})
    store = Store(AzureBackend(location, Settings()), url=location.url, policy=POLICY)
    upload, part = store.upload("x"), memoryview(b"changed")
    with pytest.raises(StorageError, match="at byte 0 changed in this process's memory"):
        upload.write_part(0, 0, [part], last=False, crc32c=crc32c_of(b"hashed!"))
    assert sent == []
    upload.write_part(0, 0, [part], last=False, crc32c=crc32c_of(part))
    assert sent == ["stage_block"]
    store.close()
