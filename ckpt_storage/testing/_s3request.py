"""One S3 request: which operation it is, and what its headers ask for.

What this server does not implement is refused with 501, never ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal
from urllib.parse import unquote

from ._s3http import Body, Head
from ._s3memory import Payload
from ._s3model import Absent, Condition, Matches, Part, S3Error, S3State, StoredObject

__all__ = [
    "UNKNOWN_OP",
    "Request",
    "Settings",
    "byte_range",
    "copy_range",
    "copy_source",
    "invalid_argument",
    "is_bucket_name",
    "new_etag",
    "not_implemented",
    "number",
    "read_condition",
    "refuse_unsupported",
    "route",
    "source_name",
    "stored_metadata",
    "write_condition",
]

UNKNOWN_OP = "unknown"
_READS = frozenset({"get", "head"})
_KEY_LIMIT_BYTES = 1024
_QUERY_BY_OP: Mapping[str, frozenset[str]] = {
    "list": frozenset(
        {
            "continuation-token",
            "delimiter",
            "encoding-type",
            "fetch-owner",
            "list-type",
            "max-keys",
            "prefix",
            "start-after",
        }
    ),
    "list_uploads": frozenset(
        {"encoding-type", "key-marker", "max-uploads", "prefix", "upload-id-marker", "uploads"}
    ),
    "list_parts": frozenset({"max-parts", "part-number-marker", "uploadId"}),
    "bucket_location": frozenset({"location"}),
    "bucket_versioning": frozenset({"versioning"}),
    "bulk_delete": frozenset({"delete"}),
    "create_upload": frozenset({"uploads"}),
    "part": frozenset({"partNumber", "uploadId"}),
    "part_copy": frozenset({"partNumber", "uploadId"}),
    "complete": frozenset({"uploadId"}),
    "abort": frozenset({"uploadId"}),
}
_CONDITIONS_BY_OP: Mapping[str, frozenset[str]] = {
    "get": frozenset({"if-match", "if-none-match"}),
    "head": frozenset({"if-match", "if-none-match"}),
    "put": frozenset({"if-match", "if-none-match"}),
    "delete": frozenset({"if-match"}),
    "complete": frozenset({"if-match", "if-none-match"}),
    "copy": frozenset(
        {
            "if-match",
            "if-none-match",
            "x-amz-copy-source-if-match",
            "x-amz-copy-source-if-none-match",
        }
    ),
    "part_copy": frozenset({"x-amz-copy-source-if-match", "x-amz-copy-source-if-none-match"}),
}
_CONDITION_PREFIXES = ("if-", "x-amz-if-", "x-amz-copy-source-if-")
_PLAIN_METADATA = frozenset(
    {"cache-control", "content-disposition", "content-language", "content-type", "expires"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one server behaves; the fields are explained at `S3Server`."""

    etag: Literal["opaque", "md5"]
    ignore_preconditions: bool
    omit_condition_element: bool
    list_page_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A routed request; `body` is empty until it was read."""

    op: str
    bucket: str
    key: str
    head: Head
    body: Body = field(default_factory=Body)
    ignores_range: bool = False

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers, and trailers where the body had some."""
        return {**self.head.headers, **self.body.trailers}

    @property
    def query(self) -> Mapping[str, str]:
        """Decoded query."""
        return self.head.query


def not_implemented(what: str) -> S3Error:
    """Return the refusal of something this server does not do."""
    return S3Error(
        HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", f"This server does not implement {what}"
    )


def invalid_argument(message: str) -> S3Error:
    """Return the refusal of a value."""
    return S3Error(HTTPStatus.BAD_REQUEST, "InvalidArgument", message)


def is_bucket_name(name: str) -> bool:
    """Tell whether S3 would accept the name for a bucket."""
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name) is not None


def route(head: Head) -> Request:
    """Name the operation that a path-style request asks for; `UNKNOWN_OP` if it is none of ours."""
    bucket, _, key = head.path.removeprefix("/").partition("/")
    if key:
        op = _object_op(head)
    elif bucket:
        op = _bucket_op(head)
    else:
        op = "list_buckets" if head.method == "GET" else UNKNOWN_OP
    return Request(op=op, bucket=bucket, key=key, head=head)


def _object_op(head: Head) -> str:
    query = head.query
    is_copy = "x-amz-copy-source" in head.headers
    if "uploads" in query:
        return "create_upload" if head.method == "POST" else UNKNOWN_OP
    if "uploadId" in query:
        part = "part_copy" if is_copy else "part"
        by_method = {"PUT": part, "POST": "complete", "DELETE": "abort", "GET": "list_parts"}
    else:
        put = "copy" if is_copy else "put"
        by_method = {"PUT": put, "GET": "get", "HEAD": "head", "DELETE": "delete"}
    return by_method.get(head.method, UNKNOWN_OP)


def _bucket_op(head: Head) -> str:
    query = head.query
    if head.method == "POST":
        return "bulk_delete" if "delete" in query else UNKNOWN_OP
    if head.method == "GET":
        for name, op in (
            ("uploads", "list_uploads"),
            ("location", "bucket_location"),
            ("versioning", "bucket_versioning"),
        ):
            if name in query:
                return op
        return "list" if query.get("list-type") == "2" else UNKNOWN_OP
    by_method = {"PUT": "create_bucket", "DELETE": "delete_bucket", "HEAD": "head_bucket"}
    return by_method.get(head.method, UNKNOWN_OP)


