"""One object on its way into S3: held back if it is one part, else a multipart upload."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_storage.errors import UnsupportedByStoreError

from .dialect_s3_requests import S3Requests, ViewsBody, code_of
from .parts import PartList, SentPart, ended, gone, joined, wrong_length

WRITE_ID = "ckpt-write-id"
"""Metadata that tells one attempt to write a key from another."""

_GONE = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_CHANGED = _GONE | {"409", "412", "ConditionalRequestConflict", "PreconditionFailed"}
_NO_CONDITION = frozenset({"501", "InvalidArgument", "InvalidRequest", "NotImplemented"})


class S3Upload:
    """An `Upload`; the object bears a random id, so that a lost answer can be resolved.

    An object of one part is kept until `complete`, which puts it in one request: S3 shows
    an object as soon as it is put.
    """

    def __init__(self, requests: S3Requests, key: str) -> None:
        self._requests = requests
        self._key = key
        self._shown = f"s3://{requests.bucket}/{key}"
        self._write_id = os.urandom(16).hex()
        self._only_part: bytes | None = None
        self._upload_id: str | None = None
        self._parts = PartList()
        # Held while the upload is begun, so that parts sent at once begin one upload.
        self._lock = threading.Lock()
        self._was_begun_unseen = False
        self._may_be_visible = False
        self._state = "open"

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """UploadPart, after CreateMultipartUpload for the first one."""
        if self._state != "open":
            raise ended(self._shown)
        if last and number == 0:
            self._only_part = joined(buffers)
            return
        upload_id = self._begun()
        try:
            answer = self._requests.send(
                "upload_part",
                Key=self._key,
                UploadId=upload_id,
                PartNumber=number + 1,
                Body=ViewsBody(buffers),
            )
        finally:
            if self._state == "aborted":
                # S3 may keep a part that arrives while its upload is being aborted.
                abort_one(self._requests, self._key, upload_id)
        size_bytes = sum(view.nbytes for view in buffers)
        part = SentPart(offset=offset, size_bytes=size_bytes, receipt=str(answer["ETag"]))
        self._parts.add(number, part)

    def complete(self, total_bytes: int) -> None:
        """PutObject or CompleteMultipartUpload; the name is write-once and needs no condition."""
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        if self._upload_id is None:
            self._put(total_bytes)
        else:
            self._join_parts(self._upload_id, total_bytes)
        self._state = "complete"
        if self._was_begun_unseen:
            # The object is there; an upload that stays is found by `abort_uploads`.
            with contextlib.suppress(Exception):
                abort_unseen(self._requests, self._key, self._upload_id)

    def abort(self) -> None:
        """AbortMultipartUpload, and DeleteObject if completing it may have worked after all."""
        if self._state == "complete":
            return
        self._state = "aborted"
        self._only_part = None
        # Waits for a thread that is just beginning the upload.
        with self._lock:
            upload_id = self._upload_id
        if upload_id is not None:
            abort_one(self._requests, self._key, upload_id)
        if self._was_begun_unseen:
            abort_unseen(self._requests, self._key, self._upload_id)
        if self._may_be_visible:
            delete_ours(self._requests, self._key, self._write_id)

    def _begun(self) -> str:
        with self._lock:
            if self._upload_id is None:
                try:
                    answer = self._requests.send(
                        "create_multipart_upload",
                        Key=self._key,
                        Metadata={WRITE_ID: self._write_id},
                    )
                except Exception as error:
                    # A refusal has begun nothing; without an answer, an upload may be open.
                    self._was_begun_unseen |= code_of(error) in {"", "InternalError"}
                    raise
                self._upload_id = str(answer["UploadId"])
            return self._upload_id

    def _put(self, total_bytes: int) -> None:
        data = self._only_part or b""
        if len(data) != total_bytes:
            raise wrong_length(self._shown, len(data), total_bytes)
        self._may_be_visible = True
        self._requests.send(
            "put_object", Key=self._key, Body=data, Metadata={WRITE_ID: self._write_id}
        )
        self._only_part = None

    def _join_parts(self, upload_id: str, total_bytes: int) -> None:
        parts = self._parts.whole(total_bytes, shown=self._shown)
        named = [{"PartNumber": number + 1, "ETag": part.receipt} for number, part in parts]
        self._may_be_visible = True
        is_known = True
        try:
            self._requests.send(
                "complete_multipart_upload",
                Key=self._key,
                UploadId=upload_id,
                MultipartUpload={"Parts": named},
            )
        except Exception as error:
            # A server forgets the id once it has done the work, and then the answer got lost.
            if code_of(error) != "NoSuchUpload":
                raise
            is_known = False
        if not is_known:
            confirm(self._requests, self._key, self._write_id, total_bytes)


def abort_one(requests: S3Requests, key: str, upload_id: str) -> None:
    """AbortMultipartUpload; one that is gone is no error."""
    try:
        requests.send("abort_multipart_upload", Key=key, UploadId=upload_id)
    except Exception as error:
        if code_of(error) not in _GONE:
            raise


def confirm(
    requests: S3Requests,
    key: str,
    write_id: str,
    total_bytes: int,
    *,
    unmarked_is_ours: bool = True,
) -> None:
    """Raise `StorageError` unless the object is the one that `write_id` stands for, and whole."""
    length = found_bytes(requests, key, write_id, unmarked_is_ours=unmarked_is_ours)
    if length == total_bytes:
        return
    raise gone(f"s3://{requests.bucket}/{key}", length, total_bytes)


def found_bytes(
    requests: S3Requests, key: str, write_id: str, *, unmarked_is_ours: bool = True
) -> int | None:
    """Return the length of the object if it is the one that `write_id` stands for, else None.

    Some servers keep no metadata: an unmarked object is ours where nobody else writes the name.
    """
    answer = _head(requests, key)
    if answer is None:
        return None
    unmarked = write_id if unmarked_is_ours else None
    if answer.get("Metadata", {}).get(WRITE_ID, unmarked) != write_id:
        return None
    return int(answer["ContentLength"])


def _head(requests: S3Requests, key: str) -> Mapping[str, Any] | None:
    try:
        return requests.send("head_object", Key=key)
    except Exception as error:
        if code_of(error) not in _GONE:
            raise
        return None


def delete_ours(requests: S3Requests, key: str, write_id: str) -> None:
    """Delete the object if it is, and stays until then, the one that `write_id` stands for.

    One without a mark may be what another copy of the same save has put there meanwhile. Where a
    server takes no condition with a deletion, it is deleted as it was found.
    """
    answer = _head(requests, key)
    if answer is None or answer.get("Metadata", {}).get(WRITE_ID) != write_id:
        return
    try:
        requests.send("delete_object", Key=key, IfMatch=answer["ETag"])
    except Exception as error:
        if code_of(error) in _CHANGED:
            return
        if code_of(error) not in _NO_CONDITION and not isinstance(error, UnsupportedByStoreError):
            raise
        requests.send("delete_object", Key=key)


def abort_unseen(requests: S3Requests, key: str, known_id: str | None) -> None:
    """Abort uploads of this very key that were begun without our getting to know."""
    pages = requests.pages(
        "list_multipart_uploads",
        {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
        Prefix=key,
    )
    for page in pages:
        for item in page.get("Uploads", ()):
            if item["Key"] == key and item["UploadId"] != known_id:
                abort_one(requests, key, item["UploadId"])
