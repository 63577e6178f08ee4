"""The S3 operations on multipart uploads.

Called through `table` by the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from urllib.parse import quote

from . import _s3digest as digest
from . import _s3xml as xml
from ._s3http import Response
from ._s3memory import Payload
from ._s3model import Part, S3Error, S3State, StoredObject, Upload
from ._s3objects import xml_response
from ._s3request import (
    Request,
    Settings,
    copy_range,
    copy_source,
    invalid_argument,
    new_etag,
    number,
    stored_metadata,
    write_condition,
)

__all__ = ["UploadOperations"]

_PAGE_COUNT = 1000
_PART_LIMIT = 10_000
_FULL_OBJECT_ALGORITHMS = frozenset({"crc32", "crc32c"})


def _invalid_request(message: str) -> S3Error:
    return S3Error(HTTPStatus.BAD_REQUEST, "InvalidRequest", message)


class UploadOperations:
    """Handlers by op name; each takes a routed request with its body and may raise `S3Error`."""

    def __init__(self, state: S3State, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.table: Mapping[str, Callable[[Request], Response]] = {
            "create_upload": self._create,
            "part": self._part,
            "part_copy": self._part_copy,
            "complete": self._complete,
            "abort": self._abort,
            "list_parts": self._list_parts,
            "list_uploads": self._list_uploads,
        }

    def _create(self, request: Request) -> Response:
        algorithm = digest.requested(request.headers)
        kind = request.headers.get("x-amz-checksum-type", "COMPOSITE").upper()
        if kind not in ("COMPOSITE", "FULL_OBJECT") or (
            kind == "FULL_OBJECT" and algorithm not in _FULL_OBJECT_ALGORITHMS
        ):
            raise _invalid_request(f"The checksum type {kind} does not go with {algorithm}")
        upload = self._state.create_upload(
            request.bucket,
            request.key,
            metadata=stored_metadata(request.headers),
            algorithm=algorithm,
            checksum_type=kind,
        )
        headers: list[tuple[str, str]] = []
        if algorithm is not None:
            headers = [
                ("x-amz-checksum-algorithm", algorithm.upper()),
                ("x-amz-checksum-type", kind),
            ]
        return xml_response(
            xml.document(
                "InitiateMultipartUploadResult",
                xml.text("Bucket", request.bucket),
                xml.text("Key", request.key),
                xml.text("UploadId", upload.upload_id),
            ),
            *headers,
        )

    def _part(self, request: Request) -> Response:
        part = self._store_part(request, request.body.payload)
        return Response(headers=[("ETag", f'"{part.etag}"'), *digest.as_headers(part.checksums)])

    def _part_copy(self, request: Request) -> Response:
        source = copy_source(request, self._state, self._settings)
        text = request.headers.get("x-amz-copy-source-range")
        start, stop = copy_range(text, source.payload.size_bytes)
        part = self._store_part(request, source.payload.cut(start, stop))
        return xml_response(
            xml.document(
                "CopyPartResult",
                xml.etag_element(part.etag),
                xml.text("LastModified", xml.timestamp(part.modified_s)),
                xml.checksum_elements(part.checksums),
            )
        )

    def _store_part(self, request: Request, payload: Payload) -> Part:
        text = request.query.get("partNumber", "")
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _PART_LIMIT):
            raise invalid_argument("The part number is not within 1 and 10000")
        upload_id = request.query["uploadId"]
        upload = self._state.upload(request.bucket, request.key, upload_id)
        checksums = {} if request.op == "part_copy" else digest.verify(request.headers, payload)
        if upload.algorithm is not None:
            if checksums and upload.algorithm not in checksums:
                raise _invalid_request("The checksum is not of the kind the upload was begun with")
            checksums = checksums or {upload.algorithm: digest.compute(upload.algorithm, payload)}
        part = Part(payload=payload, etag=new_etag(self._settings, payload), checksums=checksums)
        self._state.put_part(request.bucket, request.key, upload_id, int(text), part)
        return part

    def _complete(self, request: Request) -> Response:
        stored = self._state.complete(
            request.bucket,
            request.key,
            request.query["uploadId"],
            claims=xml.read_complete(request.body.payload),
            condition=write_condition(request, self._settings),
            assemble=lambda upload, parts: self._assemble(request, upload, parts),
        )
        return xml_response(
            xml.document(
                "CompleteMultipartUploadResult",
                xml.text("Location", f"/{request.bucket}/{quote(request.key)}"),
                xml.text("Bucket", request.bucket),
                xml.text("Key", request.key),
                xml.etag_element(stored.etag),
                xml.checksum_elements(stored.checksums),
                xml.text("ChecksumType", stored.checksum_type) if stored.checksums else "",
            )
        )

    def _assemble(self, request: Request, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        payload = Payload.joined(part.payload for part in parts)
        size = request.headers.get("x-amz-mp-object-size")
        if size is not None and size != str(payload.size_bytes):
            raise _invalid_request(f"The object has {payload.size_bytes} bytes, not {size}")
        kind = request.headers.get("x-amz-checksum-type", upload.checksum_type)
        if upload.algorithm is not None and kind != upload.checksum_type:
            raise _invalid_request("The checksum type is not the one the upload was begun with")
        claim = digest.claimed(request.headers)
        names = [upload.algorithm] if upload.algorithm is not None else list(claim)
        is_composite = upload.algorithm is not None and upload.checksum_type == "COMPOSITE"
        checksums = {
            name: digest.composite(name, [part.checksums[name] for part in parts])
            if is_composite
            else digest.compute(name, payload)
            for name in names
        }
        if any(checksums.get(name) != value for name, value in claim.items()):
            raise S3Error(HTTPStatus.BAD_REQUEST, "BadDigest", "The object's checksum differs")
        return StoredObject(
            payload=payload,
            etag=new_etag(self._settings, parts),
            metadata=upload.metadata,
            checksums=checksums,
            checksum_type="COMPOSITE" if is_composite else "FULL_OBJECT",
        )

    def _abort(self, request: Request) -> Response:
        self._state.abort(request.bucket, request.key, request.query["uploadId"])
        return Response(status=HTTPStatus.NO_CONTENT)

    def _list_parts(self, request: Request) -> Response:
        query = request.query
        upload = self._state.upload(request.bucket, request.key, query["uploadId"])
        limit = number(query, "max-parts", _PAGE_COUNT, low=1, high=_PAGE_COUNT)
        marker = number(query, "part-number-marker", 0, low=0, high=_PART_LIMIT)
        left = [(index, part) for index, part in upload.parts.items() if index > marker]
        page = left[:limit]
        entries = [
            xml.element(
                "Part",
                xml.text("PartNumber", index),
                xml.text("LastModified", xml.timestamp(part.modified_s)),
                xml.etag_element(part.etag),
                xml.text("Size", part.payload.size_bytes),
                xml.checksum_elements(part.checksums),
            )
            for index, part in page
        ]
        return xml_response(
            xml.document(
                "ListPartsResult",
                xml.text("Bucket", request.bucket),
                xml.text("Key", request.key),
                xml.text("UploadId", upload.upload_id),
                xml.text("PartNumberMarker", marker),
                xml.text("NextPartNumberMarker", page[-1][0] if page else marker),
                xml.text("MaxParts", limit),
                xml.text("IsTruncated", "true" if len(left) > limit else "false"),
                *entries,
            )
        )

    def _list_uploads(self, request: Request) -> Response:
        query = request.query
        limit = number(query, "max-uploads", _PAGE_COUNT, low=1, high=_PAGE_COUNT)
        key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
        left = [
            upload
            for upload in self._state.uploads(request.bucket)
            if upload.key.startswith(query.get("prefix", "")) and upload.key >= key_marker
        ]
        # Without an id the marker stands behind all uploads of its key, with one behind that one.
        ids = [upload.upload_id for upload in left if upload.key == key_marker]
        left = left[ids.index(id_marker) + 1 if id_marker in ids else len(ids) :]
        page = left[:limit]
        is_url = query.get("encoding-type") == "url"
        entries = [
            xml.element(
                "Upload",
                xml.text("Key", quote(upload.key) if is_url else upload.key),
                xml.text("UploadId", upload.upload_id),
                xml.text("Initiated", xml.timestamp(upload.started_s)),
                xml.text("StorageClass", "STANDARD"),
            )
            for upload in page
        ]
        last_key = page[-1].key if page else ""
        return xml_response(
            xml.document(
                "ListMultipartUploadsResult",
                xml.text("Bucket", request.bucket),
                xml.text("EncodingType", "url") if is_url else "",
                xml.text("NextKeyMarker", quote(last_key) if is_url else last_key),
                xml.text("NextUploadIdMarker", page[-1].upload_id if page else ""),
                xml.text("MaxUploads", limit),
                xml.text("IsTruncated", "true" if len(left) > limit else "false"),
                *entries,
            )
        )