def refuse_unsupported(request: Request, settings: Settings) -> None:
    """Raise `S3Error` for query parameters, conditions or keys that cannot be honoured."""
    if request.op == UNKNOWN_OP:
        raise not_implemented(f"{request.head.method} of that resource")
    known = _QUERY_BY_OP.get(request.op, frozenset())
    for name in request.query:
        # `x-id` repeats the operation's name, X-Amz-* is a signature: nothing verifies those.
        if name not in known and name != "x-id" and not name.startswith("X-Amz-"):
            raise not_implemented(f"the parameter {name} of {request.op}")
    if len(request.key.encode()) > _KEY_LIMIT_BYTES:
        raise S3Error(HTTPStatus.BAD_REQUEST, "KeyTooLongError", "The key exceeds 1024 bytes")
    if settings.ignore_preconditions and request.op not in _READS:
        return
    allowed = _CONDITIONS_BY_OP.get(request.op, frozenset())
    for name in request.headers:
        if name.startswith(_CONDITION_PREFIXES) and name not in allowed:
            raise not_implemented(f"the condition {name} of {request.op}")


def write_condition(request: Request, settings: Settings) -> Condition:
    """Return the condition of a write; raises `S3Error` 501 for forms that S3 does not have."""
    if settings.ignore_preconditions:
        return None
    headers = request.headers
    match, none_match = headers.get("if-match"), headers.get("if-none-match")
    if match is not None and none_match is not None:
        raise not_implemented("two conditions on a write")
    if none_match is not None:
        if none_match != "*":
            raise not_implemented("If-None-Match with an ETag on a write")
        return Absent()
    if match is None:
        return None
    if match == "*" or "," in match or match.startswith("W/"):
        raise not_implemented("If-Match with anything but one ETag on a write")
    return Matches(match.strip('"'))


def _failed(name: str) -> S3Error:
    return S3Error(
        HTTPStatus.PRECONDITION_FAILED,
        "PreconditionFailed",
        f"The condition {name} does not hold",
        condition=name,
    )


def _names(condition: str, etag: str) -> bool:
    tags = [tag.strip().strip('"') for tag in condition.split(",")]
    return condition.strip() == "*" or etag in tags


def read_condition(headers: Mapping[str, str], etag: str) -> bool:
    """Check the conditions of a read; False means "not modified".

    Raises `S3Error` 412 if `If-Match` names other ETags.
    """
    if "if-match" in headers and not _names(headers["if-match"], etag):
        raise _failed("If-Match")
    return "if-none-match" not in headers or not _names(headers["if-none-match"], etag)


def source_name(request: Request) -> tuple[str, str]:
    """Return bucket and key of a copy's source; raises `S3Error` 501 if it names a version."""
    text = request.headers["x-amz-copy-source"]
    if "?versionId=" in text:
        raise not_implemented("versions")
    bucket, _, key = unquote(text).removeprefix("/").partition("/")
    return bucket, key


def copy_source(request: Request, state: S3State, settings: Settings) -> StoredObject:
    """Return the object to copy from; raises `S3Error` if it is missing or its conditions fail."""
    source = state.get(*source_name(request))
    if not settings.ignore_preconditions:
        prefix = "x-amz-copy-source-"
        conditions = {
            name.removeprefix(prefix): value
            for name, value in request.headers.items()
            if name.startswith(f"{prefix}if-")
        }
        if not read_condition(conditions, source.etag):
            raise _failed("x-amz-copy-source-If-None-Match")
    return source


def byte_range(text: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return `[start, stop)` of a Range header; None if there is none or it is no byte range.

    Raises `S3Error`: 416 InvalidRange if nothing of it exists, 501 for several ranges.
    """
    if text is None:
        return None
    if "," in text:
        raise not_implemented("several ranges in one request")
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes or start >= stop:
        raise S3Error(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            "InvalidRange",
            "The requested range is not satisfiable",
        )
    return start, stop


def copy_range(text: str | None, size_bytes: int) -> tuple[int, int]:
    """Return `[start, stop)` of the source that a part copies; both ends must be given and exist.

    Raises `S3Error` 400 InvalidArgument.
    """
    if text is None:
        return 0, size_bytes
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", text)
    if found is None or not int(found[1]) <= int(found[2]) < size_bytes:
        raise invalid_argument(f"The range {text} is not within a source of {size_bytes} bytes")
    return int(found[1]), int(found[2]) + 1


def number(query: Mapping[str, str], name: str, default: int, *, low: int, high: int) -> int:
    """Return a whole number of the query, cut down to `high`; raises `S3Error` 400 below `low`."""
    value = query.get(name, str(default))
    if not (value.isascii() and value.isdigit()) or int(value) < low:
        raise invalid_argument(f"{name} is not a whole number from {low} up")
    return min(int(value), high)


def stored_metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that S3 keeps with an object and returns with it."""
    found = {
        name: value
        for name, value in headers.items()
        if name in _PLAIN_METADATA or name.startswith("x-amz-meta-")
    }
    encodings = [item.strip() for item in headers.get("content-encoding", "").split(",")]
    if kept := [item for item in encodings if item and item != "aws-chunked"]:
        found["content-encoding"] = ", ".join(kept)
    found.setdefault("content-type", "binary/octet-stream")
    return found


def new_etag(settings: Settings, content: Payload | Sequence[Part]) -> str:
    """Return the ETag of a new object or part, or of an object made of parts."""
    if isinstance(content, Payload):
        return content.md5().hex() if settings.etag == "md5" else secrets.token_hex(16)
    if settings.etag == "md5":
        digests = b"".join(bytes.fromhex(part.etag) for part in content)
        return f"{Payload.of_bytes(digests).md5().hex()}-{len(content)}"
    return f"{secrets.token_hex(16)}-{len(content)}"
