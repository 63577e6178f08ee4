"""Clients that share nothing with those under test: what they read and write is the truth."""

from __future__ import annotations

import abc
import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from xml.sax.saxutils import unescape

from servers import Running, ask


class RawClient(abc.ABC):
    """All files below one root, by another client than the package's."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the content of each file by its path below the root."""

    @abc.abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Put a whole file at a path below the root."""

    @staticmethod
    def of(root: Running) -> RawClient | None:
        """Return the client for a root; None where there is none of another make."""
        scheme, is_url, rest = root.url.partition("://")
        if not is_url:
            return FolderClient(Path(root.url))
        if scheme == "sftp" and "known_hosts" in root.storage_options:
            # OpenSSH serves the whole of this machine.
            return FolderClient(Path("/" + rest.partition("/")[2]))
        if scheme == "webdav" and "auth" not in root.storage_options:
            return None
        kinds: dict[str, Callable[[Running], RawClient]] = {
            "az": AzureClient,
            "gs": GcsClient,
            "s3": S3Client,
            "smb": SambaClient,
            "webdav": WebdavClient,
        }
        return kinds[scheme](root) if scheme in kinds else None


class FolderClient(RawClient):
    """A folder, by Python's own calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> dict[str, bytes]:
        paths = [path for path in self._folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self._folder)): path.read_bytes() for path in paths}

    def write(self, path: str, data: bytes) -> None:
        file = self._folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


class S3Client(RawClient):
    """A prefix in a bucket, by botocore alone."""

    def __init__(self, root: Running) -> None:
        self._bucket, _, prefix = root.url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/"
        self._client = s3_client(root)
        # The customer's key, if the bucket's objects are encrypted.
        self._key: dict[str, Any] = root.storage_options.get("s3_additional_kwargs", {})

    def files(self) -> dict[str, bytes]:
        pages = self._client.get_paginator("list_objects_v2")
        listing = pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
        keys = [entry["Key"] for page in listing for entry in page.get("Contents", ())]
        return {key.removeprefix(self._prefix): self._get(key) for key in keys}

    def _get(self, key: str) -> bytes:
        answer = self._client.get_object(Bucket=self._bucket, Key=key, **self._key)
        body: bytes = answer["Body"].read()
        return body

    def write(self, path: str, data: bytes) -> None:
        # A bucket with Object Lock wants a checksum with each write.
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        self._client.put_object(
            Bucket=self._bucket,
            Key=self._prefix + path,
            Body=data,
            ContentMD5=digest,
            **self._key,
        )


class GcsClient(RawClient):
    """A prefix in a bucket of an emulator, by plain requests."""

    def __init__(self, root: Running) -> None:
        self._bucket, _, self._prefix = root.url.removeprefix("gs://").partition("/")
        self._url = root.storage_options["endpoint_url"]

    def files(self) -> dict[str, bytes]:
        raise NotImplementedError  # no test asks for it yet

    def write(self, path: str, data: bytes) -> None:
        name = quote(f"{self._prefix}/{path}", safe="")
        target = f"/upload/storage/v1/b/{self._bucket}/o?uploadType=media&name={name}"
        assert ask(self._url, "POST", target, data)[0] == 200


class AzureClient(RawClient):
    """A prefix in a container, by Microsoft's synchronous client."""

    def __init__(self, root: Running) -> None:
        self._container, _, self._prefix = root.url.removeprefix("az://").partition("/")
        self._connection = root.storage_options["connection_string"]

    def files(self) -> dict[str, bytes]:
        raise NotImplementedError

    def write(self, path: str, data: bytes) -> None:
        from azure.storage.blob import BlobServiceClient  # noqa: PLC0415  # not on every machine

        with BlobServiceClient.from_connection_string(self._connection) as service:
            blob = service.get_blob_client(self._container, f"{self._prefix}/{path}")
            blob.upload_blob(data, overwrite=True)


class WebdavClient(RawClient):
    """A folder of a WebDAV server, by requests of Python's own client."""

    def __init__(self, root: Running) -> None:
        from requests import Session  # noqa: PLC0415  # not on every machine

        self._session = Session()
        self._session.auth = tuple(root.storage_options["auth"])
        self._url = f"{root.storage_options['base_url']}/{root.url.removeprefix('webdav://')}/"

    def files(self) -> dict[str, bytes]:
        asked = self._session.request("PROPFIND", self._url, headers={"Depth": "infinity"})
        asked.raise_for_status()
        base = unquote(urlsplit(self._url).path)
        links = re.findall(r"<D:href>(.*?)</D:href>", asked.text)
        paths = [unquote(unescape(urlsplit(link).path)) for link in links]
        names = [path.removeprefix(base) for path in paths if not path.endswith("/")]
        return {name: self._session.get(self._url + quote(name)).content for name in names}

    def write(self, path: str, data: bytes) -> None:
        self._session.put(self._url + quote(path), data=data).raise_for_status()


class SambaClient(RawClient):
    """A folder of a share, by smbclient."""

    def __init__(self, root: Running) -> None:
        host, _, path = root.url.removeprefix("smb://").partition("/")
        share, _, folder = path.partition("/")
        self._root = "\\\\" + "\\".join([host, share, *folder.split("/")])
        self._options = {**root.storage_options, "connection_cache": {}}

    def files(self) -> dict[str, bytes]:
        import smbclient  # noqa: PLC0415  # not on every machine

        files = {}
        for folder, _, names in smbclient.walk(self._root, **self._options):
            for name in names:
                full = f"{folder}\\{name}"
                with smbclient.open_file(
                    full, mode="rb", share_access="rwd", **self._options
                ) as file:
                    path = full.removeprefix(f"{self._root}\\").replace("\\", "/")
                    files[path] = file.read()
        return files

    def write(self, path: str, data: bytes) -> None:
        import smbclient  # noqa: PLC0415  # not on every machine

        full = "\\".join([self._root, *path.split("/")])
        with smbclient.open_file(full, mode="wb", **self._options) as file:
            file.write(data)


def s3_client(running: Running) -> Any:
    """Return a client of botocore alone."""
    import botocore.session  # noqa: PLC0415  # not on every machine
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    return botocore.session.get_session().create_client(
        "s3",
        config=config,
        aws_access_key_id=running.storage_options["key"],
        aws_secret_access_key=running.storage_options["secret"],
        **{"region_name": "us-east-1", **running.storage_options["client_kwargs"]},
    )
