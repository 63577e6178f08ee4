"""S3 and what speaks like it, through s3fs's client."""

from __future__ import annotations

import contextlib
import functools
import io
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.format.crc import crc32c_of_all
from ckpt_storage.options import MIB
from ckpt_storage.store.backend import Buffers, OpenUpload, Part, PartCopy, Settings
from ckpt_storage.store.location import Location, address_of
from ckpt_storage.store.problems import ForeignResponse, check_source, meaning_of, unless_absent

from . import clouds
from .client_registry import ForeignFs

_CHECKSUMS = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "COMPOSITE"}
_POOL_CONNECTIONS = 64
_SOURCE_COUNT = 10_000
_PIECE_BYTES = MIB

# Error codes of S3; digits are the status of a response without a body.
_UNKNOWN_HEADER = frozenset(
    {"501", "InvalidArgument", "InvalidRequest", "MethodNotAllowed", "NotImplemented"}
)

_CHANGED = frozenset({"412", "PreconditionFailed"})

_REQUIRED_FIELDS = {
    "complete_multipart_upload": {"ETag"},
    "create_multipart_upload": {"UploadId"},
    "get_object": {"ETag"},
    "head_object": {"ETag"},
    "list_multipart_uploads": {"Bucket", "IsTruncated"},
    "list_objects_v2": {"IsTruncated", "KeyCount", "Name"},
    "put_object": {"ETag"},
    "upload_part": {"ETag"},
}
"""Fields of which every response of S3 has one; an HTML page with status 200 has none."""


@dataclass(slots=True)
class _Dialect:
    """What the server at one endpoint understands, as far as it was observed.

    takes_checksums: it accepts headers with a CRC-32C.
    has_bare_etags: it compares If-Match with the ETag without its quotes; None: unknown.
    """

    takes_checksums: bool = True
    has_bare_etags: bool | None = None


_DIALECTS: dict[str, _Dialect] = {}
"""By endpoint, for all clients of this process."""


