"""One object on its way into S3 from several processes, and from other objects of the bucket.

The upload's id is all that a member needs; once the upload is complete, S3 knows the id no more and
refuses late parts.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

from ckpt_storage.errors import IntegrityError, StorageError, UnsupportedByStoreError
from ckpt_storage.format import integrity

from .base import CopySource, Existing, PartReceipt
from .dialect_s3_requests import S3Requests, code_of
from .dialect_s3_upload import WRITE_ID, abort_one, abort_unseen, confirm, delete_ours, found_bytes
from .parts import SharedParts, encode_ticket, ended, joined, not_the_owner, whole_object

_ALGORITHM = "CRC32C"
_PLAIN = "none"
_CRC_BYTES = 4

# Answers to a request for checksums of servers that have none.
_NO_CHECKSUMS = frozenset(
    {"InvalidArgument", "InvalidRequest", "MethodNotAllowed", "NotImplemented", "501"}
)
_TAKEN = frozenset({"412", "PreconditionFailed"})


class S3SharedUpload:
    """A `SharedUpload`; with `joined`, the fields of a ticket, a member's.

    S3 is asked to compute the CRC-32C of each part. A server that does not say that it will is
    sent none: part copies then tell no checksum.
    """

    def __init__(
        self, requests: S3Requests, path: str, *, joined: Mapping[str, str] | None = None
    ) -> None:
        self._requests = requests
        self._path = path
        self._key = requests.key(path)
        self._shown = f"s3://{requests.bucket}/{self._key}"
        self._is_owner = joined is None
        self._upload_id = joined["id"] if joined else None
        self._has_checksums = bool(joined) and joined is not None and joined["checksum"] != _PLAIN
        self._write_id = os.urandom(16).hex()
        self._parts = SharedParts(self._shown)
        self._sources: dict[str, tuple[str, int]] = {}
        # Held while the upload is begun, so that parts sent at once begin one upload.
        self._lock = threading.Lock()
        self._was_begun_unseen = False
        self._may_be_visible = False
        self._state = "open"

    def ticket(self) -> str:
        """CreateMultipartUpload, unless it was sent before; return the upload's id."""
        upload_id = self._begun()
        checksum = _ALGORITHM if self._has_checksums else _PLAIN
        return encode_ticket("s3", self._path, {"id": upload_id, "checksum": checksum})

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """UploadPart."""
        del last
        self._check_open()
        upload_id = self._begun()
        data = joined(buffers)
        crc32c = integrity.crc32c_of(data) if self._has_checksums else None
        extra = {} if crc32c is None else {"ChecksumCRC32C": _encoded(crc32c)}
        with self._aborted_if_late(upload_id):
            answer = self._requests.send(
                "upload_part",
                Key=self._key,
                UploadId=upload_id,
                PartNumber=number + 1,
                Body=data,
                **extra,
            )
        self._parts.add(
            PartReceipt(
                number=number,
                offset=offset,
                size_bytes=len(data),
                receipt=str(answer["ETag"]),
                crc32c=crc32c,
            )
        )

    def copy_part(
        self,
        number: int,
        offset: int,
        source: CopySource,
        source_start: int,
        length: int,
        *,
        source_bytes: int | None = None,
        last: bool,
    ) -> int | None:
        """UploadPartCopy of a range, if the source is still what it was at the first such copy."""
        del last
        self._check_open()
        etag, found = self._known_source(source)
        if source_bytes not in {None, found} or source_start + length > found:
            raise IntegrityError(
                f"{source.path} has {found} bytes; [{source_start}, {source_start + length}) of "
                f"{found if source_bytes is None else source_bytes} was to be copied.",
                path=source.path,
                offset=found,
                next_step="The object is damaged or not the one that was saved.",
            )
        upload_id = self._begun()
        with self._aborted_if_late(upload_id):
            answer = self._requests.send(
                "upload_part_copy",
                Key=self._key,
                UploadId=upload_id,
                PartNumber=number + 1,
                CopySource={"Bucket": self._requests.bucket, "Key": source.address},
                CopySourceRange=f"bytes={source_start}-{source_start + length - 1}",
                CopySourceIfMatch=etag,
            )
        told = answer["CopyPartResult"]
        crc32c = _decoded(told.get("ChecksumCRC32C"))
        self._parts.add(
            PartReceipt(
                number=number,
                offset=offset,
                size_bytes=length,
                receipt=str(told["ETag"]),
                crc32c=crc32c,
            )
        )
        return crc32c

    def receipts(self) -> list[PartReceipt]:
        """Take no more parts; S3 has them."""
        return self._parts.end()

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """CompleteMultipartUpload; to refuse what exists, with If-None-Match: *."""
        if not self._is_owner:
            raise not_the_owner(self._shown)
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        parts = {*self._parts.end(), *receipts}
        self._join_parts(
            whole_object(list(parts), total_bytes, shown=self._shown), total_bytes, existing
        )
        self._state = "complete"
        if self._was_begun_unseen:
            # The object is there; an upload that stays is found by `abort_uploads`.
            with contextlib.suppress(Exception):
                abort_unseen(self._requests, self._key, self._upload_id)

    def abort(self) -> None:
        """AbortMultipartUpload, and DeleteObject if completing it may have worked after all."""
        self._parts.end()
        if self._state == "complete":
            return
        self._state = "aborted"
        if not self._is_owner:
            return
        # Waits for a thread that is just beginning the upload.
        with self._lock:
            upload_id = self._upload_id
        if upload_id is not None:
            abort_one(self._requests, self._key, upload_id)
        if self._was_begun_unseen:
            abort_unseen(self._requests, self._key, upload_id)
        if self._may_be_visible:
            delete_ours(self._requests, self._key, self._write_id)

    @contextlib.contextmanager
    def _aborted_if_late(self, upload_id: str) -> Iterator[None]:
        """Abort once more what was aborted meanwhile: S3 may keep a part that arrives then."""
        try:
            yield
        finally:
            if self._state == "aborted" and self._is_owner:
                abort_one(self._requests, self._key, upload_id)

    def _check_open(self) -> None:
        self._parts.check_open()
        if self._state != "open":
            raise ended(self._shown)

    def _is_there(self) -> int | None:
        # Something else may have the name, which completing was told to refuse.
        return found_bytes(self._requests, self._key, self._write_id, unmarked_is_ours=False)

    def _begun(self) -> str:
        with self._lock:
            if self._upload_id is None:
                try:
                    answer = self._create(ChecksumAlgorithm=_ALGORITHM, ChecksumType="FULL_OBJECT")
                except Exception as error:
                    is_old_client = isinstance(error, UnsupportedByStoreError)
                    if not is_old_client and code_of(error) not in _NO_CHECKSUMS:
                        raise
                    answer = self._create()
                # A server that does not know the header says nothing of it.
                self._has_checksums = (
                    answer.get("ChecksumAlgorithm") == _ALGORITHM
                    and answer.get("ChecksumType") == "FULL_OBJECT"
                )
                self._upload_id = str(answer["UploadId"])
            return self._upload_id

    def _create(self, **arguments: object) -> Mapping[str, object]:
        try:
            return self._requests.send(
                "create_multipart_upload",
                Key=self._key,
                Metadata={WRITE_ID: self._write_id},
                **arguments,
            )
        except UnsupportedByStoreError:
            raise
        except Exception as error:
            # A refusal has begun nothing; without an answer, an upload may be open.
            self._was_begun_unseen |= code_of(error) in {"", "InternalError"}
            raise

    def _known_source(self, source: CopySource) -> tuple[str, int]:
        """Return ETag and length of a source, asked once, so that all copies are of one version."""
        known = self._sources.get(source.address)
        if known is None:
            answer = self._requests.send("head_object", Key=source.address)
            known = str(answer["ETag"]), int(answer["ContentLength"])
            self._sources[source.address] = known
        return known

    def _join_parts(
        self, parts: Sequence[PartReceipt], total_bytes: int, existing: Existing
    ) -> None:
        named = [{"PartNumber": part.number + 1, "ETag": part.receipt} for part in parts]
        extra: dict[str, object] = {"IfNoneMatch": "*"} if existing == "refuse" else {}
        crcs = [part.crc32c for part in parts if part.crc32c is not None]
        if self._has_checksums and len(crcs) == len(parts):
            whole = integrity.combine_many(crcs, [part.size_bytes for part in parts])
            extra |= {"ChecksumCRC32C": _encoded(whole), "ChecksumType": "FULL_OBJECT"}
        was_sent_before = self._may_be_visible
        self._may_be_visible = True
        try:
            self._requests.send(
                "complete_multipart_upload",
                Key=self._key,
                UploadId=self._begun(),
                MultipartUpload={"Parts": named},
                **extra,
            )
        except Exception as error:
            code = code_of(error)
            is_lost = code == "NoSuchUpload" or (code in _TAKEN and was_sent_before)
            if not is_lost:
                raise
            failure: Exception = error
        else:
            return
        # A server forgets the id once it has done the work, and then the answer got lost.
        if code_of(failure) == "NoSuchUpload":
            confirm(self._requests, self._key, self._write_id, total_bytes, unmarked_is_ours=False)
        elif self._is_there() != total_bytes:
            raise failure


def _encoded(crc32c: int) -> str:
    return base64.b64encode(crc32c.to_bytes(_CRC_BYTES, "big")).decode("ascii")


def _decoded(text: object) -> int | None:
    """Return the checksum that an answer holds; raises `StorageError` if it is none."""
    if text is None:
        return None
    try:
        data = base64.b64decode(str(text), validate=True)
    except ValueError:
        data = b""
    if len(data) != _CRC_BYTES:
        raise StorageError(
            f"The server tells {text!r} as the CRC-32C of a part.",
            next_step="Check what the server is; it does not speak S3.",
        )
    return int.from_bytes(data, "big")
