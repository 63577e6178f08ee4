"""S3 and what speaks like it, through s3fs's client."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.options import MIB
from ckpt_storage.store.backend import (
    DELETE_COUNT,
    Buffers,
    Capabilities,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Part,
    PartCopy,
    Settings,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import ForeignAnswer, HttpFailure

from .clients import ForeignFs
from .clouds import Body, CloudBackend, Page, total_of
from .refusals import check_source
from .s3_client import TELLING, ViewsBody, client_options

CAPABILITIES = Capabilities(
    kind="s3",
    exclusive_create=True,
    if_match=True,
    atomic_replace=True,
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
"""What AWS promises; other servers may ignore the conditions."""

_WRITE_ID = "ckpt-write-id"
"""Metadata that tells one attempt to write a key from another."""

_ALGORITHM = "CRC32C"
_CHECKSUMS = {"ChecksumAlgorithm": _ALGORITHM, "ChecksumType": "FULL_OBJECT"}
_EARLIER = 0.9
_OK = 200
_RECEIVED_BYTES = MIB

# What servers answer, as codes of S3; digits are the status of an answer without a body.
_UNKNOWN_HEADER = frozenset(
    {"501", "InvalidArgument", "InvalidRequest", "MethodNotAllowed", "NotImplemented"}
)
_NO_BULK = _UNKNOWN_HEADER | {"MalformedXML", "MissingContentMD5", "MissingRequestBodyError"}
"""Refusals of DeleteObjects as such: OpenStack Swift wants a header that clients no longer send."""


class S3Backend(CloudBackend):
    """One root in one bucket.

    The token of an upload is "CRC32C:" or ":" and S3's id of it; with the former, each part
    bears a checksum, and its receipt is the ETag with the checksum behind it.
    """

    def __init__(self, location: Location, settings: Settings) -> None:
        self.capabilities = CAPABILITIES
        # A request ends, and frees its memory, before its caller gives the call up.
        timeout_s = _EARLIER * settings.request_timeout_s
        super().__init__(
            location,
            dataclasses.replace(settings, request_timeout_s=timeout_s),
            options=client_options(location, timeout_s),
        )
        self._url = location.url
        self._takes_bulk = True
        self._takes_checksums = True
        # By upload: ETag and length of what is copied, so that all copies are of one version.
        self._sources: dict[str, dict[str, tuple[str, int]]] = {}

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        bucket, prefix, _ = self._client.fs.split_path(f"{self._client.root}/")
        return bucket, f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""

    def stat(self, path: str) -> ObjectInfo:
        """HeadObject; if it is refused, GetObject, as only that answer says why."""
        try:
            return super().stat(path)
        except Exception as error:
            if _code_of(error) in {"400", "403"}:
                self.read(path, [(0, memoryview(bytearray(1)))])
            raise

    async def _head(self, fs: ForeignFs, path: str) -> ObjectInfo:
        answer = await self._ask(fs, "head_object", Key=self._name(path))
        return ObjectInfo(
            path=path,
            size_bytes=answer["ContentLength"],
            modified_s=answer["LastModified"].timestamp(),
            version=answer["ETag"],
            write_id=answer.get("Metadata", {}).get(_WRITE_ID),
        )

    @contextlib.asynccontextmanager
    async def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> AsyncIterator[Body]:
        asked = {} if start is None else {"Range": f"bytes={start}-{start + length - 1}"}
        answer = await self._ask(fs, "get_object", Key=self._name(path), **asked)
        is_whole = answer["ResponseMetadata"]["HTTPStatusCode"] == _OK
        told = answer["ContentLength"] if is_whole else total_of(answer.get("ContentRange"))
        async with answer["Body"] as body:
            connection = body.raw_stream.connection
            if connection is not None and connection.transport is not None:
                # Asyncio takes a quarter of it at a time, and each time wakes the reader.
                connection.transport.max_size = _RECEIVED_BYTES
            yield Body(
                # As it came: asking for a length joins what came.
                pieces=body.raw_stream.content.iter_any(),
                start=0 if is_whole or start is None else start,
                total_bytes=told,
                version=answer.get("ETag"),
            )

    async def _put(
        self,
        fs: ForeignFs,
        path: str,
        data: Buffers,
        write_id: str | None,
        condition: Mapping[str, Any],
    ) -> None:
        named = {"Metadata": {_WRITE_ID: write_id}} if write_id else {}
        body = ViewsBody(data)
        await self._ask(fs, "put_object", Key=self._name(path), Body=body, **named, **condition)

    async def _delete(self, fs: ForeignFs, path: str, condition: Mapping[str, Any]) -> None:
        try:
            await self._ask(fs, "delete_object", Key=self._name(path), **condition)
        except Exception as error:
            # Clients and servers know the condition since September 2025.
            if not condition or _code_of(error) not in _UNKNOWN_HEADER:
                raise
            raise UnsupportedByStoreError(
                f"{path}: this server deletes without conditions only.", kind="unsupported"
            ) from error

    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> Page:  # noqa: ANN401  # a token
        asked = {"Prefix": below, **({} if recursive else {"Delimiter": "/"})}
        asked |= {"ContinuationToken": more} if more else {}
        answer = await self._ask(fs, "list_objects_v2", **asked)
        return Page(
            objects=[
                ObjectInfo(
                    path=self._path(item["Key"]),
                    size_bytes=item["Size"],
                    modified_s=item["LastModified"].timestamp(),
                    version=item.get("ETag"),
                )
                for item in answer.get("Contents", ())
            ],
            folders=[self._path(item["Prefix"]) for item in answer.get("CommonPrefixes", ())],
            more=answer["IsTruncated"] and answer.get("NextContinuationToken"),
        )

    def _condition(
        self, *, if_absent: bool = False, if_match: str | None = None
    ) -> Mapping[str, Any]:
        if if_absent:
            return {"IfNoneMatch": "*"}
        return {} if if_match is None else {"IfMatch": if_match}

    def delete(self, paths: Sequence[str]) -> None:
        """DeleteObject, or DeleteObjects where the server takes it."""
        for start in range(0, len(paths), DELETE_COUNT):
            some = paths[start : start + DELETE_COUNT]
            if len(some) == 1 or not self._takes_bulk or not self._delete_bulk(some):
                super().delete(some)

    def _delete_bulk(self, paths: Sequence[str]) -> bool:
        """Delete in one request; return whether the server takes such requests."""
        objects = [{"Key": self._name(path)} for path in paths]
        try:
            answer = self._send("delete_objects", Delete={"Objects": objects, "Quiet": True})
        except Exception as error:
            if _code_of(error) not in _NO_BULK:
                raise
            self._takes_bulk = False
            return False
        for refusal in answer.get("Errors", ()):
            code = str(refusal.get("Code", ""))
            if code != "NoSuchKey":
                raise HttpFailure(status=None, code=code, message=refusal.get("Message", ""))
        return True

    def begin_upload(
        self, path: str, *, write_id: str, if_absent: bool, size_hint: int | None, copies: bool
    ) -> str:
        """CreateMultipartUpload; for copies with the wish that S3 computes checksums.

        A server that does not say that it will is sent none, and its copies tell none.
        """
        del if_absent, size_hint
        begin = functools.partial(
            self._send,
            "create_multipart_upload",
            Key=self._name(path),
            Metadata={_WRITE_ID: write_id},
        )
        if copies and self._takes_checksums:
            try:
                answer = begin(**_CHECKSUMS)
            except Exception as error:
                is_old_client = isinstance(error, UnsupportedByStoreError)
                if not is_old_client and _code_of(error) not in _UNKNOWN_HEADER:
                    raise
                answer = {}
            if answer.items() >= _CHECKSUMS.items():
                return f"{_ALGORITHM}:{answer['UploadId']}"
            self._takes_checksums = False
            if answer.get("ChecksumAlgorithm"):
                # It wants a checksum with each part, and knows none of whole objects.
                self.abort_upload(path, f":{answer['UploadId']}")
            elif answer:
                return f":{answer['UploadId']}"
        return f":{begin()['UploadId']}"

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """UploadPart."""
        del offset, last
        checksum = {}
        if token.startswith(_ALGORITHM):
            crc32c = functools.reduce(lambda known, view: crc32c_of(view, known), data, 0)
            checksum = {"ChecksumCRC32C": _encoded(crc32c)}
        answer = self._send(
            "upload_part",
            **self._upload(path, token),
            PartNumber=number + 1,
            Body=ViewsBody(data),
            **checksum,
        )
        return " ".join([str(answer["ETag"]), *checksum.values()])

    def copy_source(self, path: str) -> CopySource:
        """Return the bucket at its endpoint, and the key."""
        return CopySource(
            scope=f"s3 {self.endpoint} {self._place[0]}",
            address=self._name(path),
            path=f"{self._url}/{path}",
        )

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        """UploadPartCopy of a range, if the source is still what it was at the first such copy."""
        address = copy.source.address
        known = self._sources.setdefault(token, {})
        if address not in known:
            told = self._send("head_object", Key=address)
            known[address] = str(told["ETag"]), int(told["ContentLength"])
        etag, found_bytes = known[address]
        check_source(copy, found_bytes)
        answer = self._send(
            "upload_part_copy",
            **self._upload(path, token),
            PartNumber=copy.number + 1,
            CopySource={"Bucket": self._place[0], "Key": address},
            CopySourceRange=f"bytes={copy.start}-{copy.start + copy.length - 1}",
            CopySourceIfMatch=etag,
        )["CopyPartResult"]
        checksum = answer.get("ChecksumCRC32C")
        return Part(
            number=copy.number,
            offset=copy.offset,
            size_bytes=copy.length,
            receipt=f"{answer['ETag']} {checksum or ''}".rstrip(),
            crc32c=_decoded(checksum) if checksum else None,
        )

    def flush_parts(self, path: str, token: str) -> None:
        """S3 has the parts; this process copies no more."""
        del path
        self._sources.pop(token, None)

    leave_upload = flush_parts

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str, if_absent: bool
    ) -> None:
        """CompleteMultipartUpload, on condition that nothing is there if that is asked for."""
        del write_id
        receipts = [part.receipt.split(" ") for part in parts]
        named = [
            {"PartNumber": part.number + 1, "ETag": receipt[0]}
            for part, receipt in zip(parts, receipts, strict=True)
        ]
        extra = dict(self._condition(if_absent=if_absent))
        crcs = [_decoded(text) for receipt in receipts for text in receipt[1:]]
        if token.startswith(_ALGORITHM) and len(crcs) == len(parts):
            whole = combine_many(crcs, [part.size_bytes for part in parts])
            extra |= {"ChecksumCRC32C": _encoded(whole), "ChecksumType": "FULL_OBJECT"}
        with self.taken(path, if_absent=if_absent):
            self._send(
                "complete_multipart_upload",
                **self._upload(path, token),
                MultipartUpload={"Parts": named},
                **extra,
            )
        self._sources.pop(token, None)

    def abort_upload(self, path: str, token: str) -> None:
        """AbortMultipartUpload; one that is gone is no error."""
        self._sources.pop(token, None)
        try:
            self._send("abort_multipart_upload", **self._upload(path, token))
        except Exception as error:
            if self.kind_of(error) != "not-found":
                raise

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """ListMultipartUploads."""
        key, below = self._name(prefix), self._name(f"{prefix}/" if prefix else "")
        # Rights to a bucket may end at the root's slash.
        asked = {"Prefix": key}
        while True:
            page = self._send("list_multipart_uploads", **asked)
            for item in page.get("Uploads", ()):
                if item["Key"] == key or item["Key"].startswith(below):
                    yield OpenUpload(path=self._path(item["Key"]), token=f":{item['UploadId']}")
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _upload(self, path: str, token: str) -> dict[str, str]:
        return {"Key": self._name(path), "UploadId": token.partition(":")[2]}

    def _send(self, method: str, **arguments: Any) -> Mapping[str, Any]:  # noqa: ANN401  # botocore's
        """Send one request by the client's method and return the answer."""
        return self._client.run(self._ask, method, **arguments)

    async def _ask(self, fs: ForeignFs, /, method: str, **arguments: Any) -> Mapping[str, Any]:  # noqa: ANN401  # botocore's
        """Send one request on the loop, with the options that s3fs was given.

        Raises `UnsupportedByStoreError` if the installed botocore does not know an
        argument: a condition must never be left out in silence.
        """
        await fs.set_session()
        bucket = self._place[0]
        client = await fs.get_s3(bucket)
        name = client.meta.method_to_api_mapping[method]
        known = client.meta.service_model.operation_model(name).input_shape.members
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            raise UnsupportedByStoreError(
                f"The installed botocore cannot send {', '.join(unknown)} with {name}.",
                kind="unsupported",
                next_step="Run: pip install -U 'ckpt-storage[s3]'",
            )
        extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        accepted = {key: value for key, value in extra.items() if key in known}
        answer: Mapping[str, Any] = await getattr(client, method)(
            Bucket=bucket, **{**accepted, **arguments}
        )
        telling = TELLING.get(method)
        if telling and telling.isdisjoint(answer):
            raise ForeignAnswer(" or ".join(sorted(telling)))
        return answer


def _encoded(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode("ascii")


def _decoded(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")


def _code_of(error: BaseException) -> str:
    """Return the S3 error code that a client error carries, or ""."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return ""
    return str(response.get("Error", {}).get("Code", ""))
