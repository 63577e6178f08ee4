"""A bucket that does not exist is an error that names it, and never an empty one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import S3Server
from servers import AZURE_ACCOUNT, AZURE_KEY, served

from ckpt_storage import CheckpointManager, StorageError, load, save, verify
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import open_store

MISSING = "misspelt-bucket"
ONCE = RetryPolicy(attempt_count=1)


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with 404, as a service does for a bucket that does not exist."""

    protocol_version = "HTTP/1.1"
    headers_sent: ClassVar[dict[str, str]] = {}
    body: ClassVar[bytes] = b""

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer(self) -> None:
        """Read the request, and answer."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(404)
        for name, value in {**self.headers_sent, "Content-Length": str(len(self.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815  # names of the base class


class _Gcs(_Refusing):
    # https://cloud.google.com/storage/docs/json_api/v1/status-codes, "404-not_found": "notFound:
    # Either there is no API method associated with the URL path of the request, or the request
    # refers to one or more resources that were not found." One reason for buckets and objects.
    body = json.dumps(
        {"error": {"code": 404, "message": "?", "errors": [{"reason": "notFound"}]}}
    ).encode()


class _Azure(_Refusing):
    # https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes has 404 for
    # ContainerNotFound, "The specified container does not exist", and for BlobNotFound.
    headers_sent: ClassVar[dict[str, str]] = {"x-ms-error-code": "ContainerNotFound"}


class BucketFs(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Folders below buckets, of which only "there" exists: as clients of object stores have it."""

    protocol = "bucketfs"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("bucketfs://").strip("/")

    def _check(self, path: str) -> None:
        if self._strip_protocol(path).split("/")[1] not in {"", "there"}:
            raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:  # noqa: FBT001, FBT002
        self._check(path)
        return super().ls(path, detail=detail, **more)

    def info(self, path: str, **more: Any) -> Any:
        self._check(path)
        if self._strip_protocol(path) == "/there":
            return {"name": "/there", "size": 0, "type": "directory"}
        return super().info(path, **more)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        self._check(path)
        super().makedirs(path, exist_ok=exist_ok)


@pytest.fixture(params=["s3", "gs", "az", "bucketfs"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The URL of a bucket that does not exist, and options that reach its service."""
    if request.param == "s3":
        with S3Server() as server:
            yield f"s3://{MISSING}/runs", server.storage_options
    elif request.param == "gs":
        with served(_Gcs) as at:
            yield f"gs://{MISSING}/runs", {"endpoint_url": f"http://{at}", "token": "anon"}
    elif request.param == "az":
        with served(_Azure) as at:
            text = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            text = f"{text}BlobEndpoint=http://{at}/{AZURE_ACCOUNT};"
            yield f"az://{MISSING}/runs", {"connection_string": text}
    else:
        fsspec.register_implementation("bucketfs", BucketFs, clobber=True)
        yield f"bucketfs://{MISSING}/runs", {}


def _restore(url: str, **options: Any) -> None:
    with CheckpointManager(url, **options) as manager:
        manager.restore({"w": torch.zeros(2)})


def _latest(url: str, **options: Any) -> None:
    with CheckpointManager(url, **options) as manager:
        manager.latest()


def _load(url: str, **options: Any) -> None:
    load({"w": torch.zeros(2)}, url, **options)


def _save(url: str, **options: Any) -> None:
    save({"w": torch.zeros(2)}, url, **options)


@pytest.mark.parametrize("call", [_restore, _latest, _load, _save, verify])
def test_every_call_names_the_missing_bucket(
    place: tuple[str, dict[str, Any]], call: Callable[..., object]
) -> None:
    """No call takes a missing bucket for an empty one."""
    url, options = place
    with pytest.raises(StorageError, match=MISSING) as raised:
        call(url, storage_options=options, retry=ONCE)
    assert raised.value.kind == "other"
    assert "never creates one" in str(raised.value)


def test_looks_and_listings_name_the_missing_bucket(place: tuple[str, dict[str, Any]]) -> None:
    """`stat`, `get` and `list` raise, each as the first call of its store."""
    url, options = place
    for call in ("stat", "get", "list"):
        store = open_store(url, storage_options=options, retry=ONCE)
        with pytest.raises(StorageError, match=MISSING) as raised:
            getattr(store, call)("commits")
        assert raised.value.kind == "other", call


def test_an_empty_bucket_is_an_empty_root() -> None:
    """A bucket that exists holds no checkpoint yet."""
    fsspec.register_implementation("bucketfs", BucketFs, clobber=True)
    with CheckpointManager("bucketfs://there/runs") as manager:
        assert manager.restore({"w": torch.zeros(2)}) is None


def test_a_missing_local_folder_is_an_empty_root(tmp_path: Path) -> None:
    """A save makes local folders, so a missing one is no error."""
    with CheckpointManager(tmp_path / "none" / "run") as manager:
        assert manager.restore({"w": torch.zeros(2)}) is None
