"""What the S3 server keeps, and S3's rules for it; what it does not implement it refuses with 501.

Bodies are lists of views, which are never copied and, once stored, never changed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import threading
import time

# Only test clients on this machine reach the server, and expat expands no external entities.
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from crc32c import crc32c

_SOURCE, _CHECKSUM, _PAGE = "x-amz-copy-source", "x-amz-checksum-", "encoding-type prefix"
_CONDITIONS = "if-match if-none-match"
# What is asked for: the name of the operation, and the parameters and conditions it knows.
_ROUTES = {
    "HEAD bucket": ("head_bucket", ""),
    "GET bucket list-type": ("list", f"list-type {_PAGE} max-keys delimiter continuation-token"),
    "GET bucket uploads": (
        "list_uploads",
        f"uploads {_PAGE} max-uploads key-marker upload-id-marker",
    ),
    "POST bucket delete": ("bulk_delete", "delete"),
    "GET object": ("get", "if-match"),
    "HEAD object": ("head", "if-match"),
    "PUT object": ("put", _CONDITIONS),
    "PUT object copy": ("copy", f"{_CONDITIONS} {_SOURCE}-if-match"),
    "DELETE object": ("delete", "if-match"),
    "POST object uploads": ("create_upload", "uploads"),
    "PUT object uploadId": ("part", "partNumber uploadId"),
    "PUT object uploadId copy": ("part_copy", f"partNumber uploadId {_SOURCE}-if-match"),
    "POST object uploadId": ("complete", f"uploadId {_CONDITIONS}"),
    "DELETE object uploadId": ("abort", "uploadId"),
}
_KNOWN = {op: {*words.split(), "x-id"} for op, words in _ROUTES.values()}
_CRCS = {"crc32": zlib.crc32, "crc32c": crc32c}

Body = list[memoryview]
_Home = dict[str, "_Stored"]
_Parts = dict[int, "_Stored"]


class Answer(NamedTuple):
    """An answer; its length is added when it is sent."""

    status: int
    headers: Mapping[str, str]
    body: Body


@dataclass
class S3Error(Exception):
    """A refusal: HTTP status, S3's code, and the condition that failed, if one did."""

    status: int
    code: str
    message: str = ""
    condition: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of path style; names of headers are in lower case."""

    op: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body
    time_s: float = field(default_factory=time.time)

    def checksum(self) -> dict[str, str]:
        """Return the header with a checksum of the body, if there is one."""
        names = {name for name in self.headers if name.startswith(_CHECKSUM)}
        names -= {_CHECKSUM + other for other in ("algorithm", "mode", "type")}
        if len(names) > 1 or (not names and "x-amz-sdk-checksum-algorithm" in self.headers):
            raise S3Error(400, "InvalidRequest", "Expecting a single x-amz-checksum- header")
        if names - {_CHECKSUM + known for known in _CRCS}:
            raise S3Error(501, "NotImplemented", f"{names}")
        return {name: self.headers[name] for name in names}

    def spelt(self, name: str) -> str:
        """Return a name for a listing: percent-encoded if asked, as XML cannot hold every name."""
        return quote(name) if self.query.get("encoding-type") == "url" else name

    def kept(self) -> dict[str, str]:
        """Return the headers that stay with an object."""
        kept = {name: text for name, text in self.headers.items() if name.startswith("x-amz-meta-")}
        return {"content-type": self.headers.get("content-type", "binary/octet-stream"), **kept}

    def items(self, root_name: str, name: str) -> list[dict[str, str]]:
        """Return the elements of that name in the document in the body, at least one."""
        try:
            root = ET.fromstring(b"".join(self.body))  # noqa: S314 - as for the import
        except ET.ParseError:
            raise S3Error(400, "MalformedXML") from None
        for node in root.iter():
            node.tag = node.tag.rpartition("}")[2]
        items = [{child.tag: child.text or "" for child in node} for node in root.iter(name)]
        if root.tag != root_name or not items:
            raise S3Error(400, "MalformedXML")
        return items


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """An object or a part; `kept` and `checksum` are headers."""

    body: Body
    kept: Mapping[str, str] = field(default_factory=dict)
    checksum: Mapping[str, str] = field(default_factory=dict)
    etag: str = field(default_factory=lambda: f'"{secrets.token_hex(16)}"')
    time_s: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.body))

    def headers(self) -> dict[str, str]:
        told = {**self.checksum, f"{_CHECKSUM}type": "FULL_OBJECT"} if self.checksum else {}
        return {"ETag": self.etag, **told}

    def fields(self) -> dict[str, object]:
        told = {
            f"Checksum{name[len(_CHECKSUM) :].upper()}": text
            for name, text in self.checksum.items()
        }
        return {"ETag": self.etag, "LastModified": _spelt_time(self.time_s), **told}


def operation_of(method: str, bucket: str, key: str, words: Collection[str]) -> str:
    """Name what a request with these parameters and headers asks for, "unknown" if none of ours."""
    place = "object" if key else "bucket" if bucket else "service"
    marker = [name for name in ("uploads", "uploadId", "delete", "list-type") if name in words]
    copy = ["copy"] if _SOURCE in words else []
    return _ROUTES.get(" ".join([method, place, *marker, *copy]), ("unknown", ""))[0]


@dataclass(kw_only=True, eq=False)
class S3Objects:
    """All buckets, objects and open uploads; every request is done under one lock.

    `ignore_preconditions` models a store from before conditional writes: it overwrites silently.
    `min_part_bytes` is the least size of a part that is not the last, and `list_page_count` the
    most entries of one listing; tests lower them to get many parts and pages from little data.
    """

    ignore_preconditions: bool = False
    min_part_bytes: int = 5 << 20
    list_page_count: int = 1000
    omit_condition_element: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _buckets: dict[str, _Home] = field(default_factory=dict, init=False)
    _uploads: dict[str, tuple[Request, _Parts]] = field(default_factory=dict, init=False)

    def create_bucket(self, name: str) -> None:
        """Create a bucket if it is missing."""
        self._buckets.setdefault(name, {})

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object."""
        with self._lock:
            self._buckets[bucket][key] = _Stored(body=[memoryview(data)])

    def dump(self, bucket: str | None = None) -> dict[str, bytes]:
        """Return copies of all objects of a bucket (None: of the only one) by key, in order."""
        with self._lock:
            [found] = self._buckets.values() if bucket is None else [self._buckets[bucket]]
            return {key: b"".join(stored.body) for key, stored in sorted(found.items())}

    @property
    def open_upload_count(self) -> int:
        """How many multipart uploads are open."""
        return len(self._uploads)

    def answer(self, request: Request) -> Answer:
        """Do what is asked, or refuse it and change nothing."""
        try:
            self._refuse_unknown(request)
            with self._lock:
                home = self._home(request)
                self._check(request, home.get(request.key))
                answer: Answer = getattr(self, f"_{request.op}")(request, home)
        except S3Error as error:
            return self.refusal(error)
        return answer

    def _home(self, request: Request) -> _Home:
        home = self._buckets.get(request.bucket)
        if home is None:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist")
        upload_id = request.query.get("uploadId")
        begun, _ = self._uploads.get(upload_id or "", (None, None))
        if upload_id and (begun is None or begun.key != request.key):
            raise S3Error(404, "NoSuchUpload", "It may have been aborted or completed")
        return home

    def refusal(self, error: S3Error) -> Answer:
        """Return the answer that tells of an error."""
        condition = None if self.omit_condition_element else error.condition
        fields = {"Code": error.code, "Message": error.message, "Condition": condition}
        return _document("Error", fields)._replace(status=error.status)

    def _refuse_unknown(self, request: Request) -> None:
        words = {*request.query}
        if not self.ignore_preconditions or request.op in {"get", "head"}:
            words |= {name for name in request.headers if re.match("(x-amz-.*)?if-", name)}
        known = _KNOWN.get(request.op, set())
        if not known or words - known or words.issuperset(_CONDITIONS.split()):
            raise S3Error(501, "NotImplemented", f"{request.op} with {sorted(words)}")
        # The checksum with a completion is that of the object.
        claims = {} if request.op == "complete" else request.checksum()
        for name in ({"content-md5"} & request.headers.keys()) | claims.keys():
            text, actual = request.headers[name], _digest(name, request.body)
            if text != actual:
                code = "BadDigest" if len(text) == len(actual) else "InvalidDigest"
                raise S3Error(400, code, f"{name} of the body is {actual}")

    def _check(self, request: Request, found: _Stored | None, prefix: str = "") -> None:
        """Raise unless the conditions hold for what is there."""
        match = request.headers.get(f"{prefix}if-match")
        absent = request.headers.get(f"{prefix}if-none-match")
        if self.ignore_preconditions or match is absent is None:
            return
        if absent not in (None, "*") or re.search(r"\*|,|W/", match or ""):
            raise S3Error(501, "NotImplemented", "A condition with anything but one ETag")
        if match is not None and found is None:
            raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
        if found is not None and (match or "").strip('"') != found.etag.strip('"'):
            name = "If-None-Match" if match is None else "If-Match"
            raise S3Error(412, "PreconditionFailed", f"{name} does not hold", name)

    def _head_bucket(self, _request: Request, _home: _Home) -> Answer:
        return Answer(200, {}, [])

    def _list(self, request: Request, home: _Home) -> Answer:
        prefix, delimiter = (request.query.get(name, "") for name in ("prefix", "delimiter"))
        after = bytes.fromhex(request.query.get("continuation-token", "")).decode()
        entries: dict[str, _Stored | None] = {}
        for key in sorted(key for key in home if key.startswith(prefix)):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            # Rolled up names come in the order of their keys, so a page may end at any of them.
            if name > after:
                entries[name] = home[key] if cut < 0 else None
        page = list(entries.items())[: self._limit(request, "max-keys")]
        is_cut = 0 < len(page) < len(entries)
        fields = {
            "Name": request.bucket,
            "Prefix": request.spelt(prefix),
            "KeyCount": len(page),
            "IsTruncated": is_cut,
            "NextContinuationToken": page[-1][0].encode().hex() if is_cut else None,
            "EncodingType": request.query.get("encoding-type"),
            "Contents": [
                {"Key": request.spelt(key), "Size": found.size_bytes, **found.fields()}
                for key, found in page
                if found
            ],
            "CommonPrefixes": [{"Prefix": request.spelt(key)} for key, found in page if not found],
        }
        return _document("ListBucketResult", fields)

    def _list_uploads(self, request: Request, _home: _Home) -> Answer:
        query = request.query
        # Without an id the marker stands behind all uploads of its key.
        marker = query.get("key-marker", ""), query.get("upload-id-marker", "~")
        left = sorted(
            (upload.key, upload_id, upload.time_s)
            for upload_id, (upload, _) in self._uploads.items()
            if upload.bucket == request.bucket
            and upload.key.startswith(query.get("prefix", ""))
            and (upload.key, upload_id) > marker
        )
        page = left[: self._limit(request, "max-uploads")]
        fields = {
            "Bucket": request.bucket,
            "IsTruncated": len(page) < len(left),
            "NextKeyMarker": request.spelt(page[-1][0]) if page else None,
            "NextUploadIdMarker": page[-1][1] if page else None,
            "EncodingType": query.get("encoding-type"),
            "Upload": [
                {"Key": request.spelt(key), "UploadId": name, "Initiated": _spelt_time(time_s)}
                for key, name, time_s in page
            ],
        }
        return _document("ListMultipartUploadsResult", fields)

    def _limit(self, request: Request, name: str) -> int:
        return min(_whole(request.query.get(name, str(self.list_page_count))), self.list_page_count)

    def _bulk_delete(self, request: Request, home: _Home) -> Answer:
        if not request.checksum() and "content-md5" not in request.headers:
            raise S3Error(400, "InvalidRequest", "Content-MD5 or a checksum is required")
        items = request.items("Delete", "Object")
        if len(items) > 1000 or any(item.keys() != {"Key"} for item in items):
            raise S3Error(400, "MalformedXML")
        for item in items:
            home.pop(item["Key"], None)
        is_quiet = b"<Quiet>true</Quiet>" in b"".join(request.body)
        return _document("DeleteResult", {"Deleted": [] if is_quiet else items})

    def _get(self, request: Request, _home: _Home) -> Answer:
        stored = self._existing(request.bucket, request.key)
        modified = formatdate(stored.time_s, usegmt=True)
        headers = {**stored.kept, "ETag": stored.etag, "Last-Modified": modified}
        if asked := request.headers.get("range"):
            bounds = _range(asked, stored.size_bytes)
            if bounds is None:
                raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
            start, stop = bounds
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size_bytes}"
            return Answer(206, headers, _cut(stored.body, start, stop))
        if request.headers.get(f"{_CHECKSUM}mode") == "ENABLED":
            headers |= stored.headers()
        return Answer(200, headers, stored.body)

    _head = _get

    def _existing(self, bucket: str, key: str) -> _Stored:
        found = self._buckets.get(bucket, {}).get(key)
        if found is None:
            raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
        return found

    def _put(self, request: Request, home: _Home) -> Answer:
        stored = _Stored(body=request.body, kept=request.kept(), checksum=request.checksum())
        home[request.key] = stored
        return Answer(200, stored.headers(), [])

    def _copy(self, request: Request, home: _Home) -> Answer:
        # Stock torch's writer over fsspec renames by it.
        if request.headers.get("x-amz-metadata-directive", "COPY") != "COPY":
            raise S3Error(501, "NotImplemented", "A copy with metadata of its own")
        source = self._source(request)
        home[request.key] = stored = _Stored(body=source.body, kept=source.kept)
        return _document("CopyObjectResult", stored.fields())

    def _source(self, request: Request) -> _Stored:
        bucket, _, key = unquote(request.headers[_SOURCE]).removeprefix("/").partition("/")
        source = self._existing(bucket, key)
        self._check(request, source, f"{_SOURCE}-")
        return source

    def _delete(self, request: Request, home: _Home) -> Answer:
        home.pop(request.key, None)
        return Answer(204, {}, [])

    def _create_upload(self, request: Request, _home: _Home) -> Answer:
        name = request.headers.get(f"{_CHECKSUM}algorithm", "")
        kind = request.headers.get(f"{_CHECKSUM}type", "COMPOSITE")
        if name.lower() not in ("", *_CRCS) or kind not in ("COMPOSITE", "FULL_OBJECT"):
            raise S3Error(501, "NotImplemented", f"The checksum {name} {kind}")
        # Uploads of one key are listed by age, which their ids tell.
        upload_id = f"{time.time_ns()}{secrets.token_hex(8)}"
        self._uploads[upload_id] = request, {}
        fields = {"Bucket": request.bucket, "Key": request.key, "UploadId": upload_id}
        told = {f"{_CHECKSUM}algorithm": name, f"{_CHECKSUM}type": kind} if name else {}
        answer = _document("InitiateMultipartUploadResult", fields)
        return answer._replace(headers={**answer.headers, **told})

    def _part(self, request: Request, _home: _Home) -> Answer:
        return Answer(200, self._store_part(request, request.body).headers(), [])

    def _part_copy(self, request: Request, _home: _Home) -> Answer:
        source = self._source(request)
        start, stop = 0, source.size_bytes
        if asked := request.headers.get(f"{_SOURCE}-range"):
            start, stop = _range(asked, stop) or (0, 0)
            if asked != f"bytes={start}-{stop - 1}":
                raise S3Error(400, "InvalidArgument", f"{asked} of {source.size_bytes} bytes")
        part = self._store_part(request, _cut(source.body, start, stop))
        return _document("CopyPartResult", part.fields())

    def _store_part(self, request: Request, body: Body) -> _Stored:
        number = _whole(request.query.get("partNumber", ""))
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "The part number is not within 1 and 10000")
        begun, parts = self._uploads[request.query["uploadId"]]
        checksum = request.checksum()
        if algorithm := begun.headers.get(f"{_CHECKSUM}algorithm", "").lower():
            name = _CHECKSUM + algorithm
            checksum = checksum or {name: _digest(name, body)}
            if name not in checksum:
                raise S3Error(400, "InvalidRequest", "The checksum is not of the upload's kind")
        parts[number] = part = _Stored(body=body, checksum=checksum)
        return part

    def _complete(self, request: Request, home: _Home) -> Answer:
        # An upload is forgotten once it is complete, so that a repeated request gets NoSuchUpload,
        # as from MinIO and Ceph; AWS repeats its answer for a while. A refused one stays open.
        begun, all_parts = self._uploads[request.query["uploadId"]]
        parts = self._named_parts(all_parts, request)
        body = [piece for part in parts for piece in part.body]
        claim, checksum = request.checksum(), {}
        if algorithm := begun.headers.get(f"{_CHECKSUM}algorithm", "").lower():
            name = _CHECKSUM + algorithm
            checksum = {name: _digest(name, body)}
        if claim and claim != (checksum or {name: _digest(name, body) for name in claim}):
            raise S3Error(400, "BadDigest", "The object's checksum differs")
        etag = f'"{secrets.token_hex(16)}-{len(parts)}"'
        stored = _Stored(body=body, kept=begun.kept(), checksum=checksum, etag=etag)
        home[request.key] = stored
        del self._uploads[request.query["uploadId"]]
        fields = {"Bucket": request.bucket, "Key": request.key, **stored.fields()}
        return _document("CompleteMultipartUploadResult", fields)

    def _named_parts(self, parts: _Parts, request: Request) -> list[_Stored]:
        named = request.items("CompleteMultipartUpload", "Part")
        numbers = [_whole(item.get("PartNumber", "")) for item in named]
        if sorted(set(numbers)) != numbers:
            raise S3Error(400, "InvalidPartOrder", "The parts are not in ascending order")
        etags = [parts[number].etag if number in parts else "none" for number in numbers]
        if [tag.strip('"') for tag in etags] != [item.get("ETag", "").strip('"') for item in named]:
            raise S3Error(400, "InvalidPart", "A part is not there as it is named")
        found = [parts[number] for number in numbers]
        if any(part.size_bytes < self.min_part_bytes for part in found[:-1]):
            raise S3Error(400, "EntityTooSmall", f"A part is below {self.min_part_bytes} bytes")
        return found

    def _abort(self, request: Request, _home: _Home) -> Answer:
        del self._uploads[request.query["uploadId"]]
        return Answer(204, {}, [])


