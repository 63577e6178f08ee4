"""S3 and what speaks like it, through s3fs's client: one request per call, conditions sent.

The client's own retries are off: `retry` is the one layer that repeats.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.options import MIB

from .backends.clients import Client, ForeignFs
from .base import Capabilities, Entry, PathFilter, Stat, Version
from .dialect_s3_requests import S3Requests, code_of, is_private_path
from .dialect_s3_shared import S3SharedUpload
from .dialect_s3_upload import S3Upload, abort_one
from .parts import decode_ticket, taken_whole
from .problems import HttpFailure

CAPABILITIES = Capabilities(
    kind="s3",
    exclusive_create=True,
    atomic_replace=True,
    if_match=True,
    parallel_parts=True,
    min_part_bytes=5 * MIB,
    max_part_count=10_000,
    max_part_bytes=5 << 30,
    max_put_bytes=5 << 30,
    lists_uploads=True,
    tokens_travel=True,
    copy_min_bytes=5 * MIB,
    copy_max_bytes=5 * 1024 * MIB,
    streams_parts=True,
)

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_POOL_CONNECTIONS = 64
_BULK_COUNT = 1000
_CHUNK_BYTES = MIB
_OK = 200

_WASTE_FACTOR = 4
"""A server that ignores ranges is put up with while it sends at most this many times the range."""

_NO_BULK = frozenset(
    {
        "InvalidArgument",
        "InvalidRequest",
        "MalformedXML",
        "MethodNotAllowed",
        "MissingContentMD5",
        "MissingRequestBodyError",
        "NotImplemented",
    }
)
"""Refusals of DeleteObjects as such: OpenStack Swift wants a header that clients no longer send."""


def client_options(options: Mapping[str, Any], request_timeout_s: float) -> dict[str, Any]:
    """Return s3fs's options with timeouts, one attempt and room for parallel requests.

    What the user set stays. Checksums are computed and checked only where S3 requires it:
    other servers refuse the headers, and every byte is verified by our own CRCs. Bodies are
    signed where somebody could change them on the way.
    """
    ours = {
        "connect_timeout": min(_CONNECT_TIMEOUT_S, request_timeout_s),
        "max_pool_connections": _POOL_CONNECTIONS,
        "read_timeout": min(_READ_TIMEOUT_S, request_timeout_s),
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    theirs = options.get("config_kwargs") or {}
    signing = {"payload_signing_enabled": not _is_private(options)}
    return {
        **options,
        "config_kwargs": {**ours, **theirs, "s3": {**signing, **(theirs.get("s3") or {})}},
        "use_listings_cache": False,
    }


def _is_private(options: Mapping[str, Any]) -> bool:
    """Return whether requests go by TLS or stay on this machine, as far as one can tell."""
    inner = options.get("client_kwargs") or {}
    named = [options.get("endpoint_url"), inner.get("endpoint_url")]
    named += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    endpoint = next((url for url in named if url), None)
    uses_tls = options.get("use_ssl", True) and inner.get("use_ssl", True)
    return is_private_path(endpoint) and bool(uses_tls or endpoint)


class S3Dialect:
    """Speaks S3; see `dialect.Dialect`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests = S3Requests(client)
        self._takes_bulk = True

    @property
    def capabilities(self) -> Capabilities:
        """What AWS promises; others may ignore the conditions."""
        return CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Send nothing: HeadBucket needs a right that saving does not."""
        del folders

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """GetObject; the token is the ETag."""

        async def fetch(fs: ForeignFs) -> Version:
            key = self._requests.key(path)
            answer = await self._requests.request(fs, "get_object", Key=key)
            async with answer["Body"] as body:
                data = await taken_whole(body.read, answer.get("ContentLength"), most_bytes)
            return Version(data=data, version=answer.get("ETag"))

        return self._client.run(fetch)

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """GetObject with Range, the body copied piece by piece into `view`.

        An answer of 200 is the whole object: its first bytes are skipped, unless that
        would be many times what was asked for.
        """

        async def fetch(fs: ForeignFs) -> tuple[int, int | None]:
            answer = await self._requests.request(
                fs,
                "get_object",
                Key=self._requests.key(path),
                Range=f"bytes={start}-{start + len(view) - 1}",
            )
            async with answer["Body"] as body:
                skip, total = self._placed(answer, start, len(view))
                await _skip(body, skip)
                count = 0
                while count < len(view):
                    piece = await body.read(min(_CHUNK_BYTES, len(view) - count))
                    if not piece:
                        break
                    view[count : count + len(piece)] = piece
                    count += len(piece)
            return count, total

        return self._client.run(fetch)

    def _placed(self, answer: Mapping[str, Any], start: int, wanted: int) -> tuple[int, int | None]:
        """Return how many bytes of the body precede the range, and the object's length."""
        if answer["ResponseMetadata"]["HTTPStatusCode"] != _OK:
            total = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return 0, int(total) if total.isdigit() else None
        total_bytes = int(answer["ContentLength"])
        if start + wanted > _WASTE_FACTOR * wanted + _CHUNK_BYTES:
            raise UnsupportedByStoreError(
                f"The server answers a read of {wanted} bytes with the whole object of "
                f"{total_bytes} bytes.",
                kind="unsupported",
                next_step="Use a server that honours the Range header.",
            )
        return start, total_bytes

    def stat(self, path: str) -> Stat:
        """HeadObject; if it is refused, GetObject, as only that answer says why."""
        try:
            answer = self._requests.send("head_object", Key=self._requests.key(path))
        except Exception as error:
            if code_of(error) not in {"400", "403"}:
                raise
            self.read_range(path, 0, memoryview(bytearray(1)))
            raise
        return Stat(
            path=path,
            size_bytes=answer["ContentLength"],
            modified_s=answer["LastModified"].timestamp(),
        )

    def put(self, path: str, data: bytes) -> None:
        """PutObject."""
        self._requests.send("put_object", Key=self._requests.key(path), Body=data)

    def create(self, path: str, data: bytes) -> None:
        """PutObject with If-None-Match: one request, since some servers ignore it on parts."""
        self._requests.send("put_object", Key=self._requests.key(path), Body=data, IfNoneMatch="*")

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """PutObject with If-Match."""
        self._requests.send("put_object", Key=self._requests.key(path), Body=data, IfMatch=token)

    def start_upload(self, path: str, *, part_bytes: int) -> S3Upload:
        """Begin an upload; its first request comes with its first part."""
        del part_bytes
        return S3Upload(self._requests, self._requests.key(path))

    def start_shared_upload(self, path: str) -> S3SharedUpload:
        """Begin a multipart upload; its first request comes with its ticket or first part."""
        return S3SharedUpload(self._requests, path)

    def join_upload(self, path: str, ticket: str) -> S3SharedUpload:
        """Take over the upload's id."""
        fields = decode_ticket(ticket, "s3", path, {"id", "checksum"})
        return S3SharedUpload(self._requests, path, joined=fields)

    def copy_place(self, path: str) -> tuple[str, str] | None:
        """Return the bucket at its endpoint, and the key."""
        scope = f"s3 {self._client.endpoint} {self._requests.bucket}"
        return scope, self._requests.key(path)

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """ListObjectsV2, with a delimiter for direct children only."""
        below = self._below(prefix)
        cut = len(self._requests.prefix) + 1 if self._requests.prefix else 0
        entries = []
        for page in self._object_pages(below, recursive=recursive):
            entries += [
                Entry(
                    path=item["Key"][cut:],
                    size_bytes=item["Size"],
                    modified_s=item["LastModified"].timestamp(),
                )
                for item in page.get("Contents", ())
                # Consoles make folders as empty objects with a slash at the end.
                if not item["Key"].endswith("/")
            ]
            entries += [
                Entry(path=item["Prefix"][cut:], size_bytes=0)
                for item in page.get("CommonPrefixes", ())
            ]
        return entries

    def delete(self, paths: Sequence[str]) -> None:
        """DeleteObject, or DeleteObjects by the thousand where the server takes it."""
        self._delete_keys([self._requests.key(path) for path in paths])

    def delete_folder(self, path: str) -> None:
        """Delete every key below the prefix, page by page."""
        for page in self._object_pages(self._below(path), recursive=True):
            self._delete_keys([item["Key"] for item in page.get("Contents", ())])

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """ListMultipartUploads below the exact prefix, and AbortMultipartUpload for each."""
        below, root = self._below(prefix), self._below("")
        pages = self._requests.pages(
            "list_multipart_uploads",
            {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
            Prefix=below,
        )
        open_uploads = [
            (item["Key"], item["UploadId"])
            for page in pages
            for item in page.get("Uploads", ())
            if item["Key"].startswith(below) and (only is None or only(item["Key"][len(root) :]))
        ]
        for key, upload_id in open_uploads:
            abort_one(self._requests, key, upload_id)
        return len(open_uploads)

    def now_s(self, probe_path: str) -> float:
        """PutObject and HeadObject: the time that the server gives, exact to a second."""
        self.put(probe_path, b"clock\n")
        modified_s = self.stat(probe_path).modified_s
        with contextlib.suppress(Exception):
            self.delete([probe_path])
        if modified_s is None:  # pragma: no cover  # stat always sets it
            raise StorageError("The server gives objects no time.")
        return modified_s

    def _below(self, prefix: str) -> str:
        """Return the key prefix of everything below a folder; "" is the whole bucket."""
        key = self._requests.key(prefix).rstrip("/") if prefix else self._requests.prefix
        return f"{key}/" if key else ""

    def _object_pages(self, below: str, *, recursive: bool) -> Iterator[Any]:
        arguments = {} if recursive else {"Delimiter": "/"}
        return self._requests.pages(
            "list_objects_v2",
            {"NextContinuationToken": "ContinuationToken"},
            Prefix=below,
            **arguments,
        )

    def _delete_keys(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BULK_COUNT):
            some = keys[start : start + _BULK_COUNT]
            if len(some) == 1 or not self._takes_bulk or not self._delete_bulk(some):
                self._delete_singly(some)

    def _delete_bulk(self, keys: Sequence[str]) -> bool:
        """Delete in one request; return whether the server takes such requests."""
        try:
            answer = self._requests.send(
                "delete_objects",
                Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
            )
        except Exception as error:
            if code_of(error) not in _NO_BULK:
                raise
            self._takes_bulk = False
            return False
        for refusal in answer.get("Errors", ()):
            code = str(refusal.get("Code", ""))
            if code != "NoSuchKey":
                raise HttpFailure(status=None, code=code, message=refusal.get("Message", ""))
        return True

    def _delete_singly(self, keys: Sequence[str]) -> None:
        self._client.run_all(
            lambda fs, key: self._requests.request(fs, "delete_object", Key=key), keys
        )


async def _skip(body: Any, count: int) -> None:  # noqa: ANN401  # aiobotocore's untyped stream
    while count > 0:
        piece = await body.read(min(_CHUNK_BYTES, count))
        if not piece:
            return
        count -= len(piece)