class S3Backend(clouds.CloudBackend):
    """One root in one bucket.

    Every object and part is sent with its CRC-32C, unless the server refuses such headers. The
    token of an upload is S3's id; the receipt of a part is its ETag and the checksum that the
    server returned.
    """

    capabilities = replace(
        clouds.CLOUD,
        kind="s3",
        parallel_parts=True,
        min_part_bytes=5 * MIB,
        max_part_bytes=5 << 30,
        max_part_count=10_000,
        max_put_bytes=5 << 30,
        streams_parts=True,
        tokens_travel=True,
        lists_uploads=True,
        copy_min_bytes=5 * MIB,
        copy_max_bytes=5 << 30,
    )

    def __init__(self, location: Location, settings: Settings) -> None:
        super().__init__(
            location, settings, options=_client_options(location, settings.request_timeout_s)
        )
        self._dialect = _DIALECTS.setdefault(address_of(location), _Dialect())
        # ETag and length of sources by upload, so that all copies are of one version.
        self._sources: dict[tuple[str, str], tuple[str, int]] = {}

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        bucket, prefix, _ = self._acquire().split_path(f"{self._root}/")
        return bucket, f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""

    async def _head(self, fs: ForeignFs, path: str) -> clouds.ObjectStat:
        head = await self._head_object(fs, self._name(path))
        write_id = head.get("Metadata", {}).get(clouds.WRITE_ID)
        return head["ContentLength"], head["LastModified"].timestamp(), head["ETag"], write_id

    async def _head_object(self, fs: ForeignFs, key: str) -> Mapping[str, Any]:
        """HeadObject; after an error without a body GetObject, whose error has one."""
        try:
            return await self._request(fs, "head_object", Key=key)
        except Exception as error:
            if _code_of(error) in {"400", "403"} or meaning_of(error).kind == "bad-response":
                first = clouds.range_header(0, 1)
                response = await self._request(fs, "get_object", Key=key, Range=first)
                response["Body"].close()
            raise

    @contextlib.asynccontextmanager
    async def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> AsyncIterator[clouds.Body]:
        header = {} if start is None else {"Range": clouds.range_header(start, length)}
        response = await self._request(fs, "get_object", Key=self._name(path), **header)
        # Not by the status: some servers send a range with status 200.
        first, total_bytes = clouds.span_of(response.get("ContentRange"), response["ContentLength"])
        async with response["Body"] as body:
            connection = body.raw_stream.connection
            if connection is not None and connection.transport is not None:
                # Asyncio's default is a quarter of this, and each read wakes the task.
                connection.transport.max_size = _PIECE_BYTES
            # As received: `read(length)` would join the pieces.
            pieces, version = body.raw_stream.content.iter_any(), response.get("ETag")
            yield clouds.Body(pieces=pieces, first=first, total_bytes=total_bytes, version=version)

    async def _put(
        self,
        fs: ForeignFs,
        path: str,
        data: Buffers,
        write_id: str | None,
        terms: clouds.Preconditions,
    ) -> None:
        named: dict[str, Any] = {"Key": self._name(path)}
        named |= {"Metadata": {clouds.WRITE_ID: write_id}} if write_id else {}
        dialect, spelt = self._dialect, self._spelt(terms)
        try:
            await self._request_checked(fs, "put_object", data, **named, **spelt)
        except Exception as error:
            is_open = "IfMatch" in terms and dialect.has_bare_etags is None
            if not is_open or _code_of(error) not in _CHANGED:
                raise
            # Refused for the current version: Ceph's RGW compares the ETag without its quotes.
            stat = await self._head(fs, path)
            if stat[2] != terms["IfMatch"]:
                raise
            bare: dict[str, Any] = {"IfMatch": _bare(terms["IfMatch"])}
            await self._request_checked(fs, "put_object", data, **named, **bare)
            dialect.has_bare_etags = True
        else:
            if "IfMatch" in terms and dialect.has_bare_etags is None:
                dialect.has_bare_etags = False

    def _spelt(self, terms: clouds.Preconditions) -> clouds.Preconditions:
        """Return conditions with ETags in the form that this server compares."""
        if "IfMatch" in terms and self._dialect.has_bare_etags:
            return {**terms, "IfMatch": _bare(terms["IfMatch"])}
        return terms

    async def _delete(self, fs: ForeignFs, path: str, terms: clouds.Preconditions) -> None:
        try:
            await self._request(fs, "delete_object", Key=self._name(path), **self._spelt(terms))
        except Exception as error:
            # Clients and servers support the condition since September 2025.
            if not terms or _code_of(error) not in _UNKNOWN_HEADER:
                raise
            what = f"{path}: this server does not support conditional deletes."
            raise UnsupportedByStoreError(what) from error

    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> clouds.Page:
        options = {"Prefix": below, **({} if recursive else {"Delimiter": "/"})}
        options |= {"ContinuationToken": more} if more else {}
        response = await self._request(fs, "list_objects_v2", **options)
        entries = [
            self._listed(item["Key"], item["Size"], item["LastModified"].timestamp())
            for item in response.get("Contents", ())
        ]
        entries += [self._listed(item["Prefix"]) for item in response.get("CommonPrefixes", ())]
        return entries, response["IsTruncated"] and response.get("NextContinuationToken")

    def _terms(
        self, *, if_absent: bool = False, if_match: str | None = None
    ) -> clouds.Preconditions:
        if if_absent:
            return {"IfNoneMatch": "*"}
        return {} if if_match is None else {"IfMatch": if_match}

    def begin_upload(self, path: str, *, write_id: str) -> str:
        """CreateMultipartUpload with composite checksums, as Cloudflare R2 knows no other."""
        metadata, name = {clouds.WRITE_ID: write_id}, self._name(path)
        method = "create_multipart_upload"
        response = self._run(self._request_checked, method, None, Key=name, Metadata=metadata)
        return str(response["UploadId"])

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        target = self._upload(path, token, PartNumber=part.number + 1)
        target["crc32c"] = part.crc32c
        return _receipt(self._run(self._request_checked, "upload_part", data, **target))

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        """UploadPartCopy, if the source still has the version of the first copy."""
        address = copy.source.address
        source = self._sources.get((token, address))
        if source is None:
            head = self._run(self._head_object, address)
            if len(self._sources) >= _SOURCE_COUNT:
                self._sources.clear()
            known = str(head["ETag"]), int(head["ContentLength"])
            source = self._sources.setdefault((token, address), known)
        etag, source_bytes = source
        check_source(copy, source_bytes)
        request = self._upload(path, token, PartNumber=copy.number + 1, CopySourceIfMatch=etag)
        request["CopySource"] = {"Bucket": self._place[0], "Key": address}
        if copy.length < source_bytes:
            # AWS, "UploadPartCopy": "You can copy a range only if the source object is greater than
            # 5 MB."
            request["CopySourceRange"] = f"bytes={copy.start}-{copy.start + copy.length - 1}"
        response = self._run(self._request, "upload_part_copy", **request).get("CopyPartResult", {})
        if "ETag" not in response:
            # The server ignored the header with the source, and holds an empty part.
            what = f"The server's response to the copy of a part of {path} has no ETag."
            raise UnsupportedByStoreError(what)
        checksum = response.get("ChecksumCRC32C")
        part = Part(number=copy.number, offset=copy.offset, size_bytes=copy.length)
        crc32c = clouds.decoded(checksum) if checksum else None
        return replace(part, receipt=_receipt(response), crc32c=crc32c)

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        named = []
        for part in parts:
            etag, _, checksum = part.receipt.partition(" ")
            named.append({"PartNumber": part.number + 1, "ETag": etag})
            if checksum:
                named[-1]["ChecksumCRC32C"] = checksum
        self._run(
            self._request,
            "complete_multipart_upload",
            **self._upload(path, token, MultipartUpload={"Parts": named}),
        )

    def abort_upload(self, path: str, token: str) -> None:
        with unless_absent():
            self._run(self._request, "abort_multipart_upload", **self._upload(path, token))

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        # Directory buckets accept only prefixes that end in a slash.
        options = {"Prefix": self._name(f"{prefix}/" if prefix else "")}
        while True:
            try:
                page = self._run(self._request, "list_multipart_uploads", **options)
            except Exception as error:
                # Some servers return this error if no upload is open.
                if _code_of(error) != "NoSuchUpload":
                    raise
                return
            for item in page.get("Uploads", ()):
                yield OpenUpload(path=self._path(item["Key"]), token=item["UploadId"])
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return
            options["KeyMarker"] = page["NextKeyMarker"]
            if marker := page.get("NextUploadIdMarker"):
                options["UploadIdMarker"] = marker

    def _upload(self, path: str, token: str, **more: Any) -> dict[str, Any]:
        return {"Key": self._name(path), "UploadId": token, **more}

    async def _request_checked(
        self,
        fs: ForeignFs,
        /,
        method: str,
        data: Buffers | None,
        crc32c: int | None = None,
        **arguments: Any,
    ) -> Mapping[str, Any]:
        """Send one request with the checksum of its body; without a body, ask for checksums.

        Without any of that, if the server refuses it.
        """
        body = {} if data is None else {"Body": _ViewsBody(data)}
        if self._dialect.takes_checksums:
            checksum = _CHECKSUMS
            if data is not None:
                crc32c = crc32c_of_all(data) if crc32c is None else crc32c
                checksum = {"ChecksumCRC32C": clouds.encoded(crc32c)}
            try:
                return await self._request(fs, method, **body, **arguments, **checksum)
            except Exception as error:
                if _code_of(error) not in _UNKNOWN_HEADER:
                    raise
        response = await self._request(fs, method, **body, **arguments)
        self._dialect.takes_checksums = False
        return response

    async def _request(self, fs: ForeignFs, /, method: str, **arguments: Any) -> Mapping[str, Any]:
        """Send one request on the loop, with the request options of s3fs."""
        await fs.set_session()
        bucket = self._place[0]
        client = await fs.get_s3(bucket)
        name = client.meta.method_to_api_mapping[method]
        known = client.meta.service_model.operation_model(name).input_shape.members
        extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        # SSE-C: a copy reads its source with the key that encrypted it.
        keys = {f"CopySource{key}": extra[key] for key in extra if key.startswith("SSECustomer")}
        extra |= keys
        accepted = {key: value for key, value in extra.items() if key in known}
        # The client refuses unknown arguments, so no condition is dropped silently.
        response: Mapping[str, Any] = await getattr(client, method)(
            Bucket=bucket, **{**accepted, **arguments}
        )
        required = _REQUIRED_FIELDS.get(method)
        if required and required.isdisjoint(response):
            raise ForeignResponse(" or ".join(sorted(required)))
        return response