def _document(name: str, fields: Mapping[str, object]) -> Answer:
    # What is None is left out.
    space = "" if name == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{space}>{_xml(fields)}</{name}>'
    return Answer(200, {"Content-Type": "application/xml"}, [memoryview(text.encode())])


def _xml(value: object) -> str:
    if not isinstance(value, Mapping):
        return escape(str(value).lower() if isinstance(value, bool) else str(value))
    found = ""
    for name, inner in value.items():
        for each in inner if isinstance(inner, list) else [inner]:
            found += "" if each is None else f"<{name}>{_xml(each)}</{name}>"
    return found


def _spelt_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time_s))


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise S3Error(400, "InvalidArgument", f"{text!r} is no whole number")
    return int(text)


def _range(text: str, size: int) -> tuple[int, int] | None:
    found = re.fullmatch(r"bytes=(?:(\d+)-(\d*)|-(\d+))", text)
    if found is None:
        return None
    start = int(found[1]) if found[1] else max(0, size - int(found[3]))
    stop = min(size, int(found[2]) + 1) if found[2] else size
    return (start, stop) if start < stop else None


def _cut(body: Body, start: int, stop: int) -> Body:
    found: Body = []
    for piece in body:
        if inside := piece[max(0, start) : max(0, stop)]:
            found.append(inside)
        start, stop = start - len(piece), stop - len(piece)
    return found


def _digest(header: str, body: Body) -> str:
    """Return what a header with a digest says of a body."""
    if header == "content-md5":
        raw = hashlib.md5(b"".join(body), usedforsecurity=False).digest()
    else:
        value = 0
        for piece in body:
            value = _CRCS[header.removeprefix(_CHECKSUM)](piece, value)
        raw = value.to_bytes(4, "big")
    return base64.b64encode(raw).decode()
