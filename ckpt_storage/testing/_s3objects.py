"""The S3 operations on buckets and whole objects.

Called through `table` by the server.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import quote
from xml.sax.saxutils import escape

from . import _s3digest as digest
from . import _s3xml as xml
from ._s3http import Response
from ._s3memory import Payload
from ._s3model import ListingToken, S3Error, S3State, StoredObject
from ._s3request import (
    Request,
    Settings,
    byte_range,
    copy_source,
    invalid_argument,
    is_bucket_name,
    new_etag,
    number,
    read_condition,
    source_name,
    stored_metadata,
    write_condition,
)

__all__ = ["ObjectOperations", "xml_response"]

_XML_HEADER = ("Content-Type", "application/xml")
_REGION_HEADER = ("x-amz-bucket-region", "us-east-1")
_COPY_LIMIT_BYTES = 5 * 1024**3


def xml_response(payload: Payload, *headers: tuple[str, str]) -> Response:
    """Return 200 with a document."""
    return Response(headers=[_XML_HEADER, *headers], payload=payload)


class ObjectOperations:
    """Handlers by op name; each takes a routed request with its body and may raise `S3Error`."""

    def __init__(self, state: S3State, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.table: Mapping[str, Callable[[Request], Response]] = {
            "list_buckets": self._list_buckets,
            "create_bucket": self._create_bucket,
            "delete_bucket": self._delete_bucket,
            "head_bucket": self._head_bucket,
            "bucket_location": self._bucket_location,
            "bucket_versioning": self._bucket_versioning,
            "list": self._list,
            "bulk_delete": self._bulk_delete,
            "put": self._put,
            "copy": self._copy,
            "get": self._get,
            "head": self._get,
            "delete": self._delete,
        }

    def _list_buckets(self, _request: Request) -> Response:
        entries = [
            xml.element(
                "Bucket", xml.text("Name", name), xml.text("CreationDate", xml.timestamp(created_s))
            )
            for name, created_s in self._state.buckets().items()
        ]
        owner = xml.element("Owner", xml.text("ID", "owner"))
        return xml_response(
            xml.document("ListAllMyBucketsResult", owner, xml.element("Buckets", *entries))
        )

    def _create_bucket(self, request: Request) -> Response:
        if not is_bucket_name(request.bucket):
            raise S3Error(
                HTTPStatus.BAD_REQUEST, "InvalidBucketName", "The bucket name is not valid"
            )
        if not self._state.create_bucket(request.bucket):
            raise S3Error(HTTPStatus.CONFLICT, "BucketAlreadyOwnedByYou", "The bucket exists")
        return Response(headers=[("Location", f"/{request.bucket}")])

    def _delete_bucket(self, request: Request) -> Response:
        self._state.delete_bucket(request.bucket)
        return Response(status=HTTPStatus.NO_CONTENT)

    def _head_bucket(self, request: Request) -> Response:
        self._state.require_bucket(request.bucket)
        return Response(headers=[_REGION_HEADER])

    def _bucket_location(self, request: Request) -> Response:
        self._state.require_bucket(request.bucket)
        return xml_response(xml.document("LocationConstraint"))

    def _bucket_versioning(self, request: Request) -> Response:
        self._state.require_bucket(request.bucket)
        return xml_response(xml.document("VersioningConfiguration"))

    def _list(self, request: Request) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page_count = self._settings.list_page_count
        limit = number(query, "max-keys", page_count, low=0, high=page_count)
        token = ListingToken(after=query.get("start-after", ""))
        if "continuation-token" in query:
            token = _decode_token(query["continuation-token"])
        page = self._state.page(
            request.bucket, prefix=prefix, delimiter=delimiter, token=token, limit=limit
        )
        is_url = query.get("encoding-type") == "url"

        def spell(name: str, value: str) -> str:
            # Names that XML cannot hold travel percent-encoded; botocore always asks for that.
            return f"<{name}>{quote(value) if is_url else escape(value)}</{name}>"

        content = [
            xml.text("Name", request.bucket),
            spell("Prefix", prefix),
            spell("Delimiter", delimiter) if delimiter else "",
            spell("StartAfter", query["start-after"]) if "start-after" in query else "",
            xml.text("EncodingType", "url") if is_url else "",
            xml.text("MaxKeys", limit),
            xml.text("KeyCount", len(page.objects) + len(page.prefixes)),
            xml.text("IsTruncated", "true" if page.next_token else "false"),
        ]
        if "continuation-token" in query:
            content.append(xml.text("ContinuationToken", query["continuation-token"]))
        if page.next_token:
            content.append(xml.text("NextContinuationToken", _encode_token(page.next_token)))
        content += [
            xml.element(
                "Contents",
                spell("Key", key),
                xml.text("LastModified", xml.timestamp(stored.modified_s)),
                xml.etag_element(stored.etag),
                xml.text("Size", stored.payload.size_bytes),
                xml.text("StorageClass", "STANDARD"),
            )
            for key, stored in page.objects
        ]
        content += [xml.element("CommonPrefixes", spell("Prefix", name)) for name in page.prefixes]
        return xml_response(xml.document("ListBucketResult", *content))

    def _bulk_delete(self, request: Request) -> Response:
        headers = request.headers
        if not digest.verify(headers, request.body.payload) and "content-md5" not in headers:
            raise S3Error(
                HTTPStatus.BAD_REQUEST, "InvalidRequest", "Content-MD5 or a checksum is required"
            )
        keys, is_quiet = xml.read_delete(request.body.payload)
        self._state.require_bucket(request.bucket)
        for key in keys:
            self._state.delete(request.bucket, key)
        told = [] if is_quiet else keys
        return xml_response(
            xml.document(
                "DeleteResult", *(xml.element("Deleted", xml.text("Key", key)) for key in told)
            )
        )

    def _put(self, request: Request) -> Response:
        payload = request.body.payload
        checksums = digest.verify(request.headers, payload)
        stored = StoredObject(
            payload=payload,
            etag=new_etag(self._settings, payload),
            metadata=stored_metadata(request.headers),
            checksums=checksums,
        )
        self._state.put(
            request.bucket, request.key, stored, write_condition(request, self._settings)
        )
        extra = digest.as_headers(checksums)
        if checksums:
            extra.append(("x-amz-checksum-type", stored.checksum_type))
        return Response(headers=[("ETag", f'"{stored.etag}"'), *extra])

    def _copy(self, request: Request) -> Response:
        headers = request.headers
        source = copy_source(request, self._state, self._settings)
        if source.payload.size_bytes > _COPY_LIMIT_BYTES:
            raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidRequest", "The source exceeds 5 GiB")
        replaces = headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
        if not replaces and source_name(request) == (request.bucket, request.key):
            raise S3Error(
                HTTPStatus.BAD_REQUEST, "InvalidRequest", "A copy onto itself changes nothing"
            )
        wanted = digest.requested(headers)
        algorithms = [wanted] if wanted else source.checksums
        stored = StoredObject(
            payload=source.payload,
            etag=new_etag(self._settings, source.payload),
            metadata=stored_metadata(headers) if replaces else source.metadata,
            checksums={name: digest.compute(name, source.payload) for name in algorithms},
        )
        self._state.put(
            request.bucket, request.key, stored, write_condition(request, self._settings)
        )
        return xml_response(
            xml.document(
                "CopyObjectResult",
                xml.etag_element(stored.etag),
                xml.text("LastModified", xml.timestamp(stored.modified_s)),
                xml.checksum_elements(stored.checksums),
            )
        )

    def _get(self, request: Request) -> Response:
        stored = self._state.get(request.bucket, request.key)
        headers = [
            ("ETag", f'"{stored.etag}"'),
            ("Last-Modified", formatdate(stored.modified_s, usegmt=True)),
        ]
        if not read_condition(request.headers, stored.etag):
            return Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        headers += [("Accept-Ranges", "bytes"), *stored.metadata.items()]
        size_bytes = stored.payload.size_bytes
        text = None if request.ignores_range else request.headers.get("range")
        found = byte_range(text, size_bytes)
        if found is not None:
            start, stop = found
            headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{size_bytes}"))
            return Response(
                status=HTTPStatus.PARTIAL_CONTENT,
                headers=headers,
                payload=stored.payload.cut(start, stop),
            )
        if stored.checksums and request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            headers += digest.as_headers(stored.checksums)
            headers.append(("x-amz-checksum-type", stored.checksum_type))
        return Response(headers=headers, payload=stored.payload)

    def _delete(self, request: Request) -> Response:
        condition = write_condition(request, self._settings)
        self._state.delete(request.bucket, request.key, condition)
        return Response(status=HTTPStatus.NO_CONTENT)


def _encode_token(token: ListingToken) -> str:
    text = json.dumps([token.after, token.is_prefix])
    return base64.urlsafe_b64encode(text.encode()).decode("ascii")


def _decode_token(text: str) -> ListingToken:
    try:
        after, is_prefix = json.loads(base64.urlsafe_b64decode(text))
    except (ValueError, binascii.Error):
        raise invalid_argument("The continuation token is not one of this server's") from None
    return ListingToken(after=str(after), is_prefix=bool(is_prefix))