class _ViewsBody:
    """Consecutive views as the body of one request; to botocore a file, to aiohttp a stream."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self._size = self._ends[-1] if self._ends else 0
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        start = self._at
        self._at = self._size if size < 0 else min(self._size, start + size)
        return self._between(start, self._at)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # Copies in the processor's cache: a connection that is being closed may still send pieces
        # after the caller reuses its buffers.
        for start in range(0, self._size, _PIECE_BYTES):
            yield self._between(start, min(self._size, start + _PIECE_BYTES))

    def _between(self, start: int, stop: int) -> bytes:
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1) + 1
        pieces = []
        for view, end in zip(self._views[first:last], self._ends[first:last], strict=True):
            begin = end - len(view)
            pieces.append(view[max(0, start - begin) : stop - begin])
        return b"".join(pieces)


def _client_options(location: Location, request_timeout_s: float) -> dict[str, Any]:
    """Return s3fs's options with timeouts, one attempt and a pool for parallel requests.

    The user's options win. Botocore adds checksums only where S3 requires them, as other servers
    refuse the headers. Bodies are signed where others could change them.
    """
    options, (connect_s, read_s) = (
        location.storage_options,
        clouds.client_timeouts(request_timeout_s),
    )
    ours = {
        "connect_timeout": connect_s,
        "max_pool_connections": _POOL_CONNECTIONS,
        "read_timeout": read_s,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    theirs = options.get("config_kwargs") or {}
    signing = {"payload_signing_enabled": not _is_private(location)}
    return {
        **options,
        "config_kwargs": {**ours, **theirs, "s3": {**signing, **(theirs.get("s3") or {})}},
        "use_listings_cache": False,
    }


def _is_private(location: Location) -> bool:
    """Return whether nobody can change bytes in flight: with TLS, or within this machine.

    There the SHA-256 of a body in the signature costs more time than the rest of sending it.
    """
    address = address_of(location)
    if not address:  # AWS itself
        inner = location.storage_options.get("client_kwargs") or {}
        return all(place.get("use_ssl", True) for place in (location.storage_options, inner))
    parts = urlsplit(address)
    host = parts.hostname or ""
    return parts.scheme == "https" or host in {"localhost", "::1"} or host.startswith("127.")


def _bare(etag: str) -> str:
    return etag.strip('"')


def _receipt(response: Mapping[str, Any]) -> str:
    """Return what the completion of an upload needs of the response to a part."""
    return f"{response['ETag']} {response.get('ChecksumCRC32C') or ''}".rstrip()


def _code_of(error: BaseException) -> str:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return ""
    return str(response.get("Error", {}).get("Code", ""))
