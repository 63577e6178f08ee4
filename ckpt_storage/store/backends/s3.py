"""S3 and what speaks like it, through s3fs's client: one request a call, conditions sent.

The client's own retries are off: `Store` is the one layer that repeats.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckpt_storage.errors import IntegrityError, UnsupportedByStoreError
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.options import MIB
from ckpt_storage.store.backend import (
    DELETE_COUNT,
    Buffers,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Part,
    PartCopy,
    Settings,
)
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import HttpFailure

from .clients import ForeignFs
from .remote import CHUNK_BYTES, RemoteBackend, check_waste, total_of
from .s3_requests import S3Requests, ViewsBody, client_options, code_of

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

# What servers answer, as codes of S3; digits are the status of an answer without a body.
_GONE = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_TAKEN = frozenset({"412", "PreconditionFailed"})
_PAST_END = frozenset({"416", "InvalidRange"})
_UNKNOWN_HEADER = frozenset(
    {"501", "InvalidArgument", "InvalidRequest", "MethodNotAllowed", "NotImplemented"}
)
_NO_BULK = _UNKNOWN_HEADER | {"MalformedXML", "MissingContentMD5", "MissingRequestBodyError"}
"""Refusals of DeleteObjects as such: OpenStack Swift wants a header that clients no longer send."""


class S3Backend(RemoteBackend):
    """One root in one bucket.

    The token of an upload is "CRC32C:" or ":" and S3's id of it; with the former, each part
    bears a checksum, and its receipt is the ETag with the checksum behind it.
    """

    def __init__(self, location: Location, settings: Settings) -> None:
        self.capabilities = CAPABILITIES
        # A request ends, and frees its memory, before its caller gives the call up.
        timeout_s = _EARLIER * settings.request_timeout_s
        options = client_options(location.storage_options, timeout_s)
        super().__init__(location, options, request_timeout_s=timeout_s)
        self._requests = S3Requests(self._client)
        self._url = location.url
        self._takes_bulk = True
        self._takes_checksums = True
        # By upload: ETag and length of what is copied, so that all copies are of one version.
        self._sources: dict[str, dict[str, tuple[str, int]]] = {}

    def stat(self, path: str) -> ObjectInfo:
        """HeadObject; if it is refused, GetObject, as only that answer says why."""
        key = self._requests.key(path)
        try:
            answer = self._requests.send("head_object", Key=key)
        except Exception as error:
            if code_of(error) not in {"400", "403"}:
                raise
            self.read(path, [(0, memoryview(bytearray(1)))])
            raise
        return ObjectInfo(
            path=path,
            size_bytes=answer["ContentLength"],
            modified_s=answer["LastModified"].timestamp(),
            version=answer["ETag"],
            write_id=answer.get("Metadata", {}).get(_WRITE_ID),
        )

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """GetObject; the version is the ETag."""

        async def fetch(fs: ForeignFs) -> Content:
            key = self._requests.key(path)
            answer = await self._requests.request(fs, "get_object", Key=key)
            data = bytearray()
            async with answer["Body"] as body:
                while (max_bytes is None or len(data) <= max_bytes) and (
                    piece := await body.read(CHUNK_BYTES)
                ):
                    data += piece
            return Content(data=bytes(data), version=answer.get("ETag"))

        return self._client.run(fetch)

    def _filled(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """GetObject with Range, the body copied piece by piece to where it belongs."""
        try:
            return self._client.run(partial(self._fill, path, start, view))
        except Exception as error:
            if code_of(error) not in _PAST_END:
                raise
            return 0, None

    async def _fill(
        self, path: str, start: int, view: memoryview, fs: ForeignFs
    ) -> tuple[int, int | None]:
        """Return how many bytes came, and how long the object is.

        An answer of 200 is the whole object: its first bytes are skipped, unless that
        would be many times what was asked for.
        """
        answer = await self._requests.request(
            fs,
            "get_object",
            Key=self._requests.key(path),
            Range=f"bytes={start}-{start + len(view) - 1}",
        )
        async with answer["Body"] as body:
            skip, total_bytes = 0, total_of(answer.get("ContentRange"))
            if answer["ResponseMetadata"]["HTTPStatusCode"] == _OK:
                skip, total_bytes = start, int(answer["ContentLength"])
                check_waste(start, len(view), total_bytes)
            while skip and (piece := await body.read(min(CHUNK_BYTES, skip))):
                skip -= len(piece)
            count = 0
            # As it came: asking for a length joins what came.
            while count < len(view) and (piece := await body.raw_stream.content.readany()):
                taken = piece[: len(view) - count]
                view[count : count + len(taken)] = taken
                count += len(taken)
        return count, total_bytes

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """PutObject; a condition of any size in one request, since some ignore it on parts."""
        extra: dict[str, object] = {"Metadata": {_WRITE_ID: write_id}} if write_id else {}
        if if_absent:
            extra["IfNoneMatch"] = "*"
        if if_match is not None:
            extra["IfMatch"] = if_match
        with _exists_if_taken(path, if_absent=if_absent):
            self._requests.send(
                "put_object", Key=self._requests.key(path), Body=ViewsBody(data), **extra
            )

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """ListObjectsV2, with a delimiter for direct children only."""
        cut = len(self._requests.below(""))
        for page in self._object_pages(prefix, recursive=recursive):
            for item in page.get("Contents", ()):
                # Consoles make folders as empty objects with a slash at the end.
                if not item["Key"].endswith("/"):
                    yield ObjectInfo(
                        path=item["Key"][cut:],
                        size_bytes=item["Size"],
                        modified_s=item["LastModified"].timestamp(),
                        version=item.get("ETag"),
                    )
            for item in page.get("CommonPrefixes", ()):
                yield ObjectInfo(path=item["Prefix"][cut:], size_bytes=0)

    def _object_pages(self, folder: str, *, recursive: bool) -> Iterator[Any]:
        return self._requests.pages(
            "list_objects_v2",
            {"NextContinuationToken": "ContinuationToken"},
            Prefix=self._requests.below(folder),
            **({} if recursive else {"Delimiter": "/"}),
        )

    def delete(self, paths: Sequence[str]) -> None:
        """DeleteObject, or DeleteObjects where the server takes it."""
        self._delete_keys([self._requests.key(path) for path in paths])

    def delete_version(self, path: str, version: str) -> None:
        """DeleteObject with If-Match, which clients and servers since September 2025 know."""
        try:
            self._requests.send("delete_object", Key=self._requests.key(path), IfMatch=version)
        except Exception as error:
            code = code_of(error)
            if code in _UNKNOWN_HEADER:
                raise UnsupportedByStoreError(
                    f"{path}: this server deletes without conditions only.", kind="unsupported"
                ) from error
            if code not in _GONE:
                raise

    def delete_folder(self, path: str) -> bool:
        """Delete every key below the prefix, page by page: those of empty folders, too."""
        for page in self._object_pages(path, recursive=True):
            keys = [item["Key"] for item in page.get("Contents", ())]
            for start in range(0, len(keys), DELETE_COUNT):
                self._delete_keys(keys[start : start + DELETE_COUNT])
        return True

    def _delete_keys(self, keys: Sequence[str]) -> None:
        if len(keys) == 1 or not self._takes_bulk or not self._delete_bulk(keys):
            self._client.run_all(
                lambda fs, key: self._requests.request(fs, "delete_object", Key=key), keys
            )

    def _delete_bulk(self, keys: Sequence[str]) -> bool:
        """Delete in one request; return whether the server takes such requests."""
        objects = [{"Key": key} for key in keys]
        try:
            answer = self._requests.send(
                "delete_objects", Delete={"Objects": objects, "Quiet": True}
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

    def begin_upload(
        self, path: str, *, write_id: str, if_absent: bool, size_hint: int | None, copies: bool
    ) -> str:
        """CreateMultipartUpload; for copies with the wish that S3 computes checksums.

        A server that does not say that it will is sent none, and its copies tell none.
        """
        del if_absent, size_hint
        if copies and self._takes_checksums:
            try:
                answer = self._begin(path, write_id, **_CHECKSUMS)
            except Exception as error:
                is_old_client = isinstance(error, UnsupportedByStoreError)
                if not is_old_client and code_of(error) not in _UNKNOWN_HEADER:
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
        return f":{self._begin(path, write_id)['UploadId']}"

    def _begin(self, path: str, write_id: str, **arguments: object) -> Mapping[str, Any]:
        return self._requests.send(
            "create_multipart_upload",
            Key=self._requests.key(path),
            Metadata={_WRITE_ID: write_id},
            **arguments,
        )

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """UploadPart."""
        del offset, last
        algorithm, _, upload_id = token.partition(":")
        checksum = {}
        if algorithm:
            crc32c = 0
            for view in data:
                crc32c = crc32c_of(view, crc32c)
            checksum = {"ChecksumCRC32C": _encoded(crc32c)}
        answer = self._requests.send(
            "upload_part",
            Key=self._requests.key(path),
            UploadId=upload_id,
            PartNumber=number + 1,
            Body=ViewsBody(data),
            **checksum,
        )
        return " ".join([str(answer["ETag"]), *checksum.values()])

    def copy_source(self, path: str) -> CopySource:
        """Return the bucket at its endpoint, and the key."""
        return CopySource(
            scope=f"s3 {self.endpoint} {self._requests.bucket}",
            address=self._requests.key(path),
            path=f"{self._url}/{path}",
        )

    def copy_part(self, path: str, token: str, copy: PartCopy) -> Part:
        """UploadPartCopy of a range, if the source is still what it was at the first such copy."""
        source, end = copy.source, copy.start + copy.length
        known = self._sources.setdefault(token, {})
        if source.address not in known:
            told = self._requests.send("head_object", Key=source.address)
            known[source.address] = str(told["ETag"]), int(told["ContentLength"])
        etag, found = known[source.address]
        if copy.source_bytes not in {None, found} or end > found:
            wanted = found if copy.source_bytes is None else copy.source_bytes
            raise IntegrityError(
                f"{source.path} has {found} bytes; [{copy.start}, {end}) of {wanted} was to be "
                "copied.",
                path=source.path,
                offset=found,
                next_step="The object is damaged or not the one that was saved.",
            )
        answer = self._requests.send(
            "upload_part_copy",
            Key=self._requests.key(path),
            UploadId=token.partition(":")[2],
            PartNumber=copy.number + 1,
            CopySource={"Bucket": self._requests.bucket, "Key": source.address},
            CopySourceRange=f"bytes={copy.start}-{end - 1}",
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
        """CompleteMultipartUpload, with If-None-Match: * to refuse what exists."""
        del write_id
        receipts = [part.receipt.split(" ") for part in parts]
        named = [
            {"PartNumber": part.number + 1, "ETag": receipt[0]}
            for part, receipt in zip(parts, receipts, strict=True)
        ]
        extra: dict[str, object] = {"IfNoneMatch": "*"} if if_absent else {}
        crcs = [_decoded(text) for receipt in receipts for text in receipt[1:]]
        if token.startswith(_ALGORITHM) and len(crcs) == len(parts):
            whole = combine_many(crcs, [part.size_bytes for part in parts])
            extra |= {"ChecksumCRC32C": _encoded(whole), "ChecksumType": "FULL_OBJECT"}
        with _exists_if_taken(path, if_absent=if_absent):
            self._requests.send(
                "complete_multipart_upload",
                Key=self._requests.key(path),
                UploadId=token.partition(":")[2],
                MultipartUpload={"Parts": named},
                **extra,
            )
        self._sources.pop(token, None)

    def abort_upload(self, path: str, token: str) -> None:
        """AbortMultipartUpload; one that is gone is no error."""
        self._sources.pop(token, None)
        try:
            self._requests.send(
                "abort_multipart_upload",
                Key=self._requests.key(path),
                UploadId=token.partition(":")[2],
            )
        except Exception as error:
            if code_of(error) not in _GONE:
                raise

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """ListMultipartUploads."""
        key, below = self._requests.key(prefix), self._requests.below(prefix)
        cut = len(self._requests.below(""))
        pages = self._requests.pages(
            "list_multipart_uploads",
            {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
            # Rights to a bucket may end at the root's slash.
            Prefix=key if prefix else below,
        )
        for page in pages:
            for item in page.get("Uploads", ()):
                if item["Key"] == key or item["Key"].startswith(below):
                    yield OpenUpload(path=item["Key"][cut:], token=f":{item['UploadId']}")


@contextlib.contextmanager
def _exists_if_taken(path: str, *, if_absent: bool) -> Iterator[None]:
    """Raise `FileExistsError` for a refusal that says so: some servers do not tell more."""
    try:
        yield
    except Exception as error:
        if not if_absent or code_of(error) not in _TAKEN:
            raise
        raise FileExistsError(f"{path} is there already") from None


def _encoded(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode("ascii")


def _decoded(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")
