"""Rules by which single services differ from S3, as their documentation states them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

__all__ = ["PROFILES", "Profile", "ServiceRules", "customer_key_options", "rules_of"]

Profile: TypeAlias = Literal[
    "aws",
    "aws-no-list",
    "express",
    "object-lock",
    "r2",
    "if-match-ignored",
    "sse-c",
    "flaky-bytes",
    "ceph",
    "ceph-versioned",
    "swift",
    "rclone",
]
"""A service, or a configuration of a service, whose rules the S3 server applies."""

_KEY_HEADERS = "x-amz-server-side-encryption-customer-"
_SOURCE_KEY_HEADERS = "x-amz-copy-source-server-side-encryption-customer-"
_READS = frozenset({"get", "head"})
_WRITES = frozenset({"put", "copy", "create_upload", "part", "part_copy"})
_LISTINGS = frozenset({"head_bucket", "list", "list_uploads"})
_CONDITIONS = frozenset({"if-match", "if-none-match"})
_SESSIONLESS = frozenset({"create_session", "copy", "head_bucket", "part_copy"})
_CUSTOMER_KEY = "ckpt-storage-test-customer-key-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The error for a request: HTTP status, S3's code and the message."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRules:
    """Rules beyond those that all servers of S3's protocol share.

    region: requests signed for another region are refused.
    part_numbers: which numbers the parts of a completed upload may have.
    equal_parts: all parts but the last have the same length.
    declared_checksums: a part has a checksum of the algorithm that its upload named, or none.
    full_object_crcs: an upload may request a CRC-32C of the whole object.
    list_right: the credentials may list; without it a missing key is "forbidden".
    directory_bucket: prefixes are folders, listings have no order, requests belong to a session.
    object_lock: writes need a checksum; deletions leave the object below a delete marker.
    conditions: how a write honours If-None-Match and If-Match. "bare": only the ETag without its
        quotes matches. "never-equal": If-Match always fails, and If-None-Match is ignored. With
        both a DELETE ignores it. "refused": writes have no conditions, and a DELETE compares a
        multipart object with an ETag that no response has.
    range_status: HTTP status of the response to a ranged read.
    streams_parts: each part is sent to a backend at once: it cannot be replaced or copied, and to
        list the uploads of a bucket without open uploads is an error.
    customer_key: objects are encrypted with a key that is part of each request.
    wrong_byte: the first response with the content of each key has a wrong byte.
    """

    region: str | None = None
    part_numbers: Literal["ascending", "consecutive-with-checksums", "consecutive"] = "ascending"
    equal_parts: bool = False
    declared_checksums: bool = False
    full_object_crcs: bool = True
    list_right: bool = True
    directory_bucket: bool = False
    object_lock: bool = False
    conditions: Literal["honoured", "no-if-match", "bare", "never-equal", "refused"] = "honoured"
    range_status: int = 206
    streams_parts: bool = False
    customer_key: bool = False
    wrong_byte: bool = False

    def refusal(
        self, op: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> Refusal | None:
        """Return the error of a request that is refused whatever the bucket holds, or None."""
        # AWS, "Error responses" (API_Error, table of codes): AuthorizationHeaderMalformed, the
        # header names a region that is not the bucket's.
        scope = re.search(r"Credential=[^/]+/\d{8}/([^/]+)/", headers.get("authorization", ""))
        if self.region and scope and scope[1] != self.region:
            what = f"the region '{scope[1]}' is wrong; expecting '{self.region}'"
            return Refusal(status=400, code="AuthorizationHeaderMalformed", message=what)
        # AWS, "ListObjectsV2", "HeadBucket" (Permissions): both need s3:ListBucket;
        # "ListMultipartUploads": it needs s3:ListBucketMultipartUploads.
        if not self.list_right and op in _LISTINGS:
            return _FORBIDDEN
        # Cloudflare R2, "S3 API compatibility" (Checksum types): CRC32C knows COMPOSITE only.
        is_whole = headers.get("x-amz-checksum-type") == "FULL_OBJECT"
        if is_whole and not self.full_object_crcs:
            return _not_implemented("a CRC32C of the whole object")
        has_condition = op in _WRITES and bool(_CONDITIONS & headers.keys())
        if self.conditions == "refused" and has_condition:
            return _not_implemented("a condition of a write")
        flaws = (
            _directory_flaw(op, query, headers) if self.directory_bucket else None,
            _lock_flaw(op, query, headers) if self.object_lock else None,
            _key_flaw(op, headers) if self.customer_key else None,
        )
        return next(filter(None, flaws), None)

    def conditions_of(
        self, op: str, headers: Mapping[str, str], *, in_parts: bool
    ) -> tuple[str | None, str | None]:
        """Return the ETag that must match, and "*" if no object may exist, by the service's rules.

        in_parts: the present object was uploaded in parts.
        """
        match, absent = headers.get("if-match"), headers.get("if-none-match")
        if op == "delete" and self.conditions == "refused" and in_parts:
            return match and "never", absent
        if op not in _WRITES | {"delete"} or self.conditions in {"honoured", "refused"}:
            return match, absent
        if op == "delete" and self.conditions != "no-if-match":
            return None, absent
        if match is None:
            return None, None if self.conditions == "never-equal" else absent
        if self.conditions == "no-if-match":
            return None, absent
        is_equal = self.conditions == "bare" and not match.startswith('"')
        return match if is_equal else "never", absent

    def refusal_of_parts(
        self, numbers: Sequence[int], sizes_bytes: Sequence[int], *, has_checksums: bool
    ) -> Refusal | None:
        """Return the error of an upload with these parts, None if they are valid."""
        # AWS, "CompletedPart" (PartNumber): where a checksum is applied to each part, and in
        # directory buckets always, numbers start at 1 and are consecutive; else InvalidPartOrder.
        needs_all = self.part_numbers == "consecutive" or (
            self.part_numbers == "consecutive-with-checksums" and has_checksums
        )
        if needs_all and list(numbers) != list(range(1, len(numbers) + 1)):
            what = "part numbers must be consecutive, from 1 on"
            return Refusal(status=400, code="InvalidPartOrder", message=what)
        # Cloudflare R2, "Multipart upload" (Limitations): all parts but the last are of one size,
        # and the last is no larger.
        *others, last = sizes_bytes
        if self.equal_parts and others and ({*others} != {others[0]} or last > others[0]):
            what = "All non-trailing parts must have the same length."
            return Refusal(status=400, code="InvalidPart", message=what)
        return None

    def refusal_of_part_checksum(self, declared: str, sent: str) -> Refusal | None:
        """Return the error of a part whose checksum has the algorithm `sent`, or None."""
        # As AWS answers (apache/opendal#4533, arrow-rs-object-store#34): the algorithm of a part's
        # checksum must be that of CreateMultipartUpload.
        if self.declared_checksums and sent and sent != declared:
            what = (
                f"Checksum Type mismatch occurred, expected checksum Type: {declared or 'null'}, "
                f"actual checksum Type: {sent}"
            )
            return Refusal(status=400, code="InvalidRequest", message=what)
        return None


def _not_implemented(what: str) -> Refusal:
    return Refusal(status=501, code="NotImplemented", message=f"{what} is not implemented")


_FORBIDDEN = Refusal(status=403, code="AccessDenied", message="Access Denied")


def _directory_flaw(
    op: str, query: Mapping[str, str], headers: Mapping[str, str]
) -> Refusal | None:
    # AWS, "Differences for directory buckets" (ListObjectsV2 behavior; ListMultipartUploads,
    # parameter `prefix`): prefixes must end in a delimiter, and "/" is the only delimiter.
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    if op in {"list", "list_uploads"} and not (
        (not prefix or prefix.endswith("/")) and delimiter in {"", "/"}
    ):
        what = f"prefix {prefix!r} and delimiter {delimiter!r} of a directory bucket"
        return Refusal(status=400, code="InvalidArgument", message=what)
    # AWS, "ListMultipartUploads" (upload-id-marker): not supported for directory buckets.
    if query.get("upload-id-marker"):
        return Refusal(status=501, code="NotImplemented", message="upload-id-marker")
    # AWS, "CreateSession": requests for objects are authorized by the token of a session, but for
    # CopyObject, HeadBucket and UploadPartCopy.
    if op not in _SESSIONLESS and "x-amz-s3session-token" not in headers:
        what = "requests to a directory bucket belong to a session"
        return Refusal(status=403, code="AccessDenied", message=what)
    return None


def _lock_flaw(op: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Refusal | None:
    # AWS, "PutObject" and "UploadPart" (Content-MD5): with Object Lock, Content-MD5 or a checksum
    # is required. The text is S3's.
    has_checksum = any(re.match("x-amz-checksum-(?!algorithm|type|mode)", name) for name in headers)
    if op in {"put", "part"} and not has_checksum and "content-md5" not in headers:
        what = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests "
        what += "with Object Lock parameters"
        return Refusal(status=400, code="InvalidRequest", message=what)
    # AWS, "How S3 Object Lock works": a protected version cannot be deleted.
    if op == "delete" and "versionId" in query:
        return _FORBIDDEN
    return None


def _key_flaw(op: str, headers: Mapping[str, str]) -> Refusal | None:
    # AWS, "Specifying server-side encryption with customer-provided keys": the three headers go
    # with every request that writes or reads the object, its parts too; a copy needs those of the
    # source as well. "CompleteMultipartUpload" (SSECustomerKey): also where parts bear checksums.
    places = []
    if op in _READS | _WRITES | {"complete"}:
        places.append(_KEY_HEADERS)
    if op in {"copy", "part_copy"}:
        places.append(_SOURCE_KEY_HEADERS)
    for place in places:
        key, digest = headers.get(f"{place}key", ""), headers.get(f"{place}key-md5", "")
        if headers.get(f"{place}algorithm") != "AES256" or not _is_digest_of(key, digest):
            what = "The object was stored using a form of Server Side Encryption. The correct "
            what += "parameters must be provided to retrieve the object."
            return Refusal(status=400, code="InvalidRequest", message=what)
    return None


def _is_digest_of(key: str, digest: str) -> bool:
    try:
        plain = base64.b64decode(key, validate=True)
    except binascii.Error:
        return False
    actual = hashlib.md5(plain, usedforsecurity=False).digest()
    return plain.decode() == _CUSTOMER_KEY and base64.b64encode(actual).decode() == digest


def customer_key_options() -> dict[str, object]:
    """Return the options of s3fs with the customer key of the profile "sse-c"."""
    key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": _CUSTOMER_KEY}
    return {"s3_additional_kwargs": key}


_AWS = ServiceRules(
    region="us-east-1", part_numbers="consecutive-with-checksums", declared_checksums=True
)

PROFILES: Mapping[Profile, ServiceRules] = MappingProxyType(
    {
        "aws": _AWS,
        # AWS, "GetObject" (Permissions): without s3:ListBucket, the answer for an object that does
        # not exist is 403 Access Denied; "HeadObject" says the same.
        "aws-no-list": replace(_AWS, list_right=False),
        "express": ServiceRules(part_numbers="consecutive", directory_bucket=True),
        "object-lock": replace(_AWS, object_lock=True),
        "r2": ServiceRules(equal_parts=True, full_object_crcs=False),
        # Older servers with an S3 API ignore unknown headers.
        "if-match-ignored": ServiceRules(conditions="no-if-match"),
        "sse-c": replace(_AWS, customer_key=True),
        # No vendor's rule: TCP's checksum lets one wrong packet in many millions pass (Stone and
        # Partridge, "When the CRC and TCP checksum disagree", 2000).
        "flaky-bytes": ServiceRules(wrong_byte=True),
        # As Ceph's RGW 16 answers, seen on Debian's package.
        "ceph": ServiceRules(conditions="bare"),
        "ceph-versioned": ServiceRules(conditions="never-equal"),
        # As OpenStack Swift's s3api 2.30 answers.
        "swift": ServiceRules(conditions="refused"),
        # As `rclone serve s3` 1.75 answers. A range: the right bytes and Content-Range, status 200.
        # UploadPartCopy: as a part of no bytes. Other bytes for a part that it has: 501, "part 1
        # has already been streamed to the backend and cannot be replaced with different contents".
        # ListMultipartUploads where none is open: 404 NoSuchUpload.
        "rclone": ServiceRules(range_status=200, streams_parts=True),
    }
)


def rules_of(profile: Profile | None) -> ServiceRules:
    """Return the rules of a service; None: plain S3."""
    return ServiceRules() if profile is None else PROFILES[profile]
